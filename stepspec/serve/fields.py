"""The fields that requests for text have in common, with the names of OpenAI and vLLM."""

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr, ValidationError

from stepspec.api.session import Question
from stepspec.base.strict_json import read_json
from stepspec.engines.protocol import MAX_TOKEN_ID, SAMPLING_NUMBERS
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import ContextError, ModelError, UsageError
from stepspec.loop.options import RequestOptions
from stepspec.serve.errors import RefusedError, TooLongError, truncated
from stepspec.serve.forms import Form, read_form
from stepspec.serve.refused import Refusals

MAX_ANSWERS = 16
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
MAX_BIASES = 1_024
MAX_ID_CHARACTERS = 128
ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"
"""Ids that a client may give to its request. The response has them in a header."""

ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

MAX_LISTED = 50
"""Maximum number of ignored fields that a response lists."""

T = TypeVar("T")


class _FirstErrorOnly(FailFast):
    """Reports only the first invalid item of a list, because collecting 100,000 errors is slow."""

    def __hash__(self) -> int:  # unions of types need it
        return hash(self.fail_fast)


Items = Annotated[list[T], _FirstErrorOnly()]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = Field(
        default=False, description="Whether to send a last chunk with `usage` and `metrics` and without choices."
    )


class Speculation(BaseModel):
    """How to speculate."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    policy: str | None = Field(
        default=None, description="Name of a policy; by default the one in the model's name, or that of the service."
    )
    threshold: float | None = Field(
        default=None, description="Another threshold of the policy's judge. Its certificate then does not count."
    )
    exact: bool = Field(
        default=False,
        description="Keep only what the target would have written itself: if the policy is not exact, the policy "
        "`exact` takes its place.",
    )
    max_thinking_s: float | None = Field(default=None, description="Seconds after which the thinking is cut off.")
    deadline_s: float | None = Field(
        default=None,
        description="Seconds after which the request ends and returns what exists, its time in the queue included.",
    )
    events: bool = Field(
        default=False, description="Whether a stream has the proposed steps and what the judges say, too."
    )


class Body(BaseModel):
    """The body of a request. Unknown fields are ignored."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    refusals: ClassVar[Refusals] = Refusals({})
    """Unsupported fields of the route."""

    @classmethod
    def parsed(cls, body: bytes) -> Self:
        """Parse and validate a request body. Large bodies take long, so do not call it in an event loop.

        Raises:
            RefusedError: the body is not JSON, or a field is invalid.
        """
        fields = json_object(body)
        if ESCAPED_SURROGATE.search(body):  # UTF-8 itself has none, and encoding a large body again takes long
            for name, value in fields.items():
                try:
                    json.dumps([name, value], ensure_ascii=False).encode()
                except UnicodeEncodeError:
                    raise RefusedError(name, f"{name} contains half of a surrogate pair.") from None
        return cls.validated(fields)

    @classmethod
    def validated(cls, fields: Mapping[str, Any]) -> Self:
        """Validate the fields of a request.

        Raises:
            RefusedError: a field is invalid.
        """
        try:
            request = cls.model_validate(fields)
        except ValidationError as error:
            raise first_refusal(error) from None
        cls.refusals.check(request.extra)
        return request

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that the class does not declare."""
        return self.model_extra or {}

    @property
    def ignored(self) -> list[str]:
        """Names of the unknown fields, at most `MAX_LISTED`."""
        return shortened(name for name in self.extra if name not in self.refusals)

    def fit(self, tags: ThinkingTags | None) -> None:
        """Leave out settings that clients of the API send to every model, and that this one cannot follow.

        Args:
            tags: how the model thinks; None if it does not separate its thinking.
        """

    @property
    def renamed(self) -> Mapping[str, str]:
        """Fields of the request by their names in the Python API."""
        return {}

    @contextmanager
    def in_its_words(self) -> Generator[None]:
        """Convert errors of the Python API to errors that name the request's fields."""
        try:
            yield
        except (RefusedError, ModelError):
            raise
        except ContextError as error:
            field = "messages" if getattr(self, "prompt", None) is None else "prompt"
            raise TooLongError(field, str(error)) from error
        except UsageError as error:
            names, message = self.renamed, str(error)
            if names:
                message = re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], message)
            raise RefusedError(self._field_in(message), message) from error

    def _field_in(self, message: str) -> str | None:
        """Return the field that an error is about, or None if it names none."""
        for opening, field in OPENINGS.items():
            if message.startswith(opening):
                return field
        sent = [re.escape(name) for name in self.model_fields_set - WORDS if name in type(self).model_fields]
        found = re.search(rf"\b({'|'.join(sent)})\b", message) if sent else None
        return found[0] if found else None


BANNED = -100.0
"""Value of `logit_bias` that keeps a token out of the text."""
WORDS = {"model", "user", "n"}
"""Fields whose names are words of other errors."""


class TextRequest(Body):
    """A request for text. Unknown fields are ignored; the response lists them in `metrics.ignored_fields`."""

    model: str | None = Field(
        default=None, description="Name of a served model, or `NAME@POLICY`; by default the first one."
    )
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
    n: int | None = Field(default=1, ge=1, le=MAX_ANSWERS, description=f"Number of answers, at most {MAX_ANSWERS}.")
    max_tokens: int | None = Field(default=None, description="Limit of thinking and answer together, in tokens.")
    thinking_token_budget: int | None = Field(
        default=None, description="Limit of the thinking, in tokens; then the answer begins. 0 turns thinking off."
    )
    stop: str | Items[str] | None = Field(
        default=None,
        description=f"Strings that end the answer, at most {MAX_STOPS} of {MAX_STOP_CHARACTERS} characters.",
    )
    stop_token_ids: Items[int] | None = Field(default=None, description="Tokens that end the answer.")
    ignore_eos: bool | None = Field(
        default=False, description="Whether to keep the model from ending the text before its limit."
    )
    response_format: dict[str, Any] | None = Field(
        default=None, description="`text` (the default), `json_object`, or `json_schema` with a schema."
    )
    guided_json: dict[str, Any] | str | None = Field(default=None, description="A JSON schema of the answer.")
    guided_choice: Items[str] | None = Field(default=None, description="The answer is one of these texts.")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="vLLM's structured outputs: `json`, `json_object` or `choice`."
    )
    stream: bool | None = Field(default=False, description="Whether to stream the answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Options of a stream.")
    priority: int | None = Field(
        default=None,
        description="Requests with lower numbers leave the queue first. A key has a least number.",
    )
    request_id: str | None = Field(
        default=None,
        pattern=ID_PATTERN,
        description="Id of the request in the log and the response, before `X-Request-Id`.",
    )
    session_id: str | None = Field(
        default=None, max_length=MAX_ID_CHARACTERS, description="Id of the conversation in logs, before `X-Session-ID`."
    )
    cache_salt: str | None = Field(
        default=None,
        max_length=MAX_ID_CHARACTERS,
        description="Cached text is reused only by requests with the same salt, within those of the key.",
    )
    user: str | None = Field(default=None, description="Accepted for compatibility; it has no effect.")
    stepspec: Speculation | None = Field(default=None, description="How to speculate.")

    _form: Form = PrivateAttr(default_factory=Form)

    @classmethod
    def validated(cls, fields: Mapping[str, Any]) -> Self:
        """Validate the fields of a request.

        Raises:
            RefusedError: a field is invalid, or the answer's format is not supported.
        """
        request = super().validated(fields)
        request.read_form()
        return request

    def read_form(self) -> None:
        """Read the answer's format from its fields.

        Raises:
            RefusedError: the format is not supported.
        """
        self._form = read_form(self.response_format, self.guided_json, self.guided_choice, self.structured_outputs)

    @property
    def renamed(self) -> Mapping[str, str]:
        """Fields of the request by their names in the Python API."""
        return {
            "max_tokens": self.limit,
            "max_thinking_tokens": "thinking_token_budget",
            "json_schema": self.form.field,
            "max_thinking_s": "stepspec.max_thinking_s",
            "deadline_s": "stepspec.deadline_s",
        }

    @property
    def form(self) -> Form:
        """The required format of the answer."""
        return self._form

    @property
    def speculation(self) -> Speculation:
        """How to speculate."""
        return self.stepspec or Speculation()

    @property
    def num_answers(self) -> int:
        """Number of answers."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk with usage and metrics."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def ignored(self) -> list[str]:
        """Names of the unknown fields, at most `MAX_LISTED`."""
        streaming = (self.stream_options.model_extra or {}) if self.stream_options else {}
        return shortened([*super().ignored, *(f"stream_options.{name}" for name in streaming)])

    @property
    def text_request(self) -> "TextRequest":
        """The request itself. Routes with other formats convert theirs."""
        return self

    @abstractmethod
    def questions(self) -> Sequence[Question]:
        """Return the conversations or prompts.

        Raises:
            RefusedError: there are none, or too many.
        """

    def _field_in(self, message: str) -> str | None:
        return self.form.field if message.startswith("The JSON schema ") else super()._field_in(message)

    def options(self, end_ids: Iterable[int], num_ids: int | None = None) -> RequestOptions:
        """Convert the request to options of the Python API.

        Args:
            end_ids: the tokens that end a text of the model.
            num_ids: size of the model's vocabulary; None if it is unknown.

        Raises:
            UsageError: a field is not supported, or a value is out of range.
        """
        self._check()
        given = {name: value for name in SAMPLING_NUMBERS if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # in vLLM, -1 turns top_k off
            del given["top_k"]
        bias = {_token_id(id): amount for id, amount in (self.logit_bias or {}).items()}
        if bias and num_ids is not None and (highest := max(bias)) >= num_ids:
            raise RefusedError("logit_bias", f"logit_bias has the id {highest}, but the ids end at {num_ids - 1}.")
        if self.ignore_eos:
            bias |= dict.fromkeys(end_ids, BANNED)
        return RequestOptions(
            sampling={"seed": secrets.randbits(31), "logit_bias": bias, **given},
            max_tokens=getattr(self, self.limit),
            max_thinking_tokens=self.thinking_token_budget,
            max_thinking_s=self.speculation.max_thinking_s,
            deadline_s=self.speculation.deadline_s,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            stop_token_ids=self.stop_token_ids or [],
            json_schema=self.form.json_schema,
            step_deltas=bool(self.stream),
            **self.own_options(),
        )

    def own_options(self) -> Mapping[str, Any]:
        """Return the options of this route's own fields."""
        return {}

    @property
    def limit(self) -> str:
        """Name of the field that limits the length."""
        return "max_tokens"

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


def shortened(names: Iterable[str]) -> list[str]:
    """Return the first `MAX_LISTED` names, shortened."""
    return [truncated(name, 64) for name in islice(names, MAX_LISTED)]


OPENINGS: Mapping[str, str] = {
    "Turn ": "messages",
    "The conversation ": "messages",
    "The last turn ": "messages",
    "The question ": "messages",
    "The prompt ": "prompt",
    "Tool ": "tools",
    "Two tools ": "tools",
}
"""Beginnings of errors that concern a field without naming it, and that field."""

TAG = re.compile(r"(str|int|float|bool|(dict|list)\[.*\])$")
"""Parts that pydantic adds to an error location for the type that it tried in a union."""


def json_object(body: bytes) -> Mapping[str, Any]:
    """Parse a body that must be a JSON object. Large bodies take long, so do not call it in an event loop.

    Raises:
        RefusedError: it is not.
    """
    try:
        fields = read_json(body)
    except ValueError as error:
        raise RefusedError(None, f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise RefusedError(None, "The body must be a JSON object.")
    return fields


def first_refusal(error: ValidationError) -> RefusedError:
    """Return the first problem that pydantic has found."""
    first = error.errors(include_input=False, include_url=False)[0]
    where = field_of(first["loc"])
    return RefusedError(where or None, f"{where or 'A name'}: {first['msg']}.")


def _token_id(text: str) -> int:
    """Return the token id in a key of `logit_bias`."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(MAX_TOKEN_ID)):
        raise RefusedError("logit_bias", f"logit_bias must have token ids as keys, got {truncated(repr(text), 64)}.")
    return int(text)


def field_of(location: Sequence[Any]) -> str:
    """Return a field's name, such as `messages.0`, from pydantic's error location."""
    return ".".join(str(part) for part in location if not TAG.match(str(part)))
