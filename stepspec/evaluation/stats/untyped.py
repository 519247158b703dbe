"""`scipy.stats` as one object of type Any, because the package has no type hints."""

from typing import Any

from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

scipy_stats: Any = stats
