"""pydantic-ai's agents against a service on loopback, by the three APIs that they speak."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from following import THOUGHTS, asked_of
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, AgentRunResultEvent, DeferredToolRequests, DeferredToolResults
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, PartDeltaEvent, ThinkingPart, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from stepspec import Pair

pytestmark = pytest.mark.anyio


class Sum(BaseModel):
    """A sum."""

    total: int


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel, AnthropicModel])
async def model(request: pytest.FixtureRequest, agent_address: str) -> AsyncIterator[Model]:
    client: Any
    if request.param is AnthropicModel:
        async with AsyncAnthropic(base_url=agent_address.removesuffix("/v1"), api_key="none", max_retries=0) as client:
            yield AnthropicModel("target", provider=AnthropicProvider(anthropic_client=client))
    else:
        async with AsyncOpenAI(base_url=agent_address, api_key="none", max_retries=0) as client:
            yield request.param("target", provider=OpenAIProvider(openai_client=client))


def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


def thought(message: ModelMessage) -> str:
    """Return the thinking of a message. That of the Responses API is raw content."""
    parts = [part for part in message.parts if isinstance(part, ThinkingPart)]
    return "".join(part.content or "".join((part.provider_details or {})["raw_content"]) for part in parts)


async def test_an_agent_calls_a_tool_and_goes_on_with_the_conversation(model: Model, agent_pair: Pair) -> None:
    agent = Agent(model, tools=[double], instructions="Be brief.")
    result = await agent.run("Please double 21.")
    assert result.output.strip() == "It is 42."
    calls = [part for message in result.all_messages() for part in message.parts if isinstance(part, ToolCallPart)]
    assert [(call.tool_name, call.args_as_dict()) for call in calls] == [("double", {"n": 21})]
    assert thought(result.all_messages()[1]) == "".join(THOUGHTS)
    stored = ModelMessagesTypeAdapter.validate_json(result.all_messages_json())
    following = await agent.run("Thanks.", message_history=stored)
    assert "Thanks. among them." in following.output
    seen = asked_of(agent_pair.target)
    assert [turn["role"] for turn in seen] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert seen[2]["reasoning_content"] == "".join(THOUGHTS)


async def test_a_run_is_streamed(model: Model) -> None:
    agent = Agent(model, tools=[double])
    deltas = list[str]()
    async with agent.run_stream_events("Please double 21.") as events:
        async for event in events:
            if isinstance(event, PartDeltaEvent):
                deltas.append(event.delta.part_delta_kind)
            elif isinstance(event, AgentRunResultEvent):
                result = event.result
    assert {"thinking", "text", "tool_call"} >= {*deltas} >= {"thinking", "text"}
    assert thought(result.all_messages()[1]) == "".join(THOUGHTS)
    assert result.output.strip() == "It is 42."
    async with agent.run_stream("How many?") as stream:
        chunks = [chunk async for chunk in stream.stream_text(delta=True, debounce_by=None)]
    assert len(chunks) > 2
    assert "".join(chunks).strip() == "You said 1 things, How many? among them."


async def test_an_output_has_its_type(model: Model) -> None:
    agent: Agent[None, Sum] = Agent(model, output_type=Sum)
    assert (await agent.run("It is 7.")).output == Sum(total=7)
    async with agent.run_stream("It is 7.") as stream:
        assert await stream.get_output() == Sum(total=7)


async def test_a_tool_waits_for_an_approval(model: Model) -> None:
    agent: Any = Agent(model, output_type=[str, DeferredToolRequests])
    agent.tool_plain(requires_approval=True)(double)
    asked = await agent.run("Please double 21.")
    (call,) = asked.output.approvals
    approved = DeferredToolResults(approvals={call.tool_call_id: True})
    done = await agent.run(message_history=asked.all_messages(), deferred_tool_results=approved)
    assert done.output.strip() == "It is 42."
