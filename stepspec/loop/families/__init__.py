"""The families: who writes the steps of a request, and how it is decided. A policy selects one by its name."""

from collections.abc import Awaitable, Callable, Mapping

from stepspec.loop.families.alone import alone
from stepspec.loop.families.compare import compare
from stepspec.loop.families.route import route
from stepspec.loop.families.score import score
from stepspec.loop.policy import Family
from stepspec.loop.request import Request

FAMILIES: Mapping[Family, Callable[[Request], Awaitable[None]]] = {
    "target": alone,
    "draft": alone,
    "score": score,
    "compare": compare,
    "route": route,
}
"""What each family does before a single writer finishes the text."""
