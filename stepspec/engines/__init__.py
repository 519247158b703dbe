"""Engines: the engine interface, tokenizers, and the engines, which are loaded by name."""
