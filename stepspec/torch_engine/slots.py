"""Which sequence each slot of a cache holds, so that a call reads only what its slot has not seen."""

import weakref
from dataclasses import dataclass, field

from stepspec.engine import TokenBuffer
from stepspec.torch_engine.model import CausalModel


@dataclass
class Slot:
    """One slot: the buffer it follows, how many of its ids are known to be cached, and the cached ids beyond those.

    `tail` are ids that were read after the buffer's end: a step being generated or judged. Once the buffer has grown
    they are compared with what was committed, so a step that was accepted is never read again.
    """

    index: int
    buffer: "weakref.ref[TokenBuffer] | None" = None
    agreed: int = 0
    tail: list[int] = field(default_factory=list)
    busy: bool = False
    last_used: int = 0


class SlotTable:
    """The slots of one model."""

    def __init__(self, model: CausalModel, max_slots: int) -> None:
        self.model = model
        self._slots = [Slot(index) for index in range(max_slots)]
        self._clock = 0

    def acquire(self, buffer: TokenBuffer) -> Slot | None:
        """The idle slot that already follows the buffer, else the one used longest ago; None if all are busy."""
        idle = [slot for slot in self._slots if not slot.busy]
        if not idle:
            return None
        own = [slot for slot in idle if slot.buffer is not None and slot.buffer() is buffer]
        slot = own[0] if own else min(idle, key=_reuse_order)
        if not own:
            slot.buffer, slot.agreed, slot.tail = weakref.ref(buffer), 0, []
            self.model.rollback(slot.index, 0)
        self._clock += 1
        slot.busy, slot.last_used = True, self._clock
        return slot

    def release(self, slot: Slot) -> None:
        """Gives the slot back; what it holds stays until the slot is needed."""
        slot.busy = False

    def unread(self, slot: Slot, buffer: TokenBuffer, *, at_most: int) -> list[int]:
        """The buffer's ids that the slot has not read, after rolling back whatever disagrees with the buffer.

        At most `at_most` ids of the buffer are taken as read, so that the caller gets the logits it needs.
        """
        new = buffer.since(slot.agreed)
        same = 0
        while same < min(len(new), len(slot.tail)) and new[same] == slot.tail[same]:
            same += 1
        known = min(slot.agreed + same, at_most)
        self.model.rollback(slot.index, known)
        slot.agreed, slot.tail = known, []
        return buffer.since(known)

    def remember(self, slot: Slot, prompt_length: int, beyond: list[int]) -> None:
        """Notes that the slot was given the buffer's first `prompt_length` ids and then `beyond`.

        What was read after those is rolled back; what was not read yet is not counted as held.
        """
        held = min(self.model.cache_length(slot.index), prompt_length + len(beyond))
        self.model.rollback(slot.index, held)
        slot.agreed = min(prompt_length, held)
        slot.tail = beyond[: held - slot.agreed]


def _reuse_order(slot: Slot) -> tuple[bool, int, int]:
    alive = slot.buffer is not None and slot.buffer() is not None
    return alive, slot.last_used if alive else 0, slot.index  # low indices first: an unused slot costs memory
