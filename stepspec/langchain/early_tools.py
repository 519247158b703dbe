"""EarlyTools: tools of an agent that start while the model still thinks or writes the call.

agent = create_agent(model, tools, middleware=[EarlyTools(["search"])])

The draft alone answers the same messages. It is faster than the model, so its calls are known earlier. A result is used
only if the model then makes the same call, with the same name and arguments; else it is dropped, and no message has it.
"""

import asyncio
import contextvars
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolCall, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tools import BaseTool

from stepspec.base.extras import from_extra
from stepspec.errors import UsageError
from stepspec.langchain.chat import ChatStepSpec
from stepspec.langchain.shared_models import loop_thread

with from_extra("langchain", "EarlyTools"):
    from langchain.agents.middleware import AgentMiddleware

logger = logging.getLogger(__name__)

MAX_STORED, MAX_AGE_S = 256, 300.0
"""Early results that wait for their call, in all agents together, of which the oldest is dropped first; and the seconds
after which none is used any more."""
MIN_STARTED, RETRY = 8, 8
"""Early calls before their share of hits counts, and how many turns then pass between two predictions."""

Task = asyncio.Task[ToolMessage]


@dataclass(frozen=True)
class EarlyCounts:
    """What early calls have brought so far."""

    predicted: int = 0
    """Calls that the draft has predicted, of any tool."""
    started: int = 0
    used: int = 0
    wasted: int = 0
    """Started calls that the model did not make."""
    saved_s: float = 0.0
    """Seconds for which the used ones had run when the model's call was to run, at most until they were done."""


@dataclass(frozen=True)
class _Early:
    """An early call that has started, by its name and arguments."""

    key: str
    task: Task
    since: float
    ends: list[float] = field(default_factory=list[float])


@dataclass
class _Turn:
    """The early calls of one call of the model. None starts after it has ended."""

    started: list[_Early] = field(default_factory=list[_Early])
    has_ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class EarlyTools(AgentMiddleware[Any, Any, Any]):
    """Middleware of LangChain's agents that starts calls of safe tools early. Put it last, next to the tools.

    Only tools that are named here ever start early. They must do no harm if they run for nothing, so name tools that
    only read. Tools that get the agent's state or runtime never start early. A tool that starts early sees the context
    variables of the agent and the `configurable` of its run, but no callbacks and no stream. It does not wait for a
    person who has to approve its call.
    """

    def __init__(
        self, safe: Sequence[str], *, draft: BaseChatModel | None = None, max_calls: int = 4, max_waste: float = 0.5
    ) -> None:
        """
        Args:
            safe: names of the tools that may start early.
            draft: the model that predicts calls. The default is the draft of the agent's own `ChatStepSpec`.
            max_calls: most early calls in a turn.
            max_waste: share of the early calls that may be wasted. Above it, one turn in eight is predicted.

        Raises:
            UsageError: a number is out of range.
        """
        super().__init__()
        if max_calls < 1 or not 0 <= max_waste <= 1:
            raise UsageError(f"max_calls must be at least 1, got {max_calls}, and max_waste 0 to 1, got {max_waste}.")
        self.counts = EarlyCounts()
        self._safe, self._draft = frozenset(safe), draft
        self._max_calls, self._max_waste = max_calls, max_waste
        self._num_turns = 0
        self._waiting: OrderedDict[str, _Early] = OrderedDict()  # by the id of the call that they answer
        self._lock = threading.Lock()

    async def awrap_model_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """See `AgentMiddleware.awrap_model_call`."""
        turn, work = _Turn(), self._prediction(request)
        if work is None:
            return await handler(request)
        prediction = asyncio.create_task(work(turn), context=contextvars.Context())
        response = None
        try:
            response = await handler(request)
        finally:
            prediction.cancel()
            self._settle(response, turn)
        return response

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """See `AgentMiddleware.wrap_model_call`."""
        turn, work = _Turn(), self._prediction(request)
        if work is None:
            return handler(request)
        prediction = contextvars.Context().run(lambda: loop_thread().start(work(turn)))
        response = None
        try:
            response = handler(request)
        finally:
            prediction.cancel()
            self._settle(response, turn)
        return response

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """See `AgentMiddleware.awrap_tool_call`."""
        asked_at, early = time.perf_counter(), self._early(request.tool_call, blocks=False)
        if early is not None:
            try:
                result = await asyncio.wrap_future(_result_of(early))
            except BaseException:
                self._drop(early)
                raise
            if (message := self._noted(early, result, request.tool_call["id"], asked_at)) is not None:
                return message
        return await handler(request)

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """See `AgentMiddleware.wrap_tool_call`."""
        asked_at, early = time.perf_counter(), self._early(request.tool_call, blocks=True)
        if early is not None:
            try:
                result = _result_of(early).result()
            except BaseException:
                self._drop(early)
                raise
            if (message := self._noted(early, result, request.tool_call["id"], asked_at)) is not None:
                return message
        return handler(request)

    def _prediction(self, request: Any) -> Callable[[_Turn], Coroutine[Any, Any, None]] | None:
        """Return what predicts and starts calls in a turn; None if no tool may start early in it.

        Raises:
            UsageError: nothing can predict the calls of this model.
        """
        self._num_turns += 1
        named = [tool for tool in request.tools if isinstance(tool, BaseTool) and tool.name in self._safe]
        tools = {tool.name: tool for tool in named if _gets_only_arguments(tool)}
        counts = self.counts
        is_wasteful = counts.started >= MIN_STARTED and counts.wasted > self._max_waste * counts.started
        if not tools or (is_wasteful and self._num_turns % RETRY):
            return None
        draft = self._draft
        if draft is None:
            if not isinstance(request.model, ChatStepSpec):
                raise UsageError("EarlyTools uses the draft of a ChatStepSpec. For another model, pass it a draft.")
            draft = request.model.model_copy(update={"policy": "draft", "callbacks": None})
        bound = draft.bind_tools(request.tools, tool_choice=request.tool_choice, **request.model_settings)
        system = [] if request.system_message is None else [request.system_message]
        run = partial(_run, _own_config())
        return partial(self._predict, bound, [*system, *request.messages], tools, run, contextvars.copy_context())

    async def _predict(
        self,
        draft: Runnable[Any, AIMessage],
        messages: Sequence[Any],
        tools: Mapping[str, BaseTool],
        run: Callable[[BaseTool, Mapping[str, Any]], Coroutine[Any, Any, ToolMessage]],
        of_agent: contextvars.Context,
        turn: _Turn,
    ) -> None:
        try:
            message = await draft.ainvoke(messages)
        except Exception as error:  # the agent does not depend on it
            logger.warning("The draft failed to predict calls: %s", error)
            return
        self._add(predicted=len(message.tool_calls))
        calls = [call for call in message.tool_calls if call["name"] in tools][: self._max_calls]
        with turn.lock:
            for call in () if turn.has_ended else calls:
                context = of_agent.copy()
                context.run(var_child_runnable_config.set, None)  # nothing of the agent's run hears of it
                work = run(tools[call["name"]], {**call, "type": "tool_call"})
                task = asyncio.create_task(work, context=context)
                early = _Early(_key(call), task, time.perf_counter())
                early.task.add_done_callback(partial(_note_end, early.ends))
                turn.started.append(early)
                self._add(started=1)

    def _settle(self, response: Any, turn: _Turn) -> None:
        """End a turn: keep the early calls that the model has made, and drop the others."""
        with turn.lock:
            turn.has_ended, left = True, turn.started
        messages = getattr(getattr(response, "model_response", response), "result", [response])
        for call in [call for each in messages if isinstance(each, AIMessage) for call in each.tool_calls]:
            found = next((each for each in left if each.key == _key(call)), None)
            if found is not None and call["id"] is not None:
                left.remove(found)
                with self._lock:
                    left += [each for each in [self._waiting.pop(call["id"], None)] if each is not None]
                    self._waiting[call["id"]] = found
        with self._lock:
            while len(self._waiting) > MAX_STORED:
                left.append(self._waiting.popitem(last=False)[1])
        for each in left:
            self._drop(each)

    def _early(self, call: Any, *, blocks: bool) -> _Early | None:
        """Return the early call that may answer this one. `blocks`: whether this thread does nothing else meanwhile."""
        with self._lock:
            found = self._waiting.pop(call["id"], None)
        if found is None or (found.key == _key(call) and _can_be_awaited(found, blocks=blocks)):
            return found
        self._drop(found)  # or a person or another middleware has changed the arguments
        return None

    def _noted(self, early: _Early, result: ToolMessage | None, call_id: str, asked_at: float) -> ToolMessage | None:
        """Count an early call that has ended, and return its result for the model's call; None if there is none."""
        if result is None:
            self._add(wasted=1)
            return None
        self._add(used=1, saved_s=min([asked_at, *early.ends]) - early.since)
        return result.model_copy(update={"tool_call_id": call_id, "id": None})

    def _drop(self, early: _Early) -> None:
        with suppress(RuntimeError):  # its event loop has ended, and the task with it
            early.task.get_loop().call_soon_threadsafe(early.task.cancel)
        self._add(wasted=1)

    def _add(self, **amounts: float) -> None:
        with self._lock:
            new = {name: getattr(self.counts, name) + amount for name, amount in amounts.items()}
            self.counts = replace(self.counts, **new)


def _key(call: ToolCall) -> str:
    return json.dumps([call["name"], call["args"]], sort_keys=True)


def _gets_only_arguments(tool: BaseTool) -> bool:
    """Whether a tool gets nothing from the agent besides the arguments of its call."""
    if isinstance(tool.args_schema, dict):
        return True
    form: Any = tool.get_input_schema()  # it also has what the agent fills in
    return tool.args.keys() == form.model_fields.keys()


def _own_config() -> RunnableConfig:
    """Return the configuration of the agent's run without what belongs to the graph, such as its callbacks."""
    found = ensure_config().get("configurable", {})
    graph = ("__", "checkpoint")
    return {"callbacks": [], "configurable": {name: each for name, each in found.items() if not name.startswith(graph)}}


def _can_be_awaited(early: _Early, *, blocks: bool) -> bool:
    """Whether the result is not too old, and its event loop goes on while this thread waits for it."""
    loop = early.task.get_loop()
    try:
        is_blocked = blocks and asyncio.get_running_loop() is loop
    except RuntimeError:
        is_blocked = False
    return loop.is_running() and not is_blocked and time.perf_counter() - early.since < MAX_AGE_S


async def _run(config: RunnableConfig, tool: BaseTool, call: Mapping[str, Any]) -> ToolMessage:
    """Run a tool. Only messages without an error are results: after anything else, the call runs as usual."""
    result = await tool.ainvoke(dict(call), config)
    if not isinstance(result, ToolMessage) or result.status == "error":
        raise UsageError(f"The early call of {tool.name} has no result.")
    return result


def _note_end(ends: list[float], task: Task) -> None:
    ends.append(time.perf_counter())
    if not task.cancelled():
        task.exception()  # it counts as seen


def _result_of(early: _Early) -> Future[ToolMessage | None]:
    """Return the result of an early call; None if there is none."""

    async def wait() -> ToolMessage | None:
        await asyncio.wait({early.task})
        return None if early.task.cancelled() or early.task.exception() is not None else early.task.result()

    return asyncio.run_coroutine_threadsafe(wait(), early.task.get_loop())
