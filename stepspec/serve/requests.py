"""Chat completion requests, with the fields of OpenAI and vLLM."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from stepspec.chat.tools import chosen
from stepspec.serve.fields import Items, TextRequest
from stepspec.serve.forms import attributed_to
from stepspec.serve.refused import CHAT

TURN: JsonDict = {
    "type": "object",
    "required": ["role"],
    "additionalProperties": True,
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ],
            "description": "Text; nothing else is supported.",
        },
        "reasoning_content": {"type": "string", "description": "The thinking of an earlier answer."},
        "reasoning": {"type": "string", "description": "The same as `reasoning_content`."},
        "tool_calls": {"type": "array", "items": {"type": "object"}, "description": "Tool calls of an earlier answer."},
        "tool_call_id": {"type": "string", "description": "The id of the tool call that this turn answers."},
    },
}
"""The JSON schema of a turn. Chat templates may read further fields."""


class ChatRequest(TextRequest):
    """The body of `/v1/chat/completions`.

    Unknown fields are ignored. The response lists them in `metrics.ignored_fields`.
    """

    model_config = ConfigDict(json_schema_extra=CHAT.document)
    refusals = CHAT

    messages: Items[dict[str, Any]] = Field(
        description="The conversation. The last turn must not be the assistant's.",
        json_schema_extra={"items": TURN},
    )
    max_completion_tokens: int | None = Field(
        default=None,
        description="Limit of thinking and answer together, in tokens; the default is the rest of the context.",
    )
    reasoning_effort: str | None = Field(
        default=None,
        description="How much to think, in the words of the model's chat template, such as `low`; `none` turns the "
        "thinking off.",
    )
    enable_thinking: bool | None = Field(default=None, description="False turns thinking off.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat templates of both models."
    )
    draft_chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Further variables of the draft's chat template."
    )
    tools: Items[dict[str, Any]] | None = Field(default=None, description="Tools that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="`auto` (the default), `none`, `required`, or the tool that has to be called."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Whether there may be several calls; yes.")
    logprobs: bool | None = Field(default=None, description="Whether to return the log-probabilities of all tokens.")
    top_logprobs: int | None = Field(default=None, description="Number of most likely tokens to list, at most 20.")
    include_reasoning: bool | None = Field(default=True, description="Whether the response includes the thinking.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    store: bool | None = Field(default=None, description="Accepted for compatibility; it has no effect.")

    def questions(self) -> list[list[dict[str, Any]]]:
        """Return the conversation."""
        return [self.messages]

    def own_options(self) -> Mapping[str, Any]:
        """Return the options of this route's own fields."""
        with attributed_to("tool_choice"):
            choice = chosen(self.tool_choice)
        return {
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": self.enable_thinking,
            "chat_template_kwargs": self.chat_template_kwargs or {},
            "draft_chat_template_kwargs": self.draft_chat_template_kwargs or {},
            "tools": self.tools or [],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs or 0,
        }

    @property
    def limit(self) -> str:
        """Name of the field that limits the length."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"
