"""Tool calls and text, parsed from model output chunk by chunk."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import WordTokenizer

from stepspec.chat.answer import AnswerReader
from stepspec.chat.calls import MAX_HELD, CallReader, ListedCalls, OnlyCalls, WrittenCalls
from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.chat.tools import FORMATS, CallFormat, call_format
from stepspec.loop.ledger import Ledger
from stepspec.loop.limits import Limits
from stepspec.loop.options import RequestOptions

TOKENIZER = WordTokenizer()
NAMES = ("add", "now", "say")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "text": {"type": "string"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]


def reader_of(form: CallFormat) -> CallReader:
    """Return the reader of an answer that may have tool calls."""
    written = WrittenCalls(TOKENIZER.response_parser(form.template, TOOLS), form, NAMES)
    return OnlyCalls(written, NAMES, leading=form.leading)


def reader(family: str) -> CallReader:
    """Return the call reader of a model family; "json" is constrained output."""
    return ListedCalls(NAMES) if family == "json" else reader_of(FORMATS[family])


def read(reader: CallReader, chunks: Sequence[str], *, cut: bool = False) -> tuple[str, list[tuple[str, Any, bool]]]:
    """Return the text, and for each call its name, its arguments and whether it is valid."""
    found = [*(each for chunk in chunks for each in reader.feed(chunk)), *reader.finish(cut=cut)]
    calls = [each for each in found if isinstance(each, ToolCall)]
    text = "".join(each for each in found if isinstance(each, str))
    return text, [(call.name, _arguments(call), call.problem is None) for call in calls]


def _arguments(call: ToolCall) -> Any:
    return json.loads(call.arguments, parse_constant=pytest.fail) if call.problem is None else call.arguments


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
XML = (
    "<tool_call>\n<function={}>\n<parameter=a>\n{}\n</parameter>\n<parameter=b>\n{}\n</parameter>\n</function>\n"
    "</tool_call>"
)
ONE = ("add", {"a": 1, "b": 2}, True)
TWO = ("add", {"a": 3, "b": 4}, True)
NOW = ("now", {}, True)


def chunked(text: str, size: int) -> list[str]:
    """Return the text in chunks of `size` characters."""
    return [text[start : start + size] for start in range(0, len(text), size)]


WRITTEN = [
    ("hermes", 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "Sure.", [ONE]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 3, \\"b\\": 4}"}</tool_call>',
        "",
        [ONE, TWO],
    ),
    ("hermes", '\n\n<tool_call>\n{"name": "now"}\n</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}, "id": {}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "args": {"a": 1, "b": 2}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "add", "input": {"a": 1, "b": 2}}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>\n```json\n{"name": "add", "args": {"a": 1, "b": 2}}\n```\n</tool_call>', "", [ONE]),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "\\"}]\\\\", "list": [{}, [1]]}}</tool_call>',
        "",
        [("say", {"text": '"}]\\', "list": [{}, [1]]}, True)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "say", "arguments": {"text": "A </tool_call> \\"<tool_call>{\n\t"}}</tool_call>\nSo.',
        "\nSo.",
        [("say", {"text": 'A </tool_call> "<tool_call>{\n\t'}, True)],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now"}]</tool_call>',
        "",
        [ONE, NOW],
    ),
    ("hermes", "No call at all. \n", "No call at all. \n", []),
    ("hermes", 'Less < more, and <tool is "no" tag.', 'Less < more, and <tool is "no" tag.', []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ONE]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}', "", [ONE, TWO]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "now", "arguments": null}, '
        '{"arguments": {}, "name": "now"}, {"name": "add", "arguments": {"a": 3, "b": 4}}]',
        "",
        [ONE, NOW, NOW, TWO],
    ),
    ("mistral", 'Well.[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1, "b": 2}', "Well.", [ONE]),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
    ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', "", [ONE]),
    ("llama", '{"type": "function", "function": {"name": "add", "parameters": {"a": 1, "b": 2}}}', "", [ONE]),
    (
        "llama",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "add", "parameters": {"a": 3, "b": 4}}',
        "",
        [ONE, TWO],
    ),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}\n\nThis adds them.', "This adds them.", [ONE]),
    ("llama", '{"name": "now", "parameters": {}} [1] is a note', "[1] is a note", [NOW]),
    (
        "llama",
        '{"name": "now", "parameters": {}}; {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}; '
        '{"name": "now"}',
        "",
        [NOW, ONE, NOW],
    ),
    ("llama", 'A map is {"name": "now"}.', 'A map is {"name": "now"}.', []),
    ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```'), "", [ONE]),
    (
        "deepseek",
        DEEPSEEK.format('function<｜tool▁sep｜>say\n```json\n{"text": "<｜tool▁call▁end｜>"}\n```'),
        "",
        [("say", {"text": "<｜tool▁call▁end｜>"}, True)],
    ),
    ("deepseek", "Well." + DEEPSEEK.format('add<｜tool▁sep｜>{"a": 1, "b": 2}'), "Well.", [ONE]),
    ("qwen-xml", XML.format("add", 1, 2), "", [ONE]),
    ("qwen-xml", f"Well.\n\n{XML.format('add', 1, 2)}\n{XML.format('add', 3, 4)}", "Well.", [ONE, TWO]),
    # An answer that is nothing but calls is read in every family.
    *(
        (family, text, "", calls)
        for family in ("hermes", "llama", "qwen-xml")
        for text, calls in (
            ('```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', [ONE]),
            ('\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n', [ONE]),
            ('[{"name": "add", "args": {"a": 1, "b": 2}}, {"name": "now"}]', [ONE, NOW]),
            (
                '```json\n{"name": "now"}\n```\n\n```json\n{"arguments": {"a": 3, "b": 4}, "name": "add"}\n```',
                [NOW, TWO],
            ),
        )
    ),
]
TEXTS = [
    '{"name": "Ann", "age": 5}',
    '{"name": "Ann", "arguments": {}}',
    '{"total": 5, "name": "add", "arguments": {}}',
    "{x | x > 0} is a set.",
    "[1, 2]",
    "{}",
    '```python\nprint({"name": "now"})\n```',
    'The call is\n```json\n{"name": "now"}\n```',
    '```json\n{"name": "add", "arguments": {"a": 1',
    '```json\n{"name": "now"}\n```\nThis is how a call looks.',
    '[{"name": "now"}, 3] are items.',
]
"""Answers without a call, in any family."""


@pytest.mark.parametrize(("family", "text", "plain", "calls"), WRITTEN)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_family_s_calls_are_read(family: str, text: str, plain: str, calls: list[Any], size: int) -> None:
    assert read(reader(family), chunked(text, size)) == (plain, calls)


@pytest.mark.parametrize(
    "text", [*TEXTS, '[{"name": "now"}, {"name": "Ann"}]', '{"name": "now"}\n\nThis is how to call it.']
)
@pytest.mark.parametrize("size", [1, 1000])
def test_json_that_is_no_call_is_the_answer(text: str, size: int) -> None:
    for family in FORMATS:
        if family == "llama" and text not in TEXTS:
            continue
        assert read(reader(family), chunked(text, size)) == (text, [])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("family", "body", "name"),
    [
        ("hermes", "add 1 and 2", ""),
        ("hermes", '{"name": "add", "arguments": [1]}', "add"),
        ("hermes", '{"name": "add", "arguments": "5"}', "add"),
        ("hermes", '{"name": "add", "arguments": "a b"}', "add"),
        ("hermes", '{"name": "add", "arguments": {a: 1}}', ""),
        ("hermes", '{"name": "add", "arguments": {"a": NaN}}', ""),
        ("hermes", '{"name": "add", "arguments": {"a": -Infinity}}', ""),
        ("hermes", '{"name": "add", "arguments": {"a": 1e999}}', "add"),
        ("hermes", '{"name": "add", "arguments": "{\\"a\\": NaN}"}', "add"),
        ("hermes", '{"name": "add", "arguments": {"a": 1, "a": 2}}', ""),
        ("hermes", '{"name": "say", "arguments": {"text": "\\ud800"}}', "say"),
        ("hermes", '{"name": "add", "arguments": {}, "parameters": {"a": 1}}', "add"),
        ("hermes", '{"name": "add", "values": {"a": 1}}', "add"),
        ("hermes", '{"name": "add", "arguments": {"a": 1}, "b": 2}', "add"),
        ("hermes", '{"name": "subtract", "arguments": {"a": 1}}', "subtract"),
        ("hermes", '{"arguments": {}}', ""),
        ("hermes", '{"name": "add", "arguments": {"a": [' + "[" * 5000 + "]" * 5000 + "]}}", ""),
        ("mistral", "add[ARGS][1]", ""),
        ("mistral", 'add[ARGS]{"a": 1,', ""),
        ("mistral", 'subtract[ARGS]{"a": 1}', "subtract"),
        ("qwen-xml", "\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2", ""),
        ("qwen-xml", "\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n", ""),
        ("qwen-xml", "\n<parameter=a>\n1\n</parameter>\nb = 2\n", ""),
        ("qwen-xml", "\n<parameter=text>\na <parameter=a>\n1\n</parameter>\n", ""),
        ("qwen-xml", "\n<parameter=text>\na <parameter=a>\n1\n</parameter>\nb\n</parameter>\n", ""),
        ("qwen-xml", "\n<parameter=text>\na\n<tool_call>\n<function=now>\n</parameter>\n", ""),
        ("qwen-xml", "\n<parameter=text>\na <function=now> b\n</parameter>\n", ""),
    ],
)
def test_what_is_no_call_of_a_tool_is_text_and_an_invalid_call(family: str, body: str, name: str, size: int) -> None:
    begin, end = {
        "hermes": ("<tool_call>", "</tool_call>"),
        "mistral": ("[TOOL_CALLS]", ""),
        "qwen-xml": ("<tool_call>\n<function=add>", "</function>\n</tool_call>"),
    }[family]
    found = read(reader(family), chunked(f"Well.{begin}{body}{end}", size))
    assert found == (f"Well.{body}", [(name, body, False)])


@pytest.mark.parametrize(
    ("family", "begin", "repeated"),
    [
        ("qwen-xml", "<tool_call>\n<function=say>", "<parameter=a>\n"),
        ("qwen-xml", "<tool_call>\n<function=say>", "<parameter="),
        ("qwen-xml", "<tool_call>\n<function=say>", "</function>\n"),
        ("qwen-xml", "<tool_call>", " "),
        ("qwen-xml", "<tool_call><function=", "a"),
        ("deepseek", "<｜tool▁calls▁begin｜>", " "),
        ("deepseek", "", " "),
    ],
)
@pytest.mark.parametrize("size", [8, 1_000_000])
def test_time_grows_with_the_length_alone(family: str, begin: str, repeated: str, size: int) -> None:
    text = begin + repeated * (100_000 // len(repeated)) + "</function>\n</tool_call>"
    start = time.process_time()
    read(reader(family), chunked(text, size))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("size", [1, 2, 1000])
@pytest.mark.parametrize("family", ["hermes", "qwen-xml", "mistral", "deepseek"])
def test_null_characters_are_text(family: str, size: int) -> None:
    for text in ("a\0b", "a\0", "\0\0", "<tool\0", "a <\0"):
        assert read(reader(family), chunked(text, size)) == (text, [])


OWN_XML: Mapping[str, Any] = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    "repeats": True,
}


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ("<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n", True),
        ("<parameter=a>\n1\n</parameter>\n<parameter=text>\nabc\n", False),
        ("<parameter=text>\nabc\n<parameter=a>\n1\n</parameter>\n", False),
        ("<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n", False),
    ],
)
def test_parameters_in_a_model_s_own_template_must_be_complete(body: str, valid: bool) -> None:
    tokenizer = WordTokenizer()
    fields = {"content": {"content": "text"}, "tool_calls": OWN_XML}
    tokenizer.response_template = {"version": 1, "start_anchor": "\0", "fields": fields}  # type: ignore[assignment]
    form = call_format(tokenizer)
    assert form is not None
    text = f"<tool_call>\n<function=add>\n{body}</function>\n</tool_call>"
    assert [call[2] for call in read(reader_of(form), [text])[1]] == [valid]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_cannot_be_parsed_leaves_the_others(size: int) -> None:
    tokenizer = WordTokenizer()
    called = {"open": "<call>", "close": "</call>", "content": "json", "transform": {"name": "{content.f}"}}
    fields = {"content": {"content": "text", "optional": False}, "tool_calls": {**called, "repeats": True}}
    tokenizer.response_template = {"version": 1, "start_anchor": "\0", "fields": fields}  # type: ignore[assignment]
    form = call_format(tokenizer)
    assert form is not None
    good, bad = '<call>{"f": "now"}</call>', "<call>{f}</call>"
    text, calls = read(reader_of(form), chunked(good + bad + good, size))
    assert (text, calls) == ("{f}", [NOW, ("", "{f}", False), NOW])


def test_quotes_in_plain_text_do_not_split_it() -> None:
    for family in FORMATS:
        answer = AnswerReader((), reader(family))
        assert [*answer.feed('So "a" and "b", \'"c"\' and'), *answer.finish()] == [
            AnswerDelta('So "a" and "b", \'"c"\' and')
        ]


def test_every_call_has_its_own_id() -> None:
    text = WRITTEN[1][1]
    ids = [each.id for each in reader("hermes").feed(text) if isinstance(each, ToolCall)]
    assert len(set(ids)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in ids)  # Mistral's templates accept only this form


def limits_of(family: str) -> Limits:
    text: Any = None  # of which these limits read nothing
    return Limits(RequestOptions(), Ledger(1), text, call_opener=FORMATS[family].opener)


@pytest.mark.parametrize(("family", "text", "plain", "calls"), WRITTEN)
def test_the_beginning_of_a_call_is_found(family: str, text: str, plain: str, calls: list[Any]) -> None:
    assert limits_of(family).opens_call(text, before="") == bool(calls)


def test_only_the_beginning_of_an_answer_may_be_a_call_without_a_mark() -> None:
    limits, text = limits_of("hermes"), '```json\n{"name": "now"}\n```\n\n'
    assert [limits.opens_call(text, before) for before in ("", "\n\n", "Such is a call:\n\n")] == [True, True, False]


# Text that ends within a call.

LISTED = [
    ("json", '[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "say", "arguments": {"text": "]}]"}}]'),
    ("json", '\n[{"arguments": {"a": 1, "b": 2}, "name": "add"}]'),
]


@pytest.mark.parametrize(("family", "text"), [*(each[:2] for each in WRITTEN), *LISTED])
def test_every_part_of_an_answer_has_the_first_calls_of_the_answer(family: str, text: str) -> None:
    """A text that was cut, or that the model ended too early, has no call that the entire text does not have."""
    calls = read(reader(family), [text])[1]
    for end, cut in itertools.product(range(len(text)), (True, False)):
        found = read(reader(family), [text[:end]], cut=cut)
        of_part = [call for call in found[1] if call[2] or cut]
        assert of_part == calls[: len(of_part)]
        if end % 7 == 0:
            assert read(reader(family), list(text[:end]), cut=cut) == found


@pytest.mark.parametrize("family", [*FORMATS, "json"])
def test_a_stop_string_within_a_call_leaves_no_call_and_says_so(family: str) -> None:
    call = '{"name": "say", "arguments": {"text": "one two three"}}'
    text = {
        "mistral": f"[TOOL_CALLS]{call}",
        "llama": call,
        "deepseek": DEEPSEEK.format('say<｜tool▁sep｜>{"text": "one two three"}'),
        "qwen-xml": XML.format("add", 1, "2 two three"),
        "json": f"[{call}]",
    }.get(family, f"<tool_call>{call}</tool_call>")
    for size in (1, 1000):
        answer = AnswerReader(("two",), reader(family))
        events = [*(event for chunk in chunked(text, size) for event in answer.feed(chunk)), *answer.finish()]
        assert answer.incomplete
        assert not any(isinstance(event, ToolCalled) for event in events)
        whole = AnswerReader((), reader(family))
        _ = [*(event for chunk in chunked(text, size) for event in whole.feed(chunk)), *whole.finish()]
        assert (whole.has_call, whole.incomplete) == (True, False)


def test_text_is_held_back_up_to_a_limit() -> None:
    held, answer = 0, reader("hermes")
    for chunk in itertools.chain(['{"name": "say", "arguments": {"text": "'], itertools.repeat("a" * 1000)):
        found = "".join(each for each in answer.feed(chunk) if isinstance(each, str))
        held += len(chunk) - len(found)
        assert held <= MAX_HELD + 1000
        if found:
            break
    assert held == 0


def test_other_json_is_not_held_back() -> None:
    for text in ('{"a', '{"answer"', "{x", "[1", "Hello", "```py"):
        answer = reader("hermes")
        found = "".join(str(each) for letter in text for each in answer.feed(letter))
        assert found == ("" if text == '{"a' else text)


# JSON lists of calls, which the engine enforces.

HALF = '{"name": "add", "arguments": {"a": 1'


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', "", [ONE]),
        (
            '\n\n[{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name": "add", "arguments": {"a": 3, "b": 4}}]',
            "",
            [ONE, TWO],
        ),
        ('[{"name": "add", "arguments": {"a": 1', HALF, [("", HALF, False)]),
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
    assert read(reader("json"), chunked(text, size)) == (plain, calls)


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
    assert [type(event) for event in events] == [AnswerDelta, ToolCalled]
    assert (answer.text, [call.name for call in answer.calls]) == ("Yes.", ["add"])


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama", "deepseek"])
@pytest.mark.parametrize("cut", [True, False])
def test_calls_that_never_end_are_no_calls(family: str, cut: bool) -> None:
    """A runaway model nests its JSON so deeply that a parser of the complete text would fail."""
    start = next(text for name, text, _, calls in WRITTEN if name == family and calls == [ONE]).partition('"b"')[0]
    answer = AnswerReader((), reader(family))
    _ = [*answer.feed(start + '"b": ' + "[" * 3000), *answer.finish(cut=cut)]
    assert not answer.has_call
    assert answer.incomplete == cut


MARKS: Mapping[str, Sequence[str]] = {
    "hermes": ["<tool_call>", "</tool_call>", "</tool"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", "add[ARGS]", "[CALL_ID]abc"],
    "llama": ["<|python_tag|>", "; "],
    "deepseek": ["<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "\n```json\n", "\n```"],
    "json": ["[", "]", ", "],
    "qwen-xml": ["<tool_call>\n<function=add>", "<parameter=a>\n1\n</parameter>", "</function>\n</tool_call>"],
}
PARTS = [
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "say", "parameters": {"t": "}{\\"</tool_call>"}}',
    '{"arguments": {"a": 1}, "name": "add"}',
    '{"name": "add", "arguments": ',
    '{"name": "Ann", "age": 5}',
    "```json\n",
    "\n```",
    *['{"a": 1}', '{"name": "now"}', "Well.", "{", "}", '"', "\\", "[", "]", ",", " ", "\n"],
]


@given(data=st.data(), family=st.sampled_from(sorted(MARKS)), size=st.integers(1, 9), end=st.integers(0, 200))
def test_the_size_of_the_chunks_changes_nothing(data: st.DataObject, family: str, size: int, end: int) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from([*MARKS[family], *MARKS[family], *PARTS]), max_size=8)))
    for cut in (False, True):
        found = [read(reader(family), each, cut=cut) for each in ([text], chunked(text, size))]
        assert found[0] == found[1]
    whole, part = (
        [call for call in read(reader(family), [each], cut=True)[1] if call[2]] for each in (text, text[:end])
    )
    assert part == whole[: len(part)]


@pytest.mark.parametrize(
    ("content", "text", "calls"),
    [
        ({}, '{"name": "add", "arguments": {"a": 1, "b": 2}}', [ONE]),
        ({}, '{"name": "add", "arguments": {"a": 1, "b": 2}}}', [ONE]),
        ({"content": "text"}, '{"name": "add", "arguments": {"a": 1, "b": 2}}', [ONE]),
        ({"content_args": {"allow_non_json": True}}, '{"name": "add", "arguments": {"a": 1, "b": 2}}', [ONE]),
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
    output = f"Well.<call>{text}</call>"
    assert read(reader_of(form), chunked(output, size)) == ("Well.", calls)
    for end in range(len(output)):
        assert not any(call[2] for call in read(reader_of(form), [output[:end]], cut=end % 2 == 0)[1])


def test_if_only_one_call_is_allowed_its_last_brace_ends_the_text() -> None:
    answer = AnswerReader((), reader("json"), only_call=True)
    events = [event for letter in '[{"name": "add", "arguments": {}}, {"name": "add"' for event in answer.feed(letter)]
    assert [type(event) for event in events] == [ToolCalled]
    assert answer.stopped
    assert not answer.incomplete
    assert not list(answer.finish())
