"""Threads for work that would block an event loop: parsing, rendering and encoding of long texts."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")

SMALL = 16_384
"""Number of characters that take about a millisecond. Longer texts go to a thread."""

WEIGHT = 32
"""Cost of a value in addition to its characters, in characters."""

_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="stepspec text")
"""Two threads shared by all event loops, so that the loops still get the interpreter lock."""


def is_small(value: Any) -> bool:
    """Return whether a text, or a value that contains texts, is small enough to process in an event loop."""
    budget, pending = SMALL, [value]
    while pending and budget > 0:
        each = pending.pop()
        budget -= WEIGHT
        if isinstance(each, str | bytes):
            budget -= len(each)
        elif isinstance(each, Mapping | list | tuple):
            parts = cast("Mapping[Any, Any] | list[Any] | tuple[Any, ...]", each)
            if len(parts) * WEIGHT > budget:
                return False
            pending.extend(parts)
            if isinstance(parts, Mapping):
                pending.extend(parts.values())
        elif isinstance(content := getattr(each, "content", None), str | list):
            pending.append(content)  # a LangChain message
    return budget > 0


async def off_the_loop(about: Any, work: Callable[[], T]) -> T:
    """Run work whose time grows with the size of `about`: directly if that is small, else in a thread.

    Cancelling removes the work from the queue. Work that a thread has already started runs to its end.
    """
    if is_small(about):
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
