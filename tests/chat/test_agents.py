"""LangChain agents and LangGraph graphs over scripted engines work as with any other chat model."""

import asyncio
import json
from typing import Any

import pytest
from following import FollowingEngine, asked_of, following_pair
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import BaseModel

from stepspec.engines.protocol import Generate
from stepspec.langchain import ChatStepSpec, StepSpecRunnable

pytestmark = pytest.mark.anyio


@tool
def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


@tool
def weather(city: str) -> str:
    """Tells the weather."""
    raise ValueError(f"no weather in {city}")


class Verdict(BaseModel):
    """What came of it."""

    number: int
    sure: bool


def called(message: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of a message's tool calls."""
    return [(call["name"], call["args"]) for call in message.tool_calls]


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agent_calls_a_tool_and_answers(streaming: bool) -> None:
    agent: Any = create_agent(ChatStepSpec(pair=following_pair(), streaming=streaming), [double])
    result = await agent.ainvoke({"messages": [("user", "Please double 21.")]})
    _, call, tool_message, answer = result["messages"]
    assert called(call) == [("double", {"n": 21})]
    assert (tool_message.content, tool_message.tool_call_id) == ("42", call.tool_calls[0]["id"])
    assert answer.text.strip() == "It is 42."
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "reasoning", "text"]


def test_an_agent_runs_synchronously() -> None:
    agent: Any = create_agent(ChatStepSpec(pair=following_pair()), [double])
    assert agent.invoke({"messages": [("user", "Please double 21.")]})["messages"][-1].text.strip() == "It is 42."


async def test_tools_are_called_in_parallel_and_the_model_sees_a_failure() -> None:
    @wrap_tool_call  # type: ignore[arg-type]
    async def forgiving(request: Any, handler: Any) -> Any:
        try:
            return await handler(request)
        except ValueError as error:
            return ToolMessage(str(error), tool_call_id=request.tool_call["id"], status="error")

    pair = following_pair()
    agent: Any = create_agent(ChatStepSpec(pair=pair), [double, weather], middleware=[forgiving])
    result = await agent.ainvoke({"messages": [("user", "Please double 4, and tell the weather in 'Rome'.")]})
    _, calls, *tool_messages, answer = result["messages"]
    assert called(calls) == [("double", {"n": 4}), ("weather", {"city": "Rome"})]
    assert [(each.content, each.status) for each in tool_messages] == [
        ("8", "success"),
        ("no weather in Rome", "error"),
    ]
    assert answer.text.strip() == "It is 8, no weather in Rome."


@pytest.mark.parametrize("strategy", [Verdict, ProviderStrategy(Verdict), ToolStrategy(Verdict)])
async def test_the_final_answer_is_structured(strategy: Any) -> None:
    agent: Any = create_agent(ChatStepSpec(pair=following_pair()), [], response_format=strategy)
    result = await agent.ainvoke({"messages": [("user", "Is it 7?")]})
    assert result["structured_response"] == Verdict(number=7, sure=True)


async def test_tokens_are_streamed_from_inside_an_agent() -> None:
    agent: Any = create_agent(ChatStepSpec(pair=following_pair(), policy="specreason"), [double])
    state = {"messages": [("user", "Please double 21.")]}
    chunks = [chunk async for chunk, _ in agent.astream(state, stream_mode="messages")]
    message_chunks = [chunk for chunk in chunks if isinstance(chunk, AIMessageChunk)]
    kinds = [block["type"] for chunk in message_chunks for block in chunk.content_blocks]
    assert kinds[:3] == ["reasoning", "reasoning", "tool_call_chunk"]
    assert kinds.count("text") > 2


async def test_memory_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: set[str | None] = set()
    generate = FollowingEngine.generate

    def recorded(self: FollowingEngine, call: Generate) -> Any:
        sessions.add(call.prompt.session)
        return generate(self, call)

    monkeypatch.setattr(FollowingEngine, "generate", recorded)
    pair = following_pair()
    agent: Any = create_agent(ChatStepSpec(pair=pair), [double], checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    await agent.ainvoke({"messages": [("user", "Please double 21.")]}, thread)
    result = await agent.ainvoke({"messages": [("user", "Thanks.")]}, thread)
    assert result["messages"][-1].text.strip() == "You said 5 things, Thanks. among them."
    seen = asked_of(pair.target)
    assert [turn["role"] for turn in seen] == ["user", "assistant", "tool", "assistant", "user"]
    assert seen[1]["tool_calls"][0]["function"] == {"name": "double", "arguments": {"n": 21}}
    assert all(turn["reasoning_content"] for turn in seen if turn["role"] == "assistant")
    assert sessions == {"1"}, "requests of a thread find the replica that has read it"


async def test_cancelling_in_the_middle_of_a_thought_frees_both_engines() -> None:
    pair = following_pair(hangs=True)
    agent: Any = create_agent(ChatStepSpec(pair=pair), [double])
    task = asyncio.ensure_future(agent.ainvoke({"messages": [("user", "Please double 21.")]}))
    assert isinstance(pair.target, FollowingEngine)
    assert isinstance(pair.draft, FollowingEngine)
    await pair.target.hanging.wait()  # while the target judges a step
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (pair.target.num_open, pair.draft.num_open) == (0, 0)


async def test_the_model_sees_that_a_tool_name_is_unknown() -> None:
    pair = following_pair()
    model = ChatStepSpec(pair=pair)
    known: Any = create_agent(model, [double])
    tools = known.get_graph().nodes["tools"].data
    call = {"name": "doubles", "args": {"n": 1}, "id": "abcdefghi", "type": "tool_call"}
    graph: Any = StateGraph(MessagesState)
    graph.add_node("tools", tools)
    graph.add_edge(START, "tools")
    tool_message = (await graph.compile().ainvoke({"messages": [AIMessage("", tool_calls=[call])]}))["messages"][-1]
    assert "doubles is not a valid tool" in tool_message.content
    answer = await model.ainvoke([HumanMessage("Double it."), AIMessage("", tool_calls=[call]), tool_message])
    assert "doubles is not a valid tool" in answer.text


# LangGraph without an agent


async def test_the_runnable_is_a_node_of_a_custom_graph() -> None:
    graph: Any = StateGraph(MessagesState)
    graph.add_node("think", StepSpecRunnable(pair=following_pair(), policy="specreason"))
    graph.add_edge(START, "think")
    graph.add_edge("think", END)
    app = graph.compile()
    result = await app.ainvoke({"messages": [("user", "How many?")]})
    assert result["messages"][-1].text.strip() == "You said 1 things, How many? among them."
    names = [
        event["name"]
        async for event in app.astream_events({"messages": [("user", "How many?")]}, version="v2")
        if event["event"] == "on_custom_event"
    ]
    assert names[:3] == ["stepspec.step.proposed", "stepspec.step.judged", "stepspec.step.committed"]


async def test_a_chat_model_in_a_graph_emits_step_events() -> None:
    model = ChatStepSpec(pair=following_pair())

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    app = graph.compile()
    events = [each async for each in app.astream_events({"messages": [("user", "How many?")]}, version="v2")]
    steps = [each["data"] for each in events if each["name"] == "stepspec.step.committed"]
    assert [step["origin"] for step in steps] == ["draft", "draft"]


def test_results_are_json() -> None:
    agent: Any = create_agent(ChatStepSpec(pair=following_pair()), [double])
    result = agent.invoke({"messages": [("user", "Please double 21.")]})
    assert json.dumps([message.model_dump() for message in result["messages"]])
