"""Prefix caching: which sequence each slot of a cache holds, so that a call reads only what no slot has read.

A released slot keeps its contents until it is reused. A call on a text that a slot follows continues in that slot. A
new text takes over or copies the longest prefix that any slot of its group shares with it.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepspec.engines.protocol import TokenBuffer
from stepspec.engines.torch_engine.cache import FIRST_CAPACITY
from stepspec.engines.torch_engine.memory import MIN_SLOTS
from stepspec.engines.torch_engine.model import CausalModel

MIN_PREFIX = 16
"""Minimum number of shared ids to copy. Reading fewer again takes no longer than a copy."""

CHUNK = 256
"""Number of ids that are compared together."""

LEFT = 0.75
"""Share of the memory that is left at most when slots are shortened, or dropped while running texts take more than they
may. Both copy the keys and values of all others."""


@dataclass
class Slot:
    """A slot: the ids that it holds, the buffer that it follows, and how many of the ids are known to match the buffer.

    Ids read after the buffer's end, such as a step being generated or judged, stay in `ids`. When the buffer has grown,
    they are compared with the committed ids, so an accepted step is never read again.
    """

    index: int
    ids: list[int] = field(default_factory=list)
    buffer: "weakref.ref[TokenBuffer] | None" = None
    group: str | None = None
    """The group of the buffer, which may be gone."""
    agreed: int = 0
    busy: bool = False
    last_used: int = 0
    num_expected: int = 0
    """Length of the text that the slot's call reads, before it writes."""

    def follows(self, buffer: TokenBuffer) -> bool:
        """Return whether the slot holds a prefix of this buffer, compared by identity."""
        return self.buffer is not None and self.buffer() is buffer

    @property
    def wanted(self) -> bool:
        """Whether the buffer that the slot follows still exists, so its text may continue."""
        return self.buffer is not None and self.buffer() is not None


class SlotTable:
    """The slots of one model."""

    def __init__(self, model: CausalModel, max_slots: int) -> None:
        self.model = model
        self._slots = [Slot(index) for index in range(max_slots)]
        self._room = max_slots
        self._clock = 0

    def acquire(self, buffer: TokenBuffer, prompt_length: int, after: Sequence[int] = ()) -> Slot | None:
        """Return a slot for a call on the buffer; None if all are busy.

        The slot gets the longest prefix that any slot of the buffer's group holds. Several slots follow the buffer if
        calls on it overlapped. The one with the most of the call's text is chosen.
        """
        num_expected = prompt_length + len(after)
        self._make_room(num_expected)
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            return None
        idle = [slot for slot in idle if slot.index < self._room] or idle
        following = [slot for slot in idle if slot.follows(buffer)]
        if len(following) > 1:
            slot = max(following, key=lambda slot: _num_held(slot, buffer, prompt_length, after))
        else:
            slot = following[0] if following else self._claim(buffer, idle)
        self._clock += 1
        slot.busy, slot.last_used, slot.num_expected = True, self._clock, num_expected
        return slot

    def has_room(self, length: int) -> bool:
        """Whether a text of this length fits into the memory beside those of the busy slots."""
        self._make_room(length)
        return sum(slot.busy for slot in self._slots) < self._room

    def _make_room(self, length: int = 0) -> None:
        """Set how many slots fit into the memory if one has this length, and drop idle ones beyond that number.

        All slots have the size of the longest one. If too few fit for another text, idle slots that are longer than all
        busy ones are dropped, too.
        """
        cache = self.model.cache
        if cache.max_positions is None:
            return
        busy = [slot for slot in self._slots if slot.busy]
        lengths = [max(slot.num_expected, len(slot.ids), self.model.cache_length(slot.index)) for slot in busy]
        longest = max(length, *lengths, 0)
        capacity, least = cache.capacity_for(longest), max(FIRST_CAPACITY, longest + longest // 4)
        if least <= LEFT * cache.capacity and cache.max_positions // capacity <= len(busy):
            capacity = least
        room = max(MIN_SLOTS, cache.max_positions // capacity)
        keep, capacity = max(room, len(busy)), min(capacity, cache.capacity)
        most = cache.num_slots if len(busy) <= room else LEFT * cache.num_slots
        if keep < most or capacity < cache.capacity:
            for slot in self._slots:
                if not slot.busy and len(slot.ids) > capacity:
                    self._clear(slot)
            for index, slot in enumerate(sorted(self._slots, key=_keeping_order)[:keep]):
                if slot.busy or slot.ids:
                    self._move(slot, index)
            for slot in self._slots[keep:]:
                self._clear(slot)
            cache.shrink(keep, capacity)
        self._room = min(room, len(self._slots))

    def _move(self, slot: Slot, index: int) -> None:
        """Exchange a slot with the one that has this index."""
        if slot.index != index:
            self.model.cache.swap_slots(slot.index, index)
            other = self._slots[index]
            self._slots[index], self._slots[slot.index] = slot, other
            other.index, slot.index = slot.index, index

    def _claim(self, buffer: TokenBuffer, idle: Sequence[Slot]) -> Slot:
        """Make an idle slot follow a buffer that no idle slot follows, and return it."""
        ids = buffer.since(0)
        group = buffer.group
        shared = {slot.index: common_prefix(slot.ids, ids) for slot in self._slots if slot.ids and slot.group == group}
        source = max(shared, key=lambda index: shared[index], default=None)
        slot = min(idle, key=_reuse_order)
        if source is None or shared[source] < MIN_PREFIX:
            length = shared.get(slot.index, 0)
        else:
            length = shared[source]
            if not self._slots[source].busy and not self._slots[source].wanted:
                slot = self._slots[source]
            elif source != slot.index:
                self.model.cache.copy_slot(source, slot.index, length)
        self.model.rollback(slot.index, length)
        slot.ids, slot.buffer, slot.group, slot.agreed = ids[:length], weakref.ref(buffer), group, length
        return slot

    def release(self, slot: Slot) -> None:
        """Release the slot. Its contents stay until the slot is reused."""
        slot.busy = False

    def pack(self, slots: Sequence[Slot]) -> None:
        """Move slots so that they are adjacent and in this order, with as few moves as possible.

        A pass then reads them as one slice. With scattered slots, every pass would gather the keys and values, which
        costs more than reading them. Moving a slot costs as much as one such pass, but only once.
        """
        if self.model.reads_slots:
            return
        cache = self.model.cache
        if cache.max_positions is not None and cache.num_slots * cache.capacity > cache.max_positions:
            self._make_room()
        first = Counter(slot.index - offset for offset, slot in enumerate(slots)).most_common(1)[0][0]
        end = max(self._room, *(slot.index + 1 for slot in slots))
        first = min(max(first, 0), end - len(slots))
        for index, slot in enumerate(slots, first):
            self._move(slot, index)

    def forget(self) -> None:
        """Drop the contents of idle slots."""
        for slot in self._slots:
            if not slot.busy:
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        self.model.rollback(slot.index, 0)
        slot.ids, slot.buffer, slot.agreed, slot.last_used = [], None, 0, 0

    def unread(self, slot: Slot, buffer: TokenBuffer, prompt_length: int, after: Sequence[int] = ()) -> list[int]:
        """Return which ids of a call's text the slot has not read; always includes the last one.

        The text is the buffer's first `prompt_length` ids, then `after`. Contents that differ from it are rolled back.
        Later ids of the buffer are ignored; they are there if the buffer grew after the call was made.
        """
        known = min(_num_held(slot, buffer, prompt_length, after), prompt_length + len(after) - 1)
        self.model.rollback(slot.index, known)
        slot.agreed = min(known, prompt_length)
        del slot.ids[known:]
        return [*buffer.since(known, prompt_length), *after[max(0, known - prompt_length) :]]

    def remember(self, slot: Slot, buffer: TokenBuffer, prompt_length: int, beyond: Sequence[int]) -> None:
        """Record that the slot's text is the buffer's first `prompt_length` ids, then `beyond`.

        Anything read after these ids is rolled back. Ids that were not read yet do not count as held.
        """
        num_beyond = max(0, len(slot.ids) - prompt_length)
        slot.ids += [*buffer.since(len(slot.ids), prompt_length), *beyond[num_beyond:]]
        held = min(self.model.cache_length(slot.index), len(slot.ids))
        self.model.rollback(slot.index, held)
        slot.agreed = min(prompt_length, held)
        del slot.ids[held:]

    def check(self) -> None:
        """Assert that the cache lengths match the slots."""
        for slot in self._slots:
            assert slot.busy or self.model.cache_length(slot.index) == len(slot.ids), slot
            assert slot.agreed <= len(slot.ids), slot


def _num_held(slot: Slot, buffer: TokenBuffer, prompt_length: int, after: Sequence[int]) -> int:
    """Return how many leading ids of a call's text the slot holds."""
    agreed = min(slot.agreed, prompt_length)
    return agreed + common_prefix(slot.ids[agreed:], [*buffer.since(agreed, prompt_length), *after])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading ids are equal."""
    length = min(len(first), len(second))
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        if first[start:end] != second[start:end]:
            return next(index for index in range(start, end) if first[index] != second[index])
    return length


def _reuse_order(slot: Slot) -> tuple[bool, int, int]:
    """Sort slots without a live text first, then by last use, then by index, since a new slot costs memory."""
    return slot.wanted, slot.last_used, slot.index


def _keeping_order(slot: Slot) -> tuple[bool, bool, int]:
    """Sort busy slots first, then those with a live text, then by last use."""
    return not slot.busy, not slot.wanted, slot.index if slot.busy else -slot.last_used
