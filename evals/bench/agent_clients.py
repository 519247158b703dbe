"""The clients of the agents: LangChain's `create_agent` with `ChatOpenAI`, and the package `openai`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain.agents import create_agent  # pyright: ignore[reportUnknownVariableType]
from langchain.agents.middleware import AgentMiddleware, ModelCallLimitMiddleware, ModelRequest
from langchain.messages import AIMessage, HumanMessage
from langchain.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from openai import OpenAI

from evals.bench.agent_runs import MAX_REQUESTS, MAX_TOKENS, Begin, Reply
from evals.bench.agent_tasks import Call, Task, Tool

TIMEOUT_S = 300.0
"""Seconds after which a request fails. No client retries, because a retry would count as time of the policy."""


def clients(base_url: str, api_key: str, temperature: float) -> dict[str, Begin]:
    """Return by name what begins a conversation with the service at an address."""
    own = OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=TIMEOUT_S)

    def begin_openai(task: Task, model: str, system: str) -> OpenAIConversation:
        return OpenAIConversation(own, task, model, system, temperature)

    def begin_langchain(task: Task, model: str, system: str) -> LangChainConversation:
        settings: dict[str, Any] = {"max_tokens": MAX_TOKENS, "max_retries": 0, "timeout": TIMEOUT_S}
        chat = ChatOpenAI(base_url=base_url, api_key=lambda: api_key, model=model, temperature=temperature, **settings)
        return LangChainConversation(chat, task, system)

    return {"langchain": begin_langchain, "openai": begin_openai}


def served_models(base_url: str, api_key: str) -> list[dict[str, str]]:
    """Return the id and the policy of each model that a service lists. An id of another service has the policy ""."""
    listed: Any = OpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_S).models.list()
    return [{"id": model.id, "policy": str(getattr(model, "policy", ""))} for model in listed.data]


class OpenAIConversation:
    """See `Conversation`: a loop over requests of the client `openai`."""

    def __init__(self, client: OpenAI, task: Task, model: str, system: str, temperature: float) -> None:
        self._create: Any = client.chat.completions.create
        self._task = task
        self._settings: dict[str, Any] = {
            "model": model,
            "temperature": temperature,
            "max_tokens": MAX_TOKENS,
            "tools": [each.described for each in task.tools],
            "parallel_tool_calls": False,
        }
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    def ask(self, question: str, tool_choice: str) -> Sequence[Reply]:
        """See `Conversation.ask`."""
        self._messages.append({"role": "user", "content": question})
        choice: Any = tool_choice
        if tool_choice not in ("auto", "required"):
            choice = {"type": "function", "function": {"name": tool_choice}}
        replies: list[Reply] = []
        while len(replies) < MAX_REQUESTS:
            replies.append(self._request("auto" if replies else choice))
            if not replies[-1].calls or any(call.arguments is None for call in replies[-1].calls):
                break
        return replies

    def _request(self, tool_choice: Any) -> Reply:
        """Send a request, and add the answer and the results of its calls to the conversation."""
        response = self._create(messages=self._messages, tool_choice=tool_choice, **self._settings)
        message, usage = response.choices[0].message, response.usage
        asked: list[Any] = message.tool_calls or []
        calls = [Call(each.function.name, _json_object(each.function.arguments)) for each in asked]
        if all(call.arguments is not None for call in calls):  # as in LangChain, where such an answer is left out too
            answer: dict[str, Any] = {"role": "assistant", "content": message.content or ""}
            if asked:
                answer["tool_calls"] = [each.model_dump() for each in asked]
            self._messages.append(answer)
            for each, call in zip(asked, calls, strict=True):
                result = self._task.call(call)
                self._messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
        cached = usage.prompt_tokens_details.cached_tokens
        return Reply(calls, message.content or "", usage.prompt_tokens, cached)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]


class LangChainConversation:
    """See `Conversation`: an agent of LangChain."""

    def __init__(self, chat: ChatOpenAI, task: Task, system: str) -> None:
        self._choice = _FirstChoice()
        limit = ModelCallLimitMiddleware(run_limit=MAX_REQUESTS, exit_behavior="end")
        create: Any = create_agent  # pyright: ignore[reportUnknownVariableType]
        tools = [_langchain_tool(each) for each in task.tools]
        self._agent: Any = create(chat, tools=tools, system_prompt=system, middleware=[self._choice, limit])
        self._messages: list[Any] = []

    def ask(self, question: str, tool_choice: str) -> Sequence[Reply]:
        """See `Conversation.ask`."""
        asked = [*self._messages, HumanMessage(question)]
        self._choice.first = tool_choice
        added = self._agent.invoke({"messages": asked})["messages"][len(asked) :]
        # An answer with invalid calls would lack their results, and the message about the limit is not the model's.
        kept = [each for each in added if not isinstance(each, AIMessage) or _is_valid(each)]
        self._messages = [*asked, *kept]
        return [_reply(each) for each in added if isinstance(each, AIMessage) and each.usage_metadata]


class _FirstChoice(AgentMiddleware[Any, Any, Any]):
    """Sets `tool_choice` for the first request after a question."""

    def __init__(self) -> None:
        super().__init__()
        self.first = "auto"

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[..., Any]) -> Any:
        is_first = isinstance(request.messages[-1], HumanMessage)
        settings = {**request.model_settings, "parallel_tool_calls": False}
        return handler(request.override(tool_choice=self.first if is_first else "auto", model_settings=settings))


def _langchain_tool(described: Tool) -> BaseTool:
    def call(**arguments: Any) -> str:
        return described.call(arguments)

    make: Any = tool(described.name, description=described.description, args_schema=described.schema)
    return make(call)


def _is_valid(message: AIMessage) -> bool:
    return message.usage_metadata is not None and not message.invalid_tool_calls


def _reply(message: AIMessage) -> Reply:
    usage: Any = message.usage_metadata
    calls = [Call(call["name"], call["args"]) for call in message.tool_calls]
    invalid = [Call(call["name"] or "", None) for call in message.invalid_tool_calls]
    cached = usage.get("input_token_details", {}).get("cache_read", 0)
    return Reply([*calls, *invalid], message.text, usage["input_tokens"], cached)
