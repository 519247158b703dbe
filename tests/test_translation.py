"""A draft with another tokenizer: both token buffers only grow, and both models read the same text."""

from typing import Any

import pytest
from scripted import LetterTokenizer, Opinion, Reply, ScriptedEngine, WordTokenizer

from stepspec import Pair, Policy, StepSpec
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, Verify, collect
from stepspec.errors import UsageError
from stepspec.loop.result import Result
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


def policy(**settings: Any) -> Policy:
    judges = ({"kind": "likelihood", "threshold": -3.0},)
    table = {"version": 1, "summary": "a test", "family": "score", "judges": judges}
    return Policy.model_validate(table | settings)


async def played(
    settings: Policy, draft_replies: list[Reply | str], opinions: list[Opinion | str], target_replies: list[Reply | str]
) -> tuple[Result, ScriptedEngine]:
    letters = LetterTokenizer(OTHER_TEMPLATE)
    letters.encode("#")  # shifts the ids, so that no id means the same to both models
    target = ScriptedEngine(WordTokenizer(), target_replies, opinions, name="target")
    draft = ScriptedEngine(letters, draft_replies, name="draft")
    result = await StepSpec(policy=settings, pair=Pair(target, draft, one_vocabulary=False)).generate("How many?")
    return result, draft


async def test_both_models_read_accepted_steps_in_their_own_ids() -> None:
    result, draft = await played(policy(), [ONE, TWO, END], [ONE, TWO, END], [ANSWER])
    assert (result.reasoning, result.answer) == (ONE + TWO, "So 9.")
    assert [step.origin for step in result.steps] == ["draft", "draft"]
    opening = "[user] How many?[reply]<think>"
    assert [call.prompt for call in draft.calls] == [opening, opening + ONE, opening + ONE + TWO]


async def test_the_draft_reads_the_text_of_the_target() -> None:
    salvaging = policy(salvage={})
    wrong, right = "One six.\n\n", Opinion(ONE)
    result, draft = await played(salvaging, [wrong, TWO, END], [right, TWO, END], [".\n\n", ANSWER])
    assert result.reasoning == ONE + TWO
    assert [step.origin for step in result.steps] == ["salvaged", "draft"]
    assert draft.calls[1].prompt.endswith(ONE)


async def test_the_draft_reads_the_target_s_first_steps() -> None:
    first = policy(first_target_steps=1)
    result, draft = await played(first, [TWO, END], [TWO, END], [ONE, ANSWER])
    assert result.reasoning == ONE + TWO
    assert draft.calls[0].prompt.endswith("<think>" + ONE)


async def test_the_end_of_a_draft_that_does_not_think_is_the_end_of_thinking() -> None:
    tokenizer = WordTokenizer()
    plain = WordTokenizer(tags=False)
    draft = ScriptedEngine(plain, [Reply(ONE + "<|end|>")], name="draft")
    translated = TranslatedDraft(draft, plain.encode("Question"), tokenizer, 1)
    chunk = await collect(translated.generate(Generate(TokenBuffer(tokenizer.encode("Q")), Sampling(), Stop(50))))
    assert tokenizer.decode(chunk.ids) == ONE + "</think>"
    assert chunk.end == "token"


async def test_log_probs_are_of_the_draft_s_own_tokens_and_of_a_cut_text_those_before_the_cut() -> None:
    plain, splitting = WordTokenizer(), LetterTokenizer()
    draft = ScriptedEngine(plain, [Reply(ONE, logprobs={1: -2.0})] * 2, name="draft")
    for max_tokens, expected in ((50, (-0.1, -2.0, -0.1, -0.1)), (5, (-0.1, -2.0))):
        translated = TranslatedDraft(draft, plain.encode("Question"), splitting, 1)
        call = Generate(TokenBuffer(splitting.encode("Q")), Sampling(), Stop(max_tokens, ("\n\n",)), logprobs=True)
        assert (await collect(translated.generate(call))).logprobs == expected


async def test_a_step_has_no_more_target_tokens_than_requested() -> None:
    plain = WordTokenizer()
    plain.encode("#")
    splitting = LetterTokenizer()
    draft = ScriptedEngine(plain, [ONE], name="draft")
    translated = TranslatedDraft(draft, plain.encode("Question"), splitting, 1)
    chunk = await collect(
        translated.generate(Generate(TokenBuffer(splitting.encode("Q")), Sampling(), Stop(5, ("\n\n",))))
    )
    assert splitting.decode(chunk.ids) == "One t"
    assert chunk.end == "length"


async def test_what_is_about_the_target_s_ids_does_not_reach_the_draft() -> None:
    tokenizer = WordTokenizer()
    draft = ScriptedEngine(tokenizer, [ONE], name="draft")
    translated = TranslatedDraft(draft, [0], tokenizer, 1)
    sampling = Sampling(0.5, logit_bias=((1, 5.0),), allowed=frozenset({1}))
    await collect(translated.generate(Generate(TokenBuffer([0]), sampling, Stop(5, ("\n\n",)))))
    assert draft.calls[0].sampling == Sampling(0.5)
    with pytest.raises(UsageError, match="another vocabulary"):
        await translated.verify(Verify(TokenBuffer([0]), [1]))


def test_token_level_drafting_needs_one_vocabulary_and_says_so() -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, name="target")
    target.drafters = ("prompt-lookup",)
    pair = Pair(target, ScriptedEngine(tokenizer, name="draft"), one_vocabulary=False)
    with pytest.raises(UsageError, match=r"another vocabulary.*Choose another drafter"):
        StepSpec(policy="token", pair=pair)
