"""Check that a model over the slot cache gives the network's own logits, when it is loaded."""

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stepspec.engines.torch_engine import attention
from stepspec.engines.torch_engine.attention import UnsupportedAttentionError
from stepspec.engines.torch_engine.body import FUSED, has_alibi, window_of
from stepspec.engines.torch_engine.cache import SlotCache
from stepspec.engines.torch_engine.matrix import Layout, Quantization, can_quantize, packing_pays
from stepspec.engines.torch_engine.model import Branch, CausalModel
from stepspec.engines.torch_engine.network import refuse_unsupported
from stepspec.errors import ModelError, reason_of

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""By dtype: how far logits over the slot cache may deviate from the model's own, as a share of their spread."""

QUANTIZED_TOLERANCE: dict[Layout, float] = {"int8": 0.3, "int4": 0.6, "fp8": 0.3}
"""The same for quantized weights, whose own rounding counts too. Wrong products deviate by 1 and more."""

NUM_TRIALS, NUM_AGREEING = 8, 3
"""Number of trial texts for a network in 16 bits, and how many of them it must reproduce if not the first one."""

WIDE = 64
"""Ids of a pass whose queries fill the programs of `slot_attention`."""

MAX_TRIAL = 256
"""Longest window that the trial texts exceed, in tokens."""


def checked_model(
    network: PreTrainedModel,
    name: str,
    vocabulary: Sequence[int] | None = None,
    quantize: Quantization | None = None,
) -> CausalModel:
    """Return a model over the engine's cache with the network's own logits.

    Args:
        network: the model. Its attention is replaced with the engine's.
        name: the model's name in errors.
        vocabulary: the ids that the model scores; None for all.
        quantize: how to quantize the weights; None leaves them in the network's data type.

    Raises:
        ModelError: the engine does not reproduce the network, or cannot quantize it.
    """
    refuse_unsupported(network.config, name)
    if getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        network.set_attn_implementation("eager")  # older releases of transformers ignore the soft cap in others
    own_attention: Any = network.config._attn_implementation
    trials = _trials(network)
    try:
        references = [_own_logits(network.eval(), ids) for ids in trials]
    except Exception as error:
        raise ModelError(f"{name} does not run: {type(error).__name__}: {reason_of(error)}.") from error
    ends, bound = [own[-1] for own in references], TOLERANCE[network.dtype]
    model, deviation, failure = None, torch.inf, None
    try:
        model = CausalModel(network, name)
        if model.reads_slots:
            _try_slots(model, trials, ends, bound)
        deviation = _least_deviation(model, trials, ends, bound)
    except Exception as error:
        failure = error
    reached = has_alibi(network) or network.config._attn_implementation == attention.NAME
    if model is None or not reached or deviation > bound:
        network.set_attn_implementation(own_attention)
        reason = _difference(network, trials, references, reached) or _failure(failure, deviation)
        raise ModelError(
            f"The torch engine does not reproduce {name}: {reason}. Serve it with vLLM or another server instead."
        ) from failure
    if vocabulary is not None:
        model.limit_to(vocabulary)
    if quantize is not None and not (model.is_fused and can_quantize(model.device, quantize)):
        device = "a GPU with fp8 products, such as H100" if quantize == "fp8" else "a CPU with VNNI instructions"
        raise ModelError(
            f"{name} cannot be quantized to {quantize}: that needs a model of the family {', '.join(sorted(FUSED))} "
            f"on {device}. Leave out quantize."
        )
    embeddings: Any = network.get_input_embeddings()
    if quantize or (model.is_fused and packing_pays(embeddings.weight)):
        layout = quantize or "packed"
        model.store_as(layout)
        bound = QUANTIZED_TOLERANCE.get(layout, bound)
        if (deviation := _least_deviation(model, trials, ends, bound)) > bound:
            raise ModelError(
                f"Products of {name} with weights stored as {layout} are wrong on this machine: its logits are off by "
                f"{deviation:.2g} of their spread. Choose another dtype, or another PyTorch."
            )
    model.position_bytes = model.cache.position_bytes
    model.cache = SlotCache()
    return model


def _least_deviation(
    model: CausalModel, trials: Sequence[list[int]], references: Sequence[Tensor], bound: float
) -> float:
    """Return the deviation of the first text, or that of `NUM_AGREEING` texts if the first is above a bound."""
    deviation = _deviation(model, trials[0], references[0])
    if deviation > bound and len(trials) > 1:
        pairs = zip(trials, references, strict=True)
        deviation = sorted(_deviation(model, *pair) for pair in pairs)[NUM_AGREEING - 1]
    return deviation


def _try_slots(model: CausalModel, trials: Sequence[list[int]], references: Sequence[Tensor], bound: float) -> None:
    """Go without reading by slot if the kernel does not run here or its logits deviate.

    The arguments are `_least_deviation`'s.
    """
    try:
        deviation = _least_deviation(model, trials, references, bound)
        model.rollback(0, 0)
        model.extend([0], [[0] * min(WIDE, model.max_context)], keep=[[]])  # the kernel's largest programs
    except Exception as error:  # Triton compiles the kernel at its first call, and can fail with any exception
        problem = f"{type(error).__name__}: {reason_of(error)}"
    else:
        if deviation <= bound:
            return
        problem = f"its logits are off by {deviation:.2g} of their spread"
    model.attend_in_slots_by(None)
    model.replace_cache()
    logger.warning("%s reads copies of its cache, which is slower on a GPU: %s", model.name, problem)


@torch.inference_mode()
def _deviation(model: CausalModel, ids: list[int], reference: Tensor) -> float:
    """Return how far logits over the slot cache deviate from the model's own, as a share of their spread.

    The ids are read in several passes, in rows of different lengths, after a rollback, and on branches: beside
    another one, and before the end of the trunk.

    Args:
        model: the model over the slot cache.
        ids: a text.
        reference: the model's own logits after it, [V].
    """
    start, rest = len(ids) - 3, ids[-3:]
    model.rollback(0, 0)
    model.rollback(1, 0)
    model.extend([0, 1], [ids[:start], ids[: start - 2]], keep=[[], []])
    ragged = model.extend([0, 1], [rest, ids[start - 2 :]], keep=[[2], [4]])
    model.rollback(0, start)
    alone = model.extend([0], [rest], keep=[[2]])
    model.rollback(0, start)
    beside = model.extend([0], [[*ids[:2], *rest]], keep=[[4]], branches=[[Branch(2), Branch(3)]])
    model.rollback(0, start - 1)
    before = model.extend([0], [[*ids[start - 1 : start + 1], *rest]], branches=[[Branch(3, hidden=1)]])
    ends = torch.stack([each[-1] for each in (*ragged, *alone, *beside, *before)]).float()  # [5, V]
    if model.partial is not None:
        ends, reference = ends[:, model.partial.ids], reference[model.partial.ids]
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
