"""The OpenAI Agents SDK against a service on loopback, by both of OpenAI's APIs."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import Agent, RunConfig, Runner, RunState, SQLiteSession, function_tool
from agents.models.interface import Model
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from following import asked_of
from openai import AsyncOpenAI
from pydantic import BaseModel

from stepspec import Pair

pytestmark = pytest.mark.anyio

QUIET = RunConfig(tracing_disabled=True)


class Sum(BaseModel):
    """A sum."""

    total: int


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def model(request: pytest.FixtureRequest, agent_address: str) -> AsyncIterator[Model]:
    async with AsyncOpenAI(base_url=agent_address, api_key="none", max_retries=0) as client:
        yield request.param("target", client)


@function_tool
def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


def agent(model: Model, **settings: Any) -> Agent[Any]:
    return Agent(name="calculator", model=model, **settings)


async def test_an_agent_calls_a_tool_and_a_session_keeps_the_conversation(model: Model, agent_pair: Pair) -> None:
    calculator, session = agent(model, tools=[double], instructions="Be brief."), SQLiteSession("mine")
    result = await Runner.run(calculator, "Please double 21.", session=session, run_config=QUIET)
    assert result.final_output.strip() == "It is 42."
    kinds = [item.type for item in result.new_items if item.type != "reasoning_item"]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result.context_wrapper.usage.output_tokens > 20
    following = await Runner.run(calculator, "Thanks.", session=session, run_config=QUIET)
    assert "Thanks. among them." in following.final_output
    assert [turn["role"] for turn in asked_of(agent_pair.target)] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]


async def test_a_run_is_streamed(model: Model) -> None:
    result = Runner.run_streamed(agent(model, tools=[double]), "Please double 21.", run_config=QUIET)
    text, items = list[str](), list[str]()
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text.append(event.data.delta)
        elif event.type == "run_item_stream_event":
            items.append(event.name)
    assert "".join(text) == result.final_output == "\n\nIt is 42."
    assert [name for name in items if name != "reasoning_item_created"] == [
        "tool_called",
        "tool_output",
        "message_output_created",
    ]
    assert "reasoning_item_created" in items


@pytest.mark.parametrize("streams", [False, True])
async def test_an_output_has_its_type(model: Model, streams: bool) -> None:
    typed = agent(model, output_type=Sum)
    if streams:
        result: Any = Runner.run_streamed(typed, "It is 7.", run_config=QUIET)
        assert [event async for event in result.stream_events()]
    else:
        result = await Runner.run(typed, "It is 7.", run_config=QUIET)
    assert result.final_output == Sum(total=7)


async def test_an_agent_hands_over(model: Model) -> None:
    triage = Agent(name="triage", model=model, handoffs=[agent(model, tools=[double])])
    result = await Runner.run(triage, "Transfer me to a calculator.", run_config=QUIET)
    assert result.last_agent.name == "calculator"


async def test_a_run_is_interrupted_for_an_approval_and_goes_on(model: Model) -> None:
    @function_tool(needs_approval=True)
    def triple(n: int) -> int:
        """Triples a number."""
        return 3 * n

    calculator = agent(model, tools=[triple])
    asked = await Runner.run(calculator, "Please triple 5.", run_config=QUIET)
    (interruption,) = asked.interruptions
    state = await RunState.from_string(calculator, asked.to_state().to_string())
    state.approve(state.get_interruptions()[0])
    assert interruption.name == "triple"
    assert (await Runner.run(calculator, state, run_config=QUIET)).final_output.strip() == "It is 15."
