"""Chains of draft steps: one pass of the target for several steps, what stands of them, and how long they become."""

import asyncio
import re
import time
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scripted import PROMPT, Opinion, Play, Reply, Stage
from test_family_runs import VirtualLoop

from evals.training.gsm_mini import load_split
from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.cli.run import figures
from stepspec.engines.protocol import Probe, Sampling, TokenBuffer, Verify
from stepspec.errors import EngineError, UsageError
from stepspec.loop.chain import Chain
from stepspec.loop.choice import StepChoice
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.step import Proposal
from stepspec.loop.step_pass import ChainPass

pytestmark = pytest.mark.anyio

LIKELIHOOD = {"kind": "likelihood", "threshold": -3.0}
ONE, TWO, THREE = "One two.\n\n", "Three four five.\n\n", "Six seven.\n\n"  # 4, 5 and 4 tokens
OTHER = "Three nine.\n\n"
END = "</think>"
ANSWER = "So 9.<|end|>"  # 5 tokens


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def chains(depth: int | str = 3, *judges: dict[str, Any], **settings: Any) -> Policy:
    table = {"version": 1, "summary": "a test", "family": "score", "judges": judges or (LIKELIHOOD,)}
    return Policy.model_validate(table | {"score": {"depth": depth}} | settings)


async def test_one_pass_judges_all_steps_of_a_chain() -> None:
    stage = Stage(chains(), [ONE, TWO, END], [ONE + TWO + END], [ANSWER])
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == ["draft", "draft"]
    assert stage.draft.calls[1].prompt == PROMPT + ONE
    assert [call.continuation for call in stage.target.calls if call.verb == "verify"] == [ONE + TWO]
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
        "target_passes": 1 + 5,
    }


async def test_steps_after_a_rejected_one_are_dropped() -> None:
    replies, opinions = [ONE, TWO, THREE, END], [ONE + "Three nine five.\n\n" + THREE, END]
    play = await Stage(chains(), replies, opinions, [OTHER, ANSWER]).play()
    assert [(origin, text) for origin, text, *_ in play.steps] == [("draft", ONE), ("target", OTHER)]
    counts = play.result.counts
    assert (counts.accepted, counts.rejected, counts.abandoned, counts.steps_judged) == (4 + 1, 5, 4, 2)
    assert [step.scores["likelihood.min"] for step in play.result.steps] == [-0.1, -9.0]


async def test_a_rejected_step_of_a_chain_is_salvaged() -> None:
    replies, opinions = [ONE, TWO, THREE, END], [ONE + "Three nine five.\n\n" + THREE, END]
    stage = Stage(chains(salvage={"min_logprob": 0.0}), replies, opinions, [".\n\n", ANSWER])
    play = await stage.play()
    assert [(origin, text) for origin, text, *_ in play.steps] == [("draft", ONE), ("salvaged", OTHER)]
    assert play.result.counts.salvaged == 1


REDRAFT = chains(1, salvage={"min_logprob": 0.0, "redraft": True})


async def test_the_draft_goes_on_behind_the_target_s_own_token() -> None:
    replies, opinions = [TWO, " ten.\n\n", END], ["Three nine five.\n\n", " ten.\n\n", END]
    stage = Stage(REDRAFT, replies, opinions, [ANSWER])
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("salvaged", "Three nine ten.\n\n")]
    (step,) = play.result.steps
    assert step.num_from_draft == step.num_tokens - 1
    counts = play.result.counts
    assert (counts.salvaged, counts.regenerated, counts.steps_judged, counts.steps_accepted) == (1, 1, 2, 1)
    assert [call.verb for call in stage.target.calls] == ["verify", "verify", "verify", "generate"]


async def test_the_target_finishes_a_step_that_the_draft_does_not_go_on_with() -> None:
    replies = [TWO, Reply("", fails=EngineError("no"))]
    play = await Stage(REDRAFT, replies, ["Three nine five.\n\n"], [".\n\n", END + ANSWER]).play()
    assert [step[:2] for step in play.steps] == [("salvaged", OTHER)]
    assert play.result.answer == "So 9."


async def test_a_tool_call_cannot_be_pieced_together_from_both_models() -> None:
    """Here, "nine ten" begins one: the target's own token, and what the draft adds."""
    replies, opinions = [TWO, " ten.\n\n", END], ["Three nine five.\n\n", " ten.\n\n", END]
    stage = Stage(REDRAFT, replies, opinions, [".\n\n", ANSWER])
    stage.request.limits.call_opener = re.compile("nine ten")
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("salvaged", OTHER)]
    assert play.result.steps[0].scores == {}


async def test_the_draft_is_not_asked_after_a_tool_call_that_a_paused_step_opened() -> None:
    stage = Stage(REDRAFT, [TWO], ["Three nine five.\n\n"], [" ten.\n\n", Reply(TWO + END + ANSWER, chunk_size=3)])
    stage.request.limits.call_opener, asked = re.compile("nine ten"), iter([True, False])
    stage.request.choice.speculates = lambda request: next(asked, True)
    play = await stage.play()
    assert (play.result.answer, len(stage.draft.calls)) == ("So 9.", 1)


async def test_each_step_has_its_own_probe() -> None:
    rating = {"kind": "rating", "threshold": 7}
    stage = Stage(chains(3, rating), [ONE, TWO, END], [Opinion(ONE + TWO + END, rating="8")], [ANSWER])
    play = await stage.play()
    assert len(stage.target.calls[0].probes) == 3
    assert [step.scores for step in play.result.steps] == [{"rating.specreason": 8.0}] * 2


@pytest.mark.parametrize("last", ["Six seven", ONE, "\n\n", "One two.<|end|>"])
async def test_a_step_that_cannot_be_followed_ends_a_chain(last: str) -> None:
    """An unfinished, a repeated and an empty step, and one that ends the text."""
    stage = Stage(chains(4, step={"max_step_tokens": 5}), [ONE, last + " eight nine ten", END], [ONE + last], [ANSWER])
    async for event in stage.events():
        if event.type == "step.judged":
            break
    assert len(stage.draft.calls) == 2


async def test_a_target_that_does_not_return_its_choices_judges_step_by_step() -> None:
    stage = Stage(chains(), [ONE, TWO, END], [ONE, TWO, END], [ANSWER])
    stage.target.abilities -= {"choices"}
    play = await stage.play()
    assert [call.continuation for call in stage.target.calls if call.verb == "verify"] == [ONE, TWO, ""]
    assert play.result.counts.steps_accepted == 2


async def test_recorded_requests_judge_step_by_step() -> None:
    stage = Stage(chains(), [ONE, TWO, END], [ONE, TWO, END], [ANSWER])
    stage.request.judged_steps = []
    assert [step.text for step in (await stage.play()).result.judged_steps] == [ONE, TWO, ""]


async def test_a_chain_that_does_not_fit_the_context_is_judged_step_by_step() -> None:
    rating = {"kind": "rating", "threshold": 7}
    stage = Stage(chains(3, rating), [ONE, TWO, END], [ONE, TWO, END], [ANSWER])
    probe = len(stage.request.panel.probes[0].ids)
    stage.target.max_context = len(stage.request.prompt) + 9 + probe + 5
    play = await stage.play()
    assert play.result.counts.steps_accepted == 2


async def test_the_draft_s_answer_is_kept_as_far_as_the_target_would_write_it() -> None:
    policy = chains(score={"depth": 3, "draft_answer": True})
    whole = await Stage(policy, [ONE, END, ANSWER], [ONE + END + ANSWER], []).play()
    assert whole.result.answer == "So 9."
    assert whole.counted == {
        "accepted": 10,
        "drafted": 10,
        "committed": 10,
        "steps": 1,
        "steps_proposed": 1,
        "steps_judged": 1,
        "steps_accepted": 1,
        "target_passes": 1,
    }
    part = await Stage(policy, [ONE, END, ANSWER], [ONE + END + "So 8."], [".<|end|>"]).play()
    assert part.result.answer == "So 8."
    counts = part.result.counts
    assert (counts.accepted, counts.rejected, counts.forced) == (4 + 1 + 2, 3, 1 + 2)


async def test_the_answer_is_drafted_after_a_chain_that_could_go_on() -> None:
    """The draft's next token says whether its thinking has ended."""
    policy = chains(score={"depth": 1, "draft_answer": True})
    replies = [ONE, TWO, TWO, END, ANSWER]  # of the second one, a single token is written
    stage = Stage(policy, replies, [ONE, TWO + END + ANSWER], [])
    play = await stage.play()
    assert play.result.answer == "So 9."
    counts = play.result.counts
    assert (counts.accepted, counts.abandoned, counts.forced) == (4 + 5 + 1 + 5, 1, 0)
    assert counts.target_passes == 2


async def test_a_sampled_answer_is_kept_only_if_the_target_samples_its_choices() -> None:
    policy = chains(score={"depth": 3, "draft_answer": True})
    sampled = Stage(policy, [ONE, END, ANSWER], [ONE + END + ANSWER], [], temperature=0.6)
    assert (await sampled.play()).result.counts.forced == 0
    other = Stage(policy, [ONE, END], [ONE + END], [ANSWER], temperature=0.6)
    other.target.abilities -= {"samples"}
    assert (await other.play()).result.counts.forced == 5


SURE = {"kind": "draft-confidence", "threshold": -1.0, "reject_below": -100.0}


@pytest.mark.parametrize("depth", [1, 3])
async def test_where_the_draft_is_sure_one_pass_confirms_the_end_and_the_answer(depth: int) -> None:
    """The target reads the steps in the pass in which it confirms the end of the thinking."""
    policy = chains(depth, SURE, LIKELIHOOD, judging="cascade", score={"depth": depth, "draft_answer": True})
    drafted = [ONE, *([TWO] if depth == 1 else []), TWO, END, ANSWER]  # of the second one, a single token is written
    stage = Stage(policy, drafted, [END + ANSWER], [])
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == ["draft", "draft"]
    assert play.result.answer == "So 9."
    assert [call.verb for call in stage.target.calls] == ["verify"]
    assert stage.target.calls[0].continuation == END + ANSWER


async def test_however_sure_the_draft_is_the_target_decides_about_the_end() -> None:
    policy = chains(1, SURE, LIKELIHOOD, judging="cascade", score={"depth": 1, "draft_answer": True})
    stage = Stage(policy, [ONE, END, ANSWER, END, ANSWER], [TWO, END + ANSWER], [TWO])
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == ["draft", "target"]
    assert play.result.answer == "So 9."
    counts = play.result.counts
    assert (counts.accepted, counts.rejected, counts.abandoned) == (4 + 1 + 5, 1, 5)


async def test_a_server_that_reads_its_whole_text_for_scores_judges_one_step_at_a_time_and_answers() -> None:
    rating = {"kind": "rating", "threshold": 7}
    policy = chains(1, rating, score={"draft_answer": True, "depth": 3})
    stage = Stage(policy, [ONE, TWO, END, ANSWER], [ONE, TWO, END], [ANSWER])
    stage.target.abilities -= {"cached scores", "samples"}
    play = await stage.play()
    assert [call.prompt for call in stage.draft.calls] == [PROMPT, PROMPT + ONE, PROMPT + ONE + TWO]
    assert [call.continuation for call in stage.target.calls if call.verb == "verify"] == [ONE, TWO, ""]
    assert play.result.answer == "So 9."
    assert play.result.counts.abandoned == 0


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ({"depth": 0}, "greater than or equal to 1"),
        ({"depth": 5}, "less than or equal to 4"),
        ({"depth": "auto"}, "was removed"),
        ({"look_ahead": True}, "was removed"),
    ],
)
def test_bad_depths_are_sentences(score: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chains(1, score=score)


def paused(num_asks: int) -> StepChoice:
    """Return a choice for which the target writes until it was asked so often."""
    choice, asked = StepChoice(), iter(num_asks * [False])
    choice.speculates = lambda request: next(asked, True)
    return choice


async def test_the_target_writes_while_speculation_does_not_pay() -> None:
    """It is asked before the first step and after each chunk. The target finishes its open step."""
    writes = [Reply(6 * (ONE + TWO), chunk_size=9, gap_s=0.001), ANSWER]
    stage = Stage(chains(1, score={"max_overhead": 0.05}), [THREE, END], [THREE, END], writes)
    stage.request.choice = paused(6)
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == 12 * ["target"] + ["draft"]
    writes = [Reply(5 * (TWO + ONE) + TWO + ONE[:-2], chunk_size=9, gap_s=0.001), ONE[-2:], ANSWER]
    stage = Stage(chains(1, score={"max_overhead": 0.05}), [THREE, END], [THREE, END], writes)
    stage.request.choice = paused(6)
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == 12 * ["target"] + ["draft"]


async def test_an_answer_that_the_target_wrote_meanwhile_is_seen() -> None:
    """Of a model that does not mark its thinking, a step after an answer is kept only if it is the target's own."""
    rating = {"kind": "rating", "threshold": 7}
    for written, origin in (("Two.\n\n", "draft"), ("#### two.\n\n", "target")):
        opinions = [Opinion("Nine ten.\n\n", rating="9"), "<|end|>"]
        writes = [Reply(written + TWO, chunk_size=99), "Nine ten.\n\n"]
        stage = Stage(chains(1, rating), [THREE, "<|end|>"], opinions, writes, tags=False)
        stage.request.choice = paused(1)
        play = await stage.play()
        assert [origin for origin, *_ in play.steps][2] == origin


async def test_a_draft_has_time_to_read_what_it_has_not_read() -> None:
    stage, unread = Stage(chains(1), [ONE, TWO, END], [ONE, TWO, END], [ANSWER]), list[int]()
    prompt = len(stage.request.transcript.buffer)
    stage.request.choice.patience_s = lambda num_unread, longest: unread.append(num_unread)  # type: ignore[method-assign]
    await stage.play()
    assert unread[0] == prompt
    assert unread[1:] == [0, 0]
    choice = StepChoice(0.02)
    choice._levels[0].target_s.note(0.01, 100)
    assert choice.patience_s(10_000, 256) == pytest.approx(2 * 0.01 * (256 + 10_000 / 16)), "no step is longer"
    choice.costs.drafted(64, 5.0)
    assert choice.patience_s(10_000, 256) == pytest.approx(2 * 0.01 * (64 + 10_000 / 16))


@given(st.floats(0.001, 50), st.floats(0.001, 50), st.floats(0.001, 1), st.booleans())
def test_the_first_step_of_a_session_may_take_what_the_target_takes_twice_for_the_longest_one(
    draft_s: float, judge_s: float, token_s: float, is_known: bool
) -> None:
    async def played() -> Play:
        draft = [Reply(each, delay_s=draft_s) for each in (ONE, TWO, THREE, END)]
        opinions = [Opinion(each, delay_s=judge_s) for each in (ONE, TWO, THREE, END)]
        writes = Reply(9 * (TWO + ONE) + END + ANSWER, chunk_size=1, gap_s=token_s, delay_s=token_s)
        stage = Stage(chains(1, score={"max_overhead": 0.02}), draft, opinions, [writes] * 9)
        stage.request.choice = StepChoice(0.02)
        if is_known:
            stage.request.choice._levels[0].target_s.note(token_s, 64)
        return await stage.play()

    runner = asyncio.Runner(loop_factory=VirtualLoop)
    with runner, patch.object(time, "perf_counter", runner.get_loop().time):
        result = runner.run(played()).result
    if draft_s > 2 * token_s * 512:
        assume(draft_s > 5 * token_s * 520)  # the draft reads the prompt too, and a pass takes longer than a token
        assert (result.counts.steps_proposed, result.not_proposed) == (0, "the draft was too slow")
        return
    assert result.steps[0].origin == "draft"
    assert result.counts.steps_proposed >= 1
    assert result.not_proposed is not None or result.counts.steps_proposed == 3


@pytest.mark.parametrize(
    ("why", "draft", "settings"),
    [
        ("the draft was too slow", [Reply("One", chunk_size=1, hangs=True)], {"step": {"draft_deadline_s": 0.05}}),
        ("the draft failed", [Reply("One", chunk_size=1, fails=EngineError("gone"))], {}),
        ("the thinking ended first", [], {"first_target_steps": 5}),
        ("the policy proposes none", [], {"family": "target", "judges": ()}),
        ("no draft", None, {}),
        ("no room in the context", [], {"draft_context": 5}),
        ("the draft rejects the text", [Reply("", fails=UsageError("a special token"))] * 3, {}),
        ("max_overhead", [], {"score": {"depth": 1, "max_overhead": 0.0}}),
        (None, [ONE, END], {}),
    ],
)
async def test_a_result_says_why_no_step_was_proposed(
    why: str | None, draft: list[Any] | None, settings: dict[str, Any]
) -> None:
    table = {"score": {"depth": 1}, **settings}
    context = table.pop("draft_context", 100_000)
    policy = chains(1, **table)
    stage = Stage(policy, draft or [], [ONE, END], [ANSWER if why is None else END + ANSWER] * 2, draft_context=context)
    stage.request.draft = None if draft is None else stage.draft
    stage.request.choice = StepChoice(policy.max_overhead)
    if why == "max_overhead":
        level = stage.request.choice._levels[0]
        level.gain, level.weight, stage.request.choice._speculating = -1.0, 1000.0, False
    result = (await stage.play()).result
    assert (result.not_proposed, result.counts.steps_proposed) == (why, int(why is None))
    assert result.counts.abandoned == (why in ("the draft was too slow", "the draft failed")), "one token was abandoned"
    shown = figures(result)
    assert ("proposed" in shown) == (why != "the policy proposes none")
    assert why is None or why == "the policy proposes none" or f"0 steps proposed ({why})" in shown


def test_one_request_at_a_time_tries_a_draft_that_has_not_written_a_step() -> None:
    choice = StepChoice(0.05)
    assert choice.speculates("a")
    choice.begins_chain("a")
    assert not choice.speculates("b"), "the draft may hang"
    assert choice.why == "another request tries the draft"
    choice.ends_chain("a")
    assert choice.speculates("b")
    with choice.request("b"):
        choice.begins_chain("b")
    assert choice.speculates("c"), "the request that tried it was cancelled"
    choice.begins_chain("c")
    assert not choice.speculates("d")
    choice.costs.drafted(10, 0.1)
    assert choice.speculates("d")


@pytest.fixture(scope="module")
def pair() -> Any:
    pair = load_pair(notes=False)
    yield pair
    asyncio.run(pair.aclose())


def test_a_shared_pass_says_of_each_step_what_its_own_pass_does(pair: Pair) -> None:
    target, tokenizer = pair.target, pair.target.tokenizer
    prompt = tokenizer.encode("Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?")
    texts = ("Next, Ann has 12.\n\n", "Ben has 12 + 5 = 17.\n\n", "The answer is 17.")
    steps = [Proposal(tuple(ids := tokenizer.encode_text(text)), text, len(ids)) for text in texts]
    chain = Chain(steps)
    probe = Probe(tuple(tokenizer.encode_text(" 9")), (5, 6))

    async def compare() -> None:
        buffer = TokenBuffer(prompt)
        shared = ChainPass(chain, lambda ids, probes: target.verify(Verify(buffer, ids, probes)))
        for number, step in enumerate(steps):
            found, own = await shared.read(number, [probe]), await target.verify(Verify(buffer, step.ids, [probe]))
            assert found is not None
            assert (found.choices, found.next_choice, found.probe_choices) == (
                own.choices,
                own.next_choice,
                own.probe_choices,
            )
            assert found.logprobs == pytest.approx(own.logprobs, abs=1e-4)
            assert found.probe_logprobs[0] == pytest.approx(own.probe_logprobs[0], abs=1e-4)
            assert await shared.read(number, [Probe((1,), (2,))]) is None
            buffer.append(step.ids)

    asyncio.run(compare())


def texts(pair: Pair, policy: Policy | str, temperature: float, count: int) -> list[str]:
    """Return the texts of some problems under a policy."""

    async def ask() -> list[str]:
        spec, found = StepSpec(policy=policy, pair=pair), list[str]()
        for number, problem in enumerate(islice(load_split("test"), count)):
            sampling = Sampling(temperature, seed=number)
            result = await spec.generate(problem.question, sampling=sampling, max_tokens=96)
            found.append(result.reasoning + result.answer)
        return found

    return asyncio.run(ask())


def exact(**changes: Any) -> Policy:
    policy = load_policy("exact")[0].model_dump()
    return Policy.model_validate(policy | {"score": {"depth": 4}, "token": {"drafter": "none"}} | changes)


@pytest.mark.parametrize("count", [2, pytest.param(16, marks=pytest.mark.soak)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_exact_steps_give_the_target_s_own_text(pair: Pair, temperature: float, count: int) -> None:
    assert texts(pair, exact(), temperature, count) == texts(pair, "target", temperature, count)


def test_a_chain_read_one_place_off_is_not_exact(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ChainPass.read

    async def off_by_one(self: ChainPass, number: int, probes: Any) -> Any:
        found = await read(self, number, probes)
        assert found is not None
        assert found.choices is not None
        return replace(found, choices=(*found.choices[1:], found.next_choice))

    own = texts(pair, "target", 0.0, 2)
    monkeypatch.setattr(ChainPass, "read", off_by_one)
    assert texts(pair, exact(), 0.0, 2) != own
