"""What drafters that look things up keep of each row's text, so that a call costs its new tokens only."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stepspec.engines.protocol import TokenBuffer
from stepspec.engines.torch_engine.row import BatchRow


class Source(Protocol):
    """Something that learns from ids, each given once."""

    def append(self, ids: Sequence[int]) -> None: ...


S = TypeVar("S", bound=Source)


@dataclass
class Texts(Generic[S]):
    """What one row looks in: its buffer, kept from call to call, and the hint with what the row has written."""

    buffer: S
    own: S
    num_written: int = 0


class Library(Generic[S]):
    """The texts of all rows. Uncommitted tokens stay with their row; of a buffer each id is learned once."""

    def __init__(self, make: Callable[[], S], overlap: int) -> None:
        """`overlap`: how many ids before a piece of text belong to its first one's context."""
        self._make = make
        self._overlap = overlap
        self._buffers: weakref.WeakKeyDictionary[TokenBuffer, tuple[S, int]] = weakref.WeakKeyDictionary()
        self._rows: dict[BatchRow, Texts[S]] = {}

    def of(self, row: BatchRow) -> Texts[S]:
        """What the row looks in, brought up to date."""
        if row not in self._rows:
            self._rows[row] = self._opened(row)
        texts = self._rows[row]
        texts.own.append(row.generated[texts.num_written :])
        texts.num_written = len(row.generated)
        return texts

    def _opened(self, row: BatchRow) -> Texts[S]:
        source, num_known = self._buffers.get(row.buffer) or (self._make(), 0)
        source.append(row.buffer.since(num_known, row.prompt_length))
        self._buffers[row.buffer] = source, max(num_known, row.prompt_length)
        own, tail = self._make(), row.ids_from(max(0, row.length - self._overlap))
        if row.hint:
            own.append([*tail, *row.hint])
        own.append(tail)
        return Texts(source, own)

    def close(self, row: BatchRow) -> None:
        """The row has ended."""
        self._rows.pop(row, None)
