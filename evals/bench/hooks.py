"""Hooks for benchmarks of the torch engine: layers without attention, and random acceptance."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AttentionInterface

from stepspec.engines.torch_engine import TorchEngine, decode
from stepspec.engines.torch_engine.body import FusedBody, sharing_weights
from stepspec.engines.torch_engine.drafters.base import Draft
from stepspec.engines.torch_engine.memory import SHARE, free_bytes
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.sampling import ACCEPT, Decision, Samplers, leading, uniform

BLIND = "stepspec_blind"
"""Name in transformers of the attention of `blind_model`."""


def blind_model(model: CausalModel) -> CausalModel:
    """Return a copy of the model without attention between positions, and with its own cache."""
    twin: Any = model.with_own_cache()
    fused, body = isinstance(twin._body, FusedBody), copy.copy(twin._body)
    if fused:
        body._attend = _see_nothing
        body._attend_in_slots = body._attend_in_slots and _see_nothing_in_slots
    else:
        network: Any = sharing_weights(body.modules)
        network.set_attn_implementation(BLIND)
        body.modules = network
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


def _see_nothing_in_slots(query: Tensor, *_: object) -> Tensor:
    """Replace attention: return the query, [B, T, H, D], as output."""
    return query


def _blind_attention(_: torch.nn.Module | None, query: Tensor, *__: object, **___: object) -> tuple[Tensor, None]:
    """Replace attention, with the signature that transformers uses."""
    return _see_nothing(query).contiguous(), None


attentions: Any = AttentionInterface
attentions.register(BLIND, _blind_attention)
