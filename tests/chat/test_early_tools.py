"""Tools that start early: an agent sees what it would see without them, and only safe tools run for nothing."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Annotated, Any, cast

import pytest
from following import FollowingEngine, following_pair
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool, tool
from langgraph.prebuilt import InjectedState

from stepspec.errors import UsageError
from stepspec.langchain import ChatStepSpec
from stepspec.langchain.early_tools import MIN_STARTED, EarlyCounts, EarlyTools

pytestmark = pytest.mark.anyio

ASK: Any = {"messages": [("user", "Please double 21.")]}


class Log:
    """Tools that log when they run."""

    def __init__(self, seconds: float = 0.0, fails: int = 0) -> None:
        self.seconds, self.fails = seconds, fails
        self.begun: list[tuple[str, Any]] = []
        self.ended: list[tuple[str, Any]] = []
        self.has_begun, self.has_stopped = asyncio.Event(), asyncio.Event()

    def tool(self, name: str) -> StructuredTool:
        async def run(n: int) -> str:
            self.begun.append((name, n))
            self.has_begun.set()
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.has_stopped.set()
            if len(self.begun) <= self.fails:
                raise ValueError("not yet")
            self.ended.append((name, n))
            return f"{name} of {n}"

        def run_now(n: int) -> str:
            return asyncio.run(run(n))

        return StructuredTool.from_function(run_now, coroutine=run, name=name, description="A tool.")


class Scripted(BaseChatModel):
    """A model that makes the given calls in each turn, after some seconds."""

    turns: list[list[tuple[str, int]]]
    seconds: float = 0.0
    fails: bool = False
    num_turns: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        time.sleep(self.seconds)
        return self._turn()

    async def _agenerate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(self.seconds)
        return self._turn()

    def _turn(self) -> ChatResult:
        if self.fails:
            raise ValueError("no draft")
        calls = self.turns[self.num_turns] if self.num_turns < len(self.turns) else []
        self.num_turns += 1
        made: Any = [
            {"name": name, "args": {"n": n}, "id": f"{id(self)}-{self.num_turns}-{place}"}
            for place, (name, n) in enumerate(calls)
        ]
        return ChatResult(generations=[ChatGeneration(message=AIMessage("Done.", tool_calls=made))])


def scripted_agent(log: Log, wanted: Any, predicted: Any, **options: Any) -> tuple[Any, EarlyTools]:
    """Return an agent whose model makes some calls in each turn, and whose draft predicts others, ten times as fast."""
    early = EarlyTools(["read"], draft=Scripted(turns=predicted, seconds=0.01), **options)
    tools = [log.tool("read"), log.tool("write")]
    return create_agent(Scripted(turns=wanted, seconds=0.1), tools, middleware=[early]), early


def results(messages: Sequence[Any]) -> list[Any]:
    return [message.content for message in messages if isinstance(message, ToolMessage)]


async def test_the_draft_of_the_models_own_pair_starts_the_call() -> None:
    log = Log(seconds=0.05)
    early, pair = EarlyTools(["double"]), following_pair()
    cast("FollowingEngine", pair.target).delay_s = 0.3
    agent: Any = create_agent(ChatStepSpec(pair=pair), [log.tool("double")], middleware=[early])
    result = await agent.ainvoke(ASK)
    _, call, said, answer = result["messages"]
    assert (said.content, said.tool_call_id) == ("double of 21", call.tool_calls[0]["id"])
    assert answer.text.strip() == "It is double of 21."
    assert log.begun == [("double", 21)], "once"
    counts = early.counts
    assert (counts.predicted, counts.started, counts.used, counts.wasted) == (1, 1, 1, 0)


async def test_a_tool_runs_while_the_model_thinks() -> None:
    log = Log(seconds=0.08)
    agent, early = scripted_agent(log, [[("read", 1)]], [[("read", 1)]])
    result = await agent.ainvoke(ASK)
    assert results(result["messages"]) == ["read of 1"]
    assert log.begun == [("read", 1)]
    assert 0.05 < early.counts.saved_s < 0.2


def test_so_it_does_in_synchronous_agents() -> None:
    log = Log(seconds=0.08)
    agent, early = scripted_agent(log, [[("read", 1)]], [[("read", 1)]])
    assert results(agent.invoke(ASK)["messages"]) == ["read of 1"]
    assert log.begun == [("read", 1)]
    assert early.counts.used == 1
    assert early.counts.saved_s > 0.05


async def test_what_the_model_does_not_call_is_dropped_and_cancelled() -> None:
    log = Log(seconds=5)
    agent, early = scripted_agent(log, [[]], [[("read", 1), ("read", 2)]])
    result = await agent.ainvoke(ASK)
    await asyncio.sleep(0.01)
    assert results(result["messages"]) == []
    assert log.begun == [("read", 1), ("read", 2)]
    assert not log.ended
    assert early.counts == EarlyCounts(predicted=2, started=2, wasted=2)


async def test_a_tool_that_is_not_named_never_starts_early() -> None:
    log = Log()
    agent, early = scripted_agent(log, [[("read", 1)]], [[("write", 1), ("read", 2)]])
    result = await agent.ainvoke(ASK)
    assert results(result["messages"]) == ["read of 1"]
    assert ("write", 1) not in log.begun
    assert early.counts == EarlyCounts(predicted=2, started=1, wasted=1)


async def test_a_tool_that_gets_the_state_never_starts_early() -> None:
    seen: list[int] = []

    @tool
    def read(n: int, state: Annotated[dict[str, Any], InjectedState]) -> str:
        """Reads."""
        seen.append(len(state["messages"]))
        return "read"

    early = EarlyTools(["read"], draft=Scripted(turns=[[("read", 1)]]))
    agent: Any = create_agent(Scripted(turns=[[("read", 1)]], seconds=0.05), [read], middleware=[early])
    assert results((await agent.ainvoke(ASK))["messages"]) == ["read"]
    assert seen == [2]
    assert early.counts.started == 0


async def test_a_tool_sees_whose_agent_it_belongs_to() -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="public")

    @tool
    async def read(n: int, config: RunnableConfig) -> str:
        """Reads."""
        return f"{n} of {config.get('configurable', {}).get('user')}, {tenant.get()}"

    early = EarlyTools(["read"], draft=Scripted(turns=[[("read", 1)]]))
    agent: Any = create_agent(Scripted(turns=[[("read", 1)]], seconds=0.1), [read], middleware=[early])
    tenant.set("acme")
    found = await agent.ainvoke(ASK, {"configurable": {"user": "ann"}})
    assert results(found["messages"]) == ["1 of ann, acme"]
    assert early.counts.used == 1


async def test_a_tool_with_a_json_schema_starts_early() -> None:
    log = Log()
    read = log.tool("read")
    read.args_schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    early = EarlyTools(["read"], draft=Scripted(turns=[[("read", 1)]]))
    agent: Any = create_agent(Scripted(turns=[[("read", 1)]], seconds=0.1), [read], middleware=[early])
    assert results((await agent.ainvoke(ASK))["messages"]) == ["read of 1"]
    assert (log.begun, early.counts.used) == ([("read", 1)], 1)


def test_a_result_whose_event_loop_has_stopped_is_not_waited_for() -> None:
    log = Log(seconds=5)
    early = EarlyTools(["read"], draft=Scripted(turns=[[("read", 1)]]))
    call: Any = {"name": "read", "args": {"n": 1}, "id": "c1", "type": "tool_call"}
    request = SimpleNamespace(
        model=None, tools=[log.tool("read")], tool_choice=None, model_settings={}, system_message=None, messages=[]
    )

    async def answer(_: Any) -> Any:
        await asyncio.wait_for(log.has_begun.wait(), 30)
        return AIMessage("", tool_calls=[call])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(early.awrap_model_call(request, answer))
    assert early.wrap_tool_call(SimpleNamespace(tool_call=call), lambda _: "as usual") == "as usual"
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert (early.counts.started, early.counts.wasted) == (1, 1)


async def test_a_call_that_fails_early_runs_again_as_usual() -> None:
    log = Log(fails=1)
    agent, early = scripted_agent(log, [[("read", 1)]], [[("read", 1)]])
    assert results((await agent.ainvoke(ASK))["messages"]) == ["read of 1"]
    assert log.begun == [("read", 1)] * 2
    assert (early.counts.used, early.counts.wasted) == (0, 1)


async def test_an_agent_that_is_cancelled_ends_its_early_calls() -> None:
    log = Log(seconds=5)
    agent, early = scripted_agent(log, [[("read", 1)]], [[("read", 1)]])
    running = asyncio.ensure_future(agent.ainvoke(ASK))
    await asyncio.wait_for(log.has_begun.wait(), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(log.has_stopped.wait(), 30)
    assert early.counts.wasted == 1
    assert not log.ended


async def test_a_draft_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    early = EarlyTools(["read"], draft=Scripted(turns=[], fails=True))
    agent: Any = create_agent(Scripted(turns=[[("read", 1)]], seconds=0.05), [log.tool("read")], middleware=[early])
    assert results((await agent.ainvoke(ASK))["messages"]) == ["read of 1"]
    assert "The draft failed to predict calls: no draft" in caplog.text


async def test_early_calls_of_no_use_become_rare() -> None:
    log, num_turns = Log(), 40
    agent, early = scripted_agent(log, [[("read", 0)]] * num_turns, [[("read", 1)]] * num_turns)
    await agent.ainvoke(ASK, {"recursion_limit": 3 * num_turns})
    assert log.begun.count(("read", 0)) == num_turns
    assert MIN_STARTED <= early.counts.wasted <= MIN_STARTED + num_turns // 8 + 1


async def test_few_calls_start_in_a_turn() -> None:
    log = Log()
    agent, early = scripted_agent(log, [[]], [[("read", n) for n in range(9)]], max_calls=3)
    await agent.ainvoke(ASK)
    assert (early.counts.predicted, early.counts.started) == (9, 3)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="max_calls"):
        EarlyTools(["read"], max_calls=0)
    agent: Any = create_agent(Scripted(turns=[[]]), [Log().tool("read")], middleware=[EarlyTools(["read"])])
    with pytest.raises(UsageError, match="pass it a draft"):
        agent.invoke(ASK)


@pytest.mark.parametrize("num_runs", [300, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_an_agent_never_sees_what_its_model_has_not_called(num_runs: int) -> None:
    """Random calls and predictions, judged by the log of the tools and by the agent without early tools."""
    rng = random.Random(72)

    def calls() -> list[tuple[str, int]]:
        return [(rng.choice(["read", "write"]), rng.randrange(2)) for _ in range(rng.randrange(3))]

    total = EarlyCounts()
    for _ in range(num_runs):
        wanted = [calls() or [("read", 1)] for _ in range(rng.randrange(1, 3))]
        log = Log()
        early = EarlyTools(["read"], draft=Scripted(turns=[calls() for _ in wanted]), max_waste=1.0)
        model = Scripted(turns=wanted, seconds=rng.choice([0.0, 0.002]))
        agent: Any = create_agent(model, [log.tool("read"), log.tool("write")], middleware=[early])
        messages = (await agent.ainvoke(ASK))["messages"]
        made = [call for turn in wanted for call in turn]
        assert results(messages) == [f"{name} of {n}" for name, n in made]
        asked = [call["id"] for each in messages if isinstance(each, AIMessage) for call in each.tool_calls]
        assert [each.tool_call_id for each in messages if isinstance(each, ToolMessage)] == asked
        assert isinstance(messages[0], HumanMessage)
        counts = early.counts
        assert counts.started == counts.used + counts.wasted
        assert [each for each in log.begun if each[0] == "write"] == [each for each in made if each[0] == "write"]
        assert len(log.begun) <= len(made) + counts.wasted
        assert json.dumps(made).count("read") <= [name for name, _ in log.begun].count("read")
        total = EarlyCounts(used=total.used + counts.used, wasted=total.wasted + counts.wasted)
    assert total.used > num_runs / 10
    assert total.wasted > num_runs / 10
