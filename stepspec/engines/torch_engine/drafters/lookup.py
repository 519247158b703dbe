"""Drafting by looking up the last tokens in the text itself, as in prompt lookup decoding (Saxena, 2023).

It needs no weights and no pass. Repeated text is likely to continue as before.
"""

from collections.abc import Sequence

import torch

from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts, certain
from stepspec.engines.torch_engine.drafters.texts import Library
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers

MAX_LENGTH, MIN_LENGTH = 4, 2
"""Maximum and minimum number of tokens to match. The longest match wins; among equal matches, the latest."""


class Index:
    """Index of a growing text: the position after the last occurrence of each n-gram."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}

    def append(self, ids: Sequence[int]) -> None:
        """Append ids to the text."""
        for token in ids:
            end = len(self._ids)
            for size in range(MIN_LENGTH, min(MAX_LENGTH, end) + 1):
                self._follows[tuple(self._ids[end - size :])] = end
            self._ids.append(token)

    def after(self, tail: Sequence[int], count: int) -> list[int]:
        """Return up to `count` ids that followed the last occurrence of the n-gram `tail`."""
        position = self._follows.get(tuple(tail))
        return [] if position is None else self._ids[position : position + count]


class PromptLookup(Drafter):
    """Looks up tokens in the row's own output, then in its prompt."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._texts = Library(Index, MAX_LENGTH)

    @classmethod
    def made(cls, parts: Parts) -> Drafter:
        """See `Drafter.made`."""
        return cls(parts.target.device)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`."""
        return certain([self._guess(row, count) for row, count in zip(rows, counts, strict=True)], self._device)

    def _guess(self, row: BatchRow, count: int) -> list[int]:
        texts = self._texts.of(row)
        tail = row.ids_from(max(0, row.length - MAX_LENGTH))
        for size in range(len(tail), MIN_LENGTH - 1, -1):
            if found := texts.own.after(tail[-size:], count) or texts.buffer.after(tail[-size:], count):
                return found
        return []

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        self._texts.close(row)
