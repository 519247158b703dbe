"""The families: who writes the steps of a request, and how it is decided. A policy selects one by its name."""

from collections.abc import Awaitable, Callable, Mapping

from stepspec.loop.families.alone import alone
from stepspec.loop.families.score import score
from stepspec.loop.request import Request

FAMILIES: Mapping[str, Callable[[Request], Awaitable[None]]] = {"target": alone, "draft": alone, "score": score}
"""What each family does before a single writer finishes the text."""
