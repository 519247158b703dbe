"""Requests of OpenAI's Responses API, and their translation to the fields of a chat request.

The service stores nothing, so a request has the whole conversation as input items.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from stepspec.chat.tools import MODES
from stepspec.errors import unknown_name
from stepspec.serve.errors import RefusedError
from stepspec.serve.fields import Items, Speculation, shortened
from stepspec.serve.refused import REFUSED, Refusals
from stepspec.serve.responses_input import chat_turns
from stepspec.serve.translated import PASSED, TranslatedRequest, chat_tool, check_nested, document, shown

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""Supported values of `include`. No reasoning is encrypted, so the second one is always null."""

RENAMED: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""Fields of a chat request that have another name here."""

ADVICE: Mapping[str, str] = {
    "store": "The service stores no responses. Set it to false or leave it out.",
    "previous_response_id": "The service stores no responses. Send the whole conversation in input.",
    "conversation": "The service stores no conversations. Send the whole conversation in input.",
    "background": "Set it to false, and stream to read the answer while it is generated.",
    "prompt": "Send the text of the prompt in instructions and input.",
    "truncation": "Leave it out, and shorten the input instead.",
    "max_tool_calls": "There are no built-in tools. Leave it out.",
    "messages": "Use input.",
    "n": "Send a request for each answer.",
    "max_tokens": "Use max_output_tokens.",
    "max_completion_tokens": "Use max_output_tokens.",
    "response_format": "Use text.format.",
    "reasoning_effort": "Use reasoning.effort.",
    "verbosity": "Use text.verbosity.",
    "logprobs": f"Add {LOGPROBS!r} to include.",
}
"""What to do instead of using an unsupported field."""


class ResponsesRefusals(Refusals):
    """The unsupported fields of the Responses API."""

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that fields have no value that is not supported.

        Raises:
            RefusedError: one has.
        """
        try:
            super().check(fields)
        except RefusedError as error:
            if advice := ADVICE.get(error.param or ""):
                raise RefusedError(error.param, f"{error.param} is not supported here. {advice}") from None
            raise


RESPONSES = ResponsesRefusals(
    {
        **REFUSED,
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "context_management": (),
        "previous_input_messages": (),
        "enable_response_messages": (False,),
        # Names of chat completions, which would change the answer there.
        "messages": (),
        "n": (1,),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": (),
        "reasoning_effort": (),
        "logprobs": (False,),
    }
)
LEFT_OUT = ("namespace", "web_search")
"""Types of tools that Codex offers to every model. This one does not get them."""
TOOL_REFUSALS = Refusals({"defer_loading": (False,), "async": (False,), "allowed_callers": (["direct"],)})
REASONING_REFUSALS = Refusals({"context": ("auto",), "mode": ("standard",)})
TEXT_REFUSALS = Refusals({"verbosity": ("medium",)})


class TextSettings(BaseModel):
    """Settings of the answer's text."""

    model_config = ConfigDict(extra="allow", strict=True)

    format: dict[str, Any] | None = Field(
        default=None, description="`text` (the default), `json_object`, or `json_schema` with a name and a schema."
    )


class ReasoningSettings(BaseModel):
    """Settings of the reasoning."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: str | None = Field(
        default=None,
        description="How much to think, in the words of the model's chat template, such as `low`; `none` turns the "
        "thinking off.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Accepted for compatibility. The response has the reasoning itself."
    )


Item = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": True,
            "properties": {"type": {"enum": ["message", "reasoning", "function_call", "function_call_output"]}},
        }
    ),
]
"""An input item. `chat_turns` checks it, with better errors than those of a union of types."""


class ResponsesRequest(TranslatedRequest):
    """The body of `/v1/responses`.

    Unknown fields are ignored. The response lists them in `metrics.ignored_fields`.
    """

    model_config = ConfigDict(json_schema_extra=document(RESPONSES))
    refusals = RESPONSES
    renamed_fields = RENAMED
    words = frozenset({"messages", "logprobs"})

    model: str | None = Field(
        default=None, description="Name of a served model, or `NAME@POLICY`; by default the first one."
    )
    input: str | Items[Item] = Field(
        description="A text of the user, or the conversation: messages, reasoning, function calls and their outputs."
    )
    instructions: str | None = Field(default=None, description="A system message in front of the conversation.")
    max_output_tokens: int | None = Field(
        default=None,
        description="Limit of thinking and answer together, in tokens; the default is the rest of the context.",
    )
    temperature: float | None = Field(default=None, description="0 (greedy) to 10; by default as the model says, or 0.")
    top_p: float | None = Field(default=None, description="Above 0 and at most 1 (off); by default as the model says.")
    tools: Items[dict[str, Any]] | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="`auto` (the default), `none`, `required`, or the function that has to be called."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Whether there may be several calls; yes.")
    text: TextSettings | None = Field(default=None, description="Settings of the answer's text.")
    reasoning: ReasoningSettings | None = Field(default=None, description="Settings of the reasoning.")
    include: Items[str] | None = Field(
        default=None, description=f"Further data in the response: `{LOGPROBS}` has the log-probabilities of the answer."
    )
    top_logprobs: int | None = Field(default=None, description="Number of most likely tokens to list, at most 20.")
    metadata: dict[str, str] | None = Field(default=None, description="The response has the same.")
    user: str | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    stream: bool | None = Field(default=False, description="Whether to stream the answer as server-sent events.")
    stream_options: dict[str, Any] | None = Field(default=None, description="Ignored.")
    stepspec: Speculation | None = Field(default=None, description="How to speculate.")

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that have no effect, at most `MAX_LISTED`."""
        nested: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = (
            ("text", (self.text and self.text.model_extra) or {}, TEXT_REFUSALS),
            ("reasoning", (self.reasoning and self.reasoning.model_extra) or {}, REASONING_REFUSALS),
            ("stream_options", self.stream_options or {}, {}),
        )
        names = [f"tools.{place}" for place, tool in enumerate(self.tools or []) if tool.get("type") in LEFT_OUT]
        names += [name for name in self.extra if name not in PASSED and name not in self.refusals]
        names += [f"{field}.{name}" for field, extra, known in nested for name in extra if name not in known]
        return shortened(names)

    def chat_fields(self) -> dict[str, Any]:
        """See `TranslatedRequest.chat_fields`."""
        reasoning, text = self.reasoning or ReasoningSettings(), self.text or TextSettings()
        check_nested("reasoning", reasoning.model_extra or {}, REASONING_REFUSALS)
        check_nested("text", text.model_extra or {}, TEXT_REFUSALS)
        return {
            "model": self.model,
            "messages": chat_turns(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [
                _chat_tool(f"tools.{index}", tool)
                for index, tool in enumerate(self.tools or [])
                if tool.get("type") not in LEFT_OUT
            ],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _chat_format(text.format or {}),
            "reasoning_effort": reasoning.effort,
            "logprobs": self._wants_logprobs(),
            "top_logprobs": self.top_logprobs,
            "user": self.user,
            "stream": self.stream,
            "stepspec": self.stepspec and self.stepspec.model_dump(exclude_unset=True),
        }

    def _wants_logprobs(self) -> bool:
        for name in self.include or []:
            if name not in INCLUDABLE:
                raise RefusedError("include", unknown_name("supported value of include", name, INCLUDABLE))
        return LOGPROBS in (self.include or []) or bool(self.top_logprobs)


def _chat_tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the format of chat requests."""
    kind = tool.get("type")
    if kind != "function":
        raise RefusedError(f"{where}.type", f"Tools of type {shown(kind)} are not supported. Send functions.")
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    check_nested(where, function, TOOL_REFUSALS)
    function = {name: value for name, value in function.items() if name not in TOOL_REFUSALS}
    advice = " Write {'type': 'function', 'name': 'add', 'parameters': {...}}."
    return chat_tool(where, function, advice=advice)


def _chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a `tool_choice` in the format of chat requests."""
    if choice is None or choice in MODES:
        return choice if choice is None else str(choice)
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    given = choice.get("type") if isinstance(choice, Mapping) else choice
    raise RefusedError(
        "tool_choice",
        f"tool_choice {shown(given)} is not supported. Write 'auto', 'none', 'required' or "
        "{'type': 'function', 'name': ...}.",
    )


FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("name", "schema", "description", "strict"),
}
"""Fields of `text.format` besides `type`, by its type."""


def _chat_format(form: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a `text.format` in the format of chat requests."""
    if not form:
        return None
    kind, rest = form.get("type"), {name: value for name, value in form.items() if name != "type" and value is not None}
    if not isinstance(kind, str) or kind not in FORMAT_FIELDS:
        raise RefusedError(
            "text.format.type", f"text.format.type must be one of {', '.join(FORMAT_FIELDS)}, got {shown(kind)}."
        )
    for name in rest:
        if name not in FORMAT_FIELDS[kind]:
            raise RefusedError("text.format", unknown_name("field of text.format", name, FORMAT_FIELDS[kind]))
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(rest.get("name"), str):
        raise RefusedError("text.format.name", "text.format.name must be a string.")
    if not isinstance(rest.get("schema"), dict):
        raise RefusedError("text.format.schema", "text.format.schema must be a JSON schema, which is an object.")
    return {"type": kind, "json_schema": rest}
