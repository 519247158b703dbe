"""Typical acceptance, which does not keep the exact distribution."""

import pytest
import torch
from tiny_models import generate, llama_config, make_model, make_network, noisy_copy, random_ids, serving, slow_greedy

from stepspec.engines.protocol import Drafting, Sampling
from stepspec.engines.torch_engine.sampling import overrides, samplers
from stepspec.errors import UsageError

PROMPT = random_ids(12, seed=3)
CPU = torch.device("cpu")


def test_typical_acceptance_depends_on_probability_and_entropy() -> None:
    """At tolerance 0.25 a token needs a probability of at least min(0.25, 0.5 exp(-H))."""
    sure, even = torch.tensor([0.97, 0.01, 0.01, 0.01]).log(), torch.full((4,), 0.25).log()
    logits = torch.stack([sure, even, even])[None]  # H of `even` is ln 4, so its threshold is 0.5 / 4
    how = samplers([Sampling()], 4, CPU, [Drafting("draft-model", tolerance=0.25)])
    for drafted, expected in (([0, 3], [True, True]), ([1, 3], [False, True])):
        accepted = overrides(logits, torch.tensor([drafted]), how)
        assert accepted is not None
        assert accepted.tolist() == [expected]
    exact = samplers([Sampling()], 4, CPU, [Drafting("draft-model")])
    assert overrides(logits, torch.tensor([[0, 3]]), exact) is None


@pytest.mark.anyio
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=str)
async def test_with_a_tolerance_more_tokens_are_accepted(sampling: Sampling) -> None:
    network = make_network(llama_config())
    async with serving(make_model(network), make_model(noisy_copy(network, 0.3))) as engine:
        exact = await generate(engine, PROMPT, 60, sampling=sampling, drafting=Drafting("draft-model", 4))
        loose = await generate(engine, PROMPT, 60, sampling=sampling, drafting=Drafting("draft-model", 4, 1e-4))
    assert loose.accepted / loose.drafted > exact.accepted / exact.drafted
    assert (sampling.temperature > 0) or list(exact.ids) == slow_greedy(network, PROMPT, 60)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_tokens": 65}, "between 0 and 64"),
        ({"tolerance": 1.5}, "between 0"),
    ],
    ids=str,
)
def test_values_out_of_range_are_rejected(values: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Drafting("draft-model", **values)  # type: ignore[arg-type]
