"""Requests of other APIs, which are translated to chat requests."""

import re
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from pydantic import PrivateAttr, ValidationError

from stepspec.chat.prompts import Message
from stepspec.chat.tools import Function
from stepspec.serve.errors import RefusedError, TooLongError, truncated
from stepspec.serve.fields import Body, field_of
from stepspec.serve.refused import Refusals
from stepspec.serve.requests import ChatRequest

PASSED = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed"),
    *("stop", "stop_token_ids", "ignore_eos", "thinking_token_budget"),
    *("guided_json", "guided_choice", "structured_outputs"),
    *("enable_thinking", "include_reasoning", "chat_template_kwargs", "draft_chat_template_kwargs"),
    *("priority", "request_id", "session_id", "cache_salt"),
)
"""Fields that other APIs do not have, and that are the same as in a chat request."""


class TranslatedRequest(Body):
    """The body of a request of another API. Unknown fields are ignored."""

    renamed_fields: ClassVar[Mapping[str, str]] = {}
    """Fields of a chat request that have another name here."""
    words: ClassVar[frozenset[str]] = frozenset()
    """Those that are also words of other errors."""

    _chat: ChatRequest = PrivateAttr()

    @classmethod
    def validated(cls, fields: Mapping[str, Any]) -> Self:
        """Validate the fields of a request, and translate them.

        Raises:
            RefusedError: a field is invalid or not supported.
        """
        request = super().validated(fields)
        request.translate()
        return request

    def translate(self) -> None:
        """Translate the fields to those of a chat completion.

        Raises:
            RefusedError: a field is invalid or not supported.
        """
        passed = {name: self.extra[name] for name in PASSED if name in self.extra}
        own = {name: value for name, value in self.chat_fields().items() if value is not None}
        with self._in_its_names():
            self._chat = ChatRequest.validated(passed | own)

    @abstractmethod
    def chat_fields(self) -> dict[str, Any]:
        """Return the fields as those of a chat completion; None for those that are left out.

        Raises:
            RefusedError: a field is invalid or not supported.
        """

    @property
    def text_request(self) -> ChatRequest:
        """The same request to `/v1/chat/completions`."""
        return self._chat

    def questions(self) -> Sequence[Sequence[Message]]:
        """Return the conversation."""
        return self._chat.questions()

    @contextmanager
    def in_its_words(self) -> Generator[None]:
        """Convert errors about the chat request to errors that name this request's fields."""
        with self._in_its_names(), self._chat.in_its_words():
            yield

    @contextmanager
    def _in_its_names(self) -> Generator[None]:
        try:
            yield
        except RefusedError as error:
            if type(error) not in (RefusedError, TooLongError):  # an error about a model or a key
                raise
            names = self.renamed_fields
            other = rf"(?<!['\"])\b({'|'.join(name for name in names if name not in self.words)})\b(?!['\"])"
            message = re.sub(other, lambda match: names[match[0]], str(error))
            raise type(error)(names.get((error.param or "").partition(".")[0], error.param), message) from error


def document(refusals: Refusals) -> Callable[[dict[str, Any]], None]:
    """Return a function that adds the unsupported fields, and those of chat requests, to a request's JSON schema."""

    def add(schema: dict[str, Any]) -> None:
        refusals.document(schema)
        chat = ChatRequest.model_json_schema()["properties"]
        schema["properties"] |= {name: chat[name] for name in PASSED if name not in schema["properties"]}

    return add


def check_nested(where: str, fields: Mapping[str, Any], refusals: Refusals) -> None:
    """Check the fields of an object. The errors name the object, too.

    Raises:
        RefusedError: a field has a value that is not supported.
    """
    try:
        refusals.check(fields)
    except RefusedError as error:
        raise RefusedError(f"{where}.{error.param}", f"{where}.{error}") from None


def chat_tool(
    where: str, function: Mapping[str, Any], *, schema: str = "parameters", advice: str = ""
) -> dict[str, Any]:
    """Return a function in the format of chat requests.

    Args:
        where: its place in the request.
        function: its fields.
        schema: the request's name of `parameters`.
        advice: what an error says besides.

    Raises:
        RefusedError: a field is invalid.
    """
    try:
        Function.model_validate(function, strict=True)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        param = f"{where}.{field_of(problem['loc']).replace('parameters', schema, 1)}"
        raise RefusedError(param, f"{param}: {problem['msg']}.{advice}") from None
    return {"type": "function", "function": function}


def joined_turns(role: str, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return consecutive turns of a chat as one."""
    joined: dict[str, Any] = {"role": role, "content": paragraphs(turn.get("content") for turn in turns)}
    if reasoning := paragraphs(turn.get("reasoning_content") for turn in turns):
        joined["reasoning_content"] = reasoning
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def paragraphs(texts: Iterable[str | None]) -> str:
    """Return texts with blank lines between them."""
    return "\n\n".join(filter(None, texts))


def string_of(where: str, item: Mapping[str, Any], name: str) -> str:
    """Return a field of an object that must be a string.

    Raises:
        RefusedError: it is not.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise RefusedError(f"{where}.{name}", f"{where}.{name} must be a string.")
    return value


def shown(value: Any) -> str:
    """Return a value of the client as it appears in an error."""
    return truncated(repr(value), 64)
