"""Tools: their descriptions, and how families of models are told of them and write calls."""

import json
from typing import Any

import pytest
from scripted import PLAIN_TEMPLATE, WordTokenizer

from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.chat.tools import FORMATS, Toolbox, call_format, schema_text
from stepspec.errors import UsageError


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """A description of a tool."""
    form = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": form}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})


# Lists of calls, which the engine holds the model to.


def test_a_list_s_schema_names_the_tools() -> None:
    schema = Toolbox.checked([ADD, tool("now")], "required").schema()
    assert [each["properties"]["name"] for each in schema["items"]["anyOf"]] == [{"const": "add"}, {"const": "now"}]
    assert "maxItems" not in schema
    assert Toolbox.checked([ADD, tool("now")], "now").schema()["items"]["properties"]["name"] == {"const": "now"}
    assert Toolbox.checked([ADD], "required", parallel=False).schema()["maxItems"] == 1


def test_a_schema_beside_tools_keeps_its_definitions_where_they_are_looked_for() -> None:
    own = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}
    whole = json.loads(schema_text(own, Toolbox.checked([ADD])))
    assert whole["$defs"] == own["$defs"]
    assert [form["type"] for form in whole["anyOf"]] == ["array", "object"]
    assert json.loads(schema_text(own)) == own


def test_what_a_tool_s_parameters_define_is_found_at_the_top() -> None:
    form = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    one, other = ({"type": "function", "function": {"name": name, "parameters": form}} for name in ("one", "other"))
    schema = Toolbox.checked([one, other], "required").schema()
    assert schema["$defs"] == {"one.P": {"type": "integer"}, "other.P": {"type": "integer"}}
    refs = [call["properties"]["arguments"]["properties"]["p"] for call in schema["items"]["anyOf"]]
    assert refs == [{"$ref": "#/$defs/one.P"}, {"$ref": "#/$defs/other.P"}]


# Descriptions.


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
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
def test_tools_that_are_none_are_refused(tools: Any, choice: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Toolbox.checked(tools, choice)


def test_tools_that_must_not_be_called_are_not_shown() -> None:
    assert Toolbox.checked([ADD], "none").tools == {}


# Chat templates.

CALLS = "{%- for call in message.tool_calls or [] %}{{ WRITTEN }}{% endfor -%}"
KNOWING = "{%- if tools %}{{ tools | tojson }}{% endif -%}" + PLAIN_TEMPLATE.replace(
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


def knowing(written: str) -> WordTokenizer:
    """A tokenizer whose template writes calls so. Undefined fields are empty, as in transformers."""
    import jinja2

    tokenizer = WordTokenizer(KNOWING.replace("WRITTEN", written))
    environment = jinja2.Environment()
    tokenizer._template = environment.from_string(KNOWING.replace("WRITTEN", written))  # pyright: ignore
    return tokenizer


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_family_is_known_by_what_its_template_writes(family: str) -> None:
    assert call_format(knowing(TEMPLATES[family])) is FORMATS[family]


def test_a_template_that_knows_no_tools_is_known_too() -> None:
    assert call_format(WordTokenizer()) is None


@pytest.mark.parametrize("family", TEMPLATES)
def test_earlier_calls_are_shown_in_the_family_s_way(family: str) -> None:
    tokenizer = knowing(TEMPLATES[family])
    text = tokenizer.decode(encode_messages(tokenizer, checked_messages(TURNS), [ADD]))
    assert FORMATS[family].mark in text
    assert "<|tool|>3<|end|>" in text


def test_a_model_that_knows_no_tools_is_told_of_them_in_words() -> None:
    tokenizer = WordTokenizer()
    text = tokenizer.decode(encode_messages(tokenizer, checked_messages(TURNS), [ADD]))
    assert text.startswith("<|system|>You may call these tools")
    assert '"name": "add"' in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert "<|user|><tool_response>\n3\n</tool_response><|end|>" in text


def test_what_the_system_says_is_kept_beside_the_tools() -> None:
    tokenizer = WordTokenizer()
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}]
    text = tokenizer.decode(encode_messages(tokenizer, turns, [ADD]))
    assert text.startswith("<|system|>Be brief.\n\nYou may call these tools")
