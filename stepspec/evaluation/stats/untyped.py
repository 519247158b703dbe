"""scipy.stats, whose package has no types, as one object that the type checker lets alone."""

from typing import Any

from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

scipy_stats: Any = stats
