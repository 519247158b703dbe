"""The controller, run with scripted engines: which tokens it commits, from which model, at what cost, in which order.

Every play checks the counts, the bounds on committed tokens (`max_tokens`) and on wasted tokens, and that the events,
the result and the token buffer agree; see `Stage.play`.
"""

import asyncio
import itertools
import math
import statistics
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_judge import RandomJudge
from scripted import PROMPT, Opinion, Reply, Stage, WordTokenizer, shape

from stepspec.engines.protocol import Drafting, Sampling, Verification
from stepspec.errors import ContextError, EngineError, TargetError
from stepspec.loop.commit import SURE, agreed_prefix
from stepspec.loop.draft import DRAFT_SEED
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import Policy
from stepspec.loop.result import Done, Event
from stepspec.loop.step import Proposal, StepCommitted, StepJudged, StepProposed

pytestmark = pytest.mark.anyio

RATING = {"kind": "rating", "threshold": 7}
LIKELIHOOD = {"kind": "likelihood", "threshold": -3.0}
KEEP = {"min_logprob": 0.0}
RATIO = {"drafter": "draft-model", "num_tokens": 3, "acceptance": "ratio", "threshold": 0.1}
ONE, TWO, THREE = "One two.\n\n", "Three four five.\n\n", "Six seven.\n\n"  # 4, 5 and 4 tokens
END = "</think>"
ANSWER = "So 9.<|end|>"  # 5 tokens
BAD = "0"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def score(*judges: dict[str, Any], **settings: Any) -> Policy:
    settings = {
        "version": 1,
        "summary": "a test",
        "family": "score",
        "judges": judges or (RATING,),
    } | settings
    return Policy.model_validate(settings)


def alone(family: str, **settings: Any) -> Policy:
    return Policy.model_validate({"version": 1, "summary": "a test", "family": family} | settings)


def cap(max_step_tokens: int) -> dict[str, Any]:
    return {"max_step_tokens": max_step_tokens}


# Accepted, salvaged, regenerated


async def test_accepted_steps_are_the_draft_s_and_the_answer_is_the_target_s() -> None:
    play = await Stage(score(), [ONE, TWO, END], [ONE, TWO, END], [ANSWER]).play()
    assert play.steps == [("draft", ONE, 4, 4, "delimiter"), ("draft", TWO, 5, 5, "delimiter")]
    assert play.result.reasoning == ONE + TWO
    assert play.result.answer == "So 9."
    assert play.result.finish_reason == "stop"
    assert play.counted == {
        "accepted": 4 + 5 + 1,
        "drafted": 4 + 5 + 1,
        "forced": 5,
        "generated": 5,
        "committed": 15,
        "steps": 2,
        "steps_proposed": 2,
        "steps_judged": 2,
        "steps_accepted": 2,
        "target_passes": 3 + 5,
    }


async def test_the_target_writes_a_rejected_step_again_from_its_beginning() -> None:
    stage = Stage(score(), [ONE, END], [Opinion(ONE, rating="6"), END], [TWO, ANSWER])
    play = await stage.play()
    assert play.steps == [("target", TWO, 5, 0, "delimiter")]
    assert play.result.steps[0].scores == {"rating.specreason": 6.0}
    assert stage.target.calls[1].prompt == PROMPT
    assert play.counted == {
        "accepted": 1,
        "regenerated": 5,
        "forced": 5,
        "drafted": 5,
        "rejected": 4,
        "generated": 10,
        "committed": 11,
        "steps": 1,
        "steps_proposed": 1,
        "steps_judged": 1,
        "target_passes": 2 + 5 + 5,
    }


async def test_salvage_keeps_the_agreed_beginning_and_the_target_s_next_token_is_free() -> None:
    stage = Stage(
        score(salvage=KEEP),
        ["One two three four.\n\n", END],
        [Opinion("One two seven", rating=BAD), END],
        [" eight.\n\n", ANSWER],
    )
    play = await stage.play()
    assert play.steps == [("salvaged", "One two seven eight.\n\n", 6, 2, "delimiter")]
    assert stage.target.calls[1].prompt == PROMPT + "One two seven"
    assert play.counted == {
        "accepted": 2 + 1,
        "salvaged": 2,
        "regenerated": 1 + 3,
        "forced": 5,
        "drafted": 6 + 1,
        "rejected": 4,
        "generated": 9,
        "committed": 12,
        "steps": 1,
        "steps_proposed": 1,
        "steps_judged": 1,
        "target_passes": 2 + 3 + 5,
    }


async def test_sampled_salvage_leaves_the_next_token_to_a_target_that_does_not_sample_its_choices() -> None:
    stage = Stage(
        score(salvage=KEEP),
        ["One two three four.\n\n", END],
        [Opinion("One two seven", rating=BAD), END],
        [" eight.\n\n", ANSWER],
        temperature=0.6,
    )
    stage.target.abilities -= {"samples"}
    play = await stage.play()
    assert play.steps == [("salvaged", "One two eight.\n\n", 5, 2, "delimiter")]
    assert stage.target.calls[1].prompt == PROMPT + "One two"
    assert play.result.counts.regenerated == 3


@pytest.mark.parametrize("samples", [True, False])
async def test_a_biased_request_takes_no_token_that_the_target_would_not_write(samples: bool) -> None:
    """Neither the token after a salvaged part nor the end of the thinking, if the pass did not sample them."""
    opinions = [Opinion("One two seven", rating=BAD), TWO + END] + ([] if samples else [END])
    replies = [" eight.\n\n" if samples else " six.\n\n", ANSWER]
    stage = Stage(score(salvage=KEEP), ["One two three four.\n\n", TWO, END], opinions, replies)
    stage.request.sampling = Sampling(logit_bias=((0, -1.0),))
    stage.target.abilities -= frozenset() if samples else {"samples"}
    play = await stage.play()
    first, second = play.result.steps
    assert (first.text, second.text) == ("One two seven eight.\n\n" if samples else "One two six.\n\n", TWO)
    assert play.result.counts.regenerated == (1 + 3 if samples else 3)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
async def test_salvage_keeps_to_the_limit_of_the_thinking(most: int) -> None:
    written = ["\n\n", ANSWER] if most == 4 else [ANSWER]
    stage = Stage(score(salvage=KEEP), [ONE], [Opinion("One two three", rating=BAD)], written)
    stage.request.limits.options = RequestOptions(max_thinking_tokens=most)
    play = await stage.play()
    assert sum(step.num_tokens for step in play.result.steps) == most
    assert play.result.limit == "max_thinking_tokens"


async def test_a_step_salvaged_to_its_end_is_not_written_again() -> None:
    play = await Stage(score(salvage=KEEP), [ONE, END], [Opinion(ONE, rating=BAD), END], [ANSWER]).play()
    assert play.steps == [("salvaged", ONE, 4, 4, "delimiter")]
    assert (play.result.counts.regenerated, play.result.counts.rejected) == (0, 0)
    assert play.result.counts.steps_accepted == 0
    assert [call.verb for call in play.target.calls] == ["verify", "verify", "generate"]


async def test_a_rejected_step_without_an_agreed_beginning_is_only_the_target_s() -> None:
    stage = Stage(score(salvage=KEEP), [ONE, END], [Opinion("Six", rating=BAD), END], [" ten.\n\n", ANSWER])
    play = await stage.play()
    assert play.steps == [("target", "Six ten.\n\n", 4, 0, "delimiter")]
    assert play.counted["rejected"] == 4
    assert "salvaged" not in play.counted


async def test_a_free_token_that_ends_the_step_needs_no_regeneration() -> None:
    stage = Stage(score(salvage=KEEP), ["One two three.\n\n", END], [Opinion("One two\n\n", rating=BAD), END], [ANSWER])
    assert (await stage.play()).steps == [("salvaged", "One two\n\n", 3, 2, "delimiter")]


async def test_the_salvage_bound_keeps_probable_tokens_that_are_not_the_target_s_choice() -> None:
    opinion = Opinion("One ten.\n\n", rating=BAD, logprobs={1: -1.4})
    lenient = Stage(score(salvage={"min_logprob": -1.5}), [ONE, END], [opinion, END], [ANSWER])
    assert (await lenient.play()).steps == [("salvaged", ONE, 4, 4, "delimiter")]
    strict = Stage(score(salvage={"min_logprob": -1.3}), [ONE, END], [opinion, END], [".\n\n", ANSWER])
    assert (await strict.play()).steps == [("salvaged", "One ten.\n\n", 4, 1, "delimiter")]
    own_choices = Stage(score(salvage=KEEP), [ONE, END], [opinion, END], [".\n\n", ANSWER])
    assert (await own_choices.play()).steps == [("salvaged", "One ten.\n\n", 4, 1, "delimiter")]


LOGPROBS = st.sampled_from(
    [0.0, SURE, math.nextafter(SURE, 0), -1.4, math.nextafter(-1.4, 0), math.nextafter(-1.4, -9)]
)


@given(
    st.lists(st.tuples(LOGPROBS, st.booleans()), min_size=1, max_size=5), st.sampled_from([0.0, -1.4]), st.booleans()
)
def test_a_token_is_salvaged_from_the_bound_on_or_as_the_target_s_own_choice(
    tokens: list[tuple[float, bool]], bound: float, shows_choices: bool
) -> None:
    """Where a server shows no choices, a token above one half is the target's own."""
    logprobs = tuple(logprob for logprob, _ in tokens)
    choices = tuple(7 if is_own else 8 for _, is_own in tokens) if shows_choices else None
    found = agreed_prefix(Proposal((7,) * len(tokens), "", len(tokens)), Verification(logprobs, choices, 8), bound)
    agreed = [(is_own if shows_choices else logprob > SURE) or logprob >= bound for logprob, is_own in tokens]
    assert found == next((index for index, agrees in enumerate(agreed) if not agrees), len(tokens))


async def test_the_first_steps_are_the_target_s_if_the_policy_says_so() -> None:
    policy = score(first_target_steps=2)
    play = await Stage(policy, [THREE, END], [THREE, END], [ONE, TWO, ANSWER]).play()
    assert [step[0] for step in play.steps] == ["target", "target", "draft"]
    assert play.counted["forced"] == 4 + 5 + 5
    assert [event.index for event in play.events if isinstance(event, StepProposed)] == [2, 3]


async def test_the_target_may_end_the_thinking_in_one_of_the_first_steps() -> None:
    play = await Stage(score(first_target_steps=2), [], [], ["One." + END, ANSWER]).play()
    assert play.steps == [("target", "One.", 2, 0, "thinking")]
    assert play.result.answer == "So 9."


async def test_a_step_cut_by_the_cap_continues_without_a_delimiter() -> None:
    text = "One two three four five six."
    stage = Stage(score(step=cap(3)), [text, " four five six.", END], [text, " four five six.", END], [ANSWER])
    play = await stage.play()
    assert play.steps == [
        ("draft", "One two three", 3, 3, "cap"),
        ("draft", " four five six", 3, 3, "cap"),
    ]
    assert play.result.reasoning == "One two three four five six"


async def test_salvage_and_regeneration_share_the_cap_of_one_step() -> None:
    stage = Stage(
        score(salvage=KEEP, step=cap(4)),
        ["One two three four five", END],
        [Opinion("One six", rating=BAD), END],
        [" seven eight nine", ANSWER],
    )
    play = await stage.play()
    assert play.steps == [("salvaged", "One six seven eight", 4, 1, "cap")]
    stop = stage.target.calls[1].stop
    assert stop is not None
    assert stop.max_tokens == 2


# Judges


@pytest.mark.parametrize(
    ("rating", "worst", "accepted"),
    [("9", -2.0, True), ("6", -2.0, False), ("9", -4.0, False), ("6", -4.0, False)],
)
async def test_all_judges_must_accept(rating: str, worst: float, accepted: bool) -> None:
    opinion = Opinion(ONE, rating=rating, logprobs={1: worst})
    replies = [ANSWER] if accepted else [TWO, ANSWER]
    play = await Stage(score(RATING, LIKELIHOOD), [ONE, END], [opinion, END], replies).play()
    assert play.steps[0][0] == ("draft" if accepted else "target")
    judged = next(event for event in play.events if isinstance(event, StepJudged))
    assert judged == StepJudged(0, accepted, {"rating.specreason": float(rating), "likelihood.min": worst})


async def test_all_judges_read_one_pass() -> None:
    stage = Stage(score(LIKELIHOOD, RATING), [ONE, END], [ONE, END], [ANSWER])
    await stage.play()
    assert [len(call.probes) for call in stage.target.calls if call.verb == "verify"] == [1, 0]


@pytest.mark.parametrize("rating", ["*", "</think>", "\n"])
async def test_a_judge_that_reads_no_digit_rejects_without_a_score(rating: str) -> None:
    stage = Stage(score({"kind": "rating", "threshold": 0}), [ONE, END], [Opinion(ONE, rating), END], [TWO, ANSWER])
    play = await stage.play()
    assert play.steps[0][0] == "target"
    assert play.result.steps[0].scores == {"rating.specreason": None}


async def test_the_judge_is_asked_after_the_step_and_its_question_is_never_committed() -> None:
    stage = Stage(score(), [ONE, TWO, END], [ONE, TWO, END], [ANSWER])
    await stage.play()
    first, second = stage.target.calls[:2]
    assert (first.prompt, first.continuation) == (PROMPT, ONE)
    assert first.probes[0].startswith("<|end|><|user|>Evaluate the last reasoning step")
    assert (second.prompt, second.continuation) == (PROMPT + ONE, TWO)


async def test_a_step_that_is_accepted_without_the_target_s_pass_causes_none() -> None:
    stage = Stage(score({"kind": "always"}), [ONE, TWO, END], [END], [ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("draft", TWO)]
    assert [call.continuation for call in stage.target.calls if call.verb == "verify"] == [""]
    assert play.counted["target_passes"] == 1 + 5


async def test_the_draft_s_end_after_a_step_without_a_pass_waits_for_the_target() -> None:
    stage = Stage(score({"kind": "always"}), ["One." + END, ONE, END], ["One. Two", END], [ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", "One."), ("draft", ONE)]
    assert (play.counted["accepted"], play.counted["rejected"]) == (2 + 4 + 1, 1)
    assert play.counted["target_passes"] == 2 + 5, "for each end of the draft one, and the answer"


@pytest.mark.parametrize("salvages", [False, True])
async def test_a_step_rejected_without_a_pass_gets_one_only_for_its_salvage(salvages: bool) -> None:
    policy = score({"kind": "never"}, salvage=KEEP if salvages else None)
    verified = ["3 + 4 = 7", END] if salvages else [END]
    replies = ["\n\n", ANSWER] if salvages else [TWO, ANSWER]
    stage = Stage(policy, ["3 + 4 = 8\n\n", END], verified, replies)
    play = await stage.play()
    assert play.steps == [
        ("salvaged", "3 + 4 = 7\n\n", 10, 8, "delimiter") if salvages else ("target", TWO, 5, 0, "delimiter")
    ]
    assert play.result.steps[0].scores == {"never": 0.0}


async def test_a_cascade_asks_the_target_a_question_only_while_undecided() -> None:
    judges = ({"kind": "likelihood", "threshold": -2.0, "reject_below": -6.0}, RATING)
    opinions = [ONE, Opinion(TWO, logprobs={0: -4.0}), Opinion(TWO), END]
    stage = Stage(score(*judges, judging="cascade"), [ONE, TWO, END], opinions, [ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("draft", TWO)]
    asked = [(call.continuation, len(call.probes)) for call in stage.target.calls if call.verb == "verify"]
    assert asked == [(ONE, 0), (TWO, 0), (TWO, 1), ("", 0)]
    assert [len(step.scores) for step in play.result.steps] == [1, 2]


async def test_a_judge_sees_what_the_draft_thought_of_its_step_without_the_tag() -> None:
    """The fourth token is the tag."""
    policy = score({"kind": "draft-confidence", "threshold": -0.8})
    stage = Stage(policy, [Reply("One two." + END, logprobs={1: -2.0, 3: -9.0})], ["One two." + END], [ANSWER])
    play = await stage.play()
    assert play.result.steps[0].scores == {"draft-confidence": pytest.approx(-2.2 / 3)}
    assert [step[:2] for step in play.steps] == [("draft", "One two.")]


async def test_the_log_ratio_compares_the_target_with_the_draft() -> None:
    policy = score({"kind": "likelihood", "statistic": "log-ratio", "threshold": -0.5})
    steps = [Reply(ONE, logprobs={1: -2.0}), Reply(TWO), END]
    stage = Stage(policy, steps, [Opinion(ONE), Opinion("Six", logprobs={0: -5.0}), END], [THREE, ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("target", THREE)]
    assert play.result.steps[0].scores == {"likelihood.log-ratio": pytest.approx((2.0 - 0.1) / 4)}


async def test_the_draft_returns_log_probs_only_for_a_judge_that_needs_them() -> None:
    stage = Stage(score(), [ONE, END], [ONE, END], [ANSWER])
    await stage.play()
    assert not any(call.logprobs for call in stage.draft.calls)


# Empty and repeated steps


@pytest.mark.parametrize("empty", ["\n\n", " \n\n"])
async def test_an_empty_step_is_rejected_without_a_judge_or_a_pass(empty: str) -> None:
    stage = Stage(score(), [empty, END], [END], [TWO, ANSWER])
    play = await stage.play()
    assert play.steps == [("target", TWO, 5, 0, "delimiter")]
    assert [call.continuation for call in stage.target.calls if call.verb == "verify"] == [""]
    assert "steps_judged" not in play.counted


async def test_a_repeated_step_is_rejected_without_a_judge_even_with_other_whitespace() -> None:
    stage = Stage(score(), [ONE, " " + ONE, END], [ONE, END], [TWO, ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("target", TWO)]
    assert play.result.counts.steps_judged == 1


async def test_a_repeated_step_is_rejected_even_if_the_target_would_end_after_it() -> None:
    stage = Stage(score(), [ONE, "One two." + END, END], [ONE, END], [TWO, ANSWER])
    assert [step[:2] for step in (await stage.play()).steps] == [("draft", ONE), ("target", TWO)]


async def test_a_rejected_repetition_is_not_salvaged_as_merely_probable() -> None:
    probable = Opinion("Six", logprobs=dict.fromkeys(range(4), -1.0))
    policy = score(salvage={"min_logprob": -1.5})
    play = await Stage(policy, [ONE, ONE, END], [ONE, probable, END], [" ten.\n\n", ANSWER]).play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("target", "Six ten.\n\n")]


# The guarded end


async def test_the_draft_s_end_after_text_is_accepted_when_the_target_would_end_there_too() -> None:
    play = await Stage(score(), ["One." + END], ["One." + END], [ANSWER]).play()
    assert play.steps == [("draft", "One.", 2, 2, "thinking")]
    assert play.counted["accepted"] == 3
    assert play.counted["forced"] == 5


async def test_the_draft_s_end_after_text_is_rejected_when_the_target_would_continue() -> None:
    stage = Stage(score(), ["One." + END, " Two.\n\n", END], ["One. Two", " Two.\n\n", END], [ANSWER])
    play = await stage.play()
    assert [step[1:] for step in play.steps] == [("One.", 2, 2, "cap"), (" Two.\n\n", 3, 3, "delimiter")]
    assert play.counted["rejected"] == 1
    assert play.counted["accepted"] == 2 + 3 + 1


async def test_the_draft_s_end_alone_is_rejected_and_the_target_writes_the_step() -> None:
    stage = Stage(score(), [ONE, END, END], [ONE, "Six", END], [TWO, ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("target", TWO)]
    assert play.counted["rejected"] == 1
    assert play.result.counts.steps_judged == 1


async def test_a_rejected_end_alone_is_regenerated_from_the_target_s_free_token() -> None:
    stage = Stage(score(salvage=KEEP), [END, END], ["Six", END], [" ten.\n\n", ANSWER])
    assert (await stage.play()).steps == [("target", "Six ten.\n\n", 4, 0, "delimiter")]


async def test_a_rejected_step_s_end_tag_is_rejected_with_it() -> None:
    stage = Stage(score(), ["One." + END, END], [Opinion("One." + END, rating=BAD), END], [TWO, ANSWER])
    play = await stage.play()
    assert play.steps == [("target", TWO, 5, 0, "delimiter")]
    assert play.counted["rejected"] == 3


async def test_the_thinking_ends_for_free_when_the_judging_pass_shows_that_the_target_would_end_it() -> None:
    stage = Stage(score(), [ONE], [ONE + END], [ANSWER])
    play = await stage.play()
    assert play.steps == [("draft", ONE, 4, 4, "delimiter")]
    assert play.counted["forced"] == 1 + 5
    assert play.counted["target_passes"] == 1 + 5
    assert stage.target.calls[-1].prompt == PROMPT + ONE + END


async def test_a_rejected_step_does_not_end_the_thinking_for_free() -> None:
    stage = Stage(score(), [ONE, END], [Opinion(ONE + END, rating=BAD), END], [TWO, ANSWER])
    play = await stage.play()
    assert play.steps == [("target", TWO, 5, 0, "delimiter")]
    assert play.counted["forced"] == 5


async def test_the_target_ends_the_thinking_in_a_regenerated_step() -> None:
    play = await Stage(score(), [ONE], [Opinion("Six", rating=BAD)], ["Six." + END, ANSWER]).play()
    assert play.steps == [("target", "Six.", 2, 0, "thinking")]
    assert play.result.answer == "So 9."


async def test_a_free_token_may_be_the_target_s_own_end_of_thinking() -> None:
    stage = Stage(score(salvage=KEEP), [ONE], [Opinion("One two" + END, rating=BAD)], [ANSWER])
    assert (await stage.play()).steps == [("salvaged", "One two", 2, 2, "thinking")]


@pytest.mark.parametrize("answer", ["The answer is 4.<|end|>", "\n\n4<|end|>"])
async def test_an_answer_that_the_draft_would_write_after_its_own_end_is_never_drafted(answer: str) -> None:
    stage = Stage(score(), [ONE, END + answer], [ONE, END], [ANSWER])
    play = await stage.play()
    assert play.result.answer == "So 9."
    assert play.counted["drafted"] == 5
    assert stage.target.calls[-1].prompt == PROMPT + ONE + END


async def test_the_draft_s_end_of_text_inside_the_thinking_is_rejected() -> None:
    stage = Stage(score(), ["One.<|end|>", "<|end|>", END], ["One. Two", Opinion("Six"), END], [TWO, ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", "One."), ("target", TWO)]
    assert play.counted["rejected"] == 2
    assert play.result.answer == "So 9."


async def test_the_end_of_text_inside_the_thinking_counts_when_it_is_the_target_s_own() -> None:
    play = await Stage(score(), ["One.<|end|>"], ["One.<|end|>"], []).play()
    assert play.steps == [("draft", "One.", 2, 2, "text")]
    assert (play.result.answer, play.result.finish_reason) == ("", "stop")


async def test_the_target_s_other_end_replaces_the_draft_s() -> None:
    play = await Stage(score(), ["One.<|end|>"], ["One." + END], [ANSWER]).play()
    assert play.steps == [("draft", "One.", 2, 2, "cap")]
    assert play.counted["rejected"] == 1
    assert play.result.answer == "So 9."


async def test_without_thinking_tags_the_full_text_is_the_answer() -> None:
    stage = Stage(score(), [ONE, "Two.<|end|>"], [ONE, "Two.<|end|>"], [], tags=False)
    play = await stage.play()
    assert [step[4] for step in play.steps] == ["delimiter", "text"]
    assert play.result.answer == play.result.reasoning == ONE + "Two."
    assert play.result.finish_reason == "stop"


# Events


async def test_events_are_in_order_and_only_committed_text_is_marked_as_committed() -> None:
    stage = Stage(
        score(salvage=KEEP),
        [ONE, "Three wrong.\n\n", END],
        [ONE, Opinion("Three ten", rating=BAD), END],
        [".\n\n", Reply(ANSWER, chunk_size=2)],
    )
    play = await stage.play()
    step = ["step.proposed", "step.judged", "step.committed"]
    assert shape(play.events) == [*step, *step, "step.proposed", "step.judged", "answer.delta", "done"]
    committed = [event.step.text for event in play.events if isinstance(event, StepCommitted)]
    assert committed == [ONE, "Three ten.\n\n"]
    proposed = [(event.index, event.text, event.num_tokens) for event in play.events if isinstance(event, StepProposed)]
    assert proposed == [(0, ONE, 4), (1, "Three wrong.\n\n", 4), (2, "", 1)]


async def test_a_step_is_emitted_while_the_next_one_is_written() -> None:
    stage = Stage(score(), [ONE, Reply(hangs=True)], [ONE], [])
    async with aclosing(stage.events()) as events:
        async for event in events:
            if isinstance(event, StepCommitted):
                break
    assert stage.draft.num_open == 0


# A single writer


async def test_a_request_waits_for_a_caller_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.loop.record.MAX_UNREAD", 5)
    stage = Stage(alone("target"), target_replies=[Reply(END + 50 * "Six " + "<|end|>", chunk_size=1)])
    found = list[Event]()
    async with aclosing(stage.events()) as events:
        async for event in events:
            await asyncio.sleep(0.001)
            assert stage.request.record.events.qsize() <= 7, "what one chunk gives comes on top"
            found.append(event)
    assert len(found) > 50
    assert isinstance(done := found[-1], Done)
    assert done.result.times.queue == 0 < 0.02 < done.result.times.other


async def test_a_request_whose_steps_are_accepted_waits_for_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.loop.record.MAX_UNREAD", 5)
    steps = [f"{name} two.\n\n" for name in ("One", "Three") * 10]
    stage = Stage(score(), [*steps, END], [*steps, END], [ANSWER])
    async with aclosing(stage.events()) as events:
        async for _ in events:
            for _ in range(50):
                await asyncio.sleep(0)
            assert stage.request.record.events.qsize() <= 8, "what one step gives comes on top"


async def test_a_caller_that_reads_slowly_says_nothing_about_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.loop.record.MAX_UNREAD", 1)
    rewritten = Reply("Three " * 30 + "\n\n", chunk_size=3)
    answer = Reply("Six " * 12 + "<|end|>", chunk_size=1)
    stage = Stage(score(), [ONE, END], [Opinion(rating="0"), END], [rewritten, answer])
    noted = list[float]()
    monkeypatch.setattr(stage.request.choice, "_count", lambda num_tokens, seconds: noted.append(seconds))
    async with aclosing(stage.events()) as events:
        async for _ in events:
            await asyncio.sleep(0.05)
    assert max(noted, default=0.0) < 0.05


async def test_the_target_alone_is_split_at_delimiters_and_its_answer_comes_in_chunks() -> None:
    stage = Stage(alone("target"), target_replies=[Reply(ONE + TWO + "Six." + END + ANSWER, chunk_size=3)])
    play = await stage.play()
    assert play.steps == [
        ("target", ONE, 4, 0, "delimiter"),
        ("target", TWO, 5, 0, "delimiter"),
        ("target", "Six.", 2, 0, "thinking"),
    ]
    assert play.result.answer == "So 9."
    assert play.counted == {
        "forced": 17,
        "generated": 17,
        "committed": 17,
        "steps": 3,
        "target_passes": 17,
    }
    assert len(stage.target.calls) == 1
    assert stage.draft.calls == []


async def test_the_draft_alone_writes_the_answer_too() -> None:
    stage = Stage(alone("draft"), [ONE + END + ANSWER])
    play = await stage.play()
    assert play.steps == [("draft", ONE, 4, 4, "delimiter")]
    assert play.result.answer == "So 9."
    assert play.counted == {"accepted": 10, "drafted": 10, "committed": 10, "steps": 1}
    assert stage.target.calls == []


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("family", ["target", "draft"])
async def test_a_character_of_several_tokens_is_never_split(family: str, chunk_size: int) -> None:
    text = "Ä → é.\n\n"
    reply = Reply(text + "€" + END + "5 € 😀!" + "<|end|>", chunk_size=chunk_size)
    play = await Stage(alone(family), [reply], target_replies=[reply]).play()
    assert [step[1] for step in play.steps] == [text, "€"]
    assert play.result.answer == "5 € 😀!"
    assert not any("\ufffd" in event.text for event in play.events if event.type == "answer.delta")


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 5])
async def test_a_character_that_crosses_the_cap_moves_to_the_next_step(max_step_tokens: int) -> None:
    text = "a→b€😀c"
    policy = alone("target", step=cap(max_step_tokens))
    play = await Stage(policy, target_replies=[text + END + ANSWER]).play()
    assert play.result.reasoning == text
    assert sum(step.num_tokens for step in play.result.steps) == 13


async def test_token_level_speculation_is_requested_and_counted_wherever_the_target_writes() -> None:
    policy = score(token={"drafter": "draft-model", "num_tokens": 3})
    replies = [
        Reply(TWO, token_drafted=6, token_accepted=3),
        Reply(ANSWER, token_drafted=5, token_accepted=4),
    ]
    stage = Stage(policy, [ONE, END], [Opinion(rating=BAD), END], replies)
    play = await stage.play()
    assert (play.counted["token_drafted"], play.counted["token_accepted"]) == (11, 7)
    requested = [call.drafting for call in stage.target.calls if call.verb == "generate"]
    assert requested == [Drafting("draft-model", 3)] * 2
    assert stage.draft.calls[0].drafting == Drafting()


async def test_relaxed_tokens_are_counted_and_the_first_one_is_found() -> None:
    num_one = len(WordTokenizer().encode(ONE))
    relaxed = (2, 3, num_one + 1)
    writes = [Reply(ONE + TWO + END, chunk_size=3, relaxed=relaxed, token_drafted=9, token_accepted=7), ANSWER]
    stage = Stage(alone("target", token=RATIO), target_replies=writes)
    play = await stage.play()
    assert (play.counted["relaxed_tokens"], play.result.first_relaxed) == (3, 2)
    assert not play.result.token_level_exact
    rules = [call.drafting.acceptance.rule for call in stage.target.calls if call.drafting]
    assert rules == ["ratio", "exact"], "the thinking is one call, and the answer is exact"
    assert (play.counted["token_drafted"], play.counted["token_accepted"]) == (9, 7)
    assert [step[0] for step in play.steps] == ["target", "target"]


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize(
    ("step", "last"),
    [("One is \\boxed{4}.\n\n", TWO), ("The answer is 4.\n\n", TWO), ("One four.<|end|>", "One two.<|end|>")],
    ids=["a box", "an answer in words", "the end of the text"],
)
async def test_no_relaxed_token_is_in_an_answer(step: str, last: str, temperature: float) -> None:
    """The step that would have one is written again without: from there, or above temperature 0 as a whole."""
    num_one = len(WordTokenizer(tags=False).encode(ONE))
    relaxed = Reply(ONE + step, chunk_size=4, relaxed=(0, num_one + 1, num_one + 2))
    writes = [relaxed, last, "Two.<|end|>"]
    stage = Stage(alone("target", token=RATIO), target_replies=writes, temperature=temperature, tags=False)
    play = await stage.play()
    kept = ONE + ("" if temperature else stage.tokenizer.decode(stage.tokenizer.encode(step)[:1]))
    assert play.result.answer.startswith(kept + last.removesuffix("<|end|>"))
    assert (play.counted["relaxed_tokens"], play.result.first_relaxed) == (1, 0)
    num_dropped = len(stage.tokenizer.encode(ONE + step)) - len(stage.tokenizer.encode(kept))
    assert play.counted["discarded"] == num_dropped
    assert play.counted["target_passes"] == play.counted["generated"], "also those of the call that was left"
    seeds = [call.sampling.seed for call in stage.target.calls if call.sampling]
    assert (seeds[1] == seeds[0]) is not bool(temperature)


async def test_a_text_that_ends_after_a_step_has_no_relaxed_token_in_it() -> None:
    num_one = len(WordTokenizer(tags=False).encode(ONE))
    writes = [Reply(ONE + TWO + "<|end|>", relaxed=(0, num_one + 1)), "four.<|end|>"]
    play = await Stage(alone("target", token=RATIO), target_replies=writes, tags=False).play()
    assert play.result.answer == f"{ONE}Threefour."
    assert (play.counted["relaxed_tokens"], play.counted["discarded"]) == (1, 5)


async def test_a_deadline_in_a_relaxed_step_leaves_what_was_committed() -> None:
    num_one = len(WordTokenizer().encode(ONE))
    writes = [Reply(ONE + TWO, chunk_size=num_one + 1, relaxed=(1,), gap_s=60.0)]
    stage = Stage(alone("target", token=RATIO), target_replies=writes)
    stage.request.limits.options = RequestOptions(deadline_s=0.2)
    play = await stage.play()
    assert (play.result.reasoning, play.result.finish_reason, play.result.limit) == (ONE, "length", "deadline")
    assert play.counted["discarded"] == 1


def test_samplings_made_of_lists_and_sets_are_equal_to_those_of_tuples() -> None:
    loose: Any = {"logit_bias": [[5, -1.0]], "allowed": {1, 2}}
    strict = Sampling(logit_bias=((5, -1.0),), allowed=frozenset({1, 2}))
    assert (Sampling(**loose), hash(Sampling(**loose))) == (strict, hash(strict))


async def test_draft_and_target_never_sample_with_the_same_seed() -> None:
    stage = Stage(score(), [ONE, END], [Opinion(rating=BAD), END], [TWO, ANSWER], temperature=0.6)
    await stage.play()
    seeds = [{call.sampling.seed for call in engine.calls if call.sampling} for engine in (stage.target, stage.draft)]
    assert seeds == [{7}, {7 + DRAFT_SEED}]


@pytest.mark.parametrize("family", ["score", "target"])
async def test_the_work_per_step_does_not_grow_with_the_text(family: str) -> None:
    texts = [f"{word} seven {index % 10}.\n\n" for index, word in zip(range(60), itertools.cycle(["One", "Two"]))]
    stage = (
        Stage(score(), [*texts, END], [*texts, END], [ANSWER])
        if family == "score"
        else Stage(alone("target"), target_replies=[Reply("".join(texts) + END + ANSWER, chunk_size=5)])
    )
    num_decoded: list[int] = []
    async for event in stage.events():
        if isinstance(event, StepCommitted):
            num_decoded.append(stage.tokenizer.num_decoded)
    work = [after - before for before, after in itertools.pairwise(num_decoded)]
    assert len(work) == 59
    assert max(work) == max(work[:5])


# Failures


async def test_a_draft_that_fails_immediately_costs_only_speed() -> None:
    stage = Stage(score(), [Reply(fails=EngineError("gone"))], [], [ONE + END + ANSWER])
    play = await stage.play()
    assert play.steps == [("target", ONE, 4, 0, "delimiter")]
    assert play.result.answer == "So 9."
    assert "drafted" not in play.counted


async def test_a_draft_that_fails_midway_is_not_asked_again_and_its_tokens_are_counted() -> None:
    broken = Reply("Three four", fails=EngineError("gone"), chunk_size=1)
    stage = Stage(score(), [ONE, broken], [ONE], [TWO + END + ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("target", TWO)]
    assert play.result.answer == "So 9."
    assert len(stage.draft.calls) == 2
    assert (play.counted["drafted"], play.counted["abandoned"]) == (6, 2)


async def test_a_draft_with_a_full_context_leaves_the_rest_to_the_target() -> None:
    room = len(Stage(score()).tokenizer.encode(PROMPT)) + 4
    stage = Stage(score(), [ONE], [ONE], [TWO + END + ANSWER], draft_context=room)
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("draft", ONE), ("target", TWO)]
    assert play.result.finish_reason == "stop"


@pytest.mark.parametrize("chunk_size", [1, 1000])
async def test_a_target_error_carries_the_committed_text(chunk_size: int) -> None:
    broken = Reply(ONE + TWO + "Six", fails=EngineError("The GPU is gone."), chunk_size=chunk_size)
    with pytest.raises(TargetError, match=r"The GPU is gone\.") as caught:
        await Stage(alone("target"), target_replies=[broken]).play()
    assert caught.value.committed == ONE + TWO
    assert isinstance(caught.value.__cause__, EngineError)


async def test_a_target_that_fails_in_a_regenerated_step_has_committed_the_steps_before_it() -> None:
    broken = Reply("Six", fails=EngineError("gone"))
    with pytest.raises(TargetError) as caught:
        await Stage(score(), [ONE, TWO], [ONE, Opinion(rating=BAD)], [broken]).play()
    assert caught.value.committed == ONE


async def test_a_target_that_fails_in_the_answer_has_committed_its_beginning() -> None:
    broken = Reply("So 9", fails=EngineError("gone"), chunk_size=1)
    with pytest.raises(TargetError) as caught:
        await Stage(score(), [ONE, END], [ONE, END], [broken]).play()
    assert caught.value.committed == ONE + "So 9"


async def test_a_target_that_fails_while_it_judges_fails_the_request() -> None:
    with pytest.raises(TargetError) as caught:
        await Stage(score(), [ONE, TWO], [ONE, Opinion(fails=EngineError("gone"))]).play()
    assert caught.value.committed == ONE


def prompt_length() -> int:
    return len(Stage(alone("target")).tokenizer.encode(PROMPT))


@pytest.mark.parametrize("policy", [score(), score(first_target_steps=1), alone("target"), alone("draft")])
async def test_a_prompt_that_fills_the_context_is_refused(policy: Policy) -> None:
    room = prompt_length()
    with pytest.raises(ContextError):
        await Stage(policy, [ONE], [ONE], [ONE], target_context=room, draft_context=room).play()


@pytest.mark.parametrize("family", ["target", "draft"])
async def test_a_single_writer_stops_where_the_context_is_full(family: str) -> None:
    room = prompt_length() + 6
    stage = Stage(alone(family), [ONE + TWO], target_replies=[ONE + TWO], target_context=room, draft_context=room)
    play = await stage.play()
    assert [step[1] for step in play.steps] == [ONE, "Three four"]
    assert play.result.finish_reason == "length"


async def test_a_context_too_short_for_the_judge_s_question_leaves_the_rest_to_the_target() -> None:
    stage = Stage(score(), [ONE], [], [TWO + END + ANSWER], target_context=prompt_length() + 12)
    play = await stage.play()
    assert play.steps == [("target", TWO, 5, 0, "delimiter")]
    assert play.result.answer == "So 9."
    assert (play.counted["drafted"], play.counted["abandoned"]) == (4, 4)


async def test_a_context_that_fills_midway_ends_the_request_with_the_committed_text() -> None:
    room = prompt_length() + 4
    stage = Stage(score(LIKELIHOOD), [ONE, TWO], [ONE, Opinion()], [], target_context=room)
    play = await stage.play()
    assert play.steps == [("draft", ONE, 4, 4, "delimiter")]
    assert play.result.finish_reason == "length"
    assert play.counted["abandoned"] == 5


async def test_a_salvaged_part_that_fills_the_context_is_committed() -> None:
    stage = Stage(
        score(LIKELIHOOD, salvage=KEEP),
        ["One two three"],
        [Opinion("One two nine")],
        [],
        target_context=prompt_length() + 3,
        draft_context=prompt_length() + 3,
    )
    play = await stage.play()
    assert play.steps == [("salvaged", "One two nine", 3, 2, "cap")]
    assert play.result.finish_reason == "length"


@pytest.mark.parametrize("who", ["draft", "judge", "target"])
async def test_cancelling_a_request_that_hangs_closes_its_calls(who: str) -> None:
    hangs = Reply("One", hangs=True, chunk_size=1)
    opinions: list[Opinion] = [Opinion(ONE, hangs=True)] if who == "judge" else [Opinion(rating=BAD)]
    stage = Stage(score(), [hangs if who == "draft" else ONE], opinions, [hangs])
    request = asyncio.create_task(stage.play())
    await (stage.draft if who == "draft" else stage.target).hanging.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert stage.target.num_open == stage.draft.num_open == 0


async def test_closing_the_events_closes_the_running_call() -> None:
    stage = Stage(alone("target"), target_replies=[Reply(ONE + TWO + END, hangs=True, chunk_size=4)])
    async with aclosing(stage.events()) as events:
        async for _ in events:
            assert stage.target.num_open == 1
            break
    assert stage.target.num_open == 0


# The budget


async def test_rejected_tokens_do_not_use_the_budget() -> None:
    play = await Stage(score(), [ONE], [Opinion(rating=BAD)], [TWO], max_tokens=5).play()
    assert play.steps == [("target", TWO, 5, 0, "delimiter")]
    assert play.result.finish_reason == "length"
    assert (play.counted["rejected"], play.counted["committed"]) == (4, 5)


async def test_after_too_much_waste_the_target_continues_alone() -> None:
    """Steps have at most 6 tokens. After three rejected steps, 15 tokens are wasted and 6 are committed. A fourth step
    could exceed the bound on waste: the committed tokens plus two steps."""
    stage = Stage(
        score(step=cap(6)),
        ["a b\n\n" if index % 2 else "a b c d e f" for index in range(4)],
        itertools.repeat(Opinion(rating=BAD)),
        ["x\n\n", "y\n\n", "z\n\n", "x y z" + END + ANSWER],
    )
    play = await stage.play()
    assert [call.continuation for call in play.target.calls if call.verb == "verify"] == [
        "a b c d e f",
        "a b\n\n",
        "a b c d e f",
    ]
    assert play.steps[-1][:2] == ("target", "x y z")
    assert play.result.answer == "So 9."
    assert play.result.usage.wasted_tokens == 15


async def test_a_budget_used_up_by_an_accepted_step_leaves_no_free_end() -> None:
    play = await Stage(score(), [ONE], [ONE + END], max_tokens=4).play()
    assert play.steps == [("draft", ONE, 4, 4, "delimiter")]
    assert play.counted["committed"] == 4
    assert play.result.finish_reason == "length"


async def test_a_text_that_ends_with_the_last_token_of_the_budget_has_stopped() -> None:
    play = await Stage(score(), [ONE, END], [ONE, END], [ANSWER], max_tokens=10).play()
    assert play.result.finish_reason == "stop"


@pytest.mark.parametrize("family", ["target", "draft"])
@pytest.mark.parametrize(("max_tokens", "reasoning", "answer"), [(6, ONE + "Six.", ""), (9, ONE + "Six.", "So ")])
async def test_a_truncated_text_is_returned_up_to_the_budget(
    family: str, max_tokens: int, reasoning: str, answer: str
) -> None:
    text = ONE + "Six." + END + ANSWER
    play = await Stage(alone(family), [text], target_replies=[text], max_tokens=max_tokens).play()
    assert (play.result.reasoning, play.result.answer) == (reasoning, answer)
    assert play.result.finish_reason == "length"
    assert play.result.counts.committed == max_tokens


TEXTS = [
    ONE,
    TWO,
    THREE,
    "\n\n",
    END,
    "<|end|>",
    "One." + END,
    "Six.<|end|>",
    "a b c d e f g h i",
    "€ is →.\n\n",
]
WRITTEN = [TWO + END + ANSWER, "Eight.<|end|>", END + ANSWER, THREE + ANSWER, "a b c d e f g h i<|end|>"]


@settings(max_examples=300)
@given(
    drafted=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8),
    own=st.lists(st.builds(Opinion, st.sampled_from(TEXTS), st.sampled_from(["9", "5", "*"])), min_size=1, max_size=8),
    written=st.lists(st.builds(Reply, st.sampled_from(WRITTEN), chunk_size=st.integers(1, 4)), min_size=1, max_size=8),
    max_tokens=st.integers(1, 60),
    temperature=st.sampled_from([0.0, 0.6]),
    salvage=st.sampled_from([None, {"min_logprob": 0.0}, {"min_logprob": -10.0}]),
    first=st.integers(0, 2),
    room=st.one_of(st.none(), st.integers(1, 70)),
    judges=st.sampled_from([(RATING,), ({"kind": "always"},), ({"kind": "never"},), (RandomJudge(share=0.5), RATING)]),
)
async def test_the_counts_always_hold_and_nothing_exceeds_the_budget(
    drafted: list[str],
    own: list[Opinion],
    written: list[Reply],
    max_tokens: int,
    temperature: float,
    salvage: dict[str, float] | None,
    first: int,
    room: int | None,
    judges: tuple[dict[str, Any], ...],
) -> None:
    """In addition to the checks of `Stage.play`: a request cut by its budget has committed exactly `max_tokens`."""
    stage = Stage(
        score(*judges, judging="cascade", salvage=salvage, first_target_steps=first, step=cap(6)),
        itertools.cycle(drafted),
        itertools.cycle(own),
        itertools.cycle(written),
        max_tokens=max_tokens,
        temperature=temperature,
        target_context=prompt_length() + (room or 100_000),
    )
    play = await stage.play()
    counts = play.result.counts
    if play.result.finish_reason == "length" and room is None:
        assert counts.committed == max_tokens
    assert all(step.num_tokens <= 6 for step in play.result.steps)


# Time


async def test_every_second_is_counted_once_and_queue_time_separately() -> None:
    unmeasured: list[float] = []
    for _ in range(3):  # a busy machine may interrupt any of them between two measurements
        stage = Stage(
            score(),
            [Reply(ONE, delay_s=0.1, queue_s=0.04), Reply(END, delay_s=0.05)],
            [Opinion(rating=BAD, delay_s=0.06, queue_s=0.02), END],
            [Reply(TWO, delay_s=0.08, queue_s=0.05), Reply(ANSWER, delay_s=0.04, chunk_size=2)],
        )
        times = (await stage.play()).result.times
        assert times.queue == 0
        assert times.engine_wait == pytest.approx(0.11, abs=1e-6)
        assert times.draft >= 0.11
        assert times.judge >= 0.04
        assert times.target >= 0.07
        assert 0 < times.controller < times.wall / 2
        unmeasured.append(times.other / max(times.wall, 0.1))
    assert statistics.median(unmeasured) <= 0.01


async def test_a_request_runs_ahead_of_a_slow_caller() -> None:
    stage = Stage(alone("target"), target_replies=[ONE + TWO + END + ANSWER])
    started = asyncio.get_running_loop().time()
    async for event in stage.events():
        await asyncio.sleep(0.02)
        last = event
    assert isinstance(last, Done)
    assert last.result.times.wall <= asyncio.get_running_loop().time() - started - 0.02


async def test_the_draft_s_queue_time_is_counted_separately_too() -> None:
    stage = Stage(alone("draft"), [Reply(ONE + END + ANSWER, delay_s=0.05, queue_s=0.03)])
    times = (await stage.play()).result.times
    assert times.queue == 0
    assert times.engine_wait == pytest.approx(0.03, abs=1e-6)
    assert times.draft >= 0.02
    assert times.target == times.judge == 0
