"""A Hugging Face causal LM with one primitive, `extend`, for prefill, decode, verification and step scoring."""

import inspect
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from stepspec.engines.hugging_face import load_config, loading_options
from stepspec.engines.torch_engine import attention
from stepspec.engines.torch_engine.attention import Masks, UnsupportedAttentionError, runs_of_like_length
from stepspec.engines.torch_engine.body import (
    FUSED,
    FusedBody,
    FusedHead,
    Head,
    PartialHead,
    RaggedRow,
    has_alibi,
    make_body,
    make_head,
    sharing_weights,
    window_of,
)
from stepspec.engines.torch_engine.cache import SlotCache
from stepspec.engines.torch_engine.matrix import Layout, Matrix, Quantization, can_quantize, packing_pays
from stepspec.errors import ModelError, UsageError, reason_of

logger = logging.getLogger(__name__)

CALL_BYTES = 120_000
"""Bytes of keys and values that a CPU core reads in the time of one more call of attention, about 12 microseconds."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""By dtype: how far logits over the slot cache may deviate from the model's own, as a share of their spread."""

SPAN = 16
"""Quantized models attend to multiples of so many positions, of which a mask hides the last ones.

The sums over positions then have one order in every pass. In other passes they would differ in the last
bits, which quantization amplifies: one id at a time and eight at a time, logits of a model with 0.5 billion parameters
differed by 5% of their spread.
"""

QUANTIZED_TOLERANCE: dict[Layout, float] = {"int8": 0.3, "int4": 0.6}
"""The same for quantized weights, whose own rounding counts too. Wrong products deviate by 1 and more."""

NUM_TRIALS, NUM_AGREEING = 8, 3
"""Number of trial texts for a network in 16 bits, and how many of them it must reproduce if not the first one."""

MAX_TRIAL = 256
"""Longest window that the trial texts exceed, in tokens."""

UNLIMITED = 1 << 15
"""Context of a model whose configuration names none, in tokens."""

PREFILL_CHUNK = 512
"""Prompt ids that one pass reads. A step to be judged is always read in one pass."""


class Positions(NamedTuple):
    """The positions of a pass's rows in a cache."""

    slots: Sequence[int] | Tensor  # a tensor [B] in captured passes
    starts: Tensor  # position of the first id to read, [B]
    span: int  # positions that a pass over one id may read; in captured passes, the same for any number of ids
    runs: Sequence[tuple[int, int]] = ()  # what `attention.runs_of_like_length` returns for the rows

    def further(self, count: int) -> "Positions":
        """Return the positions after `count` further ids."""
        return self._replace(starts=self.starts + count, span=self.span_of(count + 1))

    def span_of(self, width: int) -> int:
        """Return how many positions a pass over `width` ids may read."""
        return self.span if isinstance(self.slots, Tensor) else self.span + width - 1


class Branch(NamedTuple):
    """Columns at the end of a row that the others do not see, such as a judge's question."""

    length: int
    hidden: int = 0
    """How many columns at the end of the trunk the branch does not see. It leaves the trunk before them."""


class CausalModel:
    """An unmodified Hugging Face model with a slot cache. `cache.lengths[slot]` is the number of ids read into a slot.

    Args:
        network: the model.
        name: the model's name in errors.
        vocabulary: the ids that the model scores; None for all. All other logits are -inf.
        quantize: how to quantize the weights; None leaves them in the network's data type.

    Raises:
        ModelError: the engine does not reproduce the network, or cannot quantize it.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        name: str,
        vocabulary: Sequence[int] | None = None,
        quantize: Quantization | None = None,
    ) -> None:
        refuse_unsupported(network.config, name)
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
        self.partial: PartialHead | None = None
        """The head of a model with a draft vocabulary; None for others."""
        trials, references = self._reproduce()
        self.vocabulary = vocabulary
        if vocabulary is not None:
            self.logits = self.partial = PartialHead(network, torch.tensor(sorted(vocabulary), device=self.device))
        self.quantize = quantize
        if quantize is not None and not (isinstance(self._body, FusedBody) and can_quantize(self.device)):
            raise ModelError(
                f"{name} cannot be quantized: that needs a model of the family {', '.join(sorted(FUSED))} on a CPU "
                "with VNNI instructions. Leave out quantize."
            )
        embeddings: Any = network.get_input_embeddings()
        if quantize or (isinstance(self._body, FusedBody) and packing_pays(embeddings.weight)):
            self._store_as(quantize or "packed", trials, references)
        self.position_bytes = self.cache.position_bytes
        self.cache = SlotCache()
        self.uses_graphs = self.device.type == "cuda" and _is_capturable(network)

    def _reproduce(self) -> tuple[list[list[int]], list[Tensor]]:
        """Replace the network's attention and layers with the engine's, and check that the logits stay the same.

        Returns:
            The ids of the trial texts, and the network's own logits after each of them, [V].

        Raises:
            ModelError: the network does not run, or the logits over the slot cache differ from its own.
        """
        network, deviation, failure = self.network, torch.inf, None
        if getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            network.set_attn_implementation("eager")  # older releases of transformers ignore the soft cap in others
        own_attention: Any = network.config._attn_implementation
        self._own_attention = own_attention
        trials = _trials(network)
        try:
            references = [_own_logits(network, ids) for ids in trials]
        except Exception as error:
            raise ModelError(f"{self.name} does not run: {type(error).__name__}: {reason_of(error)}.") from error
        network.set_attn_implementation(attention.NAME)
        reached = self._has_alibi or network.config._attn_implementation == attention.NAME
        try:
            self._body = make_body(network)
            self.logits: FusedHead | PartialHead | Head = make_head(network)
            deviation = self._least_deviation(trials, [own[-1] for own in references], TOLERANCE[network.dtype])
        except Exception as error:
            failure = error
        if not reached or deviation > TOLERANCE[network.dtype]:
            network.set_attn_implementation(own_attention)
            reason = _difference(network, trials, references, reached) or _failure(failure, deviation)
            raise ModelError(
                f"The torch engine does not reproduce {self.name}: {reason}. "
                "Serve it with vLLM or another server instead."
            ) from failure
        if self.reads_slots:
            self._try_slots(trials[0], references[0][-1])
        return trials, [own[-1] for own in references]

    @torch.inference_mode()
    def _store_as(self, layout: Layout, trials: list[list[int]], references: list[Tensor]) -> None:
        """Store the weights of a network with fused layers in another layout, and check that the logits stay the same.

        Args:
            layout: the layout.
            trials: the ids of the trial texts.
            references: the network's own logits after each of them, [V].

        Raises:
            ModelError: the logits differ by more than rounding explains.
        """
        assert isinstance(self._body, FusedBody)
        assert isinstance(self.logits, FusedHead | PartialHead)
        self._body.store_as(layout)
        self.logits.store_as(layout)
        self.cache = SlotCache()  # quantized models have keys and values in float32
        bound = QUANTIZED_TOLERANCE.get(layout, TOLERANCE[self.network.dtype])
        deviation = self._least_deviation(trials, references, bound)
        if deviation > bound:
            raise ModelError(
                f"Products of {self.name} with weights stored as {layout} are wrong on this machine: its logits are "
                f"off by {deviation:.2g} of their spread. Choose another dtype, or another PyTorch."
            )

    def _least_deviation(self, trials: Sequence[list[int]], references: Sequence[Tensor], bound: float) -> float:
        """Return the deviation of the first text, or that of `NUM_AGREEING` texts if the first is above a bound."""
        deviation = self._deviation(trials[0], references[0])
        if deviation > bound and len(trials) > 1:
            deviation = sorted(map(self._deviation, trials, references))[NUM_AGREEING - 1]
        return deviation

    @torch.inference_mode()
    def _try_slots(self, ids: list[int], reference: Tensor) -> None:
        """Read a text by slot, and go without that if the kernel does not run here or its logits deviate.

        The arguments are `_deviation`'s.
        """
        assert isinstance(self._body, FusedBody)
        start = len(ids) - 3
        try:
            self.rollback(0, 0)
            self.extend([0], [ids[:start]], keep=[[]])
            self.cache.reserve(1, len(ids))
            slots, starts = (torch.tensor([place], device=self.device) for place in (0, start))
            rest = torch.tensor([ids[start:]], device=self.device)
            found = self.logits(self.read(Positions(slots, starts, len(ids)), rest))[0, -1].float()
            deviation = float((found - reference).norm() / (reference - reference.mean()).norm())
        except Exception as error:  # Triton compiles the kernel at its first call, and can fail with any exception
            problem = f"{type(error).__name__}: {reason_of(error)}"
        else:
            if deviation <= TOLERANCE[self.network.dtype]:
                return
            problem = f"its logits are off by {deviation:.2g} of their spread"
        self._body.read_by_row()
        logger.warning("%s reads copies of its cache, which is slower on a GPU: %s", self.name, problem)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of hidden states, and of keys and values."""
        return torch.float32 if self.quantize else self.network.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        plain = sum(parameter.nbytes for parameter in self.network.parameters() if not parameter.is_meta)
        return plain + sum(matrix.stored_bytes for matrix in self._matrices)

    @property
    def _matrices(self) -> list[Matrix]:
        """All weights that a pass multiplies with, if the layers are fused."""
        head = None if isinstance(self.logits, Head) else self.logits.matrix
        return [] if head is None or not isinstance(self._body, FusedBody) else [*self._body.matrices, head]

    def runs_of(self, lengths: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return the runs in which to attend to rows of these lengths; see `runs_of_like_length`."""
        runs = runs_of_like_length(lengths, CALL_BYTES * self.num_layers / self.position_bytes)
        return runs if self.quantize is None else [(count, fewer // SPAN * SPAN) for count, fewer in runs]

    def _num_hidden(self, span: int) -> int:
        """Return how many positions beyond the span of a pass it reads without seeing them."""
        return 0 if self.quantize is None else -span % SPAN

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that every pass reads: not embeddings that are looked up, nor head rows not scored."""
        if matrices := self._matrices:
            return sum(matrix.num_bytes for matrix in matrices)
        embeddings: Any
        head: Any
        embeddings, head = self.network.get_input_embeddings(), self.network.get_output_embeddings()
        looked_up = 0 if head is None or head.weight is embeddings.weight else embeddings.weight.nbytes
        return self.weight_bytes - looked_up

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
        return self._twin(cache=SlotCache())

    def make_trial(self) -> Callable[[], object]:
        """Return a function that reads one more id, in a cache of its own, for measurements."""
        twin = self.with_own_cache()
        return torch.inference_mode()(lambda: twin.extend([0], [[0]]))

    def as_it_was(self) -> PreTrainedModel:
        """Return the network with transformers' own attention, sharing the weights and their memory layout.

        Weights that are stored in a layout of the engine's own are copied.
        """
        network = sharing_weights(self.network)
        if isinstance(self._body, FusedBody):
            self._body.restore(network)
        if isinstance(self.logits, FusedHead):
            self.logits.restore(network)
        network.set_attn_implementation(self._own_attention)
        return network

    def first_layers(self, num_layers: int) -> "CausalModel":
        """Return the model with only its first `num_layers` layers, over the same cache.

        The full model overwrites what the short one writes to the cache.

        Raises:
            UsageError: `num_layers` is less than 1, or not less than the model's number of layers.
        """
        if not 0 < num_layers < self.num_layers:
            raise UsageError(
                f"{self.name} has {self.num_layers} layers, so its first {num_layers} cannot draft for it."
            )
        return self._twin(_body=self._body.first_layers(num_layers))

    def _twin(self, **changes: Any) -> "CausalModel":
        twin = object.__new__(CausalModel)
        twin.__dict__ = self.__dict__ | changes
        return twin

    def read(self, positions: Positions, ids: Tensor, branches: Tensor | None = None) -> Tensor:
        """Read ids into the cache, without changing `cache.lengths`.

        Args:
            positions: where the rows are in the cache.
            ids: [B, T].
            branches: what `_branch_columns` returns, [3, B, T]; None without branches.

        Returns:
            Hidden states [B, T, W].
        """
        slots, starts, _, runs = positions
        width = ids.shape[1]
        num_hidden = self._num_hidden(positions.span_of(width))
        span = positions.span_of(width) + num_hidden
        cells = starts[:, None] + torch.arange(width, device=self.device)  # [B, T]
        self.cache.begin(slots, cells, span, runs, num_hidden)
        if isinstance(slots, Tensor) and self.reads_slots:
            position_ids = cells.clamp(max=self.max_context - 1)  # padding may be beyond the context
            return self._body(ids, position_ids, Masks(rows=(slots, starts)), self.cache)
        hides = width > 1 or len(ids) > 1 or isinstance(slots, Tensor) or self.quantize is not None
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
            branches: what `_branch_columns` returns, [3, B, T]; None without branches.
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
        starts = [self.cache_length(slot) for slot in slots]
        width = max(map(len, ids))
        if self.reads_ragged and len(ids) > 1 and min(map(len, ids)) < width:
            return self._extend_ragged(slots, starts, ids, keep, branches)
        padded = [[*row, *[0] * (width - len(row))] for row in ids]
        inputs = torch.tensor([[start, *row] for start, row in zip(starts, padded, strict=True)]).to(self.device)
        branch_columns = None
        if branches is not None and any(branch.length for row in branches for branch in row):
            branch_columns = _branch_columns([len(row) for row in ids], branches, width).to(self.device)
        positions = Positions(slots, inputs[:, 0], max(starts) + 1, self.runs_of(starts))
        hidden = self.read(positions, inputs[:, 1:], branch_columns)
        for slot, start, row in zip(slots, starts, ids, strict=True):
            self.cache.lengths[slot] = start + len(row)
        columns = [range(len(row)) for row in ids] if keep is None else keep
        flat = [index * width + column for index, row in enumerate(columns) for column in row]
        if flat != list(range(hidden.shape[0] * width)):
            hidden = hidden.flatten(0, 1)[torch.tensor(flat, dtype=torch.long, device=self.device)][None]
        return self.logits(hidden).flatten(0, 1).split([len(row) for row in columns])

    @property
    def reads_slots(self) -> bool:
        """Whether captured passes read keys and values by slot; see `stepspec.engines.torch_engine.slot_attention`."""
        return isinstance(self._body, FusedBody) and self._body.reads_slots

    @property
    def reads_ragged(self) -> bool:
        """Whether rows of different lengths share a pass without padding. On a GPU, the calls would take longer."""
        return isinstance(self._body, FusedBody) and self.device.type == "cpu"

    def _extend_ragged(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        ids: Sequence[Sequence[int]],
        keep: Sequence[Sequence[int]] | None,
        branches: Sequence[Sequence[Branch]] | None,
    ) -> tuple[Tensor, ...]:
        """See `extend`. `starts` are the lengths of the slots."""
        hidden = self.read_ragged(slots, starts, ids, branches)
        for slot, start, row in zip(slots, starts, ids, strict=True):
            self.cache.lengths[slot] = start + len(row)
        return self.kept_logits(hidden, [len(row) for row in ids], keep)

    def kept_logits(
        self, hidden: Tensor, lengths: Sequence[int], keep: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor, ...]:
        """Return the logits of some columns of each row, [C, V], from hidden states of `read_ragged`, [1, N, W].

        Args:
            hidden: of the rows, one row after the other.
            lengths: of the rows.
            keep: see `extend`.
        """
        firsts = [0, *accumulate(lengths)]
        columns = [range(length) for length in lengths] if keep is None else keep
        flat = [first + column for first, row in zip(firsts, columns, strict=False) for column in row]
        return self.logits(hidden[:, flat]).flatten(0, 1).split([len(row) for row in columns])

    def read_ragged(
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
        assert isinstance(self._body, FusedBody)
        ends = [start + len(row) for start, row in zip(starts, ids, strict=True)]
        spans = [end + self._num_hidden(end) for end in ends]
        self.cache.reserve(max(slots) + 1, max(spans))
        rows, places = list[RaggedRow](), list[Tensor]()
        for index, (slot, start, row, span) in enumerate(zip(slots, starts, ids, spans, strict=True)):
            own = [] if branches is None else branches[index]
            shape = _branch_columns([len(row)], [own], len(row)) if any(each.length for each in own) else None
            cells, begin = torch.arange(start, start + len(row))[None], torch.tensor([start])
            hides = len(row) > 1 or self.quantize is not None
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

    @torch.inference_mode()
    def _deviation(self, ids: list[int], reference: Tensor) -> float:
        """Return how far logits over the slot cache deviate from the model's own, as a share of their spread.

        The ids are read in several passes, in rows of different lengths, after a rollback, and on branches: beside
        another one, and before the end of the trunk.

        Args:
            ids: a text.
            reference: the model's own logits after it, [V].
        """
        start, rest = len(ids) - 3, ids[-3:]
        self.rollback(0, 0)
        self.rollback(1, 0)
        self.extend([0, 1], [ids[:start], ids[: start - 2]], keep=[[], []])
        ragged = self.extend([0, 1], [rest, ids[start - 2 :]], keep=[[2], [4]])
        self.rollback(0, start)
        alone = self.extend([0], [rest], keep=[[2]])
        self.rollback(0, start)
        beside = self.extend([0], [[*ids[:2], *rest]], keep=[[4]], branches=[[Branch(2), Branch(3)]])
        self.rollback(0, start - 1)
        before = self.extend([0], [[*ids[start - 1 : start + 1], *rest]], branches=[[Branch(3, hidden=1)]])
        ends = torch.stack([each[-1] for each in (*ragged, *alone, *beside, *before)]).float()  # [5, V]
        if self.partial is not None:
            ends, reference = ends[:, self.partial.ids], reference[self.partial.ids]
        spread = (reference - reference.mean()).norm()  # the measure is relative, as a small model's logits are small
        return float(((ends - reference).norm(dim=-1) / spread).nan_to_num(torch.inf).max())


def _difference(
    network: PreTrainedModel, trials: Sequence[Sequence[int]], references: Sequence[Tensor], reached: bool
) -> str | None:
    """Return why the engine does not reproduce a network; None if the cause is unknown.

    Args:
        network: the network with its own attention.
        trials: the ids of each trial text.
        references: what `_own_logits` returned for them, [4, V] each.
        reached: whether the network accepted the engine's attention implementation.
    """
    shorter = [_own_logits(network, ids[:-3])[-1] for ids in trials]
    whole = [reference[0] for reference in references]
    bound = TOLERANCE[network.dtype]
    if all((short - own).norm() > bound * own.norm() for short, own in zip(shorter, whole, strict=True)):
        return "its logits for a token depend on later tokens"
    if not reached:
        return "it does not use transformers' attention interface"
    if "position_ids" not in inspect.signature(network.base_model.forward).parameters:
        return "it does not take position_ids as an input"
    return None


def _failure(error: Exception | None, deviation: float) -> str:
    """Return how a network that the engine does not reproduce failed: by its error, or by its deviation."""
    if isinstance(error, UnsupportedAttentionError):
        return str(error)
    if error is not None:
        return f"its layers fail over the engine's cache ({type(error).__name__}: {reason_of(error)})"
    return f"its logits over the engine's cache are off by {deviation:.2g} of their spread"


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


def _branch_columns(lengths: Sequence[int], branches: Sequence[Sequence[Branch]], width: int) -> Tensor:
    """Return for each column its branch's number, how far to shift its position, and the visible columns; [3, B, T].

    Branches are numbered from 1; 0 is no branch. A position is shifted back by the columns between the branch and the
    place where it leaves the trunk. A branch sees the trunk's columns up to there.

    Args:
        lengths: length of each row.
        branches: for each row, the branches at its end.
        width: T, the padded length of all rows.
    """
    numbers, shifts = ([[0] * width for _ in lengths] for _ in range(2))
    ends = [[width] * width for _ in lengths]
    for row, (length, row_branches) in enumerate(zip(lengths, branches, strict=True)):
        trunk = column = length - sum(branch.length for branch in row_branches)
        for number, branch in enumerate(row_branches, 1):
            columns, end = slice(column, column + branch.length), trunk - branch.hidden
            numbers[row][columns] = [number] * branch.length
            shifts[row][columns] = [column - end] * branch.length
            ends[row][columns] = [end] * branch.length
            column += branch.length
    return torch.tensor([numbers, shifts, ends])


def _trials(network: PreTrainedModel) -> list[list[int]]:
    """Return short texts to check a network on.

    On some texts, such as tokens never seen in training, rounding to 16 bits alone changes a network's logits a lot. So
    in 16 bits it is enough to reproduce the first text, or `NUM_AGREEING` of all. They are longer than a short window.
    """
    vocab_size = int(network.config.get_text_config().vocab_size)
    window = window_of(network.config.get_text_config()) or 0
    length = 8 + (window if window <= MAX_TRIAL else 0)
    num_texts = 1 if network.dtype == torch.float32 else NUM_TRIALS
    starts = [5 + vocab_size * number // num_texts for number in range(num_texts)]
    return [[token % vocab_size for token in range(start, start + length)] for start in starts]


@torch.inference_mode()
def _own_logits(network: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Return the model's own logits after the last four ids, [4, V], without the slot cache."""
    return network(input_ids=torch.tensor([list(ids)], device=network.device), use_cache=False).logits[0, -4:].float()


def refuse_unsupported(config: Any, name: str) -> None:
    """Reject models with layers whose state cannot be rolled back by a length.

    With a sliding window it can: the cache keeps everything, and a mask hides what is too far back.

    Raises:
        ModelError: the configuration has chunked or recurrent layers, or an encoder.
    """
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif others:
        reason = f"it has layers of type {', '.join(sorted(others))}"
    elif not getattr(text, "num_attention_heads", None):
        reason = "it has no attention layers"
    if reason:
        raise ModelError(
            f"The torch engine cannot serve {name}: {reason}, and only decoders with full or sliding-window attention "
            "are supported. "
            "Serve it with vLLM or another server instead."
        )


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Configuration fields that make a model large. A weight takes at least one bit on disk, which limits them."""


def _check_weights(folder: Path, config: Any) -> None:
    """Check that a folder's weights are safe to read and that the configuration matches their size.

    Raises:
        ModelError: the weights are pickles, which can run code, or the configuration describes a far larger model.
    """
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickles and not files:
        raise ModelError(
            f"The weights of {str(folder)!r} are pickles ({pickles[0]}), which can run any code when they are read. "
            "Convert them to safetensors."
        )
    if not files:
        return  # on the hub, or missing; loading reports missing weights
    text, max_size = config.get_text_config(), sum(file.stat().st_size for file in files) * 8
    sizes = {name: getattr(text, name, None) for name in SIZES}
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, int) and 1 <= size <= max_size):
            raise ModelError(
                f"The configuration of {str(folder)!r} has {name} = {size!r}, which does not match its weights."
            )
    if (sizes["num_hidden_layers"] or 0) > (num_tensors := sum(map(_num_tensors, files))):
        raise ModelError(
            f"The configuration of {str(folder)!r} has num_hidden_layers = {sizes['num_hidden_layers']}, but its "
            f"weights have only {num_tensors} tensors."
        )
    for name in ("vocab_size", "num_hidden_layers"):
        if (sizes[name] or 0) * (sizes["hidden_size"] or 0) > max_size:
            raise ModelError(
                f"The configuration of {str(folder)!r} has {name} = {sizes[name]}, which does not match its weights."
            )


def _num_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file, read from its header."""
    try:
        with safe_open(file, "pt") as tensors:
            return len(tensors.keys())
    except SafetensorError as error:
        raise ModelError(f"The weights in {str(file)!r} cannot be read: {reason_of(error)}.") from error


def load_network(name: str, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal LM by hub name or folder. Code that comes with the model never runs.

    Args:
        name: hub name or folder.
        device: a torch device.
        dtype: of the weights; the default is float32 on a CPU, else bfloat16.

    Raises:
        ModelError: there is no such model, it is not a causal LM, or the engine does not support it.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # a library must not write to its caller's stderr
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = loading_options(name)
    try:
        config = load_config(name)
        refuse_unsupported(config, name)
        _check_weights(Path(name), config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        network, report = loaded
    except ModelError:
        raise
    except Exception as error:  # a bad configuration can fail with any exception
        place = "folder" if Path(name).exists() else "hub name or folder"
        raise ModelError(f"Cannot load {name!r} as a causal language model ({place}): {reason_of(error)}.") from error
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them randomly
        raise ModelError(f"The weights of {name!r} are incomplete: {len(missing)} are missing, such as {missing[0]}.")
    return network.to(device)
