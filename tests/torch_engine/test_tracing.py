"""Both halves of a round are traced without graph breaks, so they depend on no tensor value on the host.

A device can therefore run and replay them without waiting for the host.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_config, make_model, make_network, noisy_copy, random_ids

from stepspec.engines.protocol import Acceptance, Sampling
from stepspec.engines.torch_engine.decode import decide, verify_and_accept
from stepspec.engines.torch_engine.drafters.base import Draft
from stepspec.engines.torch_engine.drafters.draft_model import draft_loop
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.sampling import Samplers, Seen, samplers

LENGTHS = (9, 4)
NUM_TOKENS = 2  # the first, which reads two tokens, and one that follows a drafted one
SAMPLINGS = {
    "greedy": [Sampling(), Sampling()],
    "mixed": [
        Sampling(1.0, top_p=0.9, top_k=20, min_p=0.01, seed=1),
        Sampling(repetition_penalty=1.2, presence_penalty=0.5, logit_bias=((3, 1.0),)),
    ],
}
RULES = {
    "greedy": [Acceptance("fly", window=1, entropy=0.1), Acceptance("ratio", 0.1)],
    "mixed": [Acceptance("typical", 0.1), Acceptance()],
}


def filled(network: Any) -> CausalModel:
    """Return a model that reads by slot and has read two texts except for their last tokens."""
    model = make_model(network, by_slot=True)
    model.extend([0, 1], [random_ids(length - 1, seed=length) for length in LENGTHS], keep=[[], []])
    return model


def how_for(name: str, vocab_size: int) -> Samplers:
    """Return the sampling settings of two rows, by their name in `SAMPLINGS`."""
    kinds = torch.zeros(vocab_size, dtype=torch.int8)
    how = samplers(SAMPLINGS[name], vocab_size, torch.device("cpu"), RULES[name], kinds)
    if how.penalties is None:
        return how
    return how._replace(seen=Seen(torch.zeros(2, vocab_size, dtype=torch.bool), torch.zeros(2, vocab_size)))


def assert_traced_without_breaks(function: Callable[..., Any], *arguments: Any) -> Any:
    """Assert that a function can be traced without graph breaks and gives the same results. Return the results."""
    expected = function(*arguments)
    torch.compiler.reset()
    traced = torch.compile(function, fullgraph=True, backend="eager")(*arguments)
    torch.testing.assert_close(traced, expected)
    return expected


# What a family adds is traced in the greedy rounds, and what sampling adds in those of one family.
@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=[pytest.mark.soak] if name == "mixed" and family != "llama" else [])
        for name in SAMPLINGS
        for family in FAMILIES
    ],
)
@torch.inference_mode()
def test_the_draft_loop_and_verification_are_traced_without_breaks(family: str, name: str) -> None:
    network = make_network(make_config(family, num_hidden_layers=1))
    target, drafter = filled(network), filled(noisy_copy(network, 0.1))
    how = how_for(name, target.vocab_size)
    table = [(slot, length - 1, 5, 7) for slot, length in enumerate(LENGTHS)]
    positions, (before, last) = drafter.pass_inputs(table, NUM_TOKENS)
    tokens, distributions = assert_traced_without_breaks(
        draft_loop, drafter, positions, before, last, NUM_TOKENS, how, target.vocab_size
    )
    positions, (_, last) = target.pass_inputs(table, NUM_TOKENS + 1)
    draft = Draft(tokens, (NUM_TOKENS, NUM_TOKENS), distributions)
    counts, detailed = torch.tensor([NUM_TOKENS, 1]), True  # with details, it does all that it does without them
    assert_traced_without_breaks(verify_and_accept, target, positions, last, counts, draft, how, decide, detailed)
