"""Chat completion requests with the fields of OpenAI and vLLM, and their conversion to options of the Python API."""

import re
import reprlib
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr, ValidationError
from pydantic.config import JsonDict

from stepspec.base.strict_json import read_json
from stepspec.chat.tools import ANYTHING, chosen, schema_of
from stepspec.engines.protocol import HIGHEST_ID, SAMPLING_NUMBERS
from stepspec.errors import ContextError, ModelError, UsageError, unknown_name
from stepspec.loop.options import RequestOptions
from stepspec.serve.refused import refused_properties, why_refused

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
MAX_BIASES = 1_024
MAX_LISTED = 50
"""Maximum number of ignored fields that a response lists."""

MAX_PARAM_CHARACTERS = 64
"""Maximum length of a field's name in an error, since the client may have chosen the name."""

MAX_MESSAGE_CHARACTERS = 300

T = TypeVar("T")


def _truncated(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class _FirstErrorOnly(FailFast):
    """Reports only the first invalid item of a list, because collecting 100,000 errors is slow."""

    def __hash__(self) -> int:  # unions of types need it
        return hash(self.fail_fast)


Items = Annotated[list[T], _FirstErrorOnly()]


class RefusedError(UsageError):
    """The request is invalid or not supported. `param` is the field that caused the error, or None."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(_truncated(message, MAX_MESSAGE_CHARACTERS))
        self.param = None if param is None else _truncated(param, MAX_PARAM_CHARACTERS)


@dataclass(frozen=True)
class Form:
    """The required format of the answer.

    Attributes:
        schema: the JSON schema of the answer, or None.
        choices: the texts of which the answer must be one; empty if there is no choice.
        field: the request field that sets this format.
    """

    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] = ()
    field: str = "response_format"

    @property
    def json_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that constrains the answer. With choices, the answer is a JSON string."""
        return {"type": "string", "enum": list(self.choices)} if self.choices else self.schema


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
        "tool_calls": {"type": "array", "items": {"type": "object"}, "description": "Tool calls of an earlier answer."},
        "tool_call_id": {"type": "string", "description": "The id of the tool call that this turn answers."},
    },
}
"""The JSON schema of a turn. Chat templates may read further fields."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(
        default=False, description="Whether to send a last chunk with `usage` and `metrics` and without choices."
    )


def _with_refused(schema: dict[str, Any]) -> None:
    schema["properties"] |= refused_properties()


class ChatRequest(BaseModel):
    """The body of `/v1/chat/completions`.

    Unknown fields are ignored. The response lists them in `metrics.ignored_fields`.
    """

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=_with_refused,
    )

    messages: Items[dict[str, Any]] = Field(
        description="The conversation. The last turn must not be the assistant's.",
        json_schema_extra={"items": TURN},
    )
    model: str | None = Field(default=None, description="Name of the served model. Optional.")
    policy: str | None = Field(default=None, description="Name of a policy; the default is the service's policy.")
    temperature: float | None = Field(default=None, description="0 (greedy) to 10; by default as the model says, or 0.")
    top_p: float | None = Field(default=None, description="Above 0 and at most 1 (off); by default as the model says.")
    top_k: int | None = Field(
        default=None, description="Sample from this many most likely tokens; 0 or -1 (off) is the default."
    )
    min_p: float | None = Field(default=None, description="0 (off, the default) to 1.")
    repetition_penalty: float | None = Field(
        default=None, description="Above 0 and at most 10; 1 (off) is the default."
    )
    presence_penalty: float | None = Field(default=None, description="-2 to 2; 0 (off) is the default.")
    frequency_penalty: float | None = Field(default=None, description="-2 to 2; 0 (off) is the default.")
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Values from -100 to 100 to add to the logits of tokens, by token id."
    )
    seed: int | None = Field(default=None, description="Random seed; the default is a new one for each request.")
    max_completion_tokens: int | None = Field(
        default=None,
        description="Limit of thinking and answer together, in tokens; the default is the rest of the context.",
    )
    max_tokens: int | None = Field(
        default=None, description="Older name of `max_completion_tokens`, which takes precedence."
    )
    thinking_token_budget: int | None = Field(
        default=None, description="Limit of the thinking, in tokens; then the answer begins. 0 turns thinking off."
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
    deadline_s: float | None = Field(default=None, description="Seconds after which the thinking is cut off.")
    stop: str | Items[str] | None = Field(
        default=None,
        description=f"Strings that end the answer, at most {MAX_STOPS} of {MAX_STOP_CHARACTERS} characters.",
    )
    stop_token_ids: Items[int] | None = Field(default=None, description="Tokens that end the answer.")
    tools: Items[dict[str, Any]] | None = Field(default=None, description="Tools that the model may call.")
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="`auto` (the default), `none`, `required`, or the tool that has to be called."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Whether there may be several calls; yes.")
    response_format: dict[str, Any] | None = Field(
        default=None, description="`text` (the default), `json_object`, or `json_schema` with a schema."
    )
    guided_json: dict[str, Any] | str | None = Field(default=None, description="A JSON schema of the answer.")
    guided_choice: Items[str] | None = Field(default=None, description="The answer is one of these texts.")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM's structured outputs: `json`, `json_object` or `choice`."
    )
    logprobs: bool | None = Field(default=None, description="Whether to return the log-probabilities of all tokens.")
    top_logprobs: int | None = Field(default=None, description="Number of most likely tokens to list, at most 20.")
    stream: bool | None = Field(default=False, description="Whether to stream the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Options of a stream.")
    include_reasoning: bool | None = Field(default=True, description="Whether the response includes the thinking.")
    user: str | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    store: bool | None = Field(default=None, description="Accepted for compatibility; it has no effect.")

    _form: Form = PrivateAttr(default_factory=Form)

    @classmethod
    def parsed(cls, body: bytes) -> "ChatRequest":
        """Parse and validate a request body. Large bodies take long, so do not call it in an event loop.

        Raises:
            RefusedError: the body is not JSON, a field is invalid, or the answer's format is not supported.
        """
        try:
            fields = read_json(body)
        except ValueError as error:
            raise RefusedError(None, f"The body is not valid JSON: {error}.") from None
        if not isinstance(fields, dict):
            raise RefusedError(None, "The body must be a JSON object.")
        try:
            request = cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = field_of(first["loc"])
            raise RefusedError(where, f"{where}: {first['msg']}.") from None
        for name, value in request.extra.items():
            if why := why_refused(name, value):
                raise RefusedError(name, why)
        request._form = request._read_form()
        return request

    @property
    def form(self) -> Form:
        """The required format of the answer."""
        return self._form

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that this class does not declare."""
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """Names of the unknown fields, at most `MAX_LISTED`."""
        streaming = (self.stream_options.model_extra or {}) if self.stream_options else {}
        known = refused_properties()
        names = [name for name in self.extra if name not in known]
        names += [f"stream_options.{name}" for name in streaming]
        return [name[:64] for name in names[:MAX_LISTED]]

    def options(self) -> RequestOptions:
        """Convert the request to options of the Python API.

        Raises:
            UsageError: a field is not supported, or a value is out of range.
        """
        self._check()
        given = {name: value for name in SAMPLING_NUMBERS if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # in vLLM, -1 turns top_k off
            del given["top_k"]
        bias = {_token_id(id): amount for id, amount in (self.logit_bias or {}).items()}
        sampling = {"seed": secrets.randbits(31), "logit_bias": bias, **given}
        max_tokens = getattr(self, self._limit)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        with _attributed_to("tool_choice"):
            choice = chosen(self.tool_choice)
        return RequestOptions(
            sampling=sampling,
            max_tokens=max_tokens,
            max_thinking_tokens=self.thinking_token_budget,
            reasoning_effort=self.reasoning_effort,
            enable_thinking=self.enable_thinking,
            chat_template_kwargs=self.chat_template_kwargs or {},
            draft_chat_template_kwargs=self.draft_chat_template_kwargs or {},
            deadline_s=self.deadline_s,
            stop=stops,
            stop_token_ids=self.stop_token_ids or [],
            json_schema=self.form.json_schema,
            tools=self.tools or [],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
        )

    @property
    def _limit(self) -> str:
        """Name of the field that limits the length."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    def _check(self) -> None:
        if (count := len(self.logit_bias or {})) > MAX_BIASES:
            raise RefusedError("logit_bias", f"logit_bias may have at most {MAX_BIASES} tokens, got {count}.")
        stops = self.stop if isinstance(self.stop, list) else []
        if len(stops) > MAX_STOPS:
            raise RefusedError("stop", f"stop may have at most {MAX_STOPS} strings, got {len(stops)}.")
        longest = max(map(len, stops or [self.stop or ""]))
        if longest > MAX_STOP_CHARACTERS:
            raise RefusedError(
                "stop", f"Each string in stop may have at most {MAX_STOP_CHARACTERS} characters, got {longest}."
            )

    def _read_form(self) -> Form:
        """Return the answer's format from all fields that can set it. Schemas given as strings are parsed.

        Raises:
            RefusedError: such a field is invalid, or more than one is set.
        """
        forms: list[Form] = []
        with _attributed_to("response_format"):
            forms.append(Form(schema_of(self.response_format)))
        if self.guided_json is not None:
            forms.append(Form(_schema("guided_json", self.guided_json), field="guided_json"))
        if self.guided_choice is not None:
            forms.append(Form(None, _choices("guided_choice", self.guided_choice), "guided_choice"))
        if self.structured_outputs:
            forms += _structured(self.structured_outputs)
        found = [form for form in forms if form.json_schema is not None]
        if len(found) > 1:
            first, second = found[0].field, found[1].field
            raise RefusedError(second, f"{first} and {second} both set the answer's format. Leave out one.")
        return found[0] if found else Form()

    @contextmanager
    def in_its_words(self) -> Generator[None]:
        """Convert errors of the Python API to errors that name the request's fields."""
        try:
            yield
        except (RefusedError, ContextError, ModelError):
            raise
        except UsageError as error:
            names = {
                "max_tokens": self._limit,
                "max_thinking_tokens": "thinking_token_budget",
                "json_schema": self.form.field,
            }
            message = re.sub(
                r"\b(max_tokens|max_thinking_tokens|json_schema)\b", lambda match: names[match[0]], str(error)
            )
            raise RefusedError(self._field_in(message), message) from error

    def _field_in(self, message: str) -> str | None:
        """Return the field that an error is about, or None if it names none."""
        for opening, field in OPENINGS.items():
            if message.startswith(opening):
                return field
        sent = [re.escape(name) for name in self.model_fields_set if name in type(self).model_fields]
        found = re.search(rf"\b({'|'.join(sent)})\b", message)
        return found[0] if found else None


OPENINGS: Mapping[str, str] = {
    "Turn ": "messages",
    "The conversation ": "messages",
    "The last turn ": "messages",
    "The question ": "messages",
    "Tool ": "tools",
    "Two tools ": "tools",
}
"""Beginnings of errors that concern a field without naming it, and that field."""

TAG = re.compile(r"(str|int|float|bool|(dict|list)\[.*\])$")
"""Parts that pydantic adds to an error location for the type that it tried in a union."""


def _structured(outputs: Mapping[str, Any]) -> list[Form]:
    """Return the formats that vLLM's `structured_outputs` sets."""
    forms: list[Form] = []
    for name, value in outputs.items():
        field = f"structured_outputs.{name}"
        if value is None or value is False:
            continue
        if name == "json":
            forms.append(Form(_schema(field, value), field=field))
        elif name == "json_object":
            if value is not True:
                raise RefusedError(field, f"{field} must be true or false, got {reprlib.repr(value)}.")
            forms.append(Form(ANYTHING, field=field))
        elif name == "choice":
            forms.append(Form(None, _choices(field, value), field))
        elif name in ("regex", "grammar", "structural_tag", "whitespace_pattern", "disable_any_whitespace"):
            raise RefusedError(field, f"{field} is not supported. Use json, json_object or choice.")
        else:
            raise RefusedError(
                field, unknown_name("kind of structured output", name, ("json", "json_object", "choice"))
            )
    return forms


def _schema(field: str, value: Any) -> Mapping[str, Any]:
    try:
        schema = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RefusedError(field, f"{field} is not valid JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise RefusedError(field, f"{field} must be a JSON schema, which is an object.")
    return cast("Mapping[str, Any]", schema)


def _choices(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in cast("list[Any]", value)):
        raise RefusedError(field, f"{field} must be a list of at least one string.")
    return cast("list[str]", value)


def _token_id(text: str) -> int:
    """Return the token id in a key of `logit_bias`."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(HIGHEST_ID)):
        raise RefusedError("logit_bias", f"logit_bias must have token ids as keys, got {_truncated(repr(text), 64)}.")
    return int(text)


@contextmanager
def _attributed_to(param: str) -> Generator[None]:
    """Attributes an error to its field."""
    try:
        yield
    except UsageError as error:
        raise RefusedError(param, str(error)) from error


def field_of(location: Sequence[Any]) -> str:
    """Return a field's name, such as `messages.0`, from pydantic's error location."""
    return ".".join(str(part) for part in location if not TAG.match(str(part)))
