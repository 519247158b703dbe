"""The embedded pair: two tiny models that reason about gsm-mini problems. `evals/training` makes them."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Folder with one Hugging Face model folder per role: `target` and `draft`."""
