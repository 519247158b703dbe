"""Calls with invalid ids raise an error before the model reads anything, in every argument that takes ids."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, generate, llama_config, make_model, make_network, make_tokenizer

from stepspec.engines.protocol import Probe, Sampling, Stop, TokenBuffer, Verify, check_ids
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.errors import UsageError

PLACES = ["prompt", "committed", "after", "bias", "allowed", "continuation", "probe", "label"]
WRONG = st.integers(max_value=-1) | st.integers(min_value=VOCAB_SIZE)


def call(engine: TorchEngine, place: str, ids: list[int]) -> Coroutine[Any, Any, Any]:
    """Return a call with these ids in the argument named by `place`."""
    if place in ("prompt", "committed"):
        prompt = TokenBuffer(ids if place == "prompt" else [1, 2])
        prompt.append(ids)
        return engine.verify(Verify(prompt, [3]))
    if place in ("continuation", "probe", "label"):
        probe = Probe(tuple(ids) if place == "probe" else (4,), tuple(ids) if place == "label" else (5,))
        return engine.verify(Verify(TokenBuffer([1, 2]), ids if place == "continuation" else [3], [probe]))
    bias = tuple((id, 1.0) for id in ids) if place == "bias" else ()
    sampling = Sampling(logit_bias=bias, allowed=frozenset(ids) if place == "allowed" else None)
    return generate(engine, [1, 2], 2, sampling=sampling, after=ids if place == "after" else ())


@settings(max_examples=60)
@given(st.data())
def test_an_id_that_the_model_does_not_have_is_refused_by_its_number(data: st.DataObject) -> None:
    place, wrong = data.draw(st.sampled_from(PLACES)), data.draw(WRONG)
    right = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4))
    ids = data.draw(st.permutations([*right, wrong]))

    async def check() -> None:
        engine = TorchEngine(MODEL, make_tokenizer())
        try:
            with pytest.raises(UsageError, match=rf"(id {wrong} is|got {wrong}\.)"):
                await call(engine, place, ids)
            await call(engine, place, right)
        finally:
            await engine.aclose()

    asyncio.run(check())


MODEL = make_model(make_network(llama_config()))


@pytest.mark.parametrize("wrong", [1.5, "3", None, 1 << 40, -1])
def test_invalid_ids_are_not_committed(wrong: Any) -> None:
    buffer = TokenBuffer([1, 2])
    with pytest.raises(UsageError, match="Token ids must be whole numbers from 0 to 2147483647, got "):
        buffer.append([3, wrong])
    assert buffer.since(0) == [1, 2]


class Unreadable(TokenBuffer):
    """A buffer that raises if its ids are read."""

    def since(self, start: int, end: int | None = None) -> list[int]:
        raise AssertionError("the ids of the prompt were read again")


def test_checking_a_call_reads_only_its_new_ids() -> None:
    prompt = Unreadable(range(VOCAB_SIZE))
    check_ids("tiny", VOCAB_SIZE, prompt, [1], ())
    with pytest.raises(UsageError, match=r"Token id 47 is not in the vocabulary of tiny, whose ids are 0 to 46\."):
        check_ids("tiny", VOCAB_SIZE - 1, prompt)


def test_a_stop_without_tokens_or_with_an_empty_delimiter_is_rejected() -> None:
    for count in (0, -1):
        with pytest.raises(UsageError, match=f"max_tokens must be at least 1, got {count}"):
            Stop(count)
    with pytest.raises(UsageError, match="A delimiter must not be empty"):
        Stop(5, ("\n", ""))
