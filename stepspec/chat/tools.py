"""Tools: their descriptions, and the formats in which model families write tool calls.

A model that may call a tool writes the call in its own format. A model that must call a tool writes a JSON list of
calls, which the engine constrains to a schema.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, cast
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepspec.base.json_schema import Part, part_at
from stepspec.engines.protocol import GRAMMAR_OPTIONS, Tokenizer
from stepspec.engines.template_form import CALL
from stepspec.errors import UsageError, unknown_name

Tool = Mapping[str, Any]
"""A tool in the format of OpenAI's API: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

MODES = ("auto", "none", "required")
"""Values of `tool_choice` other than the name of a tool."""

ANYTHING: Mapping[str, Any] = {"type": "object"}

OPEN_KEYS = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas"),
}
"""Keys of an object's schema that say more about its properties than `properties` does."""


class Function(BaseModel):
    """The function of a tool. Further fields are passed on to the model."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Description(BaseModel):
    """The required fields of a tool."""

    type: Literal["function"]
    function: Function


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        tools: validated tools, by name.
        choice: one of `MODES`, or the name of the tool that the model must call.
        parallel: whether one answer may contain several tool calls.
    """

    tools: Mapping[str, Tool]
    choice: str = "auto"
    parallel: bool = True

    @classmethod
    def checked(cls, tools: Sequence[Tool], choice: str = "auto", *, parallel: bool = True) -> "Toolbox":
        """Validate tools and return their toolbox. It is empty if the choice is "none".

        Raises:
            UsageError: a tool is invalid, two tools have the same name, or the choice is unknown.
        """
        named: dict[str, Tool] = {}
        for number, tool in enumerate(tools, 1):
            try:
                name = Description.model_validate(tool).function.name
            except ValidationError as error:
                problem = error.errors()[0]
                where = ".".join(map(str, problem["loc"])) or "it"
                raise UsageError(f"Tool {number}: {where}: {problem['msg']}. Write {EXAMPLE}.") from None
            if name in named:
                raise UsageError(f"Two tools are named {name!r}. Rename one of them.")
            _check_json(number, tool)
            named[name] = tool
        if choice not in MODES and choice not in named:
            raise UsageError(unknown_name("tool_choice", choice, [*MODES, *named]))
        if choice == "required" and not named:
            raise UsageError("tool_choice is 'required', but there are no tools.")
        return cls({} if choice == "none" else named, choice, parallel)

    @property
    def forced(self) -> bool:
        """Whether the model must call a tool."""
        return self.choice not in ("auto", "none")

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a list of calls."""
        names = list(self.tools) if self.choice in MODES else [self.choice]
        definitions: dict[str, Any] = {}
        calls = [_call_schema(name, _movable(self._parameters(name), name, definitions)) for name in names]
        most = {"maxItems": 1} if self.choice not in MODES or not self.parallel else {}
        listed = {"type": "array", "minItems": 1, **most, "items": calls[0] if len(calls) == 1 else {"anyOf": calls}}
        return {"$defs": definitions, **listed} if definitions else listed

    def _parameters(self, name: str) -> Mapping[str, Any]:
        """Return a tool's parameters. A tool has no other parameters than those that it lists, as in OpenAI's strict
        mode, unless its schema says so."""
        form = self.tools[name]["function"].get("parameters") or ANYTHING
        if "properties" in form and not OPEN_KEYS & form.keys():
            form = {**form, "additionalProperties": False}
        return form

    def typed(self) -> list[Tool]:
        """Return the tools with nothing but the types of their parameters, for formats that write values as text."""
        return [
            {"type": "function", "function": {"name": name, "parameters": types_of_parameters(self._parameters(name))}}
            for name in self.tools
        ]


def _movable(schema: Mapping[str, Any], name: str, definitions: dict[str, Any]) -> Mapping[str, Any]:
    """Return a schema that can stand anywhere in another one, which has the `definitions` at its top.

    A schema with references moves there whole, as `name`, because references resolve from the top.
    """

    def moved(form: Any, part: Part = "schema") -> Any:
        if isinstance(form, list):
            return [moved(each, part) for each in cast("list[Any]", form)]
        if part == "value" or not isinstance(form, Mapping):
            return form
        found = {key: moved(each, part_at(key, part)) for key, each in cast("Mapping[str, Any]", form).items()}
        to = found.get("$ref")
        return found | {"$ref": top + to[1:]} if isinstance(to, str) and re.match("#(/|$)", to) else found

    top = f"#/$defs/{name}"
    if (form := moved(schema)) == schema:
        return schema
    definitions[name] = {key: each for key, each in form.items() if key not in ("$schema", "$id")}
    return {"$ref": top}


JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    NoneType: "null",
    dict: "object",
    list: "array",
}


MAX_ALTERNATIVES = 64
"""Maximum number of schemas in which the types of a value are looked for."""


def types_of_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with nothing but the types of its properties, where they are known."""
    properties: dict[str, Any] = {}
    for form in _alternatives(schema, schema):
        for name, each in _mapping(form.get("properties")).items():
            properties.setdefault(name, {"type": [*dict.fromkeys(_types(each, schema))]})
    return {"type": "object", "properties": properties}


def _types(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON types of the values that a schema allows; none if they are not known."""
    for form in _alternatives(schema, root):
        types = form.get("type")
        yield from (each for each in _listed(types) or [types] if isinstance(each, str))
        if types is None:
            values = [*_listed(form.get("enum")), *([form["const"]] if "const" in form else [])]
            yield from (JSON_TYPES[type(value)] for value in values if type(value) in JSON_TYPES)
            if "properties" in form:
                yield "object"
            if "items" in form:
                yield "array"
        if form.get("nullable") is True:
            yield "null"


def _alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and the first of those that it refers to or combines, each once."""
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < MAX_ALTERNATIVES:
        found = _mapping(form := waiting.pop())
        if found and id(form) not in seen:
            seen.add(id(form))
            yield found
            lists = (_listed(found.get(name))[:MAX_ALTERNATIVES] for name in ("oneOf", "anyOf", "allOf"))
            waiting += [each for alternatives in lists for each in reversed(alternatives)]
            waiting.append(_referred(found.get("$ref"), root))


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a JSON pointer refers to; None if there is none."""
    found: Any = root if isinstance(reference, str) and reference.startswith("#") else None
    try:
        for part in str(reference).split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            found = found[int(name) if isinstance(found, list) else name]
    except (TypeError, ValueError, LookupError):
        return None
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _check_json(number: int, tool: Tool) -> None:
    try:
        json.dumps(tool, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"Tool {number} is not valid JSON: it contains a value such as NaN, invalid Unicode, or too deep nesting."
        ) from None


EXAMPLE = "{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object', 'properties': {...}}}}"


def _call_schema(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def schema_text(schema: Mapping[str, Any], toolbox: Toolbox | None = None) -> str:
    """Return a schema as JSON text for engines. With tools, it allows either such an answer or a list of calls.

    Raises:
        UsageError: the schema is not valid JSON.
    """
    if toolbox is None or not toolbox.tools:
        return _json_text(schema)
    calls = toolbox.schema()
    definitions: dict[str, Any] = calls.pop("$defs", {})
    own = _movable(schema, ANSWER, definitions)
    top = {"$defs": definitions} if definitions else {}
    top |= {name: schema[name] for name in (GRAMMAR_OPTIONS,) if name in schema}
    return _json_text({"anyOf": [calls, own], **top})


ANSWER = "=answer"
"""Name of the answer's schema among those of tools, none of which has such a name."""


def _json_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            "The JSON schema is not valid JSON: it contains a value such as NaN, or is nested too deeply."
        ) from None


def chosen(tool_choice: str | Mapping[str, Any] | None) -> str:
    """Convert a `tool_choice` of OpenAI's API to the `choice` of a `Toolbox`.

    Raises:
        UsageError: the value is not a valid `tool_choice`.
    """
    if tool_choice is None or isinstance(tool_choice, str):
        return tool_choice or "auto"
    try:
        return str(tool_choice["function"]["name"])
    except (KeyError, TypeError):
        advice = "Write 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}."
        raise UsageError(f"tool_choice is {tool_choice!r}. {advice}") from None


FORMAT_FIELDS: Mapping[str, tuple[str, ...]] = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
"""Fields of a `response_format` besides `type`, by its type."""


def schema_of(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the JSON schema of a `response_format` of OpenAI's API; None if it does not ask for JSON.

    Raises:
        UsageError: the value is not a valid `response_format`, or has an unknown field.
    """
    if not response_format:
        return None
    kind = response_format.get("type")
    advice = (
        "Its type must be 'text', 'json_object', or 'json_schema' with json_schema = {'name': ..., 'schema': {...}}."
    )
    if not isinstance(kind, str) or kind not in FORMAT_FIELDS:
        raise UsageError(f"response_format has an unknown type. {advice}")
    _check_fields("response_format", response_format, ("type", *FORMAT_FIELDS[kind]))
    if kind == "text":
        return None
    form = response_format.get("schema")
    if kind == "json_object" and form is None:
        return ANYTHING
    if kind == "json_schema" and isinstance(inner := response_format.get("json_schema"), Mapping):
        named = cast("Mapping[str, Any]", inner)
        _check_fields("response_format.json_schema", named, ("name", "description", "schema", "strict"))
        form = named.get("schema")
    if not isinstance(form, Mapping):
        raise UsageError(f"response_format has no JSON schema, which must be an object. {advice}")
    return cast("Mapping[str, Any]", form)


def _check_fields(where: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that all fields are known. Fields that are null count as not set."""
    for name, value in found.items():
        if name not in known and value is not None:
            raise UsageError(unknown_name(f"field of {where}", name, known))


@dataclass(frozen=True)
class CallFormat:
    """The tool call format of a model family.

    Attributes:
        mark: text that a rendered call has only in this format.
        opener: matches the mark that begins a call.
        template: the response template for transformers' parser, version 1.
        in_json: whether calls are plain JSON. The template then passes them on as text.
        leading: whether a JSON object that begins the answer is a call even if text follows.
    """

    mark: str
    opener: re.Pattern[str]
    template: Mapping[str, Any]
    in_json: bool = True
    leading: bool = False

    @property
    def parameters(self) -> re.Pattern[str] | None:
        """Matches a parameter of a call that is not JSON, if the entire call is made of them."""
        tag = self.template["fields"]["tool_calls"].get("content_args", {}).get("tag_pattern")
        return re.compile(tag, re.DOTALL) if tag else None

    @property
    def has_end(self) -> bool:
        """Whether a mark ends a call."""
        return not self.template["fields"]["tool_calls"].keys().isdisjoint({"close", "close_pattern"})


BETWEEN_CALLS = "[TOOL_CALLS][CALL_ID][ARGS]<｜tool▁sep｜>"
"""Special tokens inside and between calls that the formats do not name."""

TEXT: Mapping[str, Any] = {"content": "text", "content_args": {"strip": False}}


BARE = re.compile(r"\s*(?:```\w*\s*)?\[?\s*\{")
"""The beginning of an answer that may be nothing but calls in JSON."""


def _format(
    mark: str, opener: str | None = None, end: str | None = None, *, leading: bool = False, **field: Any
) -> CallFormat:
    """Return a format whose calls have an opening mark and optionally a closing one. `end` follows the last call."""
    fields = {"content": TEXT, "tool_calls": {**TEXT, "repeats": True, **field}}
    template = {"version": 1, "start_anchor": "\0", "fields": fields | ({"end": {"open": end}} if end else {})}
    return CallFormat(mark, re.compile(opener or re.escape(mark)), template, "content" not in field, leading)


def _own_format(template: Mapping[str, Any]) -> CallFormat | None:
    """Return the format in a model's own response template; None if the template has no tool calls."""
    # An answer without a required field would be an error.
    fields: dict[str, Any] = {name: {**field, "optional": True} for name, field in template.get("fields", {}).items()}
    if not (calls := fields.get("tool_calls")):
        return None
    opens = calls.get("open", [])
    literal = "|".join(map(re.escape, [opens] if isinstance(opens, str) else opens))
    plain = not calls.keys() & {"transform", "transform_each"} and not (
        calls.get("content_args", {}).keys() - {"allow_non_json", "strip"}
    )
    in_json = calls.get("content", "text") in ("json", "text") and plain
    if in_json:
        fields["tool_calls"] = {**calls, **TEXT}
    template = {**template, "fields": fields}
    return CallFormat("", re.compile(calls.get("open_pattern") or literal), template, in_json)


HERMES = _format("<tool_call>", open="<tool_call>", close="</tool_call>")
FORMATS: Mapping[str, CallFormat] = {  # their repeats are bounded, because the parser searches again for each chunk
    "qwen-xml": _format(  # Qwen's coding models, and all Qwen models from 3.5 on
        "<function=",
        open_pattern=r"<tool_call>\s{0,64}<function=(?P<name>[^>\n]{1,256})>",
        close_pattern=r"</function>\s{0,64}</tool_call>",
        content="xml-inline",
        content_args={  # a value ends before the next mark, so that the search takes linear time
            "tag_pattern": r"<parameter=(?P<key>[^<>\n]+)>\n?"
            r"(?P<value>(?:(?!</?parameter[=>]|<function=|<tool_call>).)*?)\n?</parameter>"
        },
        transform={"function": {"name": "{name}", "arguments": "{content}"}},
    ),
    "hermes": HERMES,  # and Qwen from 2.5 on
    "mistral": _format("[TOOL_CALLS]", open="[TOOL_CALLS]"),
    "deepseek": _format(
        "<｜tool▁call▁begin｜>",
        open_pattern=r"(?:<｜tool▁calls▁begin｜>\s{0,64})?<｜tool▁call▁begin｜>",
        close_pattern=r"(?:\n```)?<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "llama": _format('"parameters": ', r"<\|python_tag\|>", leading=True, open="<|python_tag|>"),
}


@lru_cache(maxsize=16)
def call_format(tokenizer: Tokenizer) -> CallFormat | None:
    """Return the model's tool call format: from its response template, else detected from its chat template.

    None if the model has no tool support.
    """
    if own := _own_format(tokenizer.response_template or {}):
        return own
    tool = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
    turns = [{"role": "user", "content": "Call f."}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for messages in variants_with_calls(turns):
        try:
            shown = tokenizer.render(messages, add_generation_prompt=False, tools=[tool])
        except UsageError:
            continue
        written = shown.rpartition("Call f.")[2]
        for each in FORMATS.values():
            if each.mark in written:
                return each
    return None


def call_marks(tokenizer: Tokenizer) -> str:
    """Return a text that contains all special tokens of the model's tool call format."""
    template = json.dumps((call_format(tokenizer) or HERMES).template, ensure_ascii=False)
    return (template + BETWEEN_CALLS).replace("\\", "")


def variants_with_calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the turns in the forms of tool calls that chat templates take, the usual form first.

    Some templates need the arguments as JSON text. Mistral's need ids of nine letters or digits.
    """
    yield messages
    texts = [
        {**turn, "tool_calls": [_with_text(call) for call in turn["tool_calls"]]} if turn.get("tool_calls") else turn
        for turn in messages
    ]
    yield texts
    for turns in (messages, texts):
        yield [_with_short_ids(turn) for turn in turns]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _json(function["arguments"])}}


def _with_short_ids(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    if turn["role"] == "tool":
        return {**turn, "tool_call_id": _short(turn.get("tool_call_id"))}
    calls = [{**call, "id": _short(call.get("id"))} for call in turn.get("tool_calls") or ()]
    return {**turn, "tool_calls": calls} if calls else turn


def _short(id: Any) -> str:
    """Return an id of nine letters or digits, always the same one for an id."""
    return id if re.fullmatch("[A-Za-z0-9]{9}", str(id)) else hashlib.sha256(str(id).encode()).hexdigest()[:9]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


TOOLS_PROMPT = """\
You may call these tools, each described in JSON:
{tools}

To call one, write its name and arguments as JSON between these tags, and nothing after it:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def in_plain_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
    """Convert a conversation with tools for a chat template without tool support.

    Tool descriptions go into the system prompt. Tool calls and their results become plain turns in the Hermes format.
    """
    turns: list[Mapping[str, Any]] = []
    after_result = False
    for turn in messages:
        is_result = turn["role"] == "tool"
        if is_result:
            turn = {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
        elif turn.get("tool_calls"):
            calls = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in turn["tool_calls"]]
            rest = {name: value for name, value in turn.items() if name != "tool_calls"}
            turn = {**rest, "content": "\n".join(filter(None, [turn["content"], *calls]))}
        if after_result and turn["role"] == "user":  # many templates refuse two user turns in a row
            turn = {**turn, "content": f"{turns.pop()['content']}\n{turn['content']}"}
        turns.append(turn)
        after_result = is_result
    if tools:
        prompt = TOOLS_PROMPT.format(tools="\n".join(_json(tool["function"]) for tool in tools))
        if turns[0]["role"] == "system":
            turns[0] = {**turns[0], "content": f"{turns[0]['content']}\n\n{prompt}"}
        else:
            turns.insert(0, {"role": "system", "content": prompt})
    return turns
