"""Drafting by looking the last tokens up in the text itself, as in prompt lookup decoding (Saxena, 2023).

Needs no weights and no pass: text that was written before is likely to go on as it did, above all a rejected step
that is written again, which a call is given as its hint.
"""

from collections.abc import Sequence

import torch

from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, certain
from stepspec.engines.torch_engine.drafters.texts import Library
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers

LONGEST, SHORTEST = 4, 2
"""Tokens that must agree; the longest agreement wins, and of several the latest."""


class Index:
    """Where in a growing text each n-gram was last followed by something."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}

    def append(self, ids: Sequence[int]) -> None:
        """Takes further ids."""
        for token in ids:
            end = len(self._ids)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._follows[tuple(self._ids[end - size :])] = end
            self._ids.append(token)

    def after(self, tail: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids that followed exactly this n-gram when it was last seen."""
        place = self._follows.get(tuple(tail))
        return [] if place is None else self._ids[place : place + count]


class PromptLookup(Drafter):
    """Looks in the hint and in what the row has written, then in its prompt."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._texts = Library(Index, LONGEST)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`."""
        return certain([self._guess(row, count) for row, count in zip(rows, counts, strict=True)], self._device)

    def _guess(self, row: BatchRow, count: int) -> list[int]:
        texts = self._texts.of(row)
        tail = row.ids_from(max(0, row.length - LONGEST))
        for size in range(len(tail), SHORTEST - 1, -1):
            if found := texts.own.after(tail[-size:], count) or texts.buffer.after(tail[-size:], count):
                return found
        return []

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        self._texts.close(row)
