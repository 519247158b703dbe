"""Indexed texts of the rows for lookup drafters. A call only indexes its new tokens."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from stepspec.engines.protocol import TokenBuffer
from stepspec.engines.torch_engine.row import BatchRow

MIN_LENGTH, DEPTH = 2, 8
"""Minimum and maximum number of context tokens to compare."""

LATEST = 24
"""How many of the latest occurrences of the context to examine."""


class Occurrences:
    """Positions of every token pair in a growing text.

    It uses few objects, because Python's garbage collector visits them all.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._positions: dict[tuple[int, int], list[int]] = {}

    def append(self, ids: Sequence[int]) -> None:
        """Append ids to the text."""
        for token in ids:
            if len(self.ids) >= MIN_LENGTH:
                self._positions.setdefault((self.ids[-2], self.ids[-1]), []).append(len(self.ids))
            self.ids.append(token)

    def after(self, context: Sequence[int]) -> tuple[int, list[int]]:
        """Return the length of the longest match with the context's end, 0 for none, and the positions after it."""
        longest, following = 0, list[int]()
        for position in self._positions.get((context[-2], context[-1]), [])[-LATEST:]:
            length = MIN_LENGTH
            while length < min(len(context), position) and self.ids[position - length - 1] == context[-length - 1]:
                length += 1
            if length > longest:
                longest, following = length, []
            if length == longest:
                following.append(position)
        return longest, following


@dataclass
class Texts:
    """Indexes for one row: its buffer, shared between calls, and its own output."""

    buffer: Occurrences
    own: Occurrences
    num_written: int


class Library:
    """The indexed texts of all rows. Uncommitted tokens stay with their row. Each id of a buffer is indexed once."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakKeyDictionary[TokenBuffer, Occurrences] = weakref.WeakKeyDictionary()
        self._rows: dict[BatchRow, Texts] = {}

    def of(self, row: BatchRow) -> Texts:
        """Return the row's indexes, updated with its new tokens."""
        if row not in self._rows:
            self._rows[row] = self._open(row)
        texts = self._rows[row]
        texts.own.append(row.beyond[texts.num_written :])
        texts.num_written = len(row.beyond)
        return texts

    def _open(self, row: BatchRow) -> Texts:
        source, own = self._buffers.setdefault(row.buffer, Occurrences()), Occurrences()
        source.append(row.buffer.since(len(source.ids), row.prompt_length))
        own.append(row.ids_from(max(0, row.prompt_length - DEPTH)))  # context of the first ids
        return Texts(source, own, len(row.beyond))

    def close(self, row: BatchRow) -> None:
        """Drop the indexes of a row that has ended."""
        self._rows.pop(row, None)
