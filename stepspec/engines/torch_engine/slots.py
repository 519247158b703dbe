"""Which sequence each slot of a cache holds, so that a call reads only what no slot has read.

A slot that is given back keeps what it holds until it is needed. A call on a text that a slot follows goes on there;
a new text takes over, or copies, the longest prefix that any slot shares with it, id for id.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepspec.engines.protocol import TokenBuffer
from stepspec.engines.torch_engine.model import CausalModel

LEAST_PREFIX = 16
"""Shared ids that are worth a copy; fewer are read again in the same time."""


@dataclass
class Slot:
    """One slot: the ids that it holds, the buffer it follows, and how many of the ids are known to be the buffer's.

    What was read after the buffer's end, a step being generated or judged, stays in `ids`. Once the buffer has grown
    it is compared with what was committed, so a step that was accepted is never read again.
    """

    index: int
    ids: list[int] = field(default_factory=list)
    buffer: "weakref.ref[TokenBuffer] | None" = None
    agreed: int = 0
    busy: bool = False
    last_used: int = 0

    def follows(self, buffer: TokenBuffer) -> bool:
        """Whether it holds the beginning of this very buffer."""
        return self.buffer is not None and self.buffer() is buffer

    @property
    def wanted(self) -> bool:
        """Whether the text that it holds may still be gone on with."""
        return self.buffer is not None and self.buffer() is not None


class SlotTable:
    """The slots of one model."""

    def __init__(self, model: CausalModel, max_slots: int) -> None:
        self.model = model
        self._slots = [Slot(index) for index in range(max_slots)]
        self._clock = 0

    def acquire(self, buffer: TokenBuffer) -> Slot | None:
        """A slot for a call on the buffer, with as much of it as is held anywhere; None if all are busy."""
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            return None
        slot = next((slot for slot in idle if slot.follows(buffer)), None) or self._opened(buffer, idle)
        self._clock += 1
        slot.busy, slot.last_used = True, self._clock
        return slot

    def _opened(self, buffer: TokenBuffer, idle: Sequence[Slot]) -> Slot:
        """An idle slot made to follow a buffer that none of them follows."""
        ids = buffer.since(0)
        shared = {slot.index: _common_prefix(slot.ids, ids) for slot in self._slots if slot.ids}
        source = max(shared, key=lambda index: shared[index], default=None)
        slot = min(idle, key=_reuse_order)
        if source is None or shared[source] < LEAST_PREFIX:
            length = shared.get(slot.index, 0)
        else:
            length = shared[source]
            if not self._slots[source].busy and not self._slots[source].wanted:
                slot = self._slots[source]
            elif source != slot.index:
                self.model.cache.copy_slot(source, slot.index, length)
        self.model.rollback(slot.index, length)
        slot.ids, slot.buffer, slot.agreed = ids[:length], weakref.ref(buffer), length
        return slot

    def release(self, slot: Slot) -> None:
        """Gives the slot back; what it holds stays until the slot is needed."""
        slot.busy = False

    def pack(self, slots: Sequence[Slot]) -> None:
        """Puts slots side by side in this order, moving as few as it can.

        A pass then sees them as one slice. Of slots that lie here and there every pass would have to gather the keys
        and values, which costs more than to read them; moving a slot costs as much as one such pass, once.
        """
        if self.model.uses_graphs:  # captured passes gather in any case
            return
        first = Counter(slot.index - place for place, slot in enumerate(slots)).most_common(1)[0][0]
        first = min(max(first, 0), len(self._slots) - len(slots))
        for place, slot in enumerate(slots, first):
            if slot.index != place:
                self.model.cache.swap_slots(slot.index, place)
                other = self._slots[place]
                self._slots[place], self._slots[slot.index] = slot, other
                other.index, slot.index = slot.index, place

    def forget(self) -> None:
        """Drops what idle slots hold."""
        for slot in self._slots:
            if not slot.busy:
                self.model.rollback(slot.index, 0)
                slot.ids, slot.buffer, slot.agreed, slot.last_used = [], None, 0, 0

    def unread(self, slot: Slot, buffer: TokenBuffer, prompt_length: int) -> list[int]:
        """The buffer's first `prompt_length` ids that the slot has not read, the last of them in any case.

        Whatever disagrees with the buffer is rolled back. What the buffer holds beyond that length, because it grew
        after the call was made, is no part of the call.
        """
        new = buffer.since(slot.agreed, prompt_length)
        known = min(slot.agreed + _common_prefix(slot.ids[slot.agreed :], new), prompt_length - 1)
        self.model.rollback(slot.index, known)
        slot.agreed = known
        del slot.ids[known:]
        return buffer.since(known, prompt_length)

    def remember(self, slot: Slot, buffer: TokenBuffer, prompt_length: int, beyond: Sequence[int]) -> None:
        """Notes that the slot was given the buffer's first `prompt_length` ids and then `beyond`.

        What was read after those is rolled back; what was not read yet is not counted as held.
        """
        slot.ids += [*buffer.since(len(slot.ids), prompt_length), *beyond]
        held = min(self.model.cache_length(slot.index), len(slot.ids))
        self.model.rollback(slot.index, held)
        slot.agreed = min(prompt_length, held)
        del slot.ids[held:]

    def check(self) -> None:
        """Asserts that the cache holds what the slots say."""
        for slot in self._slots:
            assert slot.busy or self.model.cache_length(slot.index) == len(slot.ids), slot
            assert slot.agreed <= len(slot.ids), slot


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are the same."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


def _reuse_order(slot: Slot) -> tuple[bool, int, int]:
    """Slots whose text is gone first, then the least recently used, then low ones: an unused slot costs memory."""
    return slot.wanted, slot.last_used, slot.index
