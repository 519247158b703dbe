"""Parts of scipy as objects of type Any, because the package has no type hints."""

from typing import Any

from scipy import optimize, special, stats  # pyright: ignore[reportMissingTypeStubs]

scipy_optimize: Any = optimize
scipy_special: Any = special
scipy_stats: Any = stats
