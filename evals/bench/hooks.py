"""Hooks for benchmarks of the torch engine: transformers' own network, layers without attention, random acceptance."""

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from transformers import AttentionInterface, PreTrainedModel

from stepspec.engines.torch_engine import TorchEngine, decode
from stepspec.engines.torch_engine.body import PRODUCTS, FusedBody, FusedHead
from stepspec.engines.torch_engine.drafters.base import Draft
from stepspec.engines.torch_engine.matrix import GROUP, Fp8Matrix, Int8Matrix, Matrix, PackedMatrix
from stepspec.engines.torch_engine.memory import SHARE, free_bytes
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.sampling import ACCEPT, Decision, Samplers, leading, uniform

BLIND = "stepspec_blind"
"""Name in transformers of the attention of `blind_model`."""


def own_networks(engine: TorchEngine) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Return target and draft with transformers' own layers and attention, sharing the weights, for comparison."""
    inside: Any = engine
    return own_network(inside.model), own_network(inside._drafter) if inside._drafter else None


def own_network(model: CausalModel) -> PreTrainedModel:
    """Return a model's network with transformers' own attention, sharing the weights and their memory layout.

    Weights that are stored in a layout of the engine's own are copied, as they are multiplied with now.
    """
    inside: Any = model
    network: Any = _sharing_weights(model.network)
    if isinstance(inside._body, FusedBody):
        for module, layer in zip(network.base_model.layers, inside._body.layers, strict=True):
            for name, parts in PRODUCTS.items():
                _restore(getattr(layer, name), [module.get_submodule(part) for part in parts])
    if isinstance(model.logits, FusedHead):
        _restore(model.logits.matrix, [network.get_output_embeddings()])
    capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None) is not None
    network.set_attn_implementation("sdpa" if network._supports_sdpa and not capped else "eager")
    return network


def _sharing_weights(network: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the network that shares its weights but has its own configuration."""
    return copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})


def _restore(matrix: Matrix, products: Sequence[Linear]) -> None:
    """Give the products the weight of the matrix that joins them, if it was freed."""
    if products[0].weight.is_meta:
        weights = torch.split(plain_weight(matrix).T, [len(each.weight) for each in products])
        for product, weight in zip(products, weights, strict=True):
            product.weight = Parameter(weight.to(product.weight.dtype), requires_grad=False)


def read_bytes(model: CausalModel) -> int:
    """Return the bytes of the weights that every pass reads: not embeddings that are looked up, nor head rows that are
    not scored."""
    inside: Any = model
    if matrices := inside._matrices:
        return sum(matrix.num_bytes for matrix in matrices)
    network: Any = model.network
    embeddings, head = network.get_input_embeddings(), network.get_output_embeddings()
    looked_up = 0 if head is None or head.weight is embeddings.weight else embeddings.weight.nbytes
    return model.weight_bytes - looked_up


def plain_weight(matrix: Matrix) -> Tensor:
    """Return the weight that a matrix of a layout of the engine's own multiplies with, [in, out]."""
    inside: Any = matrix
    if isinstance(matrix, PackedMatrix):
        return inside._packed.to_dense().T
    if isinstance(matrix, Int8Matrix):
        return inside._codes.to_dense() * inside._scales
    if isinstance(matrix, Fp8Matrix):
        return (inside._codes.float() * inside._scales).T
    eye = torch.eye(inside._scales.shape[0] * GROUP, dtype=torch.bfloat16)
    product: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
    return product(eye, inside._codes, GROUP, inside._scales)


def blind_model(model: CausalModel) -> CausalModel:
    """Return a copy of the model without attention between positions, and with its own cache."""
    twin: Any = model.with_own_cache()
    fused, body = isinstance(twin._body, FusedBody), copy.copy(twin._body)
    if fused:
        body._attend = _see_nothing
        body.attend_in_slots = body.attend_in_slots and _see_nothing_in_slots
    else:
        network: Any = _sharing_weights(body.modules)
        network.set_attn_implementation(BLIND)
        body.modules, body.attend_in_slots = network, None
    twin._body = body
    return twin


def blind_engine(engine: TorchEngine) -> TorchEngine:
    """Return an engine with a `blind_model`, to measure the time of everything but attention.

    Call it before the first call of `engine`: on a GPU the two share the memory.
    """
    inside: Any = engine
    budget = None
    if (free := free_bytes(inside.model.device)) is not None:
        budget = int(free * SHARE / 2)
        inside.make_room(budget)
    return TorchEngine(blind_model(inside.model), engine.tokenizer, budget=budget)


@contextmanager
def synthetic_acceptance(probability: float | None) -> Generator[None]:
    """Make the engines of this process accept drafted tokens at random, for untrained models.

    Everything is computed as usual; only the number of accepted tokens is sampled. The text is meaningless.

    Args:
        probability: acceptance probability of each drafted token; None changes nothing.
    """
    if probability is None:
        yield
        return
    decide = decode.decide

    def decide_at_random(logits: Tensor, draft: Draft, counts: Tensor, first: Tensor, how: Samplers) -> Decision:
        following = decide(logits, draft, counts, first, how).following
        positions = first[:, None] + torch.arange(draft.tokens.shape[1], device=logits.device)
        return Decision(leading(uniform(how.keys, positions, ACCEPT) < probability, counts), following)

    with patch.object(decode, "decide", decide_at_random):
        yield


def _see_nothing(query: Tensor, *_: object) -> Tensor:
    """Replace attention: return the query, [B, H, T, D], as output, [B, T, H, D]."""
    return query.transpose(1, 2)


def _see_nothing_in_slots(query: Tensor, *_: object, **__: object) -> Tensor:
    """Replace attention: return the query, [N, H, D], as output."""
    return query


def _blind_attention(_: torch.nn.Module | None, query: Tensor, *__: object, **___: object) -> tuple[Tensor, None]:
    """Replace attention, with the signature that transformers uses."""
    return _see_nothing(query).contiguous(), None


attentions: Any = AttentionInterface
attentions.register(BLIND, _blind_attention)
