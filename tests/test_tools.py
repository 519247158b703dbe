"""Tools: their descriptions, how families of models write calls, and what is made of what they write."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import PLAIN_TEMPLATE, WordTokenizer

from stepspec.answer import AnswerReader
from stepspec.errors import UsageError
from stepspec.prompts import checked_messages, encode_messages
from stepspec.step import AnswerDelta, ToolCall, ToolCalled
from stepspec.tools import FORMATS, CallReader, ListedCalls, Toolbox, WrittenCalls, call_format, schema_text

TOKENIZER = WordTokenizer()


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """A description of a tool."""
    form = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": form}}


ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})


def reader(family: str) -> WrittenCalls:
    """What reads that family's calls."""
    return WrittenCalls(TOKENIZER.response_parser(FORMATS[family].template, [ADD]))


def read(reader: CallReader, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any, bool]]]:
    """The text, and of each call its name, its arguments and whether it can be made."""
    found = [each for piece in pieces for each in reader.feed(piece)] + reader.finish()
    calls = [each for each in found if isinstance(each, ToolCall)]
    text = "".join(each for each in found if isinstance(each, str))
    return text, [(call.name, _arguments(call), call.problem is None) for call in calls]


def _arguments(call: ToolCall) -> Any:
    return json.loads(call.arguments) if call.problem is None else call.arguments


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
ONE = ("add", {"a": 1, "b": 2}, True)
TWO = ("add", {"a": 3, "b": 4}, True)
WRITTEN = [
    ("hermes", 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "Sure.", [ONE]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 3, \\"b\\": 4}"}</tool_call>',
        "",
        [ONE, TWO],
    ),
    ("hermes", '\n\n<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {}, True)]),
    ("hermes", "<tool_call>\nadd 1 and 2\n</tool_call>", "", [("", "add 1 and 2", False)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {}, True)]),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", [("add", "[1]", False)]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "5"}</tool_call>', "", [("add", "5", False)]),
    ("hermes", '<tool_call>\n{"arguments": {}}\n</tool_call>', "", [("", '{"arguments": {}}', False)]),
    (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1',
        "",
        [("", '{"name": "add", "arguments": {"a": 1', False)],
    ),
    ("hermes", "No call at all. \n", "No call at all. \n", []),
    ("hermes", "Less < more, and <tool is no tag.", "Less < more, and <tool is no tag.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ONE]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}', "", [ONE, TWO]),
    ("mistral", 'Well.[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1, "b": 2}', "Well.", [ONE]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1,', "", [("add", '{"a": 1,', False)]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
    (
        "llama",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}',
        "",
        [ONE, TWO],
    ),
    ("llama", 'A map is {"name": "x"}.', 'A map is {"name": "x"}.', []),
    ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```'), "", [ONE]),
    ("deepseek", "Well." + DEEPSEEK.format('add<｜tool▁sep｜>{"a": 1, "b": 2}'), "Well.", [ONE]),
    (
        "qwen-xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [ONE],
    ),
]


@pytest.mark.parametrize(("family", "text", "said", "calls"), WRITTEN)
def test_a_family_s_calls_are_read(family: str, text: str, said: str, calls: list[Any]) -> None:
    assert read(reader(family), [text]) == (said, calls)


@pytest.mark.parametrize(("family", "text", "said", "calls"), WRITTEN)
def test_calls_are_read_letter_by_letter(family: str, text: str, said: str, calls: list[Any]) -> None:
    assert read(reader(family), list(text)) == (said, calls)


def test_calls_have_ids_of_their_own() -> None:
    text = WRITTEN[1][1]
    ids = [each.id for each in reader("hermes").feed(text) if isinstance(each, ToolCall)]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)  # Mistral's templates want nothing else


@pytest.mark.parametrize(("family", "text", "said", "calls"), WRITTEN)
def test_where_a_call_begins_is_seen(family: str, text: str, said: str, calls: list[Any]) -> None:
    assert (FORMATS[family].opener.search(text) is not None) == bool(calls)


# Lists of calls, which the engine holds the model to.


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ONE]),
        (
            '\n\n[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}}]',
            "",
            [ONE, TWO],
        ),
        ('[{"name": "add", "arguments": {"a": 1', "", [("", '{"name": "add", "arguments": {"a": 1', False)]),
        ('{"n": [1, {"m": 2}]}', '{"n": [1, {"m": 2}]}', []),
        ("", "", []),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_lists_of_calls_are_read(text: str, said: str, calls: list[Any], size: int) -> None:
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(ListedCalls(), pieces) == (said, calls)


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
        ([ADD, ADD], "auto", "Two tools are called 'add'"),
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


# The answer while it is written.


@given(
    text=st.text("ab.", max_size=20),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_an_answer_ends_in_front_of_the_first_stop_string_however_it_comes(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    answer = AnswerReader(stops)
    shown = [event for piece in pieces for event in answer.feed(piece)] + list(answer.finish())
    # The earliest to be whole ends the text at once; what begins earlier and ends later never comes.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    whole = text[: min(ends)] if ends else text
    starts = [whole.find(stop) for stop in stops if stop in whole]
    told = "".join(event.text for event in shown if isinstance(event, AnswerDelta))
    assert told == answer.text
    assert answer.stopped == bool(starts)
    if len(pieces) <= 1:
        starts = [text.find(stop) for stop in stops if stop in text]
        assert told == (text[: min(starts)] if starts else text)
    assert not any(stop in told for stop in stops)


def test_calls_and_text_come_in_their_order() -> None:
    answer = AnswerReader((), reader("hermes"))
    events = [*answer.feed('Yes.\n<tool_call>{"name": "add", "argu'), *answer.feed('ments": {}}</tool_call>')]
    events += answer.finish()
    assert [type(event) for event in events] == [AnswerDelta, ToolCalled]
    assert (answer.text, [call.name for call in answer.calls]) == ("Yes.", ["add"])
