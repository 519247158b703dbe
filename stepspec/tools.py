"""Tools: how they are described, how the families of models write a call, and how calls are read from a text.

A model that may call a tool writes the call as it was taught to, and what it writes is read by transformers' parser of
responses. A model that has to call one writes a list of calls in JSON, whose schema the engine holds it to.
"""

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from stepspec.engine import Tokenizer
from stepspec.errors import UsageError, unknown_name
from stepspec.step import ToolCall

Tool = Mapping[str, Any]
"""A tool as OpenAI's API describes it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

MODES = ("auto", "none", "required")
"""What a model may be told of its tools, besides the name of the one that it has to call."""

ANYTHING: Mapping[str, Any] = {"type": "object"}


class Function(BaseModel):
    """What of a tool a model is told; further fields are passed on."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Description(BaseModel):
    """A tool's form."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        tools: checked, by name.
        choice: one of `MODES`, or the name of the tool that has to be called.
        parallel: whether several may be called at once.
    """

    tools: Mapping[str, Tool]
    choice: str = "auto"
    parallel: bool = True

    @classmethod
    def checked(cls, tools: Sequence[Tool], choice: str = "auto", *, parallel: bool = True) -> "Toolbox":
        """The toolbox of these tools, which are none if none is to be called.

        Raises:
            UsageError: a tool is described wrongly, or the choice is none of them.
        """
        named: dict[str, Tool] = {}
        for place, tool in enumerate(tools, 1):
            try:
                name = Description.model_validate(tool).function.name
            except ValidationError as error:
                problem = error.errors()[0]
                where = ".".join(map(str, problem["loc"])) or "it"
                raise UsageError(f"Tool {place}: {where}: {problem['msg']}. Write {EXAMPLE}.") from None
            if name in named:
                raise UsageError(f"Two tools are called {name!r}.")
            named[name] = tool
        if choice not in MODES and choice not in named:
            raise UsageError(unknown_name("tool_choice", choice, [*MODES, *named]))
        if choice == "required" and not named:
            raise UsageError("tool_choice is 'required', but there are no tools.")
        return cls({} if choice == "none" else named, choice, parallel)

    @property
    def forced(self) -> bool:
        """Whether the model has to call a tool."""
        return self.choice not in ("auto", "none")

    def schema(self) -> dict[str, Any]:
        """What a list of calls must look like."""
        names = list(self.tools) if self.choice in MODES else [self.choice]
        definitions: dict[str, Any] = {}
        calls = [_call_schema(name, self._parameters(name, definitions)) for name in names]
        most = {"maxItems": 1} if self.choice not in MODES or not self.parallel else {}
        listed = {"type": "array", "minItems": 1, **most, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        return {"$defs": definitions, **listed} if definitions else listed

    def _parameters(self, name: str, definitions: dict[str, Any]) -> Mapping[str, Any]:
        """A tool's parameters; what they define goes to the top, where references look, under a name of the tool's."""
        form = self.tools[name]["function"].get("parameters") or ANYTHING
        if not isinstance(form.get("$defs"), dict):
            return form
        form = json.loads(json.dumps(form).replace('"#/$defs/', f'"#/$defs/{name}.'))
        definitions |= {f"{name}.{key}": value for key, value in form.pop("$defs").items()}
        return form


EXAMPLE = "{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {...}}}}"


def _call_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def schema_text(schema: Mapping[str, Any], toolbox: Toolbox | None = None) -> str:
    """A schema as engines take it; with tools, that of an answer in that form or of a list of calls.

    What the schema defines for itself stays at the top, where its references look for it.
    """
    if toolbox is None or not toolbox.tools:
        return json.dumps(schema)
    calls, own = toolbox.schema(), dict(schema)
    whole: dict[str, Any] = {"anyOf": [calls, own]}
    for name in ("$defs", "definitions"):
        if definitions := {**calls.pop(name, {}), **own.pop(name, {})}:
            whole[name] = definitions
    return json.dumps(whole)


def chosen(tool_choice: str | Mapping[str, Any] | None) -> str:
    """A `tool_choice` in OpenAI's form as a `Toolbox` takes it.

    Raises:
        UsageError: it is none.
    """
    if tool_choice is None or isinstance(tool_choice, str):
        return tool_choice or "auto"
    try:
        return str(tool_choice["function"]["name"])
    except (KeyError, TypeError):
        said = "Write 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}."
        raise UsageError(f"tool_choice is {tool_choice!r}. {said}") from None


def schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The JSON schema that a `response_format` in OpenAI's form asks for, if it asks for one.

    Raises:
        UsageError: it is none.
    """
    kind = response_format.get("type") if response_format else "text"
    inner = response_format.get("json_schema") if response_format else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANYTHING
    form = cast("Mapping[str, Any]", inner).get("schema") if isinstance(inner, Mapping) else None
    if kind == "json_schema" and isinstance(form, Mapping):
        return cast("Mapping[str, Any]", form)
    said = "Its type is 'text', 'json_object', or 'json_schema' with json_schema = {'name': ..., 'schema': {...}}."
    raise UsageError(f"response_format is of no known kind. {said}")


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
        mark: what a rendered call has in this format and in no other.
        opener: where in a text a call begins.
        template: tells transformers' parser so; version 1 of its response templates.
    """

    mark: str
    opener: re.Pattern[str]
    template: Mapping[str, Any]


def _format(mark: str, opener: str | None = None, end: str | None = None, **field: Any) -> CallFormat:
    """A format whose calls are JSON between an opening and perhaps a closing mark; `end` stands behind them all."""
    calls = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True, **field}
    text = {"content": "text", "content_args": {"strip": False}}
    fields = {"content": text, "tool_calls": calls, **({"end": {"open": end}} if end else {})}
    return CallFormat(
        mark, re.compile(opener or re.escape(mark)), {"version": 1, "start_anchor": "\0", "fields": fields}
    )


LLAMA_OPENER = r'<\|python_tag\|>|(?<![\s\S])\s*(?=\{\s*"name"\s*:)'
HERMES = _format("<tool_call>", open="<tool_call>", close="</tool_call>")
_DEEPSEEK_CALL = {"name": "{name}", "arguments": "{content}"}
FORMATS: Mapping[str, CallFormat] = {
    "qwen-xml": _format(  # Qwen's models for code, and all from 3.5 on
        "<function=",
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        transform={"function": {"name": "{name}", "arguments": "{content}"}},
    ),
    "hermes": HERMES,  # and Qwen from 2.5 on
    "mistral": _format("[TOOL_CALLS]", open="[TOOL_CALLS]"),
    "deepseek": _format(
        "<｜tool▁call▁begin｜>",
        # Of V3 the first, of V3.1 and later ones the second.
        open_pattern=r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>"
        r"(?:function<｜tool▁sep｜>(?P<name>[^<\n]+)\n```json\n"
        r"|(?!function<｜tool▁sep｜>)(?P<name>[^<\n]+)<｜tool▁sep｜>)",
        close_pattern=r"(?:\n```)?<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
        transform=_DEEPSEEK_CALL,
    ),
    "llama": _format('"parameters": ', LLAMA_OPENER, open_pattern=LLAMA_OPENER),
}


@lru_cache(maxsize=16)
def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """The format that the model comes with, or else the one in which its chat template writes calls; None if it knows
    no tools."""
    if tokenizer.response_template and (own := tokenizer.response_template.get("fields", {}).get("tool_calls")):
        opens = own.get("open", [])
        literal = "|".join(map(re.escape, [opens] if isinstance(opens, str) else opens))
        return CallFormat("", re.compile(own.get("open_pattern") or literal), tokenizer.response_template)
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": 1}}}
    tool = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
    turns = [{"role": "user", "content": "Call f."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for messages in (turns, with_arguments_as_text(turns)):
        try:
            shown = tokenizer.render(messages, add_generation_prompt=False, tools=[tool])
        except UsageError:
            continue
        written = shown.rpartition("Call f.")[2]
        for each in FORMATS.values():
            if each.mark in written:
                return each
    return None


def with_arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same turns with arguments of calls written out, for templates that do not write JSON by themselves."""
    return [
        {**turn, "tool_calls": [_with_text(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


TOOLS_PROMPT = """\
You may call these tools, each described in JSON:
{tools}

To call one, write its name and arguments as JSON between these tags, and nothing after it:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def in_plain_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """The conversation for a model whose chat template knows no tools: they are described in the system's turn, calls
    and what came of them stand in turns like any other, in the form of Hermes."""
    turns: list[Mapping[str, Any]] = []
    for turn in messages:
        if turn["role"] == "tool":
            turns.append({"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"})
        elif turn.get("tool_calls"):
            calls = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in turn["tool_calls"]]
            rest = {name: value for name, value in turn.items() if name != "tool_calls"}
            turns.append({**rest, "content": "\n".join(filter(None, [turn["content"], *calls]))})
        else:
            turns.append(turn)
    if tools:
        prompt = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
        if turns[0]["role"] == "system":
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{prompt}"}
        else:
            turns.insert(0, {"role": "system", "content": prompt})
    return turns


class CallReader(ABC):
    """Parts a growing text into what is said and what is called."""

    @abstractmethod
    def feed(self, text: str) -> list[str | ToolCall]:
        """Takes a further piece; gives text and calls that are certain, in their order."""

    @abstractmethod
    def finish(self) -> list[str | ToolCall]:
        """Gives the rest, as no more will come."""


class WrittenCalls(CallReader):
    """Calls as the model was taught to write them, among text. White space in front of a call is not text."""

    def __init__(self, parser: Any) -> None:
        """`parser`: a streaming parser of transformers, see `Tokenizer.response_parser`."""
        self._parser = parser
        self._space = ""

    def feed(self, text: str) -> list[str | ToolCall]:
        try:
            return self._read(self._parser.feed(text))
        except (ValueError, KeyError) as error:  # of a template that is not ours
            return [_broken(text, f"The call cannot be read: {error}")]

    def finish(self) -> list[str | ToolCall]:
        try:
            found = self._read(self._parser.finalize()[1])
        except (ValueError, KeyError) as error:
            found = [_broken("", f"The call cannot be read: {error}")]
        space, self._space = self._space, ""
        return [*found, "" if any(isinstance(each, ToolCall) for each in found) else space]

    def _read(self, events: Sequence[Mapping[str, Any]]) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        for event in events:
            if event["type"] == "region_chunk" and event["field"] == "content":
                text = self._space + event["text"]
                kept = text.rstrip()
                self._space = text[len(kept) :]
                found.append(kept)
            elif event["type"] == "region_close" and event["field"] == "tool_calls":
                self._space = ""
                found += _calls_in(event["value"])
        return found


class ListedCalls(CallReader):
    """Calls as a JSON list, which the engine has held the model to; or an answer in JSON, where it had the choice."""

    def __init__(self) -> None:
        self._rest = ""
        self._listed: bool | None = None

    def feed(self, text: str) -> list[str | ToolCall]:
        self._rest += text
        if self._listed is None and (start := self._rest.lstrip()):
            self._listed = start.startswith("[")
            self._rest = start.removeprefix("[")
        if self._listed is False:
            text, self._rest = self._rest, ""
            return [text]
        found: list[str | ToolCall] = []
        while self._listed and "}" in self._rest:
            rest = self._rest.lstrip(", \t\r\n")
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                break
            found += _calls_in(value)
            self._rest = rest[end:]
        return found

    def finish(self) -> list[str | ToolCall]:
        if left := self._rest.strip(", \t\r\n]"):
            return [_broken(left, "The call is not whole.")]
        return []


class Written(BaseModel):
    """A call as models write it in JSON."""

    name: str
    arguments: Any = Field(default_factory=dict[str, Any], validation_alias=AliasChoices("arguments", "parameters"))


def _calls_in(value: Any) -> list[str | ToolCall]:
    """The calls in what a parser made of one, or of several."""
    if isinstance(value, list):
        return [call for each in cast("list[Any]", value) for call in _calls_in(each)]
    if isinstance(value, str):
        return [_from_text(part) for part in _parts(value)]
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


def _parts(text: str) -> list[str]:
    """Several calls as Llama and Mistral write them behind one mark."""
    return re.split(r"(?<=\})\s*;\s*(?=\{)|\[TOOL_CALLS\]", text)


def _from_text(text: str, name: str | None = None) -> ToolCall:
    """A call from what is no JSON, or from arguments that should be."""
    if name is None and (found := re.fullmatch(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\](.*)", text, re.DOTALL)):
        name, text = found[1], found[2]
    try:
        value = json.loads(text)
    except ValueError as error:
        return _broken(text, f"The arguments are no JSON: {error}.", name or "")
    if name is not None:
        return _with_arguments(name, value)
    (call,) = _calls_in(value) if isinstance(value, Mapping) else [_broken(text, "The call names no tool.")]
    assert isinstance(call, ToolCall)
    return call


def _broken(text: str, problem: str, name: str = "") -> ToolCall:
    return ToolCall(_new_id(), name, text, problem)


def _new_id() -> str:
    """Nine letters or digits, which is what Mistral's chat templates ask for."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
