"""Abort a draft step that repeats itself or stays unsure."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from statistics import fmean

from stepspec.engines.protocol import TokenChunk

REPEATED, MAX_PERIOD = 32, 8
"""A step is hopeless if its last tokens, as many as the first number, repeat with a period up to the second."""

WINDOW = 16
"""Number of last tokens whose mean entropy is compared with the bound."""


class StepWatch:
    """Watches one step: whether it repeats itself, and whether its entropy stays low.

    Args:
        max_entropy: bound on the mean entropy of the last `WINDOW` tokens, in nats; None for no bound.
    """

    def __init__(self, max_entropy: float | None) -> None:
        self._max_entropy = max_entropy
        self._ids: list[int] = []
        self._entropies: list[float] = []
        self.aborted = False
        """Whether the step is hopeless."""

    async def until_hopeless(self, chunks: AsyncGenerator[TokenChunk, None]) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of the step until it ends or turns out hopeless.

        A step that arrives in one chunk, such as one from a server, is only marked.
        """
        async with aclosing(chunks):
            async for chunk in chunks:
                self._ids = [*self._ids, *chunk.ids][-REPEATED:]
                self._entropies = [*self._entropies, *(chunk.entropies or ())][-WINDOW:]
                self.aborted = repeats(self._ids) or self._is_unsure
                yield replace(chunk, end="length") if self.aborted and chunk.end is None else chunk
                if self.aborted:
                    return

    @property
    def _is_unsure(self) -> bool:
        bound = self._max_entropy
        return bound is not None and len(self._entropies) == WINDOW and fmean(self._entropies) > bound


def repeats(ids: Sequence[int]) -> bool:
    """Whether the ids are one short sequence again and again."""
    return len(ids) == REPEATED and any(ids[period:] == ids[:-period] for period in range(1, MAX_PERIOD + 1))
