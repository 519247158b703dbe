"""Reads tool calls from a growing text.

Where calls stand is found by transformers' parser of responses. A call in JSON mostly begins with its name, and from
there on its arguments are passed on as they come. Other calls are told when they are whole.
"""

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from stepspec.chat.events import ToolCall


@dataclass(frozen=True)
class CallPiece:
    """A further piece of a call's arguments; the call itself follows behind the last one."""

    id: str
    name: str
    arguments: str


Found = str | CallPiece | ToolCall


class CallReader(ABC):
    """Parts a growing text into what is said and what is called."""

    @abstractmethod
    def feed(self, text: str) -> Sequence[Found]:
        """Takes a further piece; gives text and calls that are certain, in their order."""

    @abstractmethod
    def finish(self) -> Sequence[Found]:
        """Gives the rest, as no more will come."""


class WrittenCalls(CallReader):
    """Calls as the model was taught to write them, among text. White space in front of a call is not text."""

    def __init__(self, parser: Any, *, in_json: bool) -> None:
        """`parser` is a streaming parser of transformers, see `Tokenizer.response_parser`. Calls `in_json` are text to
        it; of others it makes calls itself."""
        self._parser = parser
        self._in_json = in_json
        self._calls = JsonCalls()
        """Of the region that is open."""
        self._space = ""

    def feed(self, text: str) -> Sequence[Found]:
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError, RecursionError) as error:  # of a template that makes calls itself
            return [_broken(text, f"The call cannot be read: {error}")]

    def finish(self) -> Sequence[Found]:
        try:
            found = self._read(self._parser.finalize()[1])
        except (ValueError, KeyError, RecursionError) as error:
            found = [_broken("", f"The call cannot be read: {error}")]
        space, self._space = self._space, ""
        return [*found, "" if any(isinstance(each, ToolCall) for each in found) else space]

    def _read(self, events: Sequence[Mapping[str, Any]]) -> list[Found]:
        found: list[Found] = []
        for event in events:
            if event["field"] == "content" and event["type"] == "region_chunk":
                text = self._space + event["text"]
                kept = text.rstrip()
                self._space = text[len(kept) :]
                found.append(kept)
            elif event["field"] == "tool_calls":
                found += self._called(event)
        return found

    def _called(self, event: Mapping[str, Any]) -> Sequence[Found]:
        if event["type"] == "region_open":
            self._space, self._calls = "", JsonCalls()
        elif event["type"] == "region_chunk" and self._in_json:
            return self._calls.feed(event["text"])
        elif event["type"] == "region_close":
            return self._calls.close() if self._in_json else _calls_in(event["value"])
        return []


class ListedCalls(CallReader):
    """Calls as a JSON list, which the engine has held the model to; or an answer in JSON, where it had the choice."""

    def __init__(self) -> None:
        self._calls: JsonCalls | None = None
        self._begun = False

    def feed(self, text: str) -> Sequence[Found]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
            self._calls = JsonCalls() if text.startswith("[") else None
        return self._calls.feed(text) if self._calls else [text]

    def finish(self) -> Sequence[Found]:
        return self._calls.close() if self._calls else []


_BETWEEN = r"(?:\[TOOL_CALLS\]|[\s,;\[\]}])*"
"""What stands between calls and around them; of models that cannot count, a brace too many as well."""
_NAMED = (
    r"(?:function<｜tool▁sep｜>)?(?P<named>[\w.-]+)"
    r"(?:\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]|\n```json\n|<｜tool▁sep｜>)"
)
"""A name in front of its arguments, as Mistral and DeepSeek write it."""
_BEGINNING = re.compile(
    rf"{_BETWEEN}"
    rf'(?:\{{\s*"name"\s*:\s*"(?P<inside>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:|{_NAMED})\s*(?=\{{)'
)
_LONGEST_BEGINNING = 512
_NEXT = re.compile(r"\[TOOL_CALLS\]|;(?=\s*\{)|\Z")


class JsonCalls:
    """Calls in JSON, one or several. Calls that do not begin with their name are read when the text has ended."""

    def __init__(self) -> None:
        self._any = False
        """Whether there was one."""
        self._call: _OpenCall | None = None
        self._held: str = ""
        """What is not understood yet."""

    def feed(self, text: str) -> list[CallPiece | ToolCall]:
        """Takes a further piece; gives what is known of calls."""
        found: list[CallPiece | ToolCall] = []
        self._held += text
        while self._held:
            if self._call is None:
                begins = _BEGINNING.match(self._held, 0, _LONGEST_BEGINNING)
                if begins is None:
                    return found
                inside = begins["inside"]
                self._call = _OpenCall(inside or begins["named"], inside=bool(inside))
                self._held = self._held[begins.end() :]
                self._any = True
            told, behind = self._call.feed(self._held)
            found += told
            self._held = behind or ""
            if behind is not None:
                self._call = None
        return found

    def close(self) -> list[CallPiece | ToolCall]:
        """Gives the rest, as no more will come. Words behind a call are none, and dropped."""
        found: list[CallPiece | ToolCall] = []
        while True:
            self._held = re.sub(_BETWEEN, "", self._held, count=1)
            length = len(self._held)
            found += self.feed("")
            if self._call is not None:
                return [*found, self._call.broken_off()]
            if not self._held:
                return found
            if len(self._held) == length:
                found += self._otherwise()
                self._any = True

    def _otherwise(self) -> list[ToolCall]:
        """What stands next and begins otherwise."""
        if self._held.startswith("{"):
            with suppress(ValueError, RecursionError):
                value, end = json.JSONDecoder().raw_decode(self._held)
                found = _calls_in(value)
                self._held = self._held[end:]
                return found
        end = next(mark.start() for mark in _NEXT.finditer(self._held))
        text, self._held = self._held[:end].strip(), self._held[end:]
        return [_from_text(text)] if "{" in text or not self._any else []


class _OpenCall:
    """A call whose arguments are being written."""

    def __init__(self, name: str, *, inside: bool) -> None:
        """`inside`: whether the name stands in an object, in which the arguments stand too."""
        self._id, self._name = _new_id(), name
        self._around = int(inside)
        self._nesting = Nesting("{" if inside else "")
        self._pieces: list[str] = []
        self._written = False

    def feed(self, text: str) -> tuple[list[CallPiece | ToolCall], str | None]:
        """What a further piece says of it, and what stands behind it, if it has come to its end."""
        found: list[CallPiece | ToolCall] = []
        if not self._written:
            end = self._nesting.read(text, self._around)
            self._written = end is not None
            self._pieces.append(text[:end])
            found.append(CallPiece(self._id, self._name, text[:end]))
            text = text[end:] if end is not None else ""
        if not self._written:
            return found, None
        end = self._nesting.read(text, 0) if self._around else 0
        return (found, None) if end is None else ([*found, self._whole()], text[end:])

    def _whole(self) -> ToolCall:
        arguments, problem = "".join(self._pieces), None
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as error:
            problem = _no_json(error)
        return ToolCall(self._id, self._name, arguments, problem)

    def broken_off(self) -> ToolCall:
        """What there is of it."""
        return ToolCall(self._id, self._name, "".join(self._pieces), "The call is not whole.")


class Nesting:
    """Where one is in JSON that comes in pieces."""

    def __init__(self, opened: str = "") -> None:
        self.opened = list(opened)
        """The braces and brackets that are open."""
        self.in_string = False
        self.escaped = False
        """Whether the last letter takes its meaning from the next."""

    def read(self, text: str, depth: int = -1) -> int | None:
        """Reads a further piece, up to the end of what leaves only so many open.

        Returns the place behind it, or None if it does not come.
        """
        for place, letter in enumerate(text, 1):
            if self.escaped:
                self.escaped = False
            elif self.in_string:
                self.escaped, self.in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self.in_string = True
            elif letter in "{[":
                self.opened.append(letter)
            elif letter in "}]":
                del self.opened[-1:]
                if len(self.opened) == depth:
                    return place
        return None


class Written(BaseModel):
    """A call as models write it in JSON."""

    name: str
    arguments: Any = Field(default_factory=dict[str, Any], validation_alias=AliasChoices("arguments", "parameters"))


def _calls_in(value: Any) -> list[ToolCall]:
    """The calls in what a parser made of one, or of several."""
    if isinstance(value, list):
        return [call for each in cast("list[Any]", value) for call in _calls_in(each)]
    if isinstance(value, str):
        return [_from_text(value)]
    said = cast("Mapping[str, Any]", value).get("function", value) if isinstance(value, Mapping) else value
    try:
        call = Written.model_validate(said)
    except ValidationError:
        return [_broken(json.dumps(value), "The call names no tool.")]
    if isinstance(call.arguments, str):
        return [_from_text(call.arguments, call.name)]
    return [_with_arguments(call.name, call.arguments)]


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    """A call with these arguments; none at all are as good as an empty object."""
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    if arguments is None or isinstance(arguments, Mapping):
        return ToolCall(_new_id(), name, text)
    return _broken(text, "The arguments are no JSON object.", name)


def _from_text(text: str, name: str | None = None) -> ToolCall:
    """A call from what is no JSON, or from arguments that should be."""
    if name is None and (found := re.fullmatch(rf"\s*{_NAMED}(?P<arguments>.*)", text, re.DOTALL)):
        name, text = found["named"], found["arguments"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _broken(text, _no_json(error), name or "")
    if name is not None:
        return _with_arguments(name, value)
    (call,) = _calls_in(value) if isinstance(value, Mapping) else [_broken(text, "The call names no tool.")]
    return call


def _no_json(error: Exception) -> str:
    return f"The arguments are no JSON: {error}."


def _broken(text: str, problem: str, name: str = "") -> ToolCall:
    return ToolCall(_new_id(), name, text, problem)


def _new_id() -> str:
    """Nine letters or digits, which is what Mistral's chat templates ask for."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
