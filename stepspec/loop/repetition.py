"""Abort a draft step that repeats itself."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from stepspec.engines.protocol import TokenChunk

REPEATED, MAX_PERIOD = 32, 8
"""A step is aborted if its last tokens, as many as the first number, repeat with a period up to the second."""


class StepWatch:
    """Watches whether one step repeats itself."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self.aborted = False

    async def until_repeating(self, chunks: AsyncGenerator[TokenChunk, None]) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of the step until it ends or repeats itself.

        A step that arrives in one chunk, such as one from a server, is only marked.
        """
        async with aclosing(chunks):
            async for chunk in chunks:
                self._ids = [*self._ids, *chunk.ids][-REPEATED:]
                self.aborted = repeats(self._ids)
                yield replace(chunk, end="length") if self.aborted and chunk.end is None else chunk
                if self.aborted:
                    return


def repeats(ids: Sequence[int]) -> bool:
    """Whether the ids are one short sequence again and again."""
    return len(ids) == REPEATED and any(ids[period:] == ids[:-period] for period in range(1, MAX_PERIOD + 1))
