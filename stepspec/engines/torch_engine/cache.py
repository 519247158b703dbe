"""Keys and values of many sequences, one preallocated slot each.

The cache knows positions, not tokens. Data beyond a slot's length is stale: masks hide it and the next pass overwrites
it. To reject tokens, reject a step or remove a judge's probe, set `lengths[slot]` to the shorter length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stepspec.engines.torch_engine.transfer import upload

FIRST_CAPACITY = 256


class SlotCache:
    """The cache of one model, with the interface that transformers' attention layers write to (`update`).

    Keys and values of a layer have shape [slots, H_kv, capacity, D]; both grow by more than is needed.
    Call `begin` before each pass; every layer then writes its new keys and values to the positions given there.
    """

    is_compileable = False
    is_initialized = True
    """Transformers reads these for its own handling of prefill, which the engine does not use."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.capacity = 0  # positions of every slot
        self.max_positions: int | None = None
        """Positions of all slots together, to which `SlotTable` keeps the cache; None without a limit."""
        self.is_fixed = False
        """Whether captured passes hold the addresses of keys and values, so that these cannot move."""
        self._slots: Sequence[int] | Tensor = []
        self._rows = torch.empty(0, 1, dtype=torch.long)  # the slots as a tensor, broadcast to [B, T]
        self._positions: Tensor | None = None  # where the pass writes, [B, T]
        self._span = self._num_hidden = 0
        self.runs: Sequence[tuple[int, int]] = ()
        """Runs of rows that attention handles together in this pass; see `attention.runs_of_like_length`."""

    def begin(
        self,
        slots: Sequence[int] | Tensor,
        positions: Tensor,
        span: int = 0,
        runs: Sequence[tuple[int, int]] = (),
        num_hidden: int = 0,
    ) -> None:
        """Prepare a pass that writes to `positions` of `slots` and reads the first `span` positions.

        Args:
            slots: slot indices; a tensor [B, T] for a pass that reads by slot: `update` then returns the keys and
                values of all slots. For a tensor, call `reserve` first; a list reserves room automatically.
            positions: where the pass writes, [B, T]. For a list of one slot, they must be the last that are not hidden.
            span: how many positions of each slot the pass may read.
            runs: what `attention.runs_of_like_length` returns for the rows.
            num_hidden: how many positions at the end of the span no row sees.
        """
        self._num_hidden = num_hidden
        self._slots, self._positions, self._span, self.runs = slots, positions, span, runs
        if not isinstance(slots, Tensor):
            self.reserve(max(slots) + 1, span)
            self._rows = upload(slots, positions.device)[:, None]
        else:
            self._rows = slots

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` slots of `length` positions each. Contents are preserved."""
        if num_slots <= len(self.lengths) and length <= self.capacity:
            return
        if self.is_fixed:
            size = f"{len(self.lengths)} slots of {self.capacity} positions"
            raise RuntimeError(f"A pass needs {num_slots} slots of {length} positions, but the cache has {size}")
        self.lengths += [0] * (num_slots - len(self.lengths))
        self.capacity = self.capacity_for(length)
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                store[layer] = _grown(tensor, num_slots, self.capacity, self.max_positions)

    def capacity_for(self, length: int) -> int:
        """Return the positions of every slot once one holds `length`."""
        grown = self.capacity + max(FIRST_CAPACITY, self.capacity // 4)
        return self.capacity if length <= self.capacity else max(length, grown)

    def shrink(self, num_slots: int, capacity: int) -> None:
        """Free the memory of all but the first slots and positions. No slot may hold more than `capacity`."""
        del self.lengths[num_slots:]
        self.capacity = capacity
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                store[layer] = tensor[:num_slots, :, :capacity].clone()

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [B, H_kv, T, D]; return all that the pass may read, [B, H_kv, S, D].

        A pass that reads by slot gets all slots', [slots, H_kv, capacity, D].
        """
        self._make_layer(keys, values, layer_idx)
        return self._write(self._keys[layer_idx], keys), self._write(self._values[layer_idx], values)

    def update_row(
        self, keys: Tensor, values: Tensor, layer: int, slot: int, start: int, span: int
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values of one slot, [1, H_kv, T, D], from position `start` on; return its first
        `span` keys and values. Call `reserve` before the pass."""
        self._make_layer(keys, values, layer)
        rows = [store[layer][slot : slot + 1, :, :span] for store in (self._keys, self._values)]
        for row, new in zip(rows, (keys, values), strict=True):
            row[:, :, start : start + new.shape[2]] = new
        return rows[0], rows[1]

    def _make_layer(self, keys: Tensor, values: Tensor, layer: int) -> None:
        if layer == len(self._keys):
            self._keys.append(self._empty_like(keys))
            self._values.append(self._empty_like(values))

    def _empty_like(self, new: Tensor) -> Tensor:
        return new.new_zeros(len(self.lengths), new.shape[1], self.capacity, new.shape[3])

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        slots, span = self._slots, self._span
        if not isinstance(slots, Tensor):
            first, count = slots[0], len(slots)
            if count == 1:  # on a CPU, plain slices take a third of the time of an indexed write
                row = store[first : first + 1, :, :span]
                end = span - self._num_hidden
                row[:, :, end - new.shape[2] : end] = new
                return row
            if list(slots) == list(range(first, first + count)):
                store[self._rows, :, self._positions] = new.transpose(1, 2)
                return store[first : first + count, :, :span]
        store[self._rows, :, self._positions] = new.transpose(1, 2)
        return store if isinstance(slots, Tensor) else store[self._rows[:, 0], :, :span]

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        assert length <= self.lengths[source]
        self.reserve(target + 1, length)
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self.lengths[target] = length

    def swap_slots(self, first: int, second: int) -> None:
        """Exchange the contents of two slots."""
        self.reserve(max(first, second) + 1, 0)
        lengths = self.lengths[first], self.lengths[second]
        for tensor in (*self._keys, *self._values):
            saved = tensor[first, :, : lengths[0]].clone()
            tensor[first, :, : lengths[1]] = tensor[second, :, : lengths[1]]
            tensor[second, :, : lengths[0]] = saved
        self.lengths[second], self.lengths[first] = lengths

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position of a slot, over all layers that have been written to."""
        stores = (*self._keys, *self._values)
        return sum(tensor.shape[1] * tensor.shape[3] * tensor.itemsize for tensor in stores)

    @property
    def num_slots(self) -> int:
        """Slots that memory is allocated for."""
        return self._keys[0].shape[0] if self._keys else len(self.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: transformers numbers positions from here, but the engine always passes its own."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return sizes for transformers' masks, which are not used: the engine always passes its own."""
        return self._span, 0

    def check(self) -> None:
        """Assert that every slot's length is within the capacity."""
        assert all(0 <= length <= max(self.capacity, 1) for length in self.lengths), self.lengths
        for store in (self._keys, self._values):
            assert all(tensor.shape[2] == self.capacity for tensor in store)


def _grown(tensor: Tensor, num_slots: int, capacity: int, max_positions: int | None) -> Tensor:
    """Return the tensor with at least `num_slots` slots and exactly `capacity` positions. Contents are preserved."""
    slots, heads, length, size = tensor.shape
    if slots >= num_slots and length == capacity:
        return tensor
    while slots < num_slots:
        slots *= 2
    if max_positions is not None:
        slots = max(tensor.shape[0], num_slots, min(slots, max_positions // capacity))
    grown = tensor.new_zeros(slots, heads, capacity, size)
    grown[: tensor.shape[0], :, :length] = tensor
    return grown
