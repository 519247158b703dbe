"""Drafting with the tokens that most often followed the last ones, in this text and in past outputs (arXiv:2411.04975).

Agents repeat themselves from request to request. The length of a guess depends on how often the guessed tokens came
next, so a rare continuation costs little.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch

from stepspec.engines.protocol import owner_of
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter, Parts, certain
from stepspec.engines.torch_engine.drafters.texts import DEPTH, MIN_LENGTH, Library, Occurrences
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import Samplers

MIN_SHARE = 0.1
"""A guess ends when its total probability, estimated from frequencies, falls below this."""

MAX_PAST = 32_000
"""Maximum number of tokens of past outputs to store of a group. The oldest half is dropped first."""

MAX_GROUPS = 16
"""Maximum number of groups whose past outputs are stored."""


class Suffix(Drafter):
    """Looks up tokens in the row's text, and in the outputs of calls of its group that have ended."""

    def __init__(self, device: torch.device, min_length: int = MIN_LENGTH) -> None:
        """`min_length`: tokens that the end of the text must have in common with an earlier place."""
        self._device, self._min_length = device, min_length
        self._texts = Library()
        self._past: OrderedDict[str | None, list[Occurrences]] = OrderedDict()  # by group

    @classmethod
    def made(cls, parts: Parts) -> Drafter:
        """See `Drafter.made`."""
        return cls(parts.target.device)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`."""
        return certain([self._guess(row, count) for row, count in zip(rows, counts, strict=True)], self._device)

    def _guess(self, row: BatchRow, count: int) -> list[int]:
        texts = self._texts.of(row)
        sources = (texts.own, texts.buffer, *self._past.get(row.buffer.group, ()))
        text = row.ids_from(max(0, row.length - DEPTH))
        start, share = len(text), 1.0
        while MIN_LENGTH <= len(text) < start + count:
            found = [(source.ids, *source.after(text[-DEPTH:])) for source in sources]
            longest = max(length for _, length, _ in found)
            if longest < self._min_length:
                break
            following = Counter(ids[at] for ids, length, places in found if length == longest for at in places)
            token, times = max(following.items(), key=lambda item: (item[1], -item[0]))
            share *= times / following.total()
            if share < MIN_SHARE:
                break
            text.append(token)
        return text[start:]

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`. The row's output is added to the past outputs of its group."""
        self._texts.close(row)
        past = self._past.setdefault(row.buffer.group, [Occurrences()])
        self._past.move_to_end(row.buffer.group)
        past[-1].append(row.beyond[row.num_after :])
        if len(past[-1].ids) > MAX_PAST // 2:
            past[:] = [past[-1], Occurrences()]
        if len(self._past) > MAX_GROUPS:
            self._drop_one()

    def _drop_one(self) -> None:
        """Drop the least recently used group of the client that has the most, so that a client with many salts drops
        its own."""
        counts = Counter(map(owner_of, self._past))
        most = max(counts.values())
        del self._past[next(group for group in self._past if counts[owner_of(group)] == most)]

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._past.clear()
