"""Indexed texts of the rows for lookup drafters. A call only indexes its new tokens."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stepspec.engines.protocol import TokenBuffer
from stepspec.engines.torch_engine.row import BatchRow


class TextIndex(Protocol):
    """An index of a text. Each id is appended once."""

    def append(self, ids: Sequence[int]) -> None: ...


S = TypeVar("S", bound=TextIndex)


@dataclass
class Texts(Generic[S]):
    """Indexes for one row: its buffer, shared between calls, and its own output."""

    buffer: S
    own: S
    num_written: int


class Library(Generic[S]):
    """The indexed texts of all rows. Uncommitted tokens stay with their row. Each id of a buffer is indexed once."""

    def __init__(self, make: Callable[[], S], overlap: int) -> None:
        """Create an empty library.

        Args:
            make: creates an empty index.
            overlap: how many ids before an output count as context of its first id.
        """
        self._make = make
        self._overlap = overlap
        self._buffers: weakref.WeakKeyDictionary[TokenBuffer, tuple[S, int]] = weakref.WeakKeyDictionary()
        self._rows: dict[BatchRow, Texts[S]] = {}

    def of(self, row: BatchRow) -> Texts[S]:
        """Return the row's indexes, updated with its new tokens."""
        if row not in self._rows:
            self._rows[row] = self._open(row)
        texts = self._rows[row]
        texts.own.append(row.beyond[texts.num_written :])
        texts.num_written = len(row.beyond)
        return texts

    def _open(self, row: BatchRow) -> Texts[S]:
        source, num_known = self._buffers.get(row.buffer) or (self._make(), 0)
        source.append(row.buffer.since(num_known, row.prompt_length))
        self._buffers[row.buffer] = source, max(num_known, row.prompt_length)
        own = self._make()
        own.append(row.ids_from(max(0, row.prompt_length - self._overlap)))
        return Texts(source, own, len(row.beyond))

    def close(self, row: BatchRow) -> None:
        """Drop the indexes of a row that has ended."""
        self._rows.pop(row, None)
