"""The benchmark hooks change the engine as documented, and only while they are active."""

import pytest
import torch
from tiny_models import generate, llama_config, make_config, make_model, make_network, noisy_copy, random_ids, serving

from evals.bench.hooks import blind_model, synthetic_acceptance
from stepspec.engines.protocol import Drafting

ROUNDING = 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt-neox"], ids=["fused", "modules"])
@torch.inference_mode()
def test_a_blind_model_sees_only_the_last_token(family: str) -> None:
    model = make_model(make_network(make_config(family)))
    texts = [[*random_ids(9, seed), 7] for seed in (0, 1)]
    blind = blind_model(model)
    one, other = (blind.extend([slot], [text], keep=[[9]])[0] for slot, text in enumerate(texts))
    assert torch.allclose(one, other, atol=ROUNDING)
    one, other = (model.extend([slot], [text], keep=[[9]])[0] for slot, text in enumerate(texts))
    assert not torch.allclose(one, other, atol=ROUNDING), "the original model ignores the earlier tokens"


@pytest.mark.anyio
async def test_synthetic_acceptance_works_only_inside_the_hook() -> None:
    network, drafting = make_network(llama_config()), Drafting("draft-model", 4)
    accepted: list[float] = []
    async with serving(make_model(network), make_model(noisy_copy(network, 3.0))) as engine:
        for probability in (None, 1.0, 0.7, 0.0, None):
            with synthetic_acceptance(probability):
                chunk = await generate(engine, random_ids(12, seed=3), 60, drafting=drafting)
            accepted.append(chunk.accepted / chunk.drafted)
    before, every, some, none, after = accepted
    assert (every, none) == (1.0, 0.0)
    assert 0.2 < some < 0.8  # 0.44 on average: tokens before the first rejection of four, each accepted with 0.7
    assert before == after < 0.2
