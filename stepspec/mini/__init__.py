"""The embedded pair: two small models that reason about gsm-mini problems, and the code that trains them."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Folder with one Hugging Face model folder per role: `target` and `draft`."""
