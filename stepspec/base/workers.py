"""Threads for work that would hold up an event loop: reading, rendering and encoding of long texts."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

T = TypeVar("T")

SMALL = 16_384
"""Characters that take about a millisecond; more go to a thread."""

WEIGHT = 32
"""What a value counts besides its characters."""

_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="stepspec text")
"""Two for all event loops together, so that they leave the loops their turn at the interpreter lock."""


def is_small(value: Any) -> bool:
    """Whether text, or what holds text, is so small that work on it may be done in an event loop."""
    room, rest = SMALL, [value]
    while rest and room > 0:
        each = rest.pop()
        room -= WEIGHT
        if isinstance(each, str | bytes):
            room -= len(each)
        elif isinstance(each, Mapping | list | tuple):
            parts = cast("Mapping[Any, Any] | list[Any] | tuple[Any, ...]", each)
            if len(parts) * WEIGHT > room:
                return False
            rest.extend(parts)
            if isinstance(parts, Mapping):
                rest.extend(parts.values())
        elif isinstance(content := getattr(each, "content", None), str | list):
            rest.append(content)  # a message of LangChain's
    return room > 0


async def off_the_loop(about: Any, work: Callable[[], T]) -> T:
    """Does work whose time grows with what it is about: at once if that is small, else in a thread.

    Cancelling it takes it off the queue; what a thread has begun it ends.
    """
    if is_small(about):
        return work()
    return await asyncio.get_running_loop().run_in_executor(_POOL, work)
