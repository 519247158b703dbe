"""The presence and the frequency penalty count the whole output of a request, with every drafter."""

from collections import Counter
from collections.abc import Sequence

import pytest
from tiny_models import DRAFTED, llama_config, make_model, make_network, noisy_copy, random_ids, serving, slow_logits
from transformers import PreTrainedModel

from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, collect

pytestmark = pytest.mark.anyio

PROMPT = random_ids(12, 1)
CALLS = (3, 1, 9, 14)
"""Numbers of tokens that the calls of a request write."""


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return make_network(llama_config())


def expected(network: PreTrainedModel, sampling: Sampling) -> Sequence[int]:
    """Return the greedy output, from a pass over the whole text for every token."""
    output: list[int] = []
    for _ in range(sum(CALLS)):
        logits = slow_logits(network, [*PROMPT, *output])[-1].clone()
        for id, count in Counter(output).items():
            logits[id] -= count * sampling.frequency_penalty + sampling.presence_penalty
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("drafting", [Drafting(), DRAFTED, Drafting("prompt-lookup", 3)], ids=lambda d: d.drafter)
async def test_the_output_of_earlier_calls_counts(network: PreTrainedModel, drafting: Drafting, by_slot: bool) -> None:
    sampling = Sampling(presence_penalty=0.3, frequency_penalty=0.2)
    model, drafter = (make_model(each, by_slot=by_slot) for each in (network, noisy_copy(network, 0.2)))
    buffer, after = TokenBuffer(PROMPT), list[int]()
    async with serving(model, drafter) as engine:
        for number, count in enumerate(CALLS):
            call = Generate(buffer, sampling, Stop(count), drafting, after=tuple(after))
            after += (await collect(engine.generate(call))).ids
            if number % 2:  # else the next call writes after ids that are not committed
                buffer.append(after)
                after = []
    written = [*buffer.since(len(PROMPT)), *after]
    assert written == expected(network, sampling)
    assert written != expected(network, Sampling())
    assert len(set(written)) > len(set(expected(network, Sampling())))
