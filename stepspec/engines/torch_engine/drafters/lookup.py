"""Drafting by looking up the last tokens in the text itself, as in prompt lookup decoding (Saxena, 2023).

It needs no weights and no pass. Repeated text is likely to continue as before.
"""

from collections.abc import Sequence

import torch

from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts, certain
from stepspec.engines.torch_engine.drafters.texts import MIN_LENGTH, Library
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers

MAX_LENGTH = 4
"""Maximum number of tokens to match. The longest match wins; among equal matches, the latest."""


class PromptLookup(Drafter):
    """Looks up tokens in the row's own output, then in its prompt."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._texts = Library()

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
        if len(tail) < MIN_LENGTH:
            return []
        found = [(*source.after(tail), source.ids) for source in (texts.own, texts.buffer)]
        longest, places, ids = max(found, key=lambda each: each[0])
        return ids[places[-1] : places[-1] + count] if longest else []

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        self._texts.close(row)
