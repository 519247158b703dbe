"""The fields of a chat completion, in OpenAI's words and vLLM's, and the Python API's options that they become."""

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
from stepspec.engines.protocol import SAMPLING_NUMBERS, Sampling
from stepspec.errors import ContextError, ModelError, UsageError, unknown_name
from stepspec.loop.options import RequestOptions
from stepspec.serve.refused import refused_properties, why_refused

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
MAX_LISTED = 50
"""Ignored fields that a response lists."""

MAX_PARAM_CHARACTERS = 64
"""An error names a field by at most so many characters: its name may come from the client."""

MAX_MESSAGE_CHARACTERS = 300

T = TypeVar("T")


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class _FirstWrong(FailFast):
    """Has only the first wrong item of a list reported, as a hundred thousand errors take their time."""

    def __hash__(self) -> int:  # which unions of types ask for
        return hash(self.fail_fast)


Items = Annotated[list[T], _FirstWrong()]


class RefusedError(UsageError):
    """A request that cannot be honored. `param` is the name of its field, where one is to blame."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(_cut(message, MAX_MESSAGE_CHARACTERS))
        self.param = None if param is None else _cut(param, MAX_PARAM_CHARACTERS)


@dataclass(frozen=True)
class Form:
    """What the answer has to be.

    Attributes:
        schema: a JSON schema, if it is JSON.
        choices: texts of which it is one; none if it is free.
        field: the name of the field that says so.
    """

    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] = ()
    field: str = "response_format"

    @property
    def json_schema(self) -> Mapping[str, Any] | None:
        """What the engine holds the answer to; one of several texts is written as a JSON string."""
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
        "reasoning_content": {"type": "string", "description": "The thinking behind an earlier answer."},
        "tool_calls": {"type": "array", "items": {"type": "object"}, "description": "Tool calls of an earlier answer."},
        "tool_call_id": {"type": "string", "description": "The call that a tool's turn is the result of."},
    },
}
"""A turn as a JSON schema. Chat templates may read further fields."""


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(
        default=False, description="Whether a last chunk without choices has `usage` and `metrics`."
    )


def _with_refused(schema: dict[str, Any]) -> None:
    schema["properties"] |= refused_properties()


class ChatRequest(BaseModel):
    """The body of `/v1/chat/completions`.

    Fields that are not listed here are ignored and named in the response's `metrics.ignored_fields`.
    """

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra=_with_refused,
    )

    messages: Items[dict[str, Any]] = Field(
        description="The conversation. The last turn is not the assistant's.",
        json_schema_extra={"items": TURN},
    )
    model: str | None = Field(default=None, description="Name of the served model; it may be left out.")
    policy: str | None = Field(default=None, description="Name of a policy; the default is the one served.")
    temperature: float | None = Field(default=None, description="0 (greedy, the default) to 10.")
    top_p: float | None = Field(default=None, description="Above 0 and at most 1 (off, the default).")
    top_k: int | None = Field(default=None, description="Most likely tokens kept; 0 or -1 (off) is the default.")
    min_p: float | None = Field(default=None, description="0 (off, the default) to 1.")
    repetition_penalty: float | None = Field(
        default=None, description="Above 0 and at most 10; 1 (off) is the default."
    )
    seed: int | None = Field(default=None, description="Random seed; the default is a new one for each request.")
    max_completion_tokens: int | None = Field(
        default=None, description="Most tokens of thinking and answer; the default is what the context has room for."
    )
    max_tokens: int | None = Field(
        default=None, description="Older name of `max_completion_tokens`, which precedes it."
    )
    thinking_token_budget: int | None = Field(
        default=None, description="Tokens of thinking after which the answer begins; 0 is no thinking."
    )
    reasoning_effort: str | None = Field(default=None, description="Only `none`: no thinking.")
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
    guided_choice: Items[str] | None = Field(default=None, description="Texts of which the answer is one.")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM's form of the same: `json`, `json_object` or `choice`."
    )
    stream: bool | None = Field(default=False, description="Whether the answer comes as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Options of a stream.")
    include_reasoning: bool | None = Field(default=True, description="Whether the response has the thinking.")
    user: str | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    store: bool | None = Field(default=None, description="Accepted for compatibility; it has no effect.")

    _form: Form = PrivateAttr(default_factory=Form)

    @classmethod
    def parsed(cls, body: bytes) -> "ChatRequest":
        """The request that a body holds. Takes long for a large body, so it must not run on an event loop.

        Raises:
            RefusedError: it is not JSON, a field has another type, or the form of the answer cannot be honored.
        """
        try:
            found = read_json(body)
        except ValueError as error:
            raise RefusedError(None, f"The body is not valid JSON: {error}.") from None
        if not isinstance(found, dict):
            raise RefusedError(None, "The body must be a JSON object.")
        try:
            request = cls.model_validate(found)
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
        """What the answer has to be."""
        return self._form

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that are not declared."""
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that are not known."""
        streaming = (self.stream_options.model_extra or {}) if self.stream_options else {}
        known = refused_properties()
        names = [name for name in self.extra if name not in known]
        names += [f"stream_options.{name}" for name in streaming]
        return [name[:64] for name in names[:MAX_LISTED]]

    def options(self, *, thinks: bool) -> RequestOptions:
        """The request as options of the Python API.

        Raises:
            UsageError: a field cannot be honored, or a value is out of its range.
        """
        self._check()
        given = {name: value for name in SAMPLING_NUMBERS if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's way to say that it is off
            del given["top_k"]
        sampling = Sampling(**{"seed": secrets.randbits(31), **given})
        most = getattr(self, self._limit)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        no_thinking = self.reasoning_effort == "none" and thinks
        with _of("tool_choice"):
            choice = chosen(self.tool_choice)
        return RequestOptions(
            sampling=sampling,
            max_tokens=most,
            max_thinking_tokens=0 if no_thinking else self.thinking_token_budget,
            deadline_s=self.deadline_s,
            stop=stops,
            stop_token_ids=self.stop_token_ids or [],
            json_schema=self.form.json_schema,
            tools=self.tools or [],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )

    @property
    def _limit(self) -> str:
        """Name of the field that bounds the length."""
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    def _check(self) -> None:
        if self.reasoning_effort not in (None, "none"):
            raise RefusedError(
                "reasoning_effort", "Of reasoning_effort there is only 'none'; set thinking_token_budget."
            )
        stops = self.stop if isinstance(self.stop, list) else []
        if len(stops) > MAX_STOPS:
            raise RefusedError("stop", f"stop may have at most {MAX_STOPS} strings, got {len(stops)}.")
        longest = max(map(len, stops or [self.stop or ""]))
        if longest > MAX_STOP_CHARACTERS:
            raise RefusedError(
                "stop", f"A string of stop may have at most {MAX_STOP_CHARACTERS} characters, got {longest}."
            )

    def _read_form(self) -> Form:
        """What the fields say that the answer has to be. Schemas may come as strings, which are read here.

        Raises:
            RefusedError: a field that says so cannot be honored, or two of them say so.
        """
        forms: list[Form] = []
        with _of("response_format"):
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
            raise RefusedError(second, f"{first} and {second} both say what the answer has to be. Leave out one.")
        return found[0] if found else Form()

    @contextmanager
    def in_its_words(self) -> Generator[None]:
        """Has errors of the Python API name the request's fields."""
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
                r"\b(max_tokens|max_thinking_tokens|json_schema)\b", lambda found: names[found[0]], str(error)
            )
            raise RefusedError(self._blamed(message), message) from error

    def _blamed(self, message: str) -> str | None:
        """The field that an error is about."""
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
"""How errors begin that are about a field without naming it."""

TAG = re.compile(r"(str|int|float|bool|(dict|list)\[.*\])$")
"""What pydantic adds to a place to say which type of a union it tried."""


def _structured(outputs: Mapping[str, Any]) -> list[Form]:
    """The forms that vLLM's `structured_outputs` asks for."""
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
        found = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RefusedError(field, f"{field} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise RefusedError(field, f"{field} must be a JSON schema, which is an object.")
    return cast("Mapping[str, Any]", found)


def _choices(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in cast("list[Any]", value)):
        raise RefusedError(field, f"{field} must be a list of at least one string.")
    return cast("list[str]", value)


@contextmanager
def _of(param: str) -> Generator[None]:
    """Attributes an error to its field."""
    try:
        yield
    except UsageError as error:
        raise RefusedError(param, str(error)) from error


def field_of(location: Sequence[Any]) -> str:
    """A field's name, such as `messages.0`, from where a body was found wrong."""
    return ".".join(str(part) for part in location if not TAG.match(str(part)))
