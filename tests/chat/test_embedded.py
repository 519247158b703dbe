"""With the embedded pair, the chat model gives the same answers as the Python API, in the order of commitment."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from service import serving

from stepspec import Noted, StepSpec
from stepspec.api.models import load_pair
from stepspec.client import RemoteStepSpec
from stepspec.langchain import ChatStepSpec, StepSpecRunnable
from stepspec.langchain.shared_models import shared_pair

pytestmark = pytest.mark.anyio

QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"


@pytest.fixture
def following() -> None:
    """Override the fixture of conftest.py: these tests load the embedded pair once."""


@pytest.fixture(scope="module")
def spec() -> StepSpec:
    return StepSpec(pair=shared_pair(None, None))


async def test_a_chain_answers_like_the_python_api(spec: StepSpec) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{question}")]) | ChatStepSpec() | StrOutputParser()
    expected = await spec.generate(QUESTION)
    assert "17" in expected.answer
    assert await chain.ainvoke({"question": QUESTION}) == expected.answer
    chunks = [chunk async for chunk in chain.astream({"question": QUESTION})]
    assert "".join(chunks) == expected.answer


async def test_a_stream_begins_with_a_note_on_a_question_that_the_pair_does_not_know(spec: StepSpec) -> None:
    assert spec.pair.scope is not None
    with serving(load_pair()) as address:
        async with RemoteStepSpec(address) as remote:
            events = [event async for event in remote.stream("What is the capital of France?", max_tokens=5)]
    assert events[0] == Noted(spec.pair.scope.knows)
    assert sum(isinstance(event, Noted) for event in events) == 1


def test_the_pair_loaded_by_name_is_the_default_pair() -> None:
    assert shared_pair(None, None, "embedded") is shared_pair(None, None)


async def test_steps_are_streamed_in_the_order_of_commitment(spec: StepSpec) -> None:
    expected = await spec.generate(QUESTION)
    chunks = [chunk async for chunk in ChatStepSpec().astream(QUESTION)]
    blocks: list[Any] = [block for chunk in chunks for block in chunk.content_blocks]
    kinds = [block["type"] for block in blocks]
    assert kinds == sorted(kinds)  # reasoning, then text
    whole: Any = sum(chunks[1:], chunks[0])
    thoughts = [block for block in whole.content_blocks if block["type"] == "reasoning"]
    assert [block["reasoning"] for block in thoughts] == [step.text for step in expected.steps]
    assert [block["extras"]["origin"] for block in thoughts] == [step.origin for step in expected.steps]
    written = [block["index"] for block in blocks if block["type"] == "reasoning" and "extras" not in block]
    assert {expected.steps[index - 1].origin for index in written} <= {"target", "salvaged"}
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == expected.answer


async def test_an_agent_answers_like_the_python_api(spec: StepSpec) -> None:
    @tool
    def calculate(expression: str) -> str:
        """Calculates."""
        raise AssertionError("the pair knows no tools")

    model = ChatStepSpec(max_tokens=150)
    agent: Any = create_agent(model, [calculate])
    message = (await agent.ainvoke({"messages": [("user", QUESTION)]}))["messages"][-1]
    described: Any = model.bind_tools([calculate])
    expected = await spec.generate(QUESTION, max_tokens=150, tools=described.kwargs["tools"])
    assert message.text == expected.answer
    assert message.additional_kwargs.get("reasoning_content", "") == expected.reasoning


async def test_the_runnable_answers_like_the_python_api(spec: StepSpec) -> None:
    expected = await spec.generate(QUESTION)
    message = await StepSpecRunnable().ainvoke(QUESTION)
    assert isinstance(message, AIMessage)
    assert message.content == expected.answer
    assert message == (await ChatStepSpec().ainvoke(QUESTION)).model_copy(
        update={"id": message.id, "response_metadata": message.response_metadata}
    )


async def test_the_second_turn_reuses_the_cached_prompt(spec: StepSpec) -> None:
    model = ChatStepSpec()
    first = await model.ainvoke([HumanMessage(QUESTION)])
    assert first.usage_metadata is not None
    second = await model.ainvoke([HumanMessage(QUESTION), first, HumanMessage("And how many has Ann?")])
    usage = second.usage_metadata
    assert usage is not None
    # The second prompt repeats all of the first except the opening thinking tag, which the template omits.
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    assert cached >= first.usage_metadata["input_tokens"] - 2


async def test_concurrent_calls_share_the_engine_and_give_the_same_answer(spec: StepSpec) -> None:
    model = ChatStepSpec()
    expected = await spec.generate(QUESTION)
    messages = await asyncio.gather(*(model.ainvoke(QUESTION) for _ in range(64)))
    assert {message.content for message in messages} == {expected.answer}


def test_synchronous_batches_run_concurrently(spec: StepSpec) -> None:
    messages = ChatStepSpec().batch([QUESTION] * 8)
    assert {message.content for message in messages} == {messages[0].content}
    assert ChatStepSpec().invoke(QUESTION).content == messages[0].content


def test_a_loaded_pair_reports_its_context_length(spec: StepSpec) -> None:
    profile: Any = ChatStepSpec().profile
    assert profile["max_input_tokens"] == spec.pair.target.max_context
    assert ChatStepSpec().get_num_tokens("Ann has 12 apples.") == len(
        spec.pair.target.tokenizer.encode_text("Ann has 12 apples.")
    )


@pytest.mark.parametrize("policy", ["target", "two-level", "draft"])
async def test_a_text_without_an_end_is_cut_at_the_deadline(spec: StepSpec, policy: str) -> None:
    no_end = dict.fromkeys(spec.pair.target.tokenizer.end_ids, -100.0)
    since, session = time.perf_counter(), StepSpec(policy=policy, pair=spec.pair)
    result = await session.generate(QUESTION, sampling={"logit_bias": no_end}, deadline_s=1.0)
    assert 1.0 <= time.perf_counter() - since < 2.0
    assert (result.finish_reason, result.limit) == ("length", "deadline")
    assert result.counts.committed > 10
    result.counts.check()


def test_a_text_that_ignores_its_end_has_exactly_the_wanted_length() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    with serving(load_pair()) as address:
        for route, prompt in (("completions", {"prompt": QUESTION}), ("chat/completions", {"messages": messages})):
            for ignored in (False, True):
                body = {**prompt, "max_tokens": 400, "ignore_eos": ignored}
                found = httpx.post(f"{address}/{route}", json=body, timeout=60).json()
                assert found["choices"][0]["finish_reason"] == ("length" if ignored else "stop")
                assert (found["usage"]["completion_tokens"] == 400) is ignored
