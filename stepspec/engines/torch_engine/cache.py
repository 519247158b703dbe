"""Keys and values of many sequences, one preallocated slot each; rollback is arithmetic on a length.

Knows positions, not tokens. Anything beyond a slot's length is stale: masks hide it and the next pass overwrites it,
so rejecting tokens, rejecting a step and removing a judge's probe are all `lengths[slot] = shorter`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_CAPACITY = 256


class SlotCache:
    """The cache of one model, in the form that transformers' attention layers write to (`update`).

    Per layer, keys and values of shape [slots, H_kv, capacity, D]; slots and capacity double when more is needed.
    A pass is announced with `begin`; within it every layer's new keys and values go to the announced positions.
    """

    is_compileable = False
    is_initialized = True
    """Asked by transformers for what it does with the first part of a text alone, and we do with none."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.capacity = 0  # positions of every slot
        self._slots: Sequence[int] | Tensor = []
        self._rows = torch.empty(0, 1, dtype=torch.long)  # the slots as a tensor, [B, 1]
        self._positions: Tensor | None = None  # where the pass writes, [B, T]
        self._span = 0
        self.runs: Sequence[tuple[int, int]] = ()
        """What the pass may make of rows that are of different lengths (`attention.runs_of_like_length`)."""

    def begin(
        self, slots: Sequence[int] | Tensor, positions: Tensor, span: int, runs: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Announces a pass that writes to `positions` [B, T] of `slots` and reads the first `span` positions.

        Slots given as numbers make a pass of its own; of a single one the pass then writes the last of the span. Slots
        given as a tensor [B] make a pass that can be captured and replayed with others; `reserve` must have made room.
        """
        self._slots, self._positions, self._span, self.runs = slots, positions, span, runs
        if not isinstance(slots, Tensor):
            self.reserve(max(slots) + 1, span)
            self._rows = torch.tensor(slots, device=positions.device)[:, None]
        else:
            self._rows = slots[:, None]

    def reserve(self, num_slots: int, length: int) -> None:
        """Makes room for so many slots of so many positions; what they hold is kept."""
        if num_slots <= len(self.lengths) and length <= self.capacity:
            return
        self.lengths += [0] * (num_slots - len(self.lengths))
        if length > self.capacity:
            self.capacity = max(length, 2 * self.capacity, FIRST_CAPACITY)
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                store[layer] = _grown(tensor, num_slots, self.capacity)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values [B, H_kv, T, D]; returns all that the pass may see, [B, H_kv, S, D]."""
        if layer_idx == len(self._keys):
            self._keys.append(self._empty_like(keys))
            self._values.append(self._empty_like(values))
        return self._write(self._keys[layer_idx], keys), self._write(self._values[layer_idx], values)

    def _empty_like(self, new: Tensor) -> Tensor:
        return new.new_zeros(len(self.lengths), new.shape[1], self.capacity, new.shape[3])

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        slots, span = self._slots, self._span
        if not isinstance(slots, Tensor):
            first, count = slots[0], len(slots)
            if count == 1:  # plain slices: a third of the time of an indexed write on a CPU
                row = store[first : first + 1, :, :span]
                row[:, :, span - new.shape[2] :] = new
                return row
            if list(slots) == list(range(first, first + count)):
                store[self._rows, :, self._positions] = new.transpose(1, 2)
                return store[first : first + count, :, :span]
        store[self._rows, :, self._positions] = new.transpose(1, 2)
        return store[self._rows[:, 0], :, :span]

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Gives another slot the first `length` positions of one."""
        assert length <= self.lengths[source]
        self.reserve(target + 1, length)
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self.lengths[target] = length

    def swap_slots(self, first: int, second: int) -> None:
        """Exchanges what two slots hold."""
        self.reserve(max(first, second) + 1, 0)
        lengths = self.lengths[first], self.lengths[second]
        for tensor in (*self._keys, *self._values):
            kept = tensor[first, :, : lengths[0]].clone()
            tensor[first, :, : lengths[1]] = tensor[second, :, : lengths[1]]
            tensor[second, :, : lengths[0]] = kept
        self.lengths[second], self.lengths[first] = lengths

    @property
    def position_bytes(self) -> int:
        """What the keys and values of one position of a slot take, in all layers that have been written to."""
        stores = (*self._keys, *self._values)
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.itemsize for tensor in stores)

    @property
    def num_bytes(self) -> int:
        """What is allocated."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by transformers to number positions; ours are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Asked by transformers to build masks; ours are always given."""
        return self._span, 0

    def check(self) -> None:
        """Asserts that every slot's length lies within what is allocated."""
        assert all(0 <= length <= max(self.capacity, 1) for length in self.lengths), self.lengths
        for store in (self._keys, self._values):
            assert all(tensor.shape[2] == self.capacity for tensor in store)


def _grown(tensor: Tensor, num_slots: int, capacity: int) -> Tensor:
    """The tensor with room for at least so many slots and exactly that capacity, contents kept."""
    slots, heads, length, size = tensor.shape
    if slots >= num_slots and length == capacity:
        return tensor
    while slots < num_slots:
        slots *= 2
    grown = tensor.new_zeros(slots, heads, capacity, size)
    grown[: tensor.shape[0], :, :length] = tensor
    return grown
