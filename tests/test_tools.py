"""Tools: their descriptions, and how each model family is shown tools and writes tool calls."""

import json
import re
from typing import Any

import pytest
from scripted import PLAIN_TEMPLATE, WordTokenizer, with_template

from stepspec.chat.calls import WrittenCalls
from stepspec.chat.events import ToolCall
from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.chat.tools import FORMATS, Toolbox, call_format, schema_text
from stepspec.errors import ModelError, UsageError


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """Return the description of a tool."""
    form = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": form}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})


# JSON lists of calls, which the engine enforces.


def test_a_list_s_schema_names_the_tools() -> None:
    schema = Toolbox.checked([ADD, tool("now")], "required").schema()
    assert [each["properties"]["name"] for each in schema["items"]["anyOf"]] == [{"const": "add"}, {"const": "now"}]
    assert "maxItems" not in schema
    assert Toolbox.checked([ADD, tool("now")], "now").schema()["items"]["properties"]["name"] == {"const": "now"}
    assert Toolbox.checked([ADD], "required", parallel=False).schema()["maxItems"] == 1


@pytest.mark.parametrize("more", [{}, {"additionalProperties": True}, {"patternProperties": {"x": {}}}], ids=str)
def test_a_tool_has_no_other_parameters_unless_its_schema_says_so(more: dict[str, object]) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    found = Toolbox.checked(tools, "add", parallel=True).schema()["items"]["properties"]["arguments"]
    assert found == (parameters if more else {**parameters, "additionalProperties": False})


def test_without_references_a_schema_stands_where_it_is_used() -> None:
    own = {"type": "object", "properties": {"n": {"type": "integer"}}}
    combined = json.loads(schema_text(own, Toolbox.checked([ADD])))
    assert [form["type"] for form in combined["anyOf"]] == ["array", "object"]
    assert json.loads(schema_text(own)) == own


TYPED: list[tuple[Any, list[str]]] = [
    ({"$ref": "#/$defs/O"}, ["object"]),
    ({"$ref": "#/definitions/N"}, ["number"]),
    ({"anyOf": [{"$ref": "#/$defs/O"}, {"type": "null"}]}, ["object", "null"]),
    ({"allOf": [{"$ref": "#/$defs/O"}], "description": "x"}, ["object"]),
    ({"oneOf": [{"$ref": "#/definitions/N"}, {"type": "array"}]}, ["number", "array"]),
    ({"enum": [1, 2]}, ["integer"]),
    ({"enum": ["1", None]}, ["string", "null"]),
    ({"const": True}, ["boolean"]),
    ({"properties": {"a": {}}}, ["object"]),
    ({"items": {}}, ["array"]),
    ({"type": ["integer", "null"]}, ["integer", "null"]),
    ({"type": "string", "enum": ["1"]}, ["string"]),
    ({"type": "integer", "nullable": True}, ["integer", "null"]),
    ({"$ref": "#/$defs/loop"}, []),
    ({"$ref": "#/nowhere"}, []),
    ({"$ref": "elsewhere"}, []),
    ({"$ref": 5, "type": 5, "anyOf": 5, "enum": 5}, []),
    (True, []),
    ({}, []),
]


def test_the_types_of_parameters_are_found_through_references_and_alternatives() -> None:
    properties = {f"p{number}": form for number, (form, _) in enumerate(TYPED)}
    definitions = {"O": {"properties": {"a": {}}}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    parts = {"$defs": definitions, "definitions": {"N": {"type": "number"}}}
    for parameters in (
        {"type": "object", "properties": properties, **parts},
        {"$ref": "#/$defs/all", **parts, "$defs": {**definitions, "all": {"properties": properties}}},
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        (found,) = Toolbox.checked(tools).typed()
        types = {name: form["type"] for name, form in found["function"]["parameters"]["properties"].items()}
        assert types == {f"p{number}": expected for number, (_, expected) in enumerate(TYPED)}


def test_arguments_written_as_text_become_values_of_their_schema() -> None:
    fields: dict[str, Any] = {"o": {"$ref": "#/$defs/O"}, "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}
    fields |= {
        "c": {"const": 7},
        "e": {"enum": [1, 2]},
        "a": {"allOf": [{"$ref": "#/$defs/L"}]},
        "s": {"type": "string"},
    }
    definitions = {"O": {"type": "object"}, "N": {"type": "number"}, "L": {"type": "array"}}
    parameters = {"type": "object", "properties": fields, "$defs": definitions}
    tools = Toolbox.checked([{"type": "function", "function": {"name": "f", "parameters": parameters}}]).typed()
    texts = {"o": '{"k": [1]}', "n": "2.5", "c": "7", "e": "2", "a": "[1]", "s": "5"}
    written = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    form = FORMATS["qwen-xml"]
    reader = WrittenCalls(WordTokenizer().response_parser(form.template, tools), form, {"f"})
    found = [*reader.feed(f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"), *reader.finish(cut=False)]
    (call,) = [each for each in found if isinstance(each, ToolCall)]
    assert json.loads(call.arguments) == {"o": {"k": [1]}, "n": 2.5, "c": 7, "e": 2, "a": [1], "s": "5"}


# Descriptions.


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([{"type": "function"}], "auto", "Tool 1: function"),
        ([ADD, {"name": "add"}], "auto", "Tool 2: type"),
        ([tool("two words")], "auto", "Tool 1: function.name"),
        ([ADD, ADD], "auto", "Two tools are named 'add'"),
        ([ADD], "ad", "Did you mean 'add'"),
        ([], "required", "there are no tools"),
        (["add"], "auto", "Tool 1"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, choice: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Toolbox.checked(tools, choice)


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    assert Toolbox.checked([ADD], "none").tools == {}


# Chat templates.

CALLS = "{%- for call in message.tool_calls or [] %}{{ WRITTEN }}{% endfor -%}"
TOOL_TEMPLATE = "{%- if tools %}{{ tools | tojson }}{% endif -%}" + PLAIN_TEMPLATE.replace(
    "{{ message['content'] }}", "{{ message['content'] }}" + CALLS
)
TEMPLATES = {
    "hermes": "'<tool_call>' ~ (call.function | tojson) ~ '</tool_call>'",
    "mistral": "'[TOOL_CALLS]' ~ (call.function | tojson)",
    "llama": "'{\"name\": \"' ~ call.function.name ~ '\", \"parameters\": ' ~ (call.function.arguments | tojson) ~ '}'",
    "deepseek": "'<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments",
    "qwen-xml": "'<tool_call><function=' ~ call.function.name ~ '></function></tool_call>'",
}
TURNS = [
    {"role": "user", "content": "Add 1 and 2."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
]


def tool_tokenizer(written: str) -> WordTokenizer:
    """Return a tokenizer whose template writes calls as `written`. Undefined fields are empty, as in transformers."""
    import jinja2

    tokenizer = WordTokenizer(TOOL_TEMPLATE.replace("WRITTEN", written))
    environment = jinja2.Environment()
    tokenizer._template = environment.from_string(TOOL_TEMPLATE.replace("WRITTEN", written))  # pyright: ignore
    return tokenizer


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_family_is_recognized_from_its_template(family: str) -> None:
    assert call_format(tool_tokenizer(TEMPLATES[family])) is FORMATS[family]


def test_a_template_without_tool_support_has_no_call_format() -> None:
    assert call_format(WordTokenizer()) is None


@pytest.mark.parametrize("family", TEMPLATES)
def test_earlier_calls_are_shown_in_the_family_s_format(family: str) -> None:
    tokenizer = tool_tokenizer(TEMPLATES[family])
    text = tokenizer.decode(encode_messages(tokenizer, checked_messages(TURNS), [ADD]))
    assert FORMATS[family].mark in text
    assert "<|tool|>3<|end|>" in text


def test_without_tool_support_the_tools_go_into_the_system_prompt() -> None:
    tokenizer = WordTokenizer()
    text = tokenizer.decode(encode_messages(tokenizer, checked_messages(TURNS), [ADD]))
    assert text.startswith("<|system|>You may call these tools")
    assert '"name": "add"' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert "<|user|><tool_response>\n3\n</tool_response><|end|>" in text


def test_the_system_prompt_is_kept_in_front_of_the_tools() -> None:
    tokenizer = WordTokenizer()
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}]
    text = tokenizer.decode(encode_messages(tokenizer, turns, [ADD]))
    assert text.startswith("<|system|>Be brief.\n\nYou may call these tools")


# Templates that take other forms of turns.

NO_TOOLS = Toolbox.checked([{**ADD, "function": {**ADD["function"], "description": "für „ö“"}}]).tools["add"]
STRICT_TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<|{{ m.role }}|>{{ m.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
RESULTS = [
    {"role": "system", "content": "Be brief."},
    TURNS[0],
    {**TURNS[1], "tool_calls": [{**TURNS[1]["tool_calls"][0], "id": id} for id in ("call_1", "call_2")]},
    {"role": "tool", "tool_call_id": "call_1", "content": "3 für ö"},
    {"role": "tool", "tool_call_id": "call_2", "content": "4"},
    {"role": "user", "content": "Why?"},
]


def test_a_template_that_refuses_system_turns_and_tools_gets_both_in_the_first_user_turn() -> None:
    tokenizer = with_template(STRICT_TEMPLATE)
    turns = [
        *RESULTS[:2],
        {**RESULTS[2], "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": {"a": "ö"}}}]},
    ]
    text = tokenizer.decode(encode_messages(tokenizer, checked_messages([*turns, *RESULTS[3:]]), [NO_TOOLS]))
    assert text.startswith("<|user|>Be brief.\n\nYou may call these tools")
    assert '"description": "für „ö“"' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": "ö"}}\n</tool_call>' in text
    results = "<tool_response>\n3 für ö\n</tool_response>\n<tool_response>\n4\n</tool_response>\nWhy?"
    assert text.endswith(f"<|user|>{results}<|end|><|assistant|>")


def test_ids_of_calls_are_mapped_for_a_template_that_takes_only_nine_letters() -> None:
    check = "{% if ID | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}[TOOL_CALLS]{{ ID }}"
    written = check.replace("ID", "call.id") + "{{ call.function | tojson }}"
    loop, checked = "{%- for message in messages -%}", check.replace("ID", "message.tool_call_id")
    template = TOOL_TEMPLATE.replace("{{ WRITTEN }}", written)
    template = template.replace(loop, loop + "{% if message.role == 'tool' %}" + checked + "{% endif %}")
    tokenizer = with_template(template)
    texts = [tokenizer.decode(encode_messages(tokenizer, checked_messages(RESULTS), [ADD])) for _ in range(2)]
    first, second, *results = re.findall(r"\[TOOL_CALLS\](\w{9})", texts[0])
    assert results == [first, second]
    assert first != second
    assert texts[0] == texts[1], "ids stay the same from request to request"
    known = [{**TURNS[1]["tool_calls"][0], "id": "abcdefghi"}]
    text = tokenizer.decode(
        encode_messages(tokenizer, checked_messages([TURNS[0], {**TURNS[1], "tool_calls": known}, TURNS[2]]))
    )
    assert text.count("[TOOL_CALLS]abcdefghi") == 2


PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
PARTS_ANYWHERE = STRICT_TEMPLATE.replace("{{ m.content }}", PARTS)
PARTS_OF_USERS = STRICT_TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'user' %}" + PARTS + "{% else %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        PARTS_ANYWHERE,
        PARTS_OF_USERS,
        PARTS_ANYWHERE.replace("'assistant']", "'assistant', 'system']").replace(
            "loop.index0", "(loop.index0 - (messages[0].role == 'system'))"
        ),
    ],
)
def test_a_template_that_reads_parts_alone_is_sent_parts(template: str) -> None:
    tokenizer = with_template(template)
    text = tokenizer.decode(encode_messages(tokenizer, checked_messages(RESULTS), [ADD]))
    for shown in ("Be brief.", "You may call", "Add 1 and 2.", "<tool_call>", "3 für ö", "Why?"):
        assert shown in text
    assert "[{" not in text


def test_a_template_that_never_shows_the_question_is_refused_at_load() -> None:
    with pytest.raises(ModelError, match="does not show what a user writes"):
        with_template("{% for m in messages %}<|{{ m.role }}|>{{ m.text }}{% endfor %}<|assistant|>")
