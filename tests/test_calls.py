"""Tool calls and text, parsed from model output chunk by chunk."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import WordTokenizer

from stepspec.chat.answer import AnswerReader
from stepspec.chat.calls import CallReader, ListedCalls, WrittenCalls
from stepspec.chat.events import AnswerDelta, ToolCall, ToolCallDelta, ToolCalled
from stepspec.chat.tools import FORMATS, call_format

TOKENIZER = WordTokenizer()
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def reader(family: str) -> WrittenCalls:
    """Return the call reader of a model family."""
    form = FORMATS[family]
    return WrittenCalls(TOKENIZER.response_parser(form.template, [ADD]), in_json=form.in_json)


def read(reader: CallReader, chunks: Sequence[str]) -> tuple[str, list[tuple[str, Any, bool]]]:
    """Return the text, and for each call its name, its arguments and whether it is valid."""
    found = [each for chunk in chunks for each in reader.feed(chunk)] + reader.finish()
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
        [("add", '{"a": 1', False)],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "", [("add", '{"a": 1}', False)]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>', "", [("add", "{a: 1}", False)]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}, "id": {}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', "", [ONE]),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "\\"}]\\\\", "list": [{}, [1]]}}</tool_call>',
        "",
        [("say", {"text": '"}]\\', "list": [{}, [1]]}, True)],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now"}]</tool_call>',
        "",
        [ONE, ("now", {}, True)],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_', "", [ONE]),
    ("hermes", "No call at all. \n", "No call at all. \n", []),
    ("hermes", "Less < more, and <tool is no tag.", "Less < more, and <tool is no tag.", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ONE]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}', "", [ONE, TWO]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": null}, '
        '{"arguments": {}, "name": "now"}, {"name": "add", "arguments": {"a": 3, "b": 4}}]',
        "",
        [ONE, ("now", {}, True), ("now", {}, True), TWO],
    ),
    ("mistral", "[TOOL_CALLS]add[ARGS][1]", "", [("add", "[1]", False)]),
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
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}\n\nThis adds them.', "", [ONE]),
    (
        "llama",
        '{"name": "now", "parameters": {}}; {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}; '
        '{"name": "now"}',
        "",
        [("now", {}, True), ONE, ("now", {}, True)],
    ),
    ("llama", 'A map is {"name": "x"}.', 'A map is {"name": "x"}.', []),
    ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```'), "", [ONE]),
    ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```', "", [ONE]),
    ("deepseek", "Well." + DEEPSEEK.format('add<｜tool▁sep｜>{"a": 1, "b": 2}'), "Well.", [ONE]),
    (
        "qwen-xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [ONE],
    ),
]


@pytest.mark.parametrize(("family", "text", "plain", "calls"), WRITTEN)
def test_a_family_s_calls_are_read(family: str, text: str, plain: str, calls: list[Any]) -> None:
    assert read(reader(family), [text]) == (plain, calls)


@pytest.mark.parametrize(("family", "text", "plain", "calls"), WRITTEN)
def test_calls_are_read_letter_by_letter(family: str, text: str, plain: str, calls: list[Any]) -> None:
    assert read(reader(family), list(text)) == (plain, calls)


def test_every_call_has_its_own_id() -> None:
    text = WRITTEN[1][1]
    ids = [each.id for each in reader("hermes").feed(text) if isinstance(each, ToolCall)]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)  # Mistral's templates accept only this form


@pytest.mark.parametrize(("family", "text", "plain", "calls"), WRITTEN)
def test_the_beginning_of_a_call_is_found(family: str, text: str, plain: str, calls: list[Any]) -> None:
    assert (FORMATS[family].opener.search(text) is not None) == bool(calls)


# JSON lists of calls, which the engine enforces.


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ONE]),
        (
            '\n\n[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}}]',
            "",
            [ONE, TWO],
        ),
        ('[{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1', False)]),
        ('[{"name": "ad', "", [("", '{"name": "ad', False)]),
        ('[{"arguments": {"a": 1, "b": 2}, "name": "add"}]', "", [ONE]),
        (
            '[{"name": "now", "arguments": {}}, {"arguments": {"a": 1, "b": 2}, "name": "add"}, {"name": "add", '
            '"arguments": {"a": 3, "b": 4}}]',
            "",
            [("now", {}, True), ONE, TWO],
        ),
        ('{"n": [1, {"m": 2}]}', '{"n": [1, {"m": 2}]}', []),
        ("", "", []),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_lists_of_calls_are_read(text: str, plain: str, calls: list[Any], size: int) -> None:
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    assert read(ListedCalls(), chunks) == (plain, calls)


# The answer while it is written.


@given(
    text=st.text("ab.", max_size=20),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_an_answer_ends_before_the_first_stop_string_however_it_is_chunked(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    positions = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[start:end] for start, end in itertools.pairwise(positions)]
    answer = AnswerReader(stops)
    shown = [event for chunk in chunks for event in answer.feed(chunk)] + list(answer.finish())
    # The stop string that is completed first ends the text; one that begins earlier but ends later has no effect.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    received = text[: min(ends)] if ends else text
    starts = [received.find(stop) for stop in stops if stop in received]
    emitted = "".join(event.text for event in shown if isinstance(event, AnswerDelta))
    assert emitted == answer.text
    assert answer.stopped == bool(starts)
    if len(chunks) <= 1:
        starts = [text.find(stop) for stop in stops if stop in text]
        assert emitted == (text[: min(starts)] if starts else text)
    assert not any(stop in emitted for stop in stops)


def test_calls_and_text_are_emitted_in_order() -> None:
    answer = AnswerReader((), reader("hermes"))
    events = [*answer.feed('Yes.\n<tool_call>{"name": "add", "argu'), *answer.feed('ments": {}}</tool_call>')]
    events += answer.finish()
    assert [type(event) for event in events] == [AnswerDelta, ToolCallDelta, ToolCalled]
    assert (answer.text, [call.name for call in answer.calls]) == ("Yes.", ["add"])


@pytest.mark.parametrize(("family", "text", "plain", "calls"), WRITTEN)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_call_deltas_add_up_to_the_calls(family: str, text: str, plain: str, calls: list[Any], size: int) -> None:
    answer = AnswerReader((), reader(family))
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    events = [event for chunk in chunks for event in answer.feed(chunk)] + list(answer.finish())
    for index, call in enumerate(answer.calls):
        first, *others = [event for event in events if isinstance(event, ToolCallDelta) and event.index == index]
        assert (first.id, first.name) == (call.id, call.name)
        assert all((delta.id, delta.name) == (None, None) for delta in others)
        assert "".join(delta.arguments for delta in (first, *others)) == call.arguments
        assert events.index(others[-1] if others else first) < events.index(ToolCalled(index, call))
    assert len(answer.calls) == len(calls)


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama", "deepseek"])
def test_calls_that_never_end_are_cut_off(family: str) -> None:
    """A runaway model nests its JSON so deeply that a parser of the complete text would fail."""
    start = next(text for name, text, _, calls in WRITTEN if name == family and calls == [ONE]).partition('"b"')[0]
    answer = AnswerReader((), reader(family))
    events = [*answer.feed(start + '"b": ' + "[" * 3000), *answer.finish()]
    emitted = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert [(call.name, call.arguments, call.problem) for call in answer.calls] == [
        ("add", emitted, "The call is incomplete.")
    ]


MARKS: Mapping[str, Sequence[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "</tool"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", "add[ARGS]", "[CALL_ID]abc"],
    "llama": ["<|python_tag|>", "; "],
    "deepseek": ["<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n", "\n```"],
    "qwen-xml": ["<tool_call>\n<function=add>", "<parameter=a>\n1\n</parameter>", "</function>\n</tool_call>"],
}
PARTS = [
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "say", "parameters": {"t": "}{\\"</tool_call>"}}',
    '{"arguments": {"a": 1}, "name": "add"}',
    '{"name": "add", "arguments": ',
    *['{"a": 1}', '{"name": "now"}', "Well.", "{", "}", '"', "\\", "[", "]", ",", " ", "\n"],
]


@given(data=st.data(), family=st.sampled_from(sorted(MARKS)), size=st.integers(1, 9))
def test_the_size_of_the_chunks_changes_nothing(data: st.DataObject, family: str, size: int) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*MARKS[family], *MARKS[family], *PARTS]), max_size=8)))
    chunks = [text[start : start + size] for start in range(0, len(text), size)]
    found = [read(reader(family), each) for each in ([text], chunks)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("content", "text", "calls"),
    [
        ({}, '{"name": "add", "arguments": {"a": 1, "b": 2}}', [ONE]),
        ({}, '{"name": "add", "arguments": {"a": 1, "b": 2}}}', [ONE]),
        ({"content_args": {"unquoted_keys": True}}, '{name:"add",arguments:{a:1,b:2}}', [ONE]),
        ({"content_args": {"unquoted_keys": True}}, '{"name": "add", "arguments": {a:1,b:2}}', [ONE]),
        (
            {"transform": {"name": "{content.f}", "arguments": "{content.x}"}},
            '{"f": "add", "x": {"a": 1, "b": 2}}',
            [ONE],
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_model_s_own_template_defines_how_its_calls_are_parsed(
    content: dict[str, Any], text: str, calls: list[Any], size: int
) -> None:
    tokenizer = WordTokenizer()
    called = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True, **content}
    fields = {"content": {"content": "text", "content_args": {"strip": False}}, "tool_calls": called}
    tokenizer.response_template = {"version": 1, "start_anchor": "\0", "fields": fields}  # type: ignore[assignment]
    form = call_format(tokenizer)
    assert form is not None
    assert form.opener.search("<call>")
    own = WrittenCalls(tokenizer.response_parser(form.template, [ADD]), in_json=form.in_json)
    output = f"Well.<call>{text}</call>"
    assert read(own, [output[start : start + size] for start in range(0, len(output), size)]) == ("Well.", calls)


@pytest.mark.parametrize(
    ("family", "start"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b'),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b'),
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b'),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b'),
    ],
)
def test_arguments_are_emitted_while_they_are_written(family: str, start: str) -> None:
    answer = AnswerReader((), reader(family))
    events = [event for letter in start for event in answer.feed(letter)]
    assert all(isinstance(event, ToolCallDelta) for event in events)
    assert "".join(event.arguments for event in events if isinstance(event, ToolCallDelta)) == '{"a": 1, "b'


def test_if_only_one_call_is_allowed_its_last_brace_ends_the_text() -> None:
    answer = AnswerReader((), ListedCalls(), only_call=True)
    events = [event for letter in '[{"name": "add", "arguments": {}}, {"name": "add"' for event in answer.feed(letter)]
    assert [type(event) for event in events] == [ToolCallDelta, ToolCallDelta, ToolCalled]
    assert answer.stopped
    assert not list(answer.finish())
