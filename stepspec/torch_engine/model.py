"""A Hugging Face causal LM behind one primitive, `extend`: prefill, decode, verification and step scoring alike."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from stepspec.errors import ModelError
from stepspec.torch_engine import attention
from stepspec.torch_engine.cache import SlotCache

SMALL_MODEL = 100_000_000
"""Parameters below which a CPU runs faster on one thread: the threads' meetings cost more than the arithmetic."""


class CausalModel:
    """An unmodified Hugging Face model with a slot cache. `cache.lengths[slot]` is what has been read there."""

    def __init__(self, network: PreTrainedModel, name: str) -> None:
        refuse_unsupported(network.config, name)
        self.name = name
        self.network = network.eval()
        self.device = network.device
        self.vocab_size = int(network.config.get_text_config().vocab_size)
        self.max_context = _max_context(network.config)
        self.num_parameters = sum(parameter.numel() for parameter in network.parameters())
        reference = _first_logits(network)
        network.set_attn_implementation(attention.NAME)
        try:
            same = network.config._attn_implementation == attention.NAME and self._reproduces(reference)
        except Exception as error:
            raise _not_reproduced(name, f"{type(error).__name__}: {error}") from error
        if not same:
            raise _not_reproduced(name, "its attention is not plain full attention")
        self.cache = SlotCache()

    def with_own_cache(self) -> "CausalModel":
        """The same weights for another use, with a cache of its own."""
        twin = object.__new__(CausalModel)
        twin.__dict__ = self.__dict__ | {"cache": SlotCache()}
        return twin

    def extend(
        self,
        slots: Sequence[int],
        ids: Sequence[Sequence[int]],
        *,
        keep: Sequence[int] | None = None,
        branches: Sequence[int] = (),
    ) -> Tensor:
        """Reads further ids into slots, in one pass, and advances their lengths.

        Args:
            slots: one slot per row.
            ids: B rows of ids, ragged; row b goes to the positions after what its slot holds.
            keep: columns whose logits are wanted; all of them by default.
            branches: lengths of trailing branches of a single row: each sees what stands before the first branch and
                itself, and its positions count from there.

        Returns:
            Logits [B, len(keep) or T, V]; a shorter row's are meaningless beyond its own length.
        """
        starts = [self.cache_length(slot) for slot in slots]
        width = max(len(row) for row in ids)
        padded = [list(row) + [0] * (width - len(row)) for row in ids]
        columns = torch.arange(width, device=self.device)
        first = torch.tensor(starts, device=self.device)
        positions = first[:, None] + columns  # [B, T]
        span = max(starts) + width
        self.cache.begin(list(slots), positions, span)
        mask = None
        if branches:
            positions, mask = _branch_layout(positions, span, branches)
        elif width > 1 or len(slots) > 1:
            mask = torch.arange(span, device=self.device) <= positions[:, :, None]
        logits = self.network(
            input_ids=torch.tensor(padded, device=self.device),
            position_ids=positions.clamp(max=self.max_context - 1),  # padding may lie beyond the last one
            attention_mask=None if mask is None else mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if keep is None else torch.tensor(keep, device=self.device),
        ).logits
        assert logits.shape[1] == (width if keep is None else len(keep))
        for slot, start, row in zip(slots, starts, ids, strict=True):
            self.cache.lengths[slot] = start + len(row)
        return logits

    def cache_length(self, slot: int) -> int:
        """How many positions the slot holds; a slot never used holds none."""
        return self.cache.lengths[slot] if slot < len(self.cache.lengths) else 0

    def rollback(self, slot: int, length: int) -> None:
        """Forgets everything from position `length` on."""
        assert length <= self.cache_length(slot)
        if slot < len(self.cache.lengths):
            self.cache.lengths[slot] = length

    @torch.inference_mode()
    def _reproduces(self, reference: Tensor) -> bool:
        """Whether our cache and attention give the model's own logits, whatever its configuration says."""
        self.cache = SlotCache()
        ids = [token % self.vocab_size for token in range(5, 13)]
        self.extend([0, 1], [ids[:5], ids[:3]])
        ragged = self.extend([0, 1], [ids[5:], ids[3:]])
        self.rollback(0, 5)
        alone = self.extend([0], [ids[5:]], keep=[2])
        ends = torch.stack([ragged[0, 2], ragged[1, 4], alone[0, 0]]).float()  # [3, V]
        tolerance = 1e-3 if self.network.dtype == torch.float32 else 0.1
        spread = (reference - reference.mean()).norm()  # relative to it, as a small model's logits are small
        return bool(((ends - reference).norm(dim=-1) <= tolerance * spread).all())


def _not_reproduced(name: str, reason: str) -> ModelError:
    return ModelError(
        f"The torch engine does not reproduce {name}: {reason}. Serve it with vLLM or another server instead."
    )


def _max_context(config: Any) -> int:
    """The longest text a model takes, as far as its position encoding does not change with the text's length."""
    text = config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(longest, int(rope.get("original_max_position_embeddings") or longest))
    return longest


def _branch_layout(positions: Tensor, span: int, branches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions [1, T] and mask [1, T, S] of one row that ends in branches which do not see each other."""
    width = positions.shape[1]
    start = span - width
    mask = torch.arange(span, device=positions.device) <= positions[0, :, None]  # [T, S]
    positions = positions.clone()
    trunk = column = width - sum(branches)
    for length in branches:
        mask[column : column + length, start + trunk : start + column] = False
        positions[0, column : column + length] -= column - trunk
        column += length
    return positions, mask[None]


@torch.inference_mode()
def _first_logits(network: PreTrainedModel) -> Tensor:
    """The model's own logits after a few tokens, without a cache or anything else of ours; [V]."""
    vocab_size = int(network.config.get_text_config().vocab_size)
    ids = torch.tensor([[token % vocab_size for token in range(5, 13)]], device=network.device)
    return network(input_ids=ids, use_cache=False).logits[0, -1].float()


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
            f"The torch engine cannot serve {name}: {reason}, and only full attention can be rolled back. "
            "Serve it with vLLM or another server instead."
        )


def load_network(name: str, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A causal LM by hub name or folder, never running code that comes with it.

    Raises:
        ModelError: there is no such model, or it is not a causal LM.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # a library draws no bars on its caller's stderr
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        refuse_unsupported(config, name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
        network, report = loaded
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        place = "folder" if Path(name).exists() else "hub name or folder"
        first_line = str(error).strip().split("\n")[0]
        raise ModelError(f"Cannot load {name!r} as a causal language model ({place}): {first_line}") from error
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(f"The weights of {name!r} are incomplete: {len(missing)} are missing, such as {missing[0]}.")
    return network.to(device)


def weights_hash(name: str) -> str | None:
    """SHA-256 over the weight files of a model folder; None for a model that is not a folder."""
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
