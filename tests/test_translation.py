"""A draft with another tokenizer: both sides' ids only grow, and they read the same text."""

import re
from typing import Any

import pytest
from scripted import Opinion, Reply, ScriptedEngine, WordTokenizer

from stepspec import Pair, Policy, StepSpec
from stepspec.engines.protocol import Sampling, Stop, TokenBuffer, collect
from stepspec.errors import UsageError
from stepspec.loop.step import Result
from stepspec.loop.translation import TranslatedDraft

pytestmark = pytest.mark.anyio

ONE, TWO, THREE = "One two.\n\n", "Three é five.\n\n", "Six seven.\n\n"
END, ANSWER = "</think>", "So 9.<|end|>"
PLAIN = "<|user|>How many?<|end|><|assistant|><think>"
OTHER_TEMPLATE = """\
{%- for message in messages -%}
[{{ message['role'] }}] {{ message['content'] }}
{%- endfor -%}
{%- if add_generation_prompt %}[reply]<think>{% endif -%}
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class LetterTokenizer(WordTokenizer):
    """A token for every character that is no tag."""

    def encode(self, text: str) -> list[int]:
        parts = re.split(r"(</?think>|<\|\w+\|>)", text)
        pieces = [piece for index, part in enumerate(parts) for piece in ([part] if index % 2 else part)]
        return [self._id(piece.encode()) for piece in pieces if piece]


def policy(**settings: Any) -> Policy:
    judges = ({"kind": "likelihood", "threshold": -3.0},)
    table = {"version": 1, "summary": "a test", "family": "score", "judges": judges}
    return Policy.model_validate(table | settings)


async def played(
    settings: Policy, draft_replies: list[Reply | str], opinions: list[Opinion | str], target_replies: list[Reply | str]
) -> tuple[Result, ScriptedEngine]:
    letters = LetterTokenizer(OTHER_TEMPLATE)
    letters.encode("#")  # so that no id means the same to both
    target = ScriptedEngine(WordTokenizer(), target_replies, opinions, name="target")
    draft = ScriptedEngine(letters, draft_replies, name="draft")
    result = await StepSpec(policy=settings, pair=Pair(target, draft, one_vocabulary=False)).generate("How many?")
    return result, draft


async def test_accepted_steps_are_read_by_both_in_their_own_ids() -> None:
    result, draft = await played(policy(), [ONE, TWO, END], [ONE, TWO, END], [ANSWER])
    assert (result.reasoning, result.answer) == (ONE + TWO, "So 9.")
    assert [step.origin for step in result.steps] == ["draft", "draft"]
    opening = "[user] How many?[reply]<think>"
    assert [call.prompt for call in draft.calls] == [opening, opening + ONE, opening + ONE + TWO]


async def test_what_the_target_wrote_is_read_by_the_draft() -> None:
    salvaging = policy(salvage={})
    wrong, right = "One six.\n\n", Opinion(ONE)
    result, draft = await played(salvaging, [wrong, TWO, END], [right, TWO, END], [".\n\n", ANSWER])
    assert result.reasoning == ONE + TWO
    assert [step.origin for step in result.steps] == ["salvaged", "draft"]
    assert draft.calls[1].prompt.endswith(ONE)


async def test_steps_that_the_target_begins_with_are_read_too() -> None:
    first = policy(first_target_steps=1)
    result, draft = await played(first, [TWO, END], [TWO, END], [ONE, ANSWER])
    assert result.reasoning == ONE + TWO
    assert draft.calls[0].prompt.endswith("<think>" + ONE)


async def test_the_end_of_a_draft_that_does_not_think_is_the_end_of_thinking() -> None:
    tokenizer = WordTokenizer()
    plain = WordTokenizer(tags=False)
    draft = ScriptedEngine(plain, [Reply(ONE + "<|end|>")], name="draft")
    translated = TranslatedDraft(draft, plain.encode("Question"), tokenizer, 1)
    chunk = await collect(translated.generate(TokenBuffer(tokenizer.encode("Q")), Sampling(), Stop(50)))
    assert tokenizer.decode(chunk.ids) == ONE + "</think>"
    assert chunk.end == "token"


async def test_a_step_has_no_more_of_the_target_s_tokens_than_were_asked_for() -> None:
    plain = WordTokenizer()
    plain.encode("#")
    splitting = LetterTokenizer()
    draft = ScriptedEngine(plain, [ONE], name="draft")
    translated = TranslatedDraft(draft, plain.encode("Question"), splitting, 1)
    chunk = await collect(translated.generate(TokenBuffer(splitting.encode("Q")), Sampling(), Stop(5, ("\n\n",))))
    assert splitting.decode(chunk.ids) == "One t"
    assert chunk.end == "length"


async def test_what_names_the_target_s_ids_is_refused() -> None:
    tokenizer = WordTokenizer()
    translated = TranslatedDraft(ScriptedEngine(tokenizer, [ONE], name="draft"), [0], tokenizer, 1)
    with pytest.raises(UsageError, match="other token ids"):
        await collect(translated.generate(TokenBuffer([0]), Sampling(allowed=frozenset({1})), Stop(5)))
    with pytest.raises(UsageError, match="another vocabulary"):
        await translated.verify(TokenBuffer([0]), [1])


def test_token_level_drafting_needs_one_vocabulary_and_says_so() -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, name="target")
    target.drafters = ("prompt-lookup",)
    pair = Pair(target, ScriptedEngine(tokenizer, name="draft"), one_vocabulary=False)
    with pytest.raises(UsageError, match=r"another vocabulary.*Choose another drafter"):
        StepSpec(policy="token", pair=pair)
