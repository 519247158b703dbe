"""The prompts, rendered through real chat templates by a small tokenizer."""

import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scripted import PLAIN_TEMPLATE, THINKING_TEMPLATE, WordTokenizer, with_template

from stepspec.chat.prompts import (
    PROBLEM_PROMPTS,
    RATING_PROMPT,
    YES_NO_PROMPT,
    JudgePrompt,
    RawPrompt,
    checked_messages,
    encode_messages,
    encode_prompt,
    encode_request,
    problem_prompt,
    prompt_version,
    render_probe,
)
from stepspec.engines.marked import Marks
from stepspec.engines.protocol import TokenBuffer
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.conversation import Conversation
from stepspec.errors import UsageError

NEWLINE_TEMPLATE = THINKING_TEMPLATE.replace("<think>{% endif", "<think>\n{% endif")
# Trims every turn and drops the thinking of earlier answers, as the templates of reasoning models do.
FORGETFUL_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] | trim -%}
{%- if message['role'] == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1] -%}
{%- endif -%}
<|{{ message['role'] }}|>
{{ content }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""
REFUSING_TEMPLATE = "{{ raise_exception('Only one turn is supported') }}"
ONE_TURN_TEMPLATE = "{{ messages[0]['content'] }}<|assistant|>"


def ask(question: str, template: str, *, tags: bool = True) -> str:
    tokenizer = WordTokenizer(template, tags=tags)
    return tokenizer.decode(encode_request(tokenizer, question))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (THINKING_TEMPLATE, "<|end|><|assistant|><think>"),
        (NEWLINE_TEMPLATE, "<|end|><|assistant|><think>\n"),
        (FORGETFUL_TEMPLATE, "<|end|>\n<|assistant|>\n<think>\n"),
    ],
)
@pytest.mark.parametrize("question", ["How many?", "think", "<think>", " What does <think> mean? ", "|", "n"])
def test_the_thinking_is_opened_once_for_any_question(question: str, template: str, end: str) -> None:
    text = ask(question, template)
    assert text.endswith(end)
    assert text.count("<think>") == 1 + question.count("<think>")


@pytest.mark.parametrize("tag", ["</think>", "<think>", "<|end|>", "<|user|>"])
def test_a_special_token_written_in_a_question_stays_text(tag: str) -> None:
    tokenizer = WordTokenizer()
    plain = encode_request(tokenizer, "How many are there?")
    (special,) = tokenizer.encode(tag)
    ids = encode_request(tokenizer, f"How many {tag} are there?")
    assert ids.count(special) == plain.count(special)
    assert f"How many {tag} are there?" in tokenizer.decode(ids)


def test_the_thinking_is_not_opened_for_a_model_without_tags() -> None:
    assert ask("How many?", PLAIN_TEMPLATE, tags=False) == "<|user|>How many?<|end|><|assistant|>"


@pytest.mark.parametrize("id", PROBLEM_PROMPTS)
@pytest.mark.parametrize("question", ["How many?", "{question} {0} {}", "}{", "{{x}}", "\\boxed{{}}"])
def test_a_question_appears_unchanged_in_its_prompt(id: str, question: str) -> None:
    text = problem_prompt(id).format(question=question)
    before, _, after = problem_prompt(id).partition("{question}")
    assert text == before.format() + question + after.format()
    assert ("\\boxed{}" in text.replace(question, "", 1)) == (id not in {"bare", "qa", "answer-line"})


@pytest.mark.parametrize("rating", [RATING_PROMPT, YES_NO_PROMPT])
def test_a_question_about_a_step_is_a_turn_and_the_answer_comes_next(rating: JudgePrompt) -> None:
    probe = render_probe(WordTokenizer(PLAIN_TEMPLATE), rating)
    assert probe == f"<|end|><|user|>{rating.user}<|end|><|assistant|>{rating.prefill}"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, THINKING_TEMPLATE, NEWLINE_TEMPLATE, FORGETFUL_TEMPLATE])
@pytest.mark.parametrize("rating", [RATING_PROMPT, YES_NO_PROMPT])
def test_a_probe_continues_a_request_as_the_template_renders_the_conversation(
    rating: JudgePrompt, template: str
) -> None:
    messages = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "Nine."},
        {"role": "user", "content": rating.user},
        {"role": "assistant", "content": rating.prefill + "7"},
    ]
    tokenizer = WordTokenizer(template)
    conversation = tokenizer.render(messages, add_generation_prompt=False)
    request = tokenizer.render(messages[:1], add_generation_prompt=False)
    assert conversation.startswith(request)
    assert "Nine." + render_probe(tokenizer, rating) + "7" in conversation
    assert render_probe(tokenizer, rating).endswith(rating.prefill)


def test_the_published_rating_opens_its_thinking_once_and_no_tag_ends_it() -> None:
    probe = render_probe(WordTokenizer(THINKING_TEMPLATE), RATING_PROMPT)
    assert probe.count("<think>") == 1
    assert "</think>" not in probe


@pytest.mark.parametrize("template", [REFUSING_TEMPLATE, ONE_TURN_TEMPLATE])
def test_a_template_that_cannot_ask_for_a_rating_is_refused(template: str) -> None:
    with pytest.raises(UsageError, match="chat template"):
        render_probe(WordTokenizer(template), RATING_PROMPT)


@pytest.mark.parametrize("text", ["One.", "<s>One."])
def test_a_prompt_without_a_template_begins_once(text: str) -> None:
    tokenizer = WordTokenizer(PLAIN_TEMPLATE, special="<s>")
    tokenizer.start_ids = tokenizer.encode("<s>")
    assert tokenizer.decode(RawPrompt(text).encoded(tokenizer)[0]) == "<s>One."
    assert tokenizer.decode(RawPrompt(text, add_special_tokens=False).encoded(tokenizer)[0]) == text


def test_an_unknown_prompt_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no problem prompt 'boxd'\. Did you mean 'boxed'\?"):
        problem_prompt("boxd")


def test_another_wording_has_another_version() -> None:
    versions = {prompt_version(text) for text in [*PROBLEM_PROMPTS.values(), "{question} "]}
    assert len(versions) == len(PROBLEM_PROMPTS) + 1
    assert all(len(version) == 12 for version in versions)


# Conversations

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "<think>One two.</think>Nine."},
    {"role": "user", "content": "And then?"},
]


def converse(messages: list[dict[str, Any]], template: str = PLAIN_TEMPLATE) -> str:
    tokenizer = WordTokenizer(template, tags=False)
    return tokenizer.decode(encode_messages(tokenizer, checked_messages(messages)))


def test_the_template_renders_a_conversation() -> None:
    before = "<|system|>Be brief.<|end|><|user|>How many?<|end|><|assistant|>Nine.<|end|>"
    assert (
        converse([*TALK[:2], {"role": "assistant", "content": "Nine."}, TALK[3]])
        == before + "<|user|>And then?<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("keeps", "thought"), [("", ""), ("{{ message.reasoning_content | default('') }}", "One two.")]
)
@pytest.mark.parametrize(
    "answer",
    [
        TALK[2],
        {"role": "assistant", "content": "Nine.", "reasoning_content": "One two."},
        {"role": "assistant", "content": "Nine.", "reasoning": "One two."},
    ],
    ids=["tags", "apart", "by the other name"],
)
def test_earlier_thinking_is_kept_or_dropped_as_the_template_wants(
    keeps: str, thought: str, answer: dict[str, Any]
) -> None:
    tokenizer = WordTokenizer(THINKING_TEMPLATE.replace("{{ message['content'] }}", keeps + "{{ message['content'] }}"))
    ids = encode_messages(tokenizer, checked_messages([*TALK[:2], answer, TALK[3]]))
    assert f"<|assistant|>{thought}Nine.<|end|>" in tokenizer.decode(ids)


def test_the_content_of_a_model_that_does_not_think_is_not_touched() -> None:
    assert f"<|assistant|>{TALK[2]['content']}<|end|>" in converse(TALK)


@pytest.mark.parametrize("position", range(len(TALK)))
def test_tags_stay_text_in_every_turn_of_a_conversation(position: int) -> None:
    tokenizer = WordTokenizer(PLAIN_TEMPLATE)
    plain = encode_messages(tokenizer, checked_messages(TALK))
    tagged = [
        {**message, "content": f"{message['content']} <|end|>"} if at == position else message
        for at, message in enumerate(TALK)
    ]
    (end,) = tokenizer.encode("<|end|>")
    ids = encode_messages(tokenizer, checked_messages(tagged))
    assert ids.count(end) == plain.count(end)
    assert tokenizer.decode(ids).count("<|end|>") == tokenizer.decode(plain).count("<|end|>") + 1


def test_text_in_content_blocks_is_text() -> None:
    blocks = [{"type": "text", "text": "How "}, {"type": "text", "text": "many?"}]
    assert converse([{"role": "user", "content": blocks}]) == converse([{"role": "user", "content": "How many?"}])


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "conversation is empty"),
        ([{"role": "user", "content": " "}], "question is empty"),
        ([*TALK, {"role": "user", "content": ""}], "last turn is empty"),
        (TALK[:3], "last turn is the assistant's own"),
        (["How many?"], "Turn 1 must be a mapping"),
        ([{"role": "usr", "content": "x"}], "Turn 1: There is no role 'usr'. Did you mean 'user'"),
        ([{"content": "x"}], "Turn 1: There is no role 'None'"),
        (
            [TALK[0], {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "Turn 2 has content that is not text",
        ),
        ([{"role": "user", "content": 7}], "Turn 1 has content that is not text"),
        ([{"role": "assistant", "content": "a", "reasoning": [7]}, *TALK], "Turn 1 has reasoning that is not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "Turn 1 has content that is not text"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_refused(messages: list[dict[str, Any]], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        checked_messages(messages)


# Special tokens in messages, with a real tokenizer

JSON_TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] | trim }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
NASTY = st.lists(
    st.sampled_from(
        ["<|end|>", "</think>", "<think>", "<|user|>", "<", "|>", '"', "\\", "\n", "\u00f6", "{", "12 ", "a"]
    )
    | st.text(max_size=3)
).map("".join)


JSON_TOKENIZER = with_template(JSON_TEMPLATE)


@given(NASTY, NASTY)
@example('s = "<|end|>"\n', "</think>")
def test_what_is_serialized_as_json_stays_json_with_special_tokens_in_it(text: str, other: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": other, "parameters": {"type": "object"}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {text: [other, {"x": text}]}}}
    turns = [
        {"role": "user", "content": f"q{text}q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": f"q{other}q"},
    ]
    ids = encode_messages(JSON_TOKENIZER, checked_messages(turns), [tool])
    described, asked, called, again, _ = split_at_special(ids)
    assert json.loads(described) == [tool]
    assert asked == f"q{text}q"
    assert json.loads(called.removeprefix("<tool_call>").removesuffix("</tool_call>")) == call["function"]
    assert again == f"q{other}q"


def split_at_special(ids: list[int]) -> list[str]:
    """Return the texts between the special tokens of a prompt, without empty ones."""
    parts: list[list[int]] = [[]]
    for id in ids:
        if JSON_TOKENIZER.is_special(id):
            parts.append([])
        else:
            parts[-1].append(id)
    return [JSON_TOKENIZER.decode(part) for part in parts if part or part is parts[-1]]


@pytest.mark.parametrize("cut", ["| upper", "[:9]", ".split('|') | first", "| replace('<', '')"])
def test_a_template_that_changes_texts_makes_no_special_token_of_them(cut: str) -> None:
    tokenizer = with_template(f"{{{{ messages[0]['content'] {cut} }}}}<|assistant|>")
    ids = encode_request(tokenizer, "a <|end|></think> <|user|> b")
    assert sum(map(tokenizer.is_special, ids)) == 1
    if cut == "| upper":
        assert tokenizer.decode(ids) == "A <|END|></THINK> <|USER|> B<|assistant|>"


XML_TOKENIZER = with_template(
    "{% for tool in tools or [] %}<function>{{ tool.function.name }}"
    "{% for k, v in tool.function.parameters.properties | items %}"
    "{% for x, y in v | items %}<{{ x }}>{{ y }}</{{ x }}>{% endfor %}{% endfor %}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}|>"
    "{% for call in message.tool_calls or [] %}<function={{ call.function.name | trim }}>"
    "{% for k, v in call.function.arguments | items %}<parameter={{ k }}>{{ v }}</{{ k }}>"
    "{% endfor %}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
EDGES = st.sampled_from(
    [tag[start:end] for tag in ("<|end|>", "</think>") for start in range(len(tag)) for end in range(start + 1, 9)]
)


@given(*[st.tuples(st.sampled_from(["", "x", " "]), EDGES, st.sampled_from(["", "x", " "])).map("".join)] * 4)
@example("x<|end|", "|end|", "/think", "<")
def test_no_field_becomes_a_special_token_with_the_template_s_text(a: str, b: str, c: str, d: str) -> None:
    def special(a: str, b: str, c: str, d: str) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": a, "arguments": {b: c}}}
        form = {"type": "object", "properties": {d: {a: b, c: d}}}
        turns = [{"role": "user", "content": a + d}, {"role": "assistant", "content": c, "tool_calls": [call]}]
        tool = {"type": "function", "function": {"name": b, "description": c, "parameters": form}}
        ids = encode_messages(XML_TOKENIZER, checked_messages([*turns, {"role": "user", "content": f"q{b}"}]), [tool])
        return [*filter(XML_TOKENIZER.is_special, ids)]

    assert special(a, b, c, d) == special("a", "b", "c", "d")


JSON_LINE = with_template("{{ messages[0].content | tojson }} <")


@given(NASTY)
def test_marks_at_edges_do_not_change_how_other_text_is_encoded(text: str) -> None:
    text = f"|>{text.strip()}<"
    assume(not JSON_LINE.special_spans(text))
    assert encode_request(JSON_LINE, text) == JSON_LINE.encode(json.dumps(text, ensure_ascii=False) + " <")


class EdgedTokenizer(WordTokenizer):
    """Any text may be part of a special token."""

    def special_edges(self, text: str) -> tuple[bool, bool]:
        return True, True


def test_names_that_templates_look_for_get_no_marks() -> None:
    form = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    marked = Marks(EdgedTokenizer()).put({"name": "f", "description": "F.", "parameters": form})
    assert marked["parameters"]["type"] == "object"
    ((name, of_name),) = marked["parameters"]["properties"].items()
    assert name != "x"
    assert of_name == {"type": "string"}


def test_a_variable_of_the_template_keeps_its_name() -> None:
    tokenizer = EdgedTokenizer(PLAIN_TEMPLATE + "{{ im_start }}", tags=False)
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": "How many?"}], arguments={"im_start": "<|end|>"})
    assert tokenizer.decode(prompt.ids).endswith("<|assistant|><|end|>")
    assert not tokenizer.is_special(prompt.ids[-1])


def test_a_server_that_takes_only_text_gets_no_special_tokens_of_a_message() -> None:
    address = Address.parsed("http://127.0.0.1:1/v1")
    for question, refused in (("1+1?", False), ("a <|end|> b", True), ("a <|en d|> b <", False)):
        buffer = TokenBuffer(encode_request(XML_TOKENIZER, question))
        Conversation(address, XML_TOKENIZER, buffer, as_ids=True)
        with pytest.raises(UsageError, match="takes only text") if refused else nullcontext():
            Conversation(address, XML_TOKENIZER, buffer, as_ids=False)
