"""Hooks that benchmarks install into the torch engine: layers without attention, and acceptance at random."""

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
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.sampling import ACCEPT, Samplers, leading, uniform

BLIND = "stepspec_blind"
"""Name of the attention of `blind_model` in transformers."""


def blind_model(model: CausalModel) -> CausalModel:
    """The model with layers that look at no other position, and a cache of its own."""
    twin: Any = model.with_own_cache()
    fused, body = isinstance(twin._body, FusedBody), copy.copy(twin._body)
    if fused:
        body._attend = _see_nothing
    else:
        network: Any = sharing_weights(body._body)
        network.set_attn_implementation(BLIND)
        body._body = network
    twin._body = body
    return twin


def blind_engine(engine: TorchEngine) -> TorchEngine:
    """An engine over a `blind_model`, to measure what all but attention takes."""
    inside: Any = engine
    return TorchEngine(blind_model(inside._model), engine.tokenizer)


@contextmanager
def synthetic_acceptance(probability: float | None) -> Generator[None]:
    """Have the engines of this process accept drafted tokens at random, for models that have learned nothing.

    Everything is computed as usual; only how many drafted tokens are kept is drawn by lot. The text means nothing.

    Args:
        probability: of each drafted token; None changes nothing.
    """
    if probability is None:
        yield
        return
    decide = decode.decide

    def decide_by_lot(
        logits: Tensor, draft: Draft, counts: Tensor, first: Tensor, how: Samplers
    ) -> tuple[Tensor, Tensor]:
        _, following = decide(logits, draft, counts, first, how)
        positions = first[:, None] + torch.arange(draft.tokens.shape[1], device=logits.device)
        return leading(uniform(how.keys, positions, ACCEPT) < probability, counts), following

    with patch.object(decode, "decide", decide_by_lot):
        yield


def _see_nothing(query: Tensor, *_: object) -> Tensor:
    """In the place of attention: [B, T, H, D] of query [B, H, T, D]."""
    return query.transpose(1, 2)


def _blind_attention(_: torch.nn.Module | None, query: Tensor, *__: object, **___: object) -> tuple[Tensor, None]:
    """The same as transformers calls it."""
    return _see_nothing(query).contiguous(), None


attentions: Any = AttentionInterface
attentions.register(BLIND, _blind_attention)
