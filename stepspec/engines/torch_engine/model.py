"""A Hugging Face causal LM behind one primitive, `extend`: prefill, decode, verification and step scoring alike."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from stepspec.engines.hugging_face import loading_options
from stepspec.engines.torch_engine import attention
from stepspec.engines.torch_engine.attention import UnsupportedAttentionError, runs_of_like_length
from stepspec.engines.torch_engine.body import PartialHead, make_body, make_head, sharing_weights
from stepspec.engines.torch_engine.cache import SlotCache
from stepspec.errors import ModelError, UsageError, reason_of

CALL_BYTES = 120_000
"""Keys and values of a layer that a CPU core reads in the time of one more call of attention, about 12 microseconds."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far off a model's own logits those over our cache may be, as a share of their spread, by what it computes in."""

NUM_TRIALS = 8
"""Texts that a network in 16 bits is tried on at most."""

PIECE = 512
"""Ids of prompts that one pass reads; a step to be judged is read whole, however long."""


class Positions(NamedTuple):
    """Where the rows of a pass stand in a cache."""

    slots: Sequence[int] | Tensor  # a tensor [B] in frames that are captured
    starts: Tensor  # position of the first id that the pass reads, [B]
    span: int  # positions that a pass over one id may see; a framed pass sees as many however long it is
    runs: Sequence[tuple[int, int]] = ()  # `attention.runs_of_like_length` of the rows

    def further(self, count: int) -> "Positions":
        """Behind so many ids."""
        return self._replace(starts=self.starts + count, span=self.span_of(count + 1))

    def span_of(self, width: int) -> int:
        """Positions that a pass over so many ids may see."""
        return self.span if isinstance(self.slots, Tensor) else self.span + width - 1


class CausalModel:
    """An unmodified Hugging Face model with a slot cache. `cache.lengths[slot]` is what has been read there.

    Args:
        network: the model.
        name: what errors call it.
        vocabulary: the ids that it scores; None for all. The logits of all others are -inf.
    """

    def __init__(self, network: PreTrainedModel, name: str, vocabulary: Sequence[int] | None = None) -> None:
        refuse_unsupported(network.config, name)
        self.name = name
        self.network = network.eval()
        self.device = network.device
        self.vocab_size = int(network.config.get_text_config().vocab_size)
        self.num_layers = int(network.config.get_text_config().num_hidden_layers)
        self.max_context = _max_context(network.config)
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self.cache = SlotCache()
        self.position_bytes = 1
        """What the keys and values of one position take; known once some have been written."""
        self._reproduce()
        self.vocabulary = vocabulary
        if vocabulary is not None:
            self.logits = PartialHead(network, torch.tensor(vocabulary, device=self.device))
        self.position_bytes = self.cache.position_bytes
        self.cache = SlotCache()
        self.uses_graphs = self.device.type == "cuda"

    def _reproduce(self) -> None:
        """Puts our attention and layers in the place of the network's own.

        Raises:
            ModelError: together with our cache they do not give the network's own logits.
        """
        network, deviation, failure = self.network, torch.inf, None
        usual: Any = network.config._attn_implementation
        trials = _trials(network)
        try:
            references = [_own_logits(network, ids) for ids in trials]
        except Exception as error:
            raise ModelError(f"{self.name} does not run: {type(error).__name__}: {reason_of(error)}.") from error
        network.set_attn_implementation(attention.NAME)
        reached = network.config._attn_implementation == attention.NAME
        try:
            self._body, self.logits = make_body(network), make_head(network)
            for ids, reference in zip(trials, references, strict=True):
                deviation = min(deviation, self._deviation(ids, reference[-1]))
                if deviation <= TOLERANCE[network.dtype]:
                    break
        except Exception as error:
            failure = error
        if not reached or deviation > TOLERANCE[network.dtype]:
            network.set_attn_implementation(usual)
            reason = _difference(network, trials[0], references[0], reached) or _failure(failure, deviation)
            raise ModelError(
                f"The torch engine does not reproduce {self.name}: {reason}. "
                "Serve it with vLLM or another server instead."
            ) from failure

    @property
    def weight_bytes(self) -> int:
        """What the weights take."""
        return sum(parameter.nbytes for parameter in self.network.parameters())

    def runs_of(self, lengths: Sequence[int]) -> Sequence[tuple[int, int]]:
        """What attention had better make of rows that are so many positions long."""
        return runs_of_like_length(lengths, CALL_BYTES * self.num_layers / self.position_bytes)

    @property
    def read_bytes(self) -> int:
        """What of the weights every pass reads: not the embeddings that it looks up, nor rows that are not scored."""
        embeddings: Any
        head: Any
        embeddings, head = self.network.get_input_embeddings(), self.network.get_output_embeddings()
        looked_up = 0 if head is None or head.weight is embeddings.weight else embeddings.weight.nbytes
        if head is not None and self.vocabulary is not None:
            looked_up += head.weight[0].nbytes * (len(head.weight) - len(self.vocabulary))
        return self.weight_bytes - looked_up

    def with_own_cache(self) -> "CausalModel":
        """The same weights for another use, with a cache of its own."""
        return self._twin(cache=SlotCache())

    def as_it_was(self) -> PreTrainedModel:
        """The network with transformers' own attention, over the same weights, as they lie in memory here."""
        network = sharing_weights(self.network)
        network.set_attn_implementation("sdpa")
        return network

    def first_layers(self, num_layers: int) -> "CausalModel":
        """The model without its later layers, over the same cache: what it reads, the whole model overwrites.

        Raises:
            UsageError: the model has no more layers than that.
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
        """Hidden states [B, T, W] of ids [B, T], read into a cache whose lengths stay what they are.

        `branches` is what `_branch_columns` makes of branches.
        """
        slots, starts, _, runs = positions
        width = ids.shape[1]
        span = positions.span_of(width)
        cells = starts[:, None] + torch.arange(width, device=self.device)  # [B, T]
        self.cache.begin(slots, cells, span, runs)
        position_ids, mask = cells, None
        if width > 1 or len(ids) > 1 or isinstance(slots, Tensor):
            mask = torch.arange(span, device=self.device) <= cells[:, :, None]  # [B, T, S]
        if branches is not None:
            assert mask is not None
            numbers, shifts = branches
            position_ids = cells - shifts
            of_key = numbers.new_zeros(len(ids), span).scatter(1, cells, numbers)[:, None]  # [B, 1, S]
            mask = mask & ((of_key == 0) | (of_key == numbers[:, :, None]))
        position_ids = position_ids.clamp(max=self.max_context - 1)  # padding may lie beyond the last one
        return self._body(ids, position_ids, None if mask is None else mask[:, None], self.cache)

    def extend(
        self,
        slots: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        keep: Sequence[Sequence[int]] | None = None,
        branches: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, ...]:
        """Reads further ids into slots, in one pass, and advances their lengths.

        Args:
            slots: one slot per row.
            ids: B rows of ids, ragged; row b goes to the positions after what its slot holds.
            keep: columns of each row whose logits are wanted; all of them by default.
            branches: for each row the lengths of its trailing branches: each sees what stands before the row's first
                branch and itself, and its positions count from there.

        Returns:
            For each row the logits of its columns, [C, V].
        """
        starts = [self.cache_length(slot) for slot in slots]
        width = max(map(len, ids))
        padded = [[*row, *[0] * (width - len(row))] for row in ids]
        inputs = torch.tensor([[start, *row] for start, row in zip(starts, padded, strict=True)]).to(self.device)
        columns_of = None
        if branches is not None and any(map(sum, branches)):
            columns_of = _branch_columns([len(row) for row in ids], branches, width).to(self.device)
        positions = Positions(slots, inputs[:, 0], max(starts) + 1, self.runs_of(starts))
        hidden = self.read(positions, inputs[:, 1:], columns_of)
        for slot, start, row in zip(slots, starts, ids, strict=True):
            self.cache.lengths[slot] = start + len(row)
        columns = [range(len(row)) for row in ids] if keep is None else keep
        flat = [index * width + column for index, row in enumerate(columns) for column in row]
        if flat != list(range(hidden.shape[0] * width)):
            hidden = hidden.flatten(0, 1)[torch.tensor(flat, dtype=torch.long, device=self.device)][None]
        return self.logits(hidden).flatten(0, 1).split([len(row) for row in columns])

    def cache_length(self, slot: int) -> int:
        """How many positions the slot holds; a slot never used holds none."""
        return self.cache.lengths[slot] if slot < len(self.cache.lengths) else 0

    def rollback(self, slot: int, length: int) -> None:
        """Forgets everything from position `length` on."""
        assert length <= self.cache_length(slot)
        if slot < len(self.cache.lengths):
            self.cache.lengths[slot] = length

    @torch.inference_mode()
    def _deviation(self, ids: list[int], reference: Tensor) -> float:
        """How far off the model's own logits [V] ours are, whatever its configuration says; a share of their spread.

        Read in pieces, in rows of unlike lengths, after a rollback, and on a branch beside another.
        """
        self.rollback(0, 0)
        self.rollback(1, 0)
        self.extend([0, 1], [ids[:5], ids[:3]])
        ragged = self.extend([0, 1], [ids[5:], ids[3:]])
        self.rollback(0, 5)
        alone = self.extend([0], [ids[5:]], keep=[[2]])
        self.rollback(0, 5)
        beside = self.extend([0], [[*ids[:2], *ids[5:]]], branches=[[2, 3]])
        ends = torch.stack([each[-1] for each in (*ragged, *alone, *beside)]).float()  # [4, V]
        spread = (reference - reference.mean()).norm()  # relative to it, as a small model's logits are small
        return float(((ends - reference).norm(dim=-1) / spread).nan_to_num(torch.inf).max())


def _difference(network: PreTrainedModel, ids: list[int], reference: Tensor, reached: bool) -> str | None:
    """What sets a network apart from those that the engine reproduces; None if that is not known.

    Args:
        network: with its own attention.
        ids: of a trial.
        reference: what `_own_logits` gave for it.
        reached: whether the network takes the attention that it is given.
    """
    shorter = _own_logits(network, ids[:-3])
    if (shorter[-1] - reference[-4]).norm() > TOLERANCE[network.dtype] * reference[-4].norm():
        return "what it makes of a token depends on those that follow"
    if not reached:
        return "its attention is code of its own, outside of transformers' attention interface"
    if "position_ids" not in inspect.signature(network.base_model.forward).parameters:
        return "it numbers the positions of a text by itself"
    return None


def _failure(error: Exception | None, deviation: float) -> str:
    """What was seen of a network that the engine does not reproduce."""
    if isinstance(error, UnsupportedAttentionError):
        return str(error)
    if error is not None:
        return f"its layers fail over the engine's cache ({type(error).__name__}: {reason_of(error)})"
    return f"its logits over the engine's cache are off by {deviation:.2g} of their spread"


def _max_context(config: Any) -> int:
    """The longest text a model takes, as far as its position encoding does not change with the text's length."""
    text = config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def _branch_columns(lengths: Sequence[int], branches: Sequence[Sequence[int]], width: int) -> Tensor:
    """For rows of these lengths whose last columns are branches: which branch each column is of, 0 for none, and how
    many columns of earlier branches stand before it; [2, B, T]."""
    numbers, shifts = ([[0] * width for _ in lengths] for _ in range(2))
    for row, (length, row_branches) in enumerate(zip(lengths, branches, strict=True)):
        trunk = column = length - sum(row_branches)
        for number, count in enumerate(row_branches, 1):
            numbers[row][column : column + count] = [number] * count
            shifts[row][column : column + count] = [column - trunk] * count
            column += count
    return torch.tensor([numbers, shifts])


def _trials(network: PreTrainedModel) -> list[list[int]]:
    """Texts of a few tokens each to try a network on: one that it reproduces in 16 bits is enough.

    On some texts, such as tokens that training never showed it, rounding to 16 bits alone turns a network's logits into
    others, its own as well. What is wrong in a model's layers shows on every text.
    """
    vocab_size = int(network.config.get_text_config().vocab_size)
    num_texts = 1 if network.dtype == torch.float32 else NUM_TRIALS
    starts = [5 + vocab_size * number // num_texts for number in range(num_texts)]
    return [[token % vocab_size for token in range(start, start + 8)] for start in starts]


@torch.inference_mode()
def _own_logits(network: PreTrainedModel, ids: list[int]) -> Tensor:
    """The model's own logits after each of T ids, without a cache of ours; [T, V]."""
    return network(input_ids=torch.tensor([ids], device=network.device), use_cache=False).logits[0].float()


def refuse_unsupported(config: Any, name: str) -> None:
    """Only full attention can be rolled back by a length.

    Raises:
        ModelError: the configuration says that some layers slide, chunk, recur or are an encoder's.
    """
    text = config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or [])
    sliding = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif layers - {"full_attention"}:
        reason = f"it has layers of type {', '.join(sorted(layers - {'full_attention'}))}"
    elif not layers and sliding:
        reason = f"its attention slides over a window of {text.sliding_window} tokens"
    elif getattr(text, "attn_logit_softcapping", None):
        reason = "its attention scores are soft-capped"
    elif not getattr(text, "num_attention_heads", None):
        reason = "it has no attention layers"
    if reason:
        raise ModelError(
            f"The torch engine cannot serve {name}: {reason}, and only decoders of full attention can be rolled back. "
            "Serve it with vLLM or another server instead."
        )


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""What of a configuration makes a model large. No more weights can be on disk than there are bits."""


def _check_weights(folder: Path, config: Any) -> None:
    """Whether a folder's weights may be read, and are as many as its configuration makes room for.

    Raises:
        ModelError: they are pickles, which can run code; or the configuration describes a far larger model.
    """
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickles and not files:
        raise ModelError(
            f"The weights of {str(folder)!r} are pickles ({pickles[0]}), which can run any code when they are read. "
            "Convert them to safetensors."
        )
    if not files:
        return  # on the hub, or missing, which loading reports
    text, most = config.get_text_config(), sum(file.stat().st_size for file in files) * 8
    sizes = {name: getattr(text, name, None) for name in SIZES}
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, int) and 1 <= size <= most):
            raise ModelError(
                f"The configuration of {str(folder)!r} has {name} = {size!r}; its weights do not fit that."
            )
    if (sizes["num_hidden_layers"] or 0) > (num_tensors := sum(map(_num_tensors, files))):
        raise ModelError(
            f"The configuration of {str(folder)!r} has num_hidden_layers = {sizes['num_hidden_layers']}, but its "
            f"weights are {num_tensors} tensors."
        )
    for name in ("vocab_size", "num_hidden_layers"):
        if (sizes[name] or 0) * (sizes["hidden_size"] or 0) > most:
            raise ModelError(
                f"The configuration of {str(folder)!r} has {name} = {sizes[name]}; its weights do not fit that."
            )


def _num_tensors(file: Path) -> int:
    """Tensors of a file of weights, by its header."""
    try:
        with safe_open(file, "pt") as tensors:
            return len(tensors.keys())
    except SafetensorError as error:
        raise ModelError(f"The weights in {str(file)!r} cannot be read: {reason_of(error)}.") from error


def load_network(name: str, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A causal LM by hub name or folder, never running code that comes with it.

    Raises:
        ModelError: there is no such model, or it is not a causal LM.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # a library draws no bars on its caller's stderr
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = loading_options(name)
    try:
        config = AutoConfig.from_pretrained(name, **options)
        refuse_unsupported(config, name)
        _check_weights(Path(name), config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        network, report = loaded
    except ModelError:
        raise
    except Exception as error:  # a configuration with any values in it fails in any way
        place = "folder" if Path(name).exists() else "hub name or folder"
        raise ModelError(f"Cannot load {name!r} as a causal language model ({place}): {reason_of(error)}.") from error
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(f"The weights of {name!r} are incomplete: {len(missing)} are missing, such as {missing[0]}.")
    return network.to(device)
