"""The transcript: steps and answer do not depend on how the ids are chunked, and no character is split."""

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import WordTokenizer, check_deltas

from stepspec.chat.answer import AnswerReader
from stepspec.chat.events import AnswerDelta
from stepspec.engines.protocol import Stop
from stepspec.engines.thinking import ThinkingTags
from stepspec.loop.step import StepCommitted
from stepspec.loop.thinking import thinking_of
from stepspec.loop.transcript import Transcript

TOKENIZER = WordTokenizer()
PROMPT = TOKENIZER.encode("<|user|>é<|end|><|assistant|><think>")
TAGS = TOKENIZER.thinking
assert TAGS is not None
THINK_END = TAGS.end

fragments = st.sampled_from(["One", " two", ".", "\n\n", "\n", "3", "é", "→", "😀", "\ufffd", "</think>"])
texts = st.lists(fragments, max_size=40).map("".join)


def new(max_step_tokens: int = 6, tags: ThinkingTags | None = TAGS, answer: AnswerReader | None = None) -> Transcript:
    ends = TOKENIZER.end_ids | (tags.ends if tags is not None else set())
    return Transcript(PROMPT, TOKENIZER, Stop(max_step_tokens, ("\n\n",), ends), thinking_of(tags), answer)


def write(chunks: Sequence[Sequence[int]], max_step_tokens: int = 6, tags: ThinkingTags | None = TAGS) -> Transcript:
    """Write the chunks, and check that the events match the transcript."""
    transcript = new(max_step_tokens, tags)
    transcript.shows_deltas = True
    events = [event for chunk in chunks for event in transcript.write_on(chunk, "target")]
    events += transcript.finish("target")
    assert [event.step for event in events if isinstance(event, StepCommitted)] == transcript.steps
    check_deltas(events)
    assert "".join(event.text for event in events if isinstance(event, AnswerDelta)) == transcript.answer.text
    assert transcript.buffer.since(len(PROMPT)) == [id for chunk in chunks for id in chunk]
    return transcript


@given(
    text=texts,
    ends=st.booleans(),
    cut=st.integers(0, 10),
    max_step_tokens=st.integers(1, 8),
    tags=st.sampled_from([TAGS, None]),
    data=st.data(),
)
def test_however_the_ids_are_cut_into_chunks_the_text_is_the_same(
    text: str, ends: bool, cut: int, max_step_tokens: int, tags: ThinkingTags | None, data: st.DataObject
) -> None:
    ids = TOKENIZER.encode(text + "<|end|>" * ends)
    ids = ids[: len(ids) - cut] if not ends else ids
    cuts = data.draw(st.sets(st.integers(0, len(ids))))
    bounds = [0, *sorted(cuts), len(ids)]
    chunks = [ids[start:end] for start, end in itertools.pairwise(bounds)]
    in_one_chunk = write([ids], max_step_tokens, tags)
    in_chunks = write(chunks, max_step_tokens, tags)
    assert in_chunks.steps == in_one_chunk.steps
    assert in_chunks.answer.text == in_one_chunk.answer.text
    assert (in_chunks.thinking, in_chunks.ended) == (in_one_chunk.thinking, in_one_chunk.ended)


@given(text=texts.map(lambda text: text.replace("\ufffd", "")), max_step_tokens=st.integers(1, 8))
def test_nothing_of_a_finished_text_is_lost(text: str, max_step_tokens: int) -> None:
    reasoning, _, answer = text.partition("</think>")
    transcript = write([[id] for id in TOKENIZER.encode(text + "<|end|>")], max_step_tokens)
    assert "".join(step.text for step in transcript.steps) == without_marks(reasoning)
    assert transcript.answer.text == without_marks(answer)
    assert transcript.ended
    assert not transcript.thinking
    assert sum(step.num_tokens for step in transcript.steps) == len(TOKENIZER.encode(reasoning))
    assert all(step.end == "delimiter" for step in transcript.steps if step.text.endswith("\n\n"))


def without_marks(text: str) -> str:
    """Return the text without the names of special tokens."""
    return re.sub(r"</?think>|<\|\w+\|>", "", text)


@given(
    parts=st.lists(texts | st.sampled_from(["<think>", "<|user|>", "</think>", "é→"]), max_size=8),
    spelled=st.lists(st.booleans(), min_size=8, max_size=8),
    sizes=st.lists(st.integers(1, 3), min_size=60, max_size=60),
    keeps_user=st.booleans(),
)
def test_an_answer_contains_no_special_token_unless_it_is_spelled_out(
    parts: list[str], spelled: list[bool], sizes: list[int], keeps_user: bool
) -> None:
    """The deltas add up to the final answer. Special tokens that mark tool calls are left to the call reader."""
    encoded = [
        TOKENIZER.encode_text(part) if plain else TOKENIZER.encode(part)
        for part, plain in zip(parts, spelled, strict=False)
    ]
    ids = [id for part in encoded for id in part]
    marks = "calls begin with <|user|>" if keeps_user else ""
    transcript = new(answer=AnswerReader(marks=marks))
    list(transcript.write_on([THINK_END], "target"))
    emitted, rest = list[str](), [*ids, *TOKENIZER.end_ids]
    for size in [*sizes, len(rest) + 1]:
        if rest:
            emitted += [e.text for e in transcript.write_on(rest[:size], "target") if isinstance(e, AnswerDelta)]
        rest = rest[size:]
    visible = [id for id in ids if not TOKENIZER.is_special(id) or (keeps_user and TOKENIZER.piece(id) == "<|user|>")]
    assert "".join(emitted) == transcript.answer.text == TOKENIZER.decode(visible)


def test_a_step_records_how_it_ended() -> None:
    transcript = write([TOKENIZER.encode("One.\n\nOne two One two One two One.</think>4<|end|>")])
    assert [(step.text, step.end) for step in transcript.steps] == [
        ("One.\n\n", "delimiter"),
        ("One two One two One two", "cap"),
        (" One.", "thinking"),
    ]


def test_thinking_that_ends_with_the_text_leaves_no_answer() -> None:
    transcript = write([TOKENIZER.encode("One.<|end|>")])
    assert [(step.text, step.end) for step in transcript.steps] == [("One.", "text")]
    assert transcript.ended
    assert transcript.answer.text == ""


def test_a_tag_alone_is_no_step() -> None:
    transcript = write([TOKENIZER.encode("One.\n\n</think>")])
    assert len(transcript.steps) == 1
    assert not transcript.thinking
    assert not transcript.ended


def test_a_second_tag_is_not_part_of_the_answer() -> None:
    assert write([TOKENIZER.encode("One.</think>4</think>5<|end|>")]).answer.text == "45"


@pytest.mark.parametrize(("num_ids", "answer"), [(3, "a"), (4, "a"), (5, "a→"), (6, "a→"), (8, "a→"), (9, "a→😀")])
def test_the_answer_waits_for_a_complete_character(num_ids: int, answer: str) -> None:
    ids = TOKENIZER.encode("</think>a→😀")
    transcript = new()
    for id in ids[:num_ids]:
        list(transcript.write_on([id], "target"))
    assert transcript.answer.text == answer


def test_a_broken_character_does_not_hold_back_the_answer_forever() -> None:
    broken = TOKENIZER.encode("€")[0]
    transcript = new()
    list(transcript.write_on([THINK_END], "target"))
    for _ in range(10):
        list(transcript.write_on([broken], "target"))
    assert len(transcript.answer.text) == 7


def test_a_broken_character_at_the_end_is_shown_as_one() -> None:
    broken = TOKENIZER.encode("€")[:2]
    assert write([[THINK_END, *broken, *TOKENIZER.end_ids]]).answer.text == "\ufffd"


def test_the_draft_s_share_of_a_step_excludes_the_tag() -> None:
    transcript = new()
    transcript.extend(TOKENIZER.encode("One.</think>"))
    assert transcript.step_is_over
    (committed,) = transcript.close_step("draft", 3)
    assert (committed.step.num_tokens, committed.step.num_from_draft) == (2, 2)


def test_the_open_step_s_tokens_reduce_the_cap_of_its_rest() -> None:
    transcript = new(max_step_tokens=6)
    transcript.extend(TOKENIZER.encode("One two"))
    assert transcript.rest_of_step(100).max_tokens == 4
    assert transcript.rest_of_step(3).max_tokens == 3
    assert transcript.rest_of_step(100).delimiters == ("\n\n",)


class SpaceEatingTokenizer(WordTokenizer):
    """Drops the space in front of a text's first word, as SentencePiece tokenizers do."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).removeprefix(" ")


def test_a_space_at_the_start_of_a_step_or_an_answer_is_kept_for_any_tokenizer() -> None:
    tokenizer = SpaceEatingTokenizer()
    tags = tokenizer.thinking
    assert tags is not None
    stop = Stop(2, ("\n\n",), tags.ends | tokenizer.end_ids)
    transcript = Transcript(tokenizer.encode("<think>"), tokenizer, stop, thinking_of(tags))
    events = list(transcript.write_on(tokenizer.encode(" One two six</think> Four"), "target"))
    assert [event.step.text for event in events if isinstance(event, StepCommitted)] == [" One two", " six"]
    assert transcript.answer.text == " Four"
