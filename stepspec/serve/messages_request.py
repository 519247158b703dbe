"""Requests of Anthropic's Messages API, and their translation to the fields of a chat request."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PrivateAttr, WithJsonSchema

from stepspec.engines.thinking import ThinkingTags
from stepspec.serve.errors import RefusedError
from stepspec.serve.fields import Items, Speculation, shortened
from stepspec.serve.messages_input import chat_turns
from stepspec.serve.refused import Refusals
from stepspec.serve.translated import PASSED, TranslatedRequest, chat_tool, document, shown, string_of

RENAMED: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "enable_thinking": "thinking",
}
"""Fields of a chat request that have another name here."""

MESSAGES = Refusals({"container": (), "mcp_servers": ()})

Message = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}},
        }
    ),
]
"""A message. `chat_turns` checks it, with better errors than those of a union of types."""


class CountRequest(TranslatedRequest):
    """The body of `/v1/messages/count_tokens`."""

    model_config = ConfigDict(json_schema_extra=document(MESSAGES))
    refusals = MESSAGES
    renamed_fields = RENAMED

    model: str = Field(description="Name of a served model, or `NAME@POLICY`.")
    messages: Items[Message] = Field(
        description="The conversation, with text, thinking, `tool_use` and `tool_result` blocks. The last message must "
        "not be the assistant's."
    )
    system: str | Items[dict[str, Any]] | None = Field(default=None, description="The system prompt.")
    tools: Items[dict[str, Any]] | None = Field(
        default=None, description="Tools that the model may call, each with `name` and `input_schema`."
    )
    tool_choice: dict[str, Any] | None = Field(
        default=None, description="Of type `auto` (the default), `any`, `none`, or `tool` with a name."
    )
    thinking: dict[str, Any] | None = Field(
        default=None,
        description="Of type `enabled` with `budget_tokens`, `adaptive` or `disabled`; by default as the model does.",
    )
    output_config: dict[str, Any] | None = Field(
        default=None, description="`effort`, in the words of the model's chat template, and `format`, a JSON schema."
    )

    _unfit: list[str] = PrivateAttr(default_factory=list[str])

    def chat_fields(self) -> dict[str, Any]:
        """See `TranslatedRequest.chat_fields`."""
        choice, thinking, output = self.tool_choice or {}, self.thinking or {}, self.output_config or {}
        if thinking and thinking.get("type") not in ("enabled", "adaptive", "disabled"):
            raise RefusedError("thinking.type", "thinking.type must be enabled, adaptive or disabled.")
        return {
            "model": self.model,
            "messages": chat_turns(self.system, self.messages),
            "tools": [_chat_tool(f"tools.{index}", tool) for index, tool in enumerate(self.tools or [])],
            "tool_choice": _chat_choice(choice),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
            "thinking_token_budget": thinking.get("budget_tokens") if thinking.get("type") == "enabled" else None,
            "enable_thinking": False if thinking.get("type") == "disabled" else None,
            "include_reasoning": False if thinking.get("display") == "omitted" else None,
            "reasoning_effort": output.get("effort"),
            "response_format": _chat_format(output.get("format")),
        }

    def fit(self, tags: ThinkingTags | None) -> None:
        """See `Body.fit`."""
        chat, self._unfit = self._chat, []
        if tags is None and chat.thinking_token_budget is not None:
            chat.thinking_token_budget = None
            self._unfit.append("thinking.budget_tokens")
        if chat.reasoning_effort is not None and (tags is None or tags.effort is None):
            chat.reasoning_effort = None
            self._unfit.append("output_config.effort")

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that have no effect, at most `MAX_LISTED`."""
        unknown = (name for name in self.extra if name not in PASSED and name not in self.refusals)
        return shortened([*self._unfit, *unknown])


class MessagesRequest(CountRequest):
    """The body of `/v1/messages`.

    Unknown fields are ignored. The response lists them in `metrics.ignored_fields`.
    """

    max_tokens: int = Field(description="Limit of thinking and answer together, in tokens.")
    stop_sequences: Items[str] | None = Field(default=None, description="Strings that end the answer.")
    temperature: float | None = Field(default=None, description="0 (greedy) to 10; by default as the model says, or 0.")
    top_p: float | None = Field(default=None, description="Above 0 and at most 1 (off); by default as the model says.")
    top_k: int | None = Field(default=None, description="Sample from this many most likely tokens; by default off.")
    stream: bool | None = Field(default=False, description="Whether to stream the answer as server-sent events.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    service_tier: str | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    stepspec: Speculation | None = Field(default=None, description="How to speculate.")

    def chat_fields(self) -> dict[str, Any]:
        """See `TranslatedRequest.chat_fields`."""
        return {
            **super().chat_fields(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "stepspec": self.stepspec and self.stepspec.model_dump(exclude_unset=True),
        }


def _chat_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the format of chat requests."""
    if tool.get("type") not in (None, "custom"):
        raise RefusedError(
            f"{where}.type", f"Tools of type {shown(tool['type'])} are not supported. Send tools with an input_schema."
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RefusedError(f"{where}.input_schema", f"{where}.input_schema must be a JSON schema, which is an object.")
    function = {"name": string_of(where, tool, "name"), "parameters": {"type": "object", **schema}}
    if tool.get("description"):
        function["description"] = string_of(where, tool, "description")
    return chat_tool(where, function, schema="input_schema")


def _chat_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """Return a `tool_choice` in the format of chat requests."""
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": string_of("tool_choice", choice, "name")}}
    modes = {None: None, "auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str | None) or kind not in modes:
        raise RefusedError("tool_choice.type", f"tool_choice.type must be auto, any, tool or none, got {shown(kind)}.")
    return modes[kind]


def _chat_format(form: Any) -> dict[str, Any] | None:
    """Return an `output_config.format` in the format of chat requests."""
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise RefusedError(
            "output_config.format", "output_config.format must be {'type': 'json_schema', 'schema': ...}."
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
