"""Parses tool calls from a stream of text.

The response parser of transformers finds the regions that contain calls. Most JSON calls begin with the tool's name;
their arguments are streamed. All other calls are emitted when they are complete.
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
    """The next chunk of a call's arguments. The `ToolCall` follows the last chunk."""

    id: str
    name: str
    arguments: str


Found = str | CallPiece | ToolCall


class CallReader(ABC):
    """Splits a stream of text into visible text and tool calls."""

    @abstractmethod
    def feed(self, text: str) -> Sequence[Found]:
        """Read the next chunk. Return the text and calls that later text cannot change, in order."""

    @abstractmethod
    def finish(self) -> Sequence[Found]:
        """Return the rest at the end of the stream."""


class WrittenCalls(CallReader):
    """Reads calls in the model's own format, mixed with text. White space before a call is dropped."""

    def __init__(self, parser: Any, *, in_json: bool) -> None:
        """
        Args:
            parser: a streaming parser of transformers, see `Tokenizer.response_parser`.
            in_json: whether the parser passes calls on as JSON text. Otherwise the parser parses them itself.
        """
        self._parser = parser
        self._in_json = in_json
        self._calls = JsonCalls()
        """Reads the open region."""
        self._space = ""

    def feed(self, text: str) -> Sequence[Found]:
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError, RecursionError) as error:  # from a parser that parses the calls itself
            return [_invalid(text, f"The call cannot be parsed: {error}")]

    def finish(self) -> Sequence[Found]:
        try:
            found = self._read(self._parser.finalize()[1])
        except (ValueError, KeyError, RecursionError) as error:
            found = [_invalid("", f"The call cannot be parsed: {error}")]
        space, self._space = self._space, ""
        return [*found, "" if any(isinstance(each, ToolCall) for each in found) else space]

    def _read(self, events: Sequence[Mapping[str, Any]]) -> list[Found]:
        found: list[Found] = []
        for event in events:
            if event["field"] == "content" and event["type"] == "region_chunk":
                text = self._space + event["text"]
                stripped = text.rstrip()
                self._space = text[len(stripped) :]
                found.append(stripped)
            elif event["field"] == "tool_calls":
                found += self._read_call(event)
        return found

    def _read_call(self, event: Mapping[str, Any]) -> Sequence[Found]:
        if event["type"] == "region_open":
            self._space, self._calls = "", JsonCalls()
        elif event["type"] == "region_chunk" and self._in_json:
            return self._calls.feed(event["text"])
        elif event["type"] == "region_close":
            return self._calls.close() if self._in_json else _calls_in(event["value"])
        return []


class ListedCalls(CallReader):
    """Reads constrained output: a JSON list of calls, or a JSON answer if the schema allows both."""

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
"""Separators between and around calls, including the surplus closing braces that some models write."""
_NAMED = (
    r"(?:function<｜tool▁sep｜>)?(?P<named>[\w.-]+)"
    r"(?:\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]|\n```json\n|<｜tool▁sep｜>)"
)
"""A tool name before its arguments, in the formats of Mistral and DeepSeek."""
_BEGINNING = re.compile(
    rf"{_BETWEEN}"
    rf'(?:\{{\s*"name"\s*:\s*"(?P<inside>[\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:|{_NAMED})\s*(?=\{{)'
)
_LONGEST_BEGINNING = 512
_NEXT = re.compile(r"\[TOOL_CALLS\]|;(?=\s*\{)|\Z")


class JsonCalls:
    """Reads one or more calls in JSON. Calls that do not begin with their name are read at the end of the text."""

    def __init__(self) -> None:
        self._any = False
        """Whether a call has been found."""
        self._call: _OpenCall | None = None
        self._held: str = ""
        """Text that is not parsed yet."""

    def feed(self, text: str) -> list[CallPiece | ToolCall]:
        """Read the next chunk. Return the chunks of calls and the calls found so far."""
        found: list[CallPiece | ToolCall] = []
        self._held += text
        while self._held:
            if self._call is None:
                beginning = _BEGINNING.match(self._held, 0, _LONGEST_BEGINNING)
                if beginning is None:
                    return found
                inside = beginning["inside"]
                self._call = _OpenCall(inside or beginning["named"], inside=bool(inside))
                self._held = self._held[beginning.end() :]
                self._any = True
            parts, rest = self._call.feed(self._held)
            found += parts
            self._held = rest or ""
            if rest is not None:
                self._call = None
        return found

    def close(self) -> list[CallPiece | ToolCall]:
        """Return the rest at the end of the text. Text after a call that is not a call is dropped."""
        found: list[CallPiece | ToolCall] = []
        while True:
            self._held = re.sub(_BETWEEN, "", self._held, count=1)
            length = len(self._held)
            found += self.feed("")
            if self._call is not None:
                return [*found, self._call.incomplete()]
            if not self._held:
                return found
            if len(self._held) == length:
                found += self._other_calls()
                self._any = True

    def _other_calls(self) -> list[ToolCall]:
        """Read the next calls, which do not begin with their name."""
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
    """A call whose arguments are still streaming."""

    def __init__(self, name: str, *, inside: bool) -> None:
        """`inside`: whether one JSON object contains both the name and the arguments."""
        self._id, self._name = _new_id(), name
        self._outer_depth = int(inside)
        self._nesting = Nesting("{" if inside else "")
        self._chunks: list[str] = []
        self._complete = False
        """Whether the arguments are complete."""

    def feed(self, text: str) -> tuple[list[CallPiece | ToolCall], str | None]:
        """Read the next chunk. Return the parts of the call, and the text after the call, or None while it is open."""
        found: list[CallPiece | ToolCall] = []
        if not self._complete:
            end = self._nesting.read(text, self._outer_depth)
            self._complete = end is not None
            self._chunks.append(text[:end])
            found.append(CallPiece(self._id, self._name, text[:end]))
            text = text[end:] if end is not None else ""
        if not self._complete:
            return found, None
        end = self._nesting.read(text, 0) if self._outer_depth else 0
        return (found, None) if end is None else ([*found, self._finished()], text[end:])

    def _finished(self) -> ToolCall:
        arguments, problem = "".join(self._chunks), None
        try:
            json.loads(arguments)
        except (ValueError, RecursionError) as error:
            problem = _json_problem(error)
        return ToolCall(self._id, self._name, arguments, problem)

    def incomplete(self) -> ToolCall:
        """Return the call as far as it was written, marked as invalid."""
        return ToolCall(self._id, self._name, "".join(self._chunks), "The call is incomplete.")


class Nesting:
    """Tracks the nesting depth in streamed JSON."""

    def __init__(self, opened: str = "") -> None:
        self.opened = list(opened)
        """The open braces and brackets."""
        self.in_string = False
        self.escaped = False
        """Whether the last character was a backslash that escapes the next one."""

    def read(self, text: str, depth: int = -1) -> int | None:
        """Read the next chunk, up to the bracket that brings the number of open brackets down to `depth`.

        Returns:
            The position after that bracket, or None if the chunk does not contain it.
        """
        for position, letter in enumerate(text, 1):
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
                    return position
        return None


class Written(BaseModel):
    """A tool call in the JSON that models write."""

    name: str
    arguments: Any = Field(default_factory=dict[str, Any], validation_alias=AliasChoices("arguments", "parameters"))


def _calls_in(value: Any) -> list[ToolCall]:
    """Return the calls in a parsed value, which holds one call or a list of calls."""
    if isinstance(value, list):
        return [call for each in cast("list[Any]", value) for call in _calls_in(each)]
    if isinstance(value, str):
        return [_from_text(value)]
    function = cast("Mapping[str, Any]", value).get("function", value) if isinstance(value, Mapping) else value
    try:
        call = Written.model_validate(function)
    except ValidationError:
        return [_invalid(json.dumps(value), "The call does not name a tool.")]
    if isinstance(call.arguments, str):
        return [_from_text(call.arguments, call.name)]
    return [_with_arguments(call.name, call.arguments)]


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    """Return a call with these arguments. None stands for an empty object."""
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    if arguments is None or isinstance(arguments, Mapping):
        return ToolCall(_new_id(), name, text)
    return _invalid(text, "The arguments are not a JSON object.", name)


def _from_text(text: str, name: str | None = None) -> ToolCall:
    """Return the call in a text, or the call of the tool `name` with the text as its arguments."""
    if name is None and (found := re.fullmatch(rf"\s*{_NAMED}(?P<arguments>.*)", text, re.DOTALL)):
        name, text = found["named"], found["arguments"]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _invalid(text, _json_problem(error), name or "")
    if name is not None:
        return _with_arguments(name, value)
    (call,) = _calls_in(value) if isinstance(value, Mapping) else [_invalid(text, "The call does not name a tool.")]
    return call


def _json_problem(error: Exception) -> str:
    return f"The arguments are not valid JSON: {error}."


def _invalid(text: str, problem: str, name: str = "") -> ToolCall:
    return ToolCall(_new_id(), name, text, problem)


def _new_id() -> str:
    """Return nine random letters or digits, the id format that Mistral's chat templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
