"""Drafting by what most often followed the last tokens, in this text and in past outputs (arXiv:2411.04975).

Agents repeat themselves from request to request. How far a guess goes follows from how often what is guessed came
next, so that a rare continuation costs little.
"""

from collections import Counter, deque
from collections.abc import Sequence

import torch

from stepspec.torch_engine.drafters.base import Draft, Drafter, certain
from stepspec.torch_engine.drafters.texts import Library
from stepspec.torch_engine.row import Row
from stepspec.torch_engine.sampling import Samplers

DEPTH = 8
"""Most tokens of context that are compared."""

LEAST_SHARE = 0.1
"""A guess ends where the whole of it is less likely than this, by the frequencies."""

MAX_PAST = 32_000
"""Tokens of past outputs that are remembered; the oldest outputs go first."""


class Frequencies:
    """How often each token followed each context of up to `DEPTH` tokens."""

    def __init__(self) -> None:
        self._tail: list[int] = []
        self._follows: dict[tuple[int, ...], Counter[int]] = {}

    def append(self, ids: Sequence[int]) -> None:
        """Takes further ids of the text."""
        for token in ids:
            for size in range(1, len(self._tail) + 1):
                self._follows.setdefault(tuple(self._tail[-size:]), Counter())[token] += 1
            self._tail = [*self._tail[1 - DEPTH :], token]

    def add(self, ids: Sequence[int]) -> None:
        """Takes a text of its own."""
        self._tail = []
        self.append(ids)

    def remove(self, ids: Sequence[int]) -> None:
        """Takes back a text that was added."""
        for end in range(1, len(ids)):
            for size in range(1, min(DEPTH, end) + 1):
                context = tuple(ids[end - size : end])
                self._follows[context][ids[end]] -= 1
                self._follows[context] += Counter()  # drops what fell to 0
                if not self._follows[context]:
                    del self._follows[context]

    def after(self, context: Sequence[int]) -> Counter[int]:
        """How often each token followed exactly this context."""
        return self._follows.get(tuple(context)) or Counter()


class Suffix(Drafter):
    """Counts in the row's text and its hint, and in the outputs of calls that have ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._texts = Library(Frequencies, DEPTH)
        self._past = Frequencies()
        self._outputs: deque[list[int]] = deque()
        self._num_past = 0

    def propose(self, rows: Sequence[Row], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`."""
        return certain([self._guess(row, count) for row, count in zip(rows, counts, strict=True)], self._device)

    def _guess(self, row: Row, count: int) -> list[int]:
        texts = self._texts.of(row)
        text = row.ids_from(max(0, row.length - DEPTH))
        start, share = len(text), 1.0
        while len(text) - start < count:
            follows = self._following(text, (texts.own, texts.buffer, self._past))
            if not follows:
                break
            token, times = max(follows.items(), key=lambda item: (item[1], -item[0]))
            share *= times / follows.total()
            if share < LEAST_SHARE:
                break
            text.append(token)
        return text[start:]

    def _following(self, text: Sequence[int], sources: Sequence[Frequencies]) -> Counter[int]:
        """Frequencies behind the longest context that any source knows."""
        for size in range(min(DEPTH, len(text)), 0, -1):
            context = text[-size:]
            if follows := sum((source.after(context) for source in sources), Counter[int]()):
                return follows
        return Counter()

    def release(self, row: Row) -> None:
        """See `Drafter.release`: what was written is remembered."""
        self._texts.close(row)
        self._past.add(row.generated)
        self._outputs.append(row.generated)
        self._num_past += len(row.generated)
        while self._num_past > MAX_PAST:
            oldest = self._outputs.popleft()
            self._past.remove(oldest)
            self._num_past -= len(oldest)

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._past, self._num_past = Frequencies(), 0
        self._outputs.clear()
