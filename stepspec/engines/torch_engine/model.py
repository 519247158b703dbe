"""A Hugging Face causal LM with one primitive, `extend`, for prefill, decode, verification and step scoring."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stepspec.engines.torch_engine import attention
from stepspec.engines.torch_engine.attention import Masks, SlotAttention, SlotRows, even_span, runs_of_like_length
from stepspec.engines.torch_engine.body import (
    FusedBody,
    FusedHead,
    Head,
    PartialHead,
    RaggedRow,
    has_alibi,
    make_body,
    make_head,
    window_of,
)
from stepspec.engines.torch_engine.cache import SlotCache
from stepspec.engines.torch_engine.graphs import SlotPasses
from stepspec.engines.torch_engine.matrix import Layout, Matrix, Quantization
from stepspec.engines.torch_engine.transfer import upload
from stepspec.errors import UsageError

CALL_BYTES = 120_000
"""Bytes of keys and values that a CPU core reads in the time of one more call of attention, about 12 microseconds."""

UNLIMITED = 1 << 15
"""Context of a model whose configuration names none, in tokens."""

PREFILL_CHUNK = 512
"""Prompt ids that one pass reads. A step to be judged is always read in one pass."""


class Positions(NamedTuple):
    """The positions of a pass's rows in a cache."""

    slots: Sequence[int] | Tensor  # a tensor [B] in passes that read by slot
    starts: Tensor  # position of the first id to read, [B]
    span: int = 0  # positions that a pass over one id may read; not used by slot
    runs: Sequence[tuple[int, int]] = ()  # what `attention.runs_of_like_length` returns for the rows

    def further(self, count: int) -> "Positions":
        """Return the positions after `count` further ids."""
        return self._replace(starts=self.starts + count, span=self.span + count)

    def slot_table(self, width: int) -> Tensor:
        """Return the rows of a pass by slot over `width` ids each, [3, B], as for `SlotPasses`."""
        return torch.stack([torch.as_tensor(self.slots), self.starts, torch.full_like(self.starts, width)])


class Branch(NamedTuple):
    """Columns at the end of a row that the others do not see, such as a judge's question."""

    length: int
    hidden: int = 0
    """How many columns at the end of the trunk the branch does not see. It leaves the trunk before them."""


class CausalModel:
    """An unmodified Hugging Face model with a slot cache. `cache.lengths[slot]` is the number of ids read into a slot.

    `self_check.checked_model` makes one whose logits are those of the network.

    Args:
        network: the model. Its attention is replaced with the engine's.
        name: the model's name in errors.
    """

    def __init__(self, network: PreTrainedModel, name: str) -> None:
        self.name = name
        self.network = network.eval()
        self.device = network.device
        self.vocab_size = int(network.config.get_text_config().vocab_size)
        self.num_layers = int(network.config.get_text_config().num_hidden_layers)
        self.max_context = _max_context(network.config)
        self.window = window_of(network.config.get_text_config())
        """Positions that layers with a sliding window see; None without such layers."""
        self._has_alibi = has_alibi(network)
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self.cache = SlotCache()
        self.position_bytes = 1
        """Bytes of the keys and values of one position; set after the first pass."""
        self.quantize: Quantization | None = None
        self.vocabulary: Sequence[int] | None = None
        """The ids that the model scores; None for all. All other logits are -inf."""
        self.partial: PartialHead | None = None
        """The head of a model with a draft vocabulary; None for others."""
        self._is_capturable = self.device.type == "cuda" and _is_capturable(network)
        network.set_attn_implementation(attention.NAME)
        if self.device.type == "cuda":
            # On H100 and H200, PyTorch prefers cuDNN for attention with a mask, which builds a plan of 20 to 50 ms for
            # every new shape of a pass. Other engines run in other threads, so it is turned off for the process.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._body = make_body(network)
        self.logits: FusedHead | PartialHead | Head = make_head(network)
        self.slot_passes = SlotPasses()

    def limit_to(self, vocabulary: Sequence[int]) -> None:
        """Score only the ids of a draft vocabulary."""
        self.vocabulary = vocabulary
        ids = torch.tensor(sorted(vocabulary), device=self.device)
        self.logits = self.partial = PartialHead(self.network, ids)

    @torch.inference_mode()
    def store_as(self, layout: Layout) -> None:
        """Store the weights in another layout. Requires `is_fused`."""
        assert isinstance(self._body, FusedBody)
        assert isinstance(self.logits, FusedHead | PartialHead)
        self.quantize = None if layout == "packed" else layout
        self._body.store_as(layout)
        if layout != "fp8":  # the last product decides between ids
            self.logits.store_as(layout)
        self.cache = SlotCache()  # models with products in whole numbers have keys and values in float32

    @property
    def is_fused(self) -> bool:
        """Whether the engine runs fused layers in place of the network's own."""
        return isinstance(self._body, FusedBody)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of hidden states, and of keys and values."""
        return torch.float32 if self._is_integer else self.network.dtype

    @property
    def _is_integer(self) -> bool:
        """Whether products are in whole numbers."""
        return self.quantize in ("int8", "int4")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        plain = sum(parameter.nbytes for parameter in self.network.parameters() if not parameter.is_meta)
        return plain + sum(matrix.stored_bytes for matrix in self._matrices)

    @property
    def _matrices(self) -> list[Matrix]:
        """All weights that a pass multiplies with, if the layers are fused."""
        head = None if isinstance(self.logits, Head) else self.logits.matrix
        return [*self._body.matrices, head] if head is not None and isinstance(self._body, FusedBody) else []

    def runs_of(self, lengths: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return the runs in which to attend to rows of these lengths; see `runs_of_like_length`."""
        return runs_of_like_length(lengths, CALL_BYTES * self.num_layers / self.position_bytes)

    def _span(self, end: int) -> int:
        """Return how many positions a row reads that sees those before `end`."""
        if not self._is_integer:
            return end
        assert isinstance(self._body, FusedBody)
        return even_span(end, self._body.head_size)

    def shorten(self, max_model_len: int | None) -> None:
        """Limit the context to `max_model_len` tokens; None changes nothing.

        Raises:
            UsageError: the model's context is shorter.
        """
        if max_model_len is None:
            return
        if max_model_len > self.max_context:
            raise UsageError(
                f"max_model_len={max_model_len} exceeds the context of {self.name}, which is {self.max_context} tokens."
            )
        self.max_context = max_model_len

    def with_own_cache(self) -> "CausalModel":
        """Return a model with the same weights and a separate cache."""
        twin = object.__new__(CausalModel)
        twin.__dict__ = self.__dict__ | {"cache": SlotCache()}
        twin.slot_passes = SlotPasses()
        return twin

    def make_trial(self) -> Callable[[], object]:
        """Return a function that reads one more id, in a cache of its own, for measurements."""
        twin = self.with_own_cache()
        return torch.inference_mode()(lambda: twin.extend([0], [[0]]))

    def read(self, positions: Positions, ids: Tensor, branches: Tensor | None = None) -> Tensor:
        """Read ids into the cache, without changing `cache.lengths`.

        Args:
            positions: where the rows are in the cache.
            ids: [B, T].
            branches: what `branch_columns` returns for each row, [3, B, T]; None without branches, and by slot.

        Returns:
            Hidden states [B, T, W].
        """
        slots, starts, span, runs = positions
        width = ids.shape[1]
        if isinstance(slots, Tensor):
            hidden = self.slot_passes.read(self._read_in_slots, ids.flatten(), positions.slot_table(width), None, width)
            return hidden.view(*ids.shape, -1)
        end = span + width - 1
        span = self._span(end)
        runs = [(count, span - self._span(end - fewer)) for count, fewer in runs]
        cells = starts[:, None] + torch.arange(width, device=self.device)  # [B, T]
        self.cache.begin(slots, cells, span, runs, span - end)
        hides = width > 1 or len(ids) > 1 or self._is_integer
        position_ids, masks = self._places(starts, cells, span, branches, hides=hides)
        return self._body(ids, position_ids, masks, self.cache)

    def _places(
        self, starts: Tensor, cells: Tensor, span: int, branches: Tensor | None, *, hides: bool
    ) -> tuple[Tensor, Masks]:
        """Return the position ids of a pass, [B, T], and which positions are visible.

        Args:
            starts: positions of the first ids, [B].
            cells: where the pass writes, [B, T].
            span: S.
            branches: what `branch_columns` returns for each row, [3, B, T]; None without branches.
            hides: whether some position is not visible with full attention; else there is no mask for that.
        """
        position_ids, mask = cells, None
        if hides:
            mask = torch.arange(span, device=self.device) <= cells[:, :, None]  # [B, T, S]
        if branches is not None:
            assert mask is not None
            numbers, shifts, ends = branches
            position_ids = cells - shifts
            of_key = numbers.new_zeros(len(cells), span).scatter(1, cells, numbers)[:, None]  # [B, 1, S]
            before = torch.arange(span, device=self.device) < (starts[:, None] + ends)[:, :, None]  # [B, T, S]
            mask = mask & (((of_key == 0) & before) | (of_key == numbers[:, :, None]))
        keys = near = None
        if self._has_alibi or (self.window is not None and (hides or span > self.window)):
            keys = torch.arange(span, device=self.device).expand(len(cells), -1)
            if branches is not None:
                keys = keys.scatter(1, cells, position_ids)
        if self.window is not None and keys is not None:
            near = keys[:, None] > position_ids[:, :, None] - self.window  # [B, T, S]
            near = near if mask is None else mask & near
        position_ids = position_ids.clamp(max=self.max_context - 1)  # padding may be beyond the context
        full, window = (None if each is None else each[:, None] for each in (mask, near))
        return position_ids, Masks(full, window, keys)

    def extend(
        self,
        slots: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        keep: Sequence[Sequence[int]] | None = None,
        branches: Sequence[Sequence[Branch]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Read further ids into slots in one pass, and advance the slots' lengths.

        Args:
            slots: one slot per row.
            ids: B rows of ids, ragged; row b goes to the positions after the contents of its slot.
            keep: for each row, the columns whose logits to return; all by default.
            branches: for each row, the branches at its end. A branch sees itself and the trunk, which is everything
                before the row's first branch, up to where it leaves it. Its positions continue from there.

        Returns:
            For each row, the logits of its columns, [C, V].
        """
        starts, lengths = [self.cache_length(slot) for slot in slots], [len(row) for row in ids]
        widths = lengths if self.reads_ragged else [max(lengths)] * len(ids)
        if self.reads_slots or len({*widths}) > 1:
            hidden = self._read_ragged(slots, starts, ids, branches)
        else:
            padded = [[*row, *[0] * (widths[0] - len(row))] for row in ids]
            inputs = upload([[start, *row] for start, row in zip(starts, padded, strict=True)], self.device)
            columns = None
            if branches is not None and any(branch.length for row in branches for branch in row):
                columns = upload([*map(branch_columns, widths, lengths, branches)], self.device).transpose(0, 1)
            positions = Positions(slots, inputs[:, 0], max(starts) + 1, self.runs_of(starts))
            hidden = self.read(positions, inputs[:, 1:], columns).flatten(0, 1)[None]
        for slot, start, length in zip(slots, starts, lengths, strict=True):
            self.cache.lengths[slot] = start + length
        return self.kept_logits(hidden, widths, [range(length) for length in lengths] if keep is None else keep)

    @property
    def reads_slots(self) -> bool:
        """Whether passes read keys and values by slot; see `stepspec.engines.torch_engine.slot_attention`."""
        return self._body.attend_in_slots is not None

    def attend_in_slots_by(self, attention: SlotAttention | None) -> None:
        """Choose what reads keys and values by slot; None for passes that read copies of them."""
        self._body.attend_in_slots = attention

    @property
    def can_capture(self) -> bool:
        """Whether CUDA graphs can hold the model's passes; see `SlotPasses`."""
        return self.reads_slots and self._is_capturable

    def capture(self, max_rows: int, report: Callable[[int, int], None] = lambda *_: None) -> None:
        """Capture small passes; see `SlotPasses.capture`. The cache cannot grow any more. Requires `reads_slots`."""
        self.slot_passes.capture(self._read_in_slots, max_rows, self.device, report)
        self.cache.is_fixed = True

    def replace_cache(self) -> None:
        """Begin with an empty cache, without captured passes, which read the former one."""
        self.cache, self.slot_passes = SlotCache(), SlotPasses()

    @property
    def reads_ragged(self) -> bool:
        """Whether rows of different lengths share a pass without padding."""
        return self.reads_slots or (self.is_fused and self.device.type == "cpu")

    def pass_inputs(self, rows: Sequence[Sequence[int]], beyond: int) -> tuple[Positions, Tensor]:
        """Copy the positions of rows and further numbers to the device, in one copy.

        Args:
            rows: for each row, its slot, the position of the first id to read, and F further numbers.
            beyond: how many ids to read from that position on, in this pass and the following ones.

        Returns:
            The positions of a pass that reads the first id, and the further numbers, [F, B].
        """
        top, table = max(row[1] for row in rows), upload(rows, self.device)
        if self.reads_slots:
            self.cache.reserve(max(row[0] for row in rows) + 1, top + beyond + 1)
            return Positions(table[:, 0], table[:, 1]), table[:, 2:].T
        positions = Positions([row[0] for row in rows], table[:, 1], top + 1, self.runs_of([row[1] for row in rows]))
        return positions, table[:, 2:].T

    def kept_logits(self, hidden: Tensor, widths: Sequence[int], keep: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        """Return the logits of some columns of each row, [C, V].

        Args:
            hidden: hidden states of the rows, one row after the other, [1, N, W].
            widths: of the rows, with their padding.
            keep: the columns of each row.
        """
        firsts = [0, *accumulate(widths)]
        flat = [first + column for first, row in zip(firsts, keep, strict=False) for column in row]
        if flat != [*range(hidden.shape[1])]:
            hidden = hidden[:, upload(flat, self.device, torch.long)]
        return self.logits(hidden).flatten(0, 1).split([len(row) for row in keep])

    def read_beside(
        self,
        positions: Positions,
        ids: Tensor,
        lengths: Sequence[int],
        slots: Sequence[int],
        starts: Sequence[int],
        others: Sequence[Sequence[int]],
        branches: Sequence[Sequence[Branch]],
    ) -> tuple[Tensor, Tensor]:
        """Read ids and other rows in one pass, without changing `cache.lengths`. Requires `reads_ragged`.

        Args:
            positions: where the ids are in the cache.
            ids: [B, T].
            lengths: how many ids of each row count; the others need not be read.
            slots: the slots of the other rows, which are ragged.
            starts: positions of their first ids.
            others: the other rows.
            branches: their branches; see `extend`.

        Returns:
            Hidden states of the ids, [B, T, W], and of the others, one row after the other, [1, N, W].
        """
        if isinstance(positions.slots, Tensor):
            own = positions.slot_table(ids.shape[1])
            flat, table, columns = self._slot_inputs(slots, starts, others, branches)
            columns = None if columns is None else torch.nn.functional.pad(columns, (ids.numel(), 0))
            longest = max(ids.shape[1], *map(len, others))
            every = torch.cat([ids.flatten(), flat]), torch.cat([own, table], 1), columns, longest
            hidden = self.slot_passes.read(self._read_in_slots, *every)
            return hidden[: ids.numel()].view(*ids.shape, -1), hidden[None, ids.numel() :]
        rows = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
        every = [*positions.slots, *slots], [*positions.starts.tolist(), *starts], [*rows, *others]
        hidden = self._read_ragged(*every, [*[()] * len(ids), *branches])
        last = torch.tensor(lengths)
        firsts = (last.cumsum(0) - last)[:, None]
        places = firsts + torch.minimum(torch.arange(ids.shape[1]), last[:, None] - 1)
        return hidden[0, places], hidden[:, sum(lengths) :]

    def _slot_inputs(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        ids: Sequence[Sequence[int]],
        branches: Sequence[Sequence[Branch]] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Copy rows to the device in one copy: ids [N], table [3, R], and branches [3, N], as for `SlotPasses`."""
        lengths = [len(row) for row in ids]
        count = sum(lengths)
        self.cache.reserve(max(slots) + 1, max(map(sum, zip(starts, lengths, strict=True))) + 1)
        columns = list[list[int]]()
        if branches is not None and any(branch.length for row in branches for branch in row):
            tables = map(branch_columns, lengths, lengths, branches)
            columns = [[number for part in parts for number in part] for parts in zip(*tables, strict=True)]
        parts = [[id for row in ids for id in row], slots, starts, lengths, *columns]
        flat, table, *rest = upload([number for part in parts for number in part], self.device).split(
            [count, 3 * len(slots), *[3 * count] * bool(columns)]
        )
        return flat, table.view(3, -1), rest[0].view(3, -1) if rest else None

    def _read_in_slots(self, ids: Tensor, table: Tensor, branches: Tensor, longest: int) -> Tensor:
        """Run a pass of `SlotPasses`. What padding writes goes behind all texts."""
        slots, starts, lengths = table
        ends, places = lengths.cumsum(0), torch.arange(len(ids), device=self.device)
        row = torch.searchsorted(ends, places, right=True)
        exists, row = row < len(slots), row.clamp(max=len(slots) - 1)
        firsts = ends - lengths
        cells = torch.where(exists, starts[row] + places - firsts[row], self.cache.capacity - 1)
        position_ids = (cells - branches[1]).clamp(max=self.max_context - 1)  # padding is beyond the context
        self.cache.begin(torch.where(exists, slots[row], 0)[None], cells[None])
        rows = SlotRows(torch.stack([slots, starts, firsts, lengths]).int(), branches.int(), longest)
        return self._body(ids[None], position_ids[None], Masks(rows=rows), self.cache)[0]

    def _read_ragged(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        ids: Sequence[Sequence[int]],
        branches: Sequence[Sequence[Branch]] | None = None,
    ) -> Tensor:
        """Read rows of different lengths without padding, without changing `cache.lengths`. Requires `reads_ragged`.

        Args:
            slots: one slot per row.
            starts: positions of the rows' first ids.
            ids: the rows.
            branches: see `extend`.

        Returns:
            Hidden states of all rows, one row after the other, [1, N, W].
        """
        if self.reads_slots:
            flat, table, columns = self._slot_inputs(slots, starts, ids, branches)
            return self.slot_passes.read(self._read_in_slots, flat, table, columns, max(map(len, ids)))[None]
        assert isinstance(self._body, FusedBody)
        ends = [start + len(row) for start, row in zip(starts, ids, strict=True)]
        spans = [self._span(end) for end in ends]
        self.cache.reserve(max(slots) + 1, max(spans))
        rows, places = list[RaggedRow](), list[Tensor]()
        for index, (slot, start, row, span) in enumerate(zip(slots, starts, ids, spans, strict=True)):
            own = () if branches is None else branches[index]
            shape = None
            if any(each.length for each in own):
                shape = torch.tensor(branch_columns(len(row), len(row), own))[:, None]
            cells, begin = torch.arange(start, start + len(row))[None], torch.tensor([start])
            hides = len(row) > 1 or self._is_integer
            position_ids, masks = self._places(begin, cells, span, shape, hides=hides)
            rows.append(RaggedRow(slot, start, len(row), span, masks))
            places.append(position_ids)
        flat = torch.tensor([[id for row in ids for id in row]])
        return self._body.ragged(flat, torch.cat(places, 1), rows, self.cache)

    def cache_length(self, slot: int) -> int:
        """Return the number of positions that the slot holds; 0 if it was never used."""
        return self.cache.lengths[slot] if slot < len(self.cache.lengths) else 0

    def rollback(self, slot: int, length: int) -> None:
        """Drop everything from position `length` on."""
        assert length <= self.cache_length(slot)
        if slot < len(self.cache.lengths):
            self.cache.lengths[slot] = length


def _is_capturable(network: PreTrainedModel) -> bool:
    """Return whether a CUDA graph can hold a pass.

    Experts wait for the host, except for PyTorch's grouped products in bfloat16 on GPUs like H100 and B200.
    """
    parts = network.modules()
    if not any(hasattr(part, "num_experts") or "experts" in type(part).__name__.lower() for part in parts):
        return True
    major, _ = torch.cuda.get_device_capability(network.device)
    grouped = getattr(network.config, "_experts_implementation", None) == "grouped_mm"
    return grouped and network.dtype == torch.bfloat16 and major in (9, 10)


def _max_context(config: Any) -> int:
    """Return the longest text, in tokens, up to which the position encoding does not depend on the length."""
    text = config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", None) or getattr(text, "seq_length", None) or UNLIMITED)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def branch_columns(width: int, length: int, branches: Sequence[Branch]) -> tuple[list[int], list[int], list[int]]:
    """Return for each column of a row its branch's number, how far to shift its position, and the columns that it sees.

    Branches are numbered from 1; 0 is no branch. A position is shifted back by the columns between the branch and the
    place where it leaves the trunk. A branch sees the trunk's columns up to there.

    Args:
        width: of the row with its padding.
        length: of the row.
        branches: at the end of the row.
    """
    numbers, shifts, ends = [0] * width, [0] * width, [width] * width
    trunk = column = length - sum(branch.length for branch in branches)
    for number, branch in enumerate(branches, 1):
        columns, end = slice(column, column + branch.length), trunk - branch.hidden
        numbers[columns] = [number] * branch.length
        shifts[columns] = [column - end] * branch.length
        ends[columns] = [end] * branch.length
        column += branch.length
    return numbers, shifts, ends
