"""Utilities for every layer: data files, optional extras, threads, strict JSON, checks of settings."""
