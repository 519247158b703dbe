"""Parses tool calls from a stream of text.

A call is emitted when its own end has closed it, so nothing acts on half a call. It names a tool of the request.
All else that a model writes in a call's place is text, and an invalid call that says what is wrong.
"""

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from stepspec.base.json_scanner import JsonScanner
from stepspec.chat.events import ToolCall
from stepspec.chat.tools import CallFormat

Found = str | ToolCall


class CallReader(ABC):
    """Splits a stream of text into visible text and tool calls. The text of an invalid call is visible, too."""

    incomplete = False
    """Whether the text was cut within a call, known at the end."""

    @abstractmethod
    def feed(self, text: str) -> Sequence[Found]:
        """Read the next chunk. Return the text and calls that later text cannot change, in order."""

    @abstractmethod
    def finish(self, *, cut: bool) -> Sequence[Found]:
        """Return the rest at the end of the stream. `cut`: whether a limit or a stop string ended the text."""


END = "\0"
"""Fed once after the text: no mark contains it, so a mark before it is complete."""


class WrittenCalls(CallReader):
    """Reads calls in the model's own format, mixed with text. White space before a call is dropped.

    The response parser of transformers finds the regions that contain calls.
    """

    def __init__(self, parser: Any, form: CallFormat, names: Container[str]) -> None:
        """
        Args:
            parser: a new parser with the format's template, see `Tokenizer.response_parser`.
            form: the model's format.
            names: names of the tools.
        """
        self._parser, self._form, self._names = parser, form, names
        self._values: JsonCalls | None = None
        """Reads the open region."""
        self._body: list[str] = []
        """Text of the open region."""
        self._complete: list[Found] = []
        """What is complete in the open region, but depends on its end."""
        self._space = ""
        self._ended = False
        """Whether `END` has been fed."""

    def feed(self, text: str) -> Sequence[Found]:
        may_have_strings = self._values is not None or self._parser.holds_text or self._form.opener.search(text)
        split = self._form.in_json and may_have_strings
        parts = re.findall(r'[^"]*"|[^"]+', text) if split else [text]
        return [each for part in parts for each in self._feed(part)]

    def _feed(self, part: str) -> list[Found]:
        """Read text with at most one quote in a call, at its end. The parser sees no strings of JSON: a mark there is
        none."""
        if self._values is not None and self._values.in_string:
            return self._read_body(part)
        return self._read(self._parser.feed(part))

    def _end(self) -> list[Found]:
        return self._read(self._parser.finalize()[1])

    def finish(self, *, cut: bool) -> Sequence[Found]:
        self._ended = True
        found = self._feed(END)
        if self._values is None:
            found += self._end()
            return [*found, "" if any(isinstance(each, ToolCall) for each in found) else self._space]
        self.incomplete = cut and (self._form.has_end or not self._form.in_json or bool(self._values.rest))
        if cut:
            return found
        if self._form.has_end:
            return [*found, *_invalid("".join(self._body), "The call is incomplete.")]
        return [*found, *self._end()]

    def _own(self, text: str) -> str:
        """Return what the model wrote of a text."""
        return text.removesuffix(END) if self._ended else text

    def _read(self, events: Sequence[Mapping[str, Any]]) -> list[Found]:
        found: list[Found] = []
        for event in events:
            if event["field"] == "content" and event["type"] == "region_chunk":
                text = self._space + self._own(event["text"])
                stripped = text.rstrip()
                self._space = text[len(stripped) :]
                found.append(stripped)
            elif event["field"] == "tool_calls" and event["type"] == "region_open":
                self._space, self._values, self._body, self._complete = "", JsonCalls(self._names), [], []
            elif event["field"] == "tool_calls" and event["type"] == "region_chunk":
                found += self._read_body(event["text"])
            elif event["field"] == "tool_calls":
                found += self._close_region(event["value"])
        return found

    def _read_body(self, text: str) -> list[Found]:
        assert self._values is not None
        self._body.append(text := self._own(text))
        found = self._values.feed(text) if self._form.in_json else []
        if not self._form.has_end:
            return found
        self._complete += found
        return []

    def _close_region(self, value: Any) -> list[Found]:
        """Return the calls of the region that has ended. `value` is what the parser made of it, or its error."""
        assert self._values is not None
        values, self._values = self._values, None
        if self._form.in_json:
            return [*self._complete, *values.close()]
        text, parameters = "".join(self._body), self._form.parameters
        if isinstance(value, Exception):
            return _invalid(text, f"The call cannot be parsed: {value}")
        if parameters is not None:
            found = [*parameters.finditer(text)]
            keys = [each["key"] for each in found]
            opened = [(text[each.start() : each.start("key")], text[each.end("key") : each.end()]) for each in found]
            nested = any(mark in value for mark, value in opened)
            if nested or parameters.sub("", text).strip() or len(set(keys)) < len(keys):
                return _invalid(text, "Its parameters are not complete, or one occurs twice.")
        calls = cast("list[Any]", value if isinstance(value, list) else [value])
        return [found for each in calls for found in _call_of(each, self._names, text)]


class ListedCalls(CallReader):
    """Reads constrained output: a JSON list of calls, or a JSON answer if the schema allows both."""

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._calls: JsonCalls | None = None
        self._begun = False

    def feed(self, text: str) -> Sequence[Found]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
            self._calls = JsonCalls(self._names) if text.startswith("[") else None
        return self._calls.feed(text) if self._calls else [text]

    def finish(self, *, cut: bool) -> Sequence[Found]:
        rest = self._calls.close() if self._calls else []
        self.incomplete = cut and bool(rest)
        return [] if cut else rest


ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Names that models give to the arguments of a call."""
_FURTHER = ("type", "id")
"""Fields that a call may have besides its name and arguments."""
_SEPARATOR = r"`(?:json|jso|js|j)?|[\s,;\[\]}]"
"""Separates calls: fences and the surplus closing braces that some models write, too."""
_BETWEEN = re.compile(rf"(?:\[TOOL_CALLS\]|{_SEPARATOR})*")
_BARE_BETWEEN = re.compile(rf"(?:{_SEPARATOR})*")
_NAMED = (
    r"(?:function<｜tool▁sep｜>)?(?P<named>[\w.-]+)"
    r"(?:\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]|\n```json\n|<｜tool▁sep｜>)"
)
"""A tool name before its arguments, in the formats of Mistral and DeepSeek."""
_BEGINNING = re.compile(rf"{_BETWEEN.pattern}(?:{_NAMED}\s*)?(?=\{{)")
_BARE_BEGINNING = re.compile(rf"{_BARE_BETWEEN.pattern}(?=\{{)")
_MAX_BEGINNING = 512
_KEYS = "|".join(("name", "function", *ARGUMENTS, *_FURTHER))
_NO_CALL = re.compile(rf'{_BARE_BETWEEN.pattern}\{{\s*(?:[^\s"]|"(?!(?:{_KEYS})")[^"]*")')
"""A JSON object that begins with a key that calls do not have."""
MAX_HELD = 100_000
"""Most characters of an answer that are held back because it may be nothing but calls."""


class OnlyCalls(CallReader):
    """Reads an answer that is nothing but tool calls in JSON, in a fence or not. `other` reads every other answer."""

    def __init__(self, other: CallReader, names: Container[str], *, leading: bool = False) -> None:
        """`leading`: whether text may follow a call without a fence or list, as in the format of Llama."""
        self._other, self._names, self._leading = other, names, leading
        self._values: JsonCalls | None = JsonCalls(names, named=False)
        """Reads the text that is held back; None once it is known not to be a call."""
        self._held: list[str] = []
        self._num_held = 0
        self._found: list[Found] = []
        self._called = False
        """Whether calls have been emitted, which text may follow."""

    def feed(self, text: str) -> Sequence[Found]:
        if self._values is None:
            return self._other.feed(text)
        found = self._values.feed(text)
        bound = [each.name in self._names for each in found if isinstance(each, ToolCall)]
        between = self._values.between
        is_json = len(between) <= _MAX_BEGINNING and _BARE_BETWEEN.fullmatch(between) is not None
        if not self._called:
            self._held.append(text)
            if self._num_held < _MAX_BEGINNING and _NO_CALL.match("".join(self._held)[:_MAX_BEGINNING]):
                return self._release("".join(self._held))
            self._num_held += len(text)
            begins = self._leading and bound[:1] == [True]
            self._called = begins and "".join(self._held).lstrip().startswith("{")
        if self._called:
            return [*found, *([] if is_json else self._release(between))]
        self._found += found
        may_be_calls = is_json and all(bound) and self._num_held <= MAX_HELD
        return [] if may_be_calls else self._release("".join(self._held))

    def _release(self, text: str) -> list[Found]:
        self._values = None
        return [*self._other.feed(text)]

    def finish(self, *, cut: bool) -> Sequence[Found]:
        found: list[Found] = []
        if self._values is not None:
            rest = self._values.close()
            self.incomplete = cut and bool(rest)
            if self._called:
                return [] if cut else rest
            if self._found and not rest and not cut:
                return self._found
            found = self._release("".join(self._held))
        found += self._other.finish(cut=cut)
        self.incomplete |= self._other.incomplete
        return found


class JsonCalls:
    """Reads one or more calls in JSON."""

    def __init__(self, names: Container[str], *, named: bool = True) -> None:
        """
        Args:
            names: names of the tools.
            named: whether a tool's name may precede its arguments, see `_NAMED`.
        """
        self._names = names
        self._beginning, self._separators = (_BEGINNING, _BETWEEN) if named else (_BARE_BEGINNING, _BARE_BETWEEN)
        self.between = ""
        """Text since the last value; empty while a value is open."""
        self._nesting = Nesting()
        self._chunks: list[str] = []
        """Text of the open value, with the tool's name before it."""
        self._named: str | None = None

    @property
    def in_string(self) -> bool:
        """Whether a string of the open value is open."""
        return self._nesting.in_string

    @property
    def rest(self) -> str:
        """Text that is no call so far, without separators."""
        return "".join(self._chunks) or self._separators.sub("", self.between, count=1)

    def feed(self, text: str) -> list[Found]:
        """Read the next chunk. Return the calls that it completes."""
        found: list[Found] = []
        while text:
            if not self._chunks:
                self.between = (self.between + text).lstrip()
                begun = self._beginning.match(self.between, 0, _MAX_BEGINNING)
                if begun is None:
                    return found
                text, self.between = self.between[begun.end() :], ""
                self._named = begun.groupdict().get("named")
                self._chunks = [begun[0][begun.start("named") :]] if self._named else []
            end = self._nesting.read(text)
            self._chunks.append(text[:end])
            if end is None:
                return found
            found += self._calls()
            self._chunks, text = [], text[end:]
        return found

    def _calls(self) -> list[Found]:
        text = "".join(self._chunks)
        try:
            value = _DECODER.decode("".join(self._chunks[bool(self._named) :]))
        except (ValueError, RecursionError) as error:
            return _invalid(text, f"The call is not valid JSON: {error}.", self._named or "")
        return _call_of({"name": self._named, "arguments": value} if self._named else value, self._names, text)

    def close(self) -> list[Found]:
        """Return the rest at the end of the text."""
        rest = self.rest
        return _invalid(rest, "The call is incomplete." if self._chunks else "The call is not JSON.") if rest else []


@dataclass
class Nesting(JsonScanner):
    """Tracks the nesting depth in streamed JSON."""

    depth: int = 0

    def read(self, text: str) -> int | None:
        """Read the next chunk. Return the position after the bracket that closes the value, or None."""
        for position, letter in self.outside(text):
            if letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return position
        return None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with all its keys."""
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number, object_pairs_hook=_unique)
"""Models write raw line breaks in strings. Nothing else is read that JSON does not allow."""


def _call_of(value: Any, names: Container[str], text: str) -> list[Found]:
    """Return the call in a parsed value. `text` is what the model wrote."""
    fields: dict[str, Any] = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
    if isinstance(inner := fields.get("function"), Mapping) and fields.keys() <= {"function", *_FURTHER}:
        fields = dict(cast("Mapping[str, Any]", inner))
    name, known = fields.pop("name", None), fields.keys() & {*ARGUMENTS}
    others = fields.keys() - {*_FURTHER, *known}
    if not isinstance(name, str):
        return _invalid(text, "The call does not name a tool.")
    if name not in names:
        return _invalid(text, f"There is no tool {name!r}.", name)
    if others or len(known) > 1:
        return _invalid(text, f"The call has {', '.join(map(repr, sorted(fields)))} where 'arguments' belong.", name)
    arguments = fields[known.pop()] if known else None
    try:
        if isinstance(arguments, str) and arguments:
            arguments = _DECODER.decode(arguments)
        if arguments not in (None, "") and not isinstance(arguments, Mapping):
            return _invalid(text, "The arguments are not a JSON object.", name)
        written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, RecursionError) as error:
        return _invalid(text, f"The arguments are not valid JSON: {error}.", name)
    return [ToolCall(_new_id(), name, written)]


def _invalid(text: str, problem: str, name: str = "") -> list[Found]:
    return [text, ToolCall(_new_id(), name, text, problem)]


def _new_id() -> str:
    """Return nine random letters or digits, the id format that Mistral's chat templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
