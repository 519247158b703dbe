"""LangGraph's checkpoints and interrupts, with models in this process and behind a service on loopback."""

from typing import Any

import pytest
from following import THOUGHTS, asked_of
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from stepspec import Pair
from stepspec.langchain import ChatStepSpec, StepSpecRunnable

pytestmark = pytest.mark.anyio

THREAD: Any = {"configurable": {"thread_id": "1"}}
DOUBLE: Any = {"messages": [("user", "Please double 21.")]}


@tool
def double(n: int) -> int:
    """Doubles a number."""
    return 2 * n


@pytest.fixture(params=["here", "served"])
def model(request: pytest.FixtureRequest, agent_pair: Pair, agent_address: str) -> ChatStepSpec:
    return (
        ChatStepSpec(pair=agent_pair, policy="specreason")
        if request.param == "here"
        else ChatStepSpec(base_url=agent_address)
    )


def asking(model: ChatStepSpec, saver: InMemorySaver) -> Any:
    """Return an agent that asks before it calls the tool."""
    middleware: Any = HumanInTheLoopMiddleware(interrupt_on={"double": True})
    return create_agent(model, [double], middleware=[middleware], checkpointer=saver)


@pytest.mark.parametrize(
    ("decision", "answer"),
    [
        ({"type": "approve"}, "It is 42"),
        ({"type": "edit", "edited_action": {"name": "double", "args": {"n": 4}}}, "8"),
        ({"type": "reject", "message": "Not now"}, "Not now"),
    ],
)
async def test_a_call_waits_for_a_person_and_another_agent_goes_on(
    model: ChatStepSpec, agent_pair: Pair, decision: Any, answer: str
) -> None:
    """The second agent has only what the checkpoint holds, as after a restart."""
    saver = InMemorySaver()
    stopped = await asking(model, saver).ainvoke(DOUBLE, THREAD)
    (asked,) = stopped["__interrupt__"]
    assert asked.value["action_requests"][0]["args"] == {"n": 21}
    done = await asking(model, saver).ainvoke(Command(resume={"decisions": [decision]}), THREAD)
    assert done["messages"][-1].text.endswith(f"{answer}.")
    seen = asked_of(agent_pair.target)
    assert [turn["role"] for turn in seen] == ["user", "assistant", "tool"]
    assert seen[1]["reasoning_content"] == "".join(THOUGHTS)


async def test_a_resumed_run_is_streamed(model: ChatStepSpec) -> None:
    agent = asking(model, InMemorySaver())
    kinds = list[str]()
    for given in (DOUBLE, Command(resume={"decisions": [{"type": "approve"}]})):
        async for mode, found in agent.astream(given, THREAD, stream_mode=["messages", "updates"]):
            if mode == "messages" and isinstance(found[0], AIMessageChunk):
                kinds += [block["type"] for block in found[0].content_blocks]
            elif mode == "updates" and "__interrupt__" in found:
                kinds.append("interrupt")
    assert kinds[:4] == ["reasoning", "reasoning", "tool_call_chunk", "interrupt"]
    assert kinds[4:6] == ["reasoning", "reasoning"]
    assert {*kinds[6:]} == {"text"}


async def test_a_thread_goes_on_from_an_earlier_checkpoint(model: ChatStepSpec) -> None:
    agent: Any = create_agent(model, [double], checkpointer=InMemorySaver())
    await agent.ainvoke(DOUBLE, THREAD)
    await agent.ainvoke({"messages": [("user", "Thanks.")]}, THREAD)
    history = [each async for each in agent.aget_state_history(THREAD)]
    called = next(each for each in history if each.next == ("tools",))
    again = await agent.ainvoke(None, called.config)
    assert [message.type for message in again["messages"]] == ["human", "ai", "tool", "ai"]
    assert again["messages"][-1].text.strip() == "It is 42."


async def test_a_node_of_a_graph_is_interrupted(model: ChatStepSpec) -> None:
    def review(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("user", interrupt(state["messages"][-1].text))]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("draft", StepSpecRunnable(model))
    graph.add_node("review", review)
    graph.add_node("final", StepSpecRunnable(model))
    for start, end in ((START, "draft"), ("draft", "review"), ("review", "final")):
        graph.add_edge(start, end)
    app = graph.compile(checkpointer=InMemorySaver())
    (asked,) = (await app.ainvoke({"messages": [("user", "How many?")]}, THREAD))["__interrupt__"]
    assert asked.value.strip() == "You said 1 things, How many? among them."
    done = await app.ainvoke(Command(resume="Shorter."), THREAD)
    assert done["messages"][-1].text.strip() == "You said 3 things, Shorter. among them."
