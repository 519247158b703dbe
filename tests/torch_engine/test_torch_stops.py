"""Generation ends where a slow search through the text finds the first stop, with and without drafting."""

import itertools

import pytest
from tiny_models import (
    DRAFTED,
    llama_config,
    make_model,
    make_network,
    noisy_copy,
    piece,
    random_ids,
    serving,
    slow_greedy,
)
from transformers import PreTrainedModel

from stepspec.engines.protocol import (
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    collect,
)
from stepspec.engines.torch_engine.engine import TorchEngine

pytestmark = pytest.mark.anyio

PROMPT = random_ids(9, 1)
CAP = 30
DRAFTINGS = [Drafting(), DRAFTED, Drafting("draft-model", 7)]


@pytest.fixture(scope="module")
def network() -> PreTrainedModel:
    return make_network(llama_config())


@pytest.fixture(scope="module")
def text(network: PreTrainedModel) -> list[int]:
    """Return the greedy text without any stop."""
    return slow_greedy(network, PROMPT, CAP + 10)


def slow_end(text: list[int], stop: Stop) -> tuple[list[int], str]:
    """Return the text up to its first stop, and the reason for the end."""
    for count in range(1, stop.max_tokens + 1):
        written = "".join(map(piece, text[:count]))
        if text[count - 1] in stop.token_ids:
            return text[:count], "token"
        if any(delimiter in written for delimiter in stop.delimiters):
            return text[:count], "delimiter"
    return text[: stop.max_tokens], "length"


def all_stops(text: list[int]) -> list[Stop]:
    """Return stops at the first tokens of the text: a delimiter equals a token, is part of it, or spans two tokens."""
    stops = [Stop(cap) for cap in (1, 2, 5, CAP)]
    for before, token in itertools.pairwise(text[:8]):
        stops += [
            Stop(CAP, (piece(token),)),
            Stop(CAP, (piece(token)[1],)),
            Stop(CAP, (piece(before)[1:] + piece(token)[:2],)),
            Stop(CAP, ("never", piece(before) + piece(token))),
            Stop(CAP, token_ids=frozenset([token])),
            Stop(CAP, (piece(token),), frozenset([token])),
            Stop(4, (piece(token),)),
        ]
    return stops


async def generate_until(engine: TorchEngine, buffer: TokenBuffer, stop: Stop, drafting: Drafting) -> TokenChunk:
    return await collect(engine.generate(Generate(buffer, Sampling(), stop, drafting)))


@pytest.mark.parametrize("drafting", DRAFTINGS, ids=str)
@pytest.mark.parametrize("drafted_by", ["the target itself", "a noisy copy"])
async def test_nothing_is_emitted_beyond_the_stop_and_the_next_call_continues_there(
    network: PreTrainedModel, text: list[int], drafting: Drafting, drafted_by: str
) -> None:
    drafter = make_model(network if drafted_by == "the target itself" else noisy_copy(network, 0.08))
    async with serving(make_model(network), drafter) as engine:
        for stop in all_stops(text):
            buffer = TokenBuffer(PROMPT)
            chunk = await generate_until(engine, buffer, stop, drafting)
            assert (list(chunk.ids), chunk.end) == slow_end(text, stop)
            buffer.append(chunk.ids)
            following = await generate_until(engine, buffer, Stop(6), drafting)
            assert [*chunk.ids, *following.ids] == text[: len(chunk.ids) + 6]


@pytest.mark.parametrize("drafting", DRAFTINGS, ids=str)
async def test_the_next_call_is_right_when_the_end_token_was_not_committed(
    network: PreTrainedModel, text: list[int], drafting: Drafting
) -> None:
    async with serving(make_model(network), make_model(network)) as engine:
        buffer = TokenBuffer(PROMPT)
        chunk = await generate_until(engine, buffer, Stop(CAP, token_ids=frozenset([text[6]])), drafting)
        other = [(chunk.ids[-1] + 1) % 48, 3]
        buffer.append([*chunk.ids[:-1], *other])
        following = await generate_until(engine, buffer, Stop(8), drafting)
    assert list(following.ids) == slow_greedy(network, [*PROMPT, *chunk.ids[:-1], *other], 8)


@pytest.mark.parametrize("drafting", DRAFTINGS, ids=str)
async def test_a_drafted_end_token_ends_the_text(network: PreTrainedModel, text: list[int], drafting: Drafting) -> None:
    ends = frozenset([text[7]])
    async with serving(make_model(network), make_model(network), ends) as engine:
        chunk = await generate_until(engine, TokenBuffer(PROMPT), Stop(CAP), drafting)
    assert (list(chunk.ids), chunk.end) == slow_end(text, Stop(CAP, token_ids=ends))


async def test_only_emitted_tokens_count_as_accepted(network: PreTrainedModel, text: list[int]) -> None:
    async with serving(make_model(network), make_model(network)) as engine:
        for stop in all_stops(text):
            chunk = await generate_until(engine, TokenBuffer(PROMPT), stop, DRAFTED)
            assert chunk.accepted <= chunk.drafted
            # A round that stops within its accepted tokens does not emit the token that follows them.
            assert chunk.passes + chunk.accepted - len(chunk.ids) in (0, 1)


async def test_chunks_come_in_order_and_the_last_has_the_reason(network: PreTrainedModel, text: list[int]) -> None:
    network = make_network(llama_config(max_position_embeddings=4096))
    async with serving(make_model(network)) as engine:
        chunks = [chunk async for chunk in engine.generate(Generate(TokenBuffer(PROMPT), Sampling(), Stop(300)))]
    assert len(chunks) > 1
    assert [chunk.end for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert sum((chunk.ids for chunk in chunks), ()) == tuple(slow_greedy(network, PROMPT, 300))
