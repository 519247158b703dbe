"""The clients of the agents: LangChain's `create_agent` with `ChatStepSpec`, and the package `anthropic`.

Both stream, and note when the text and the calls of each request came.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import httpx
from anthropic import Anthropic
from langchain.agents import create_agent  # pyright: ignore[reportUnknownVariableType]
from langchain.agents.middleware import AgentMiddleware, ModelCallLimitMiddleware, ModelRequest
from langchain.messages import AIMessage, HumanMessage
from langchain.tools import BaseTool, tool
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from evals.bench.agent_runs import EARLY, MAX_REQUESTS, MAX_TOKENS, TWO_LEVEL, Begin, Reply
from evals.bench.agent_tasks import Call, Task, Tool, World
from stepspec.langchain import ChatStepSpec
from stepspec.langchain.early_tools import EarlyCounts, EarlyTools

TIMEOUT_S = 300.0
"""Seconds after which a request fails. No client retries, because a retry would count as time of the policy."""


def clients(base_url: str, api_key: str, temperature: float) -> dict[str, Begin]:
    """Return by name what begins a conversation with the service at an address, such as http://127.0.0.1:8000."""
    own = Anthropic(base_url=base_url, api_key=api_key, max_retries=0, timeout=TIMEOUT_S)
    listed = httpx.get(f"{base_url}/v1/models", headers={"Authorization": f"Bearer {api_key}"}, timeout=TIMEOUT_S)
    model = listed.raise_for_status().json()["data"][0]["id"]

    def begin_anthropic(task: Task, world: World, policy: str, system: str) -> AnthropicConversation:
        return AnthropicConversation(own, task, world, f"{model}@{policy}", system, temperature)

    def begin_langchain(task: Task, world: World, policy: str, system: str) -> LangChainConversation:
        settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "max_retries": 0, "timeout": TIMEOUT_S}
        named = TWO_LEVEL if policy == EARLY else policy
        address: dict[str, Any] = {"base_url": f"{base_url}/v1", "api_key": api_key, "policy": named}
        chat = ChatStepSpec(**address, temperature=temperature, streaming=True, **settings)
        early = EarlyTools(task.early) if policy == EARLY else None
        return LangChainConversation(chat, task, world, system, early)

    return {"langchain": begin_langchain, "anthropic": begin_anthropic}


class AnthropicConversation:
    """See `Conversation`: a loop over requests of the client `anthropic`."""

    early: EarlyCounts | None = None

    def __init__(self, client: Anthropic, task: Task, world: World, model: str, system: str, temperature: float):
        self._client, self._task, self._world = client, task, world
        self._settings: dict[str, Any] = {
            "model": model,
            "system": system,
            "extra_body": {"temperature": temperature},  # the client has no argument for it
            "max_tokens": MAX_TOKENS,
            "tools": [_anthropic_tool(each) for each in task.tools],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        }
        self._messages: list[Any] = []

    def ask(self, question: str) -> Sequence[Reply]:
        """See `Conversation.ask`."""
        self._messages.append({"role": "user", "content": question})
        replies: list[Reply] = []
        while len(replies) < MAX_REQUESTS and (not replies or replies[-1].calls):
            replies.append(self._request())
        return replies

    def _request(self) -> Reply:
        """Send a request, and add the answer and the results of its calls to the conversation."""
        since = text_at = time.perf_counter()
        first_s, opened = 0.0, self._client.messages.stream(messages=self._messages, **self._settings)
        with opened as stream:
            for event in stream:
                if event.type == "text":
                    text_at = time.perf_counter()
                elif event.type == "message_delta":
                    metrics: Any = event.model_dump()["metrics"]
                    first_s = metrics["stepspec"]["times"]["first_token"] or 0.0
            message = stream.get_final_message()
        ended = time.perf_counter()
        used: list[Any] = [block for block in message.content if block.type == "tool_use"]
        calls = [Call(block.name, block.input) for block in used]
        text = "".join(block.text for block in message.content if block.type == "text")
        self._messages.append({"role": "assistant", "content": message.content or text})
        results = [self._task.call(call, self._world) for call in calls]
        if used:
            blocks = [
                {"type": "tool_result", "tool_use_id": block.id, "content": result}
                for block, result in zip(used, results, strict=True)
            ]
            self._messages.append({"role": "user", "content": blocks})
        return Reply(calls, results, text, message.usage.output_tokens, since, first_s, text_at, ended)


def _anthropic_tool(described: Tool) -> dict[str, Any]:
    return {"name": described.name, "description": described.description, "input_schema": described.schema}


class LangChainConversation:
    """See `Conversation`: an agent of LangChain."""

    def __init__(self, chat: ChatStepSpec, task: Task, world: World, system: str, early: EarlyTools | None) -> None:
        self._clock, self._early = _Clock(), early
        limit = ModelCallLimitMiddleware(run_limit=MAX_REQUESTS, exit_behavior="end")
        middleware = [limit, _OneCall(), *([early] if early else [])]
        create: Any = create_agent  # pyright: ignore[reportUnknownVariableType]
        tools = [_langchain_tool(each, task, world) for each in task.tools]
        self._agent: Any = create(chat, tools=tools, system_prompt=system, middleware=middleware)
        self._messages: list[Any] = []

    @property
    def early(self) -> EarlyCounts | None:
        """See `Conversation.early`."""
        return self._early.counts if self._early else None

    def ask(self, question: str) -> Sequence[Reply]:
        """See `Conversation.ask`."""
        asked, first = [*self._messages, HumanMessage(question)], len(self._clock.times)
        found = self._agent.invoke({"messages": asked}, {"callbacks": [self._clock]})["messages"]
        added = found[len(asked) :]
        results = {each.tool_call_id: each.text for each in added if each.type == "tool"}
        # An answer with invalid calls would lack their results, and the message about the limit is not the model's.
        self._messages = [*asked, *(each for each in added if not isinstance(each, AIMessage) or _is_valid(each))]
        replies = [each for each in added if isinstance(each, AIMessage) and each.usage_metadata]
        return [
            _reply(message, results, times) for message, times in zip(replies, self._clock.times[first:], strict=True)
        ]


class _Clock(BaseCallbackHandler):
    """Notes when each request began, when its last text came, and when it ended. Early requests have no callbacks."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.times.append([now, now, now])

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        if token:
            self.times[-1][1] = time.perf_counter()

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.times[-1][2] = time.perf_counter()


class _OneCall(AgentMiddleware[Any, Any, Any]):
    """Allows one call in an answer."""

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[..., Any]) -> Any:
        settings = {**request.model_settings, "parallel_tool_calls": False}
        return handler(request.override(model_settings=settings))


def _langchain_tool(described: Tool, task: Task, world: World) -> BaseTool:
    def call(**arguments: Any) -> str:
        return task.call(Call(described.name, arguments), world)

    make: Any = tool(described.name, description=described.description, args_schema=described.schema)
    return make(call)


def _is_valid(message: AIMessage) -> bool:
    return message.usage_metadata is not None and not message.invalid_tool_calls


def _reply(message: AIMessage, results: dict[str, str], times: Sequence[float]) -> Reply:
    usage: Any = message.usage_metadata
    calls = [Call(call["name"], call["args"]) for call in message.tool_calls]
    found = [results.get(call["id"] or "", "") for call in message.tool_calls]
    first_s = message.response_metadata["stepspec"]["first_token_s"] or 0.0
    began, text_at, ended = times
    return Reply(calls, found, message.text, usage["output_tokens"], began, first_s, text_at, ended)
