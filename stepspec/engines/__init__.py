"""Engines: the interface, tokenizers, and the engines themselves, which are loaded by name."""
