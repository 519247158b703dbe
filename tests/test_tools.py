"""Tools: their descriptions, and how each model family is shown tools and writes tool calls."""

import json
from typing import Any

import pytest
from scripted import PLAIN_TEMPLATE, WordTokenizer

from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.chat.tools import FORMATS, Toolbox, call_format, schema_text
from stepspec.errors import UsageError


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


def test_a_schema_beside_tools_keeps_its_definitions_at_the_top() -> None:
    own = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
    combined = json.loads(schema_text(own, Toolbox.checked([ADD])))
    assert combined["$defs"] == own["$defs"]
    assert [form["type"] for form in combined["anyOf"]] == ["array", "object"]
    assert json.loads(schema_text(own)) == own


def test_definitions_in_a_tool_s_parameters_move_to_the_top() -> None:
    form = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    one, other = ({"type": "function", "function": {"name": name, "parameters": form}} for name in ("one", "other"))
    schema = Toolbox.checked([one, other], "required").schema()
    assert schema["$defs"] == {"one.P": {"type": "integer"}, "other.P": {"type": "integer"}}
    refs = [call["properties"]["arguments"]["properties"]["p"] for call in schema["items"]["anyOf"]]
    assert refs == [{"$ref": "#/$defs/one.P"}, {"$ref": "#/$defs/other.P"}]


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
