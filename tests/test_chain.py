"""Chains of draft steps: one pass of the target for several steps, what stands of them, and how long they become."""

import asyncio
import re
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
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
from stepspec.loop.pace import FIRST_CONTROL, StepPace
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.step import Proposal
from stepspec.loop.step_pass import ChainPass
from stepspec.loop.writing_watch import WritingWatch

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
    stage.request.pace.speculates = lambda request: next(asked, True)
    play = await stage.play()
    assert (play.result.answer, len(stage.draft.calls)) == ("So 9.", 1)


async def test_each_step_has_its_own_probe() -> None:
    rating = {"kind": "rating", "threshold": 7}
    stage = Stage(chains(3, rating), [ONE, TWO, END], [Opinion(ONE + TWO + END, rating="8")], [ANSWER])
    play = await stage.play()
    assert len(stage.target.calls[0].probes) == 3
    assert [step.scores for step in play.result.steps] == [{"rating.short": 8.0}] * 2


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


SURE = {"kind": "draft-confidence", "signal": "min-logprob", "threshold": -1.0, "reject_below": -100.0}


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
    rating = {"kind": "rating", "prompt": "specreason", "threshold": 7}
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
        ({"depth": 2, "candidates": 2}, "cannot both be above 1"),
        ({"draft_answer": True, "candidates": 2}, "for one candidate a step"),
    ],
)
def test_bad_depths_are_sentences(score: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chains(1, score=score)


@pytest.mark.parametrize(("committed", "least"), [(0, 0.0), (5, 0.0), (12, 0.9)])
def test_a_draft_that_does_not_pay_costs_five_percent_at_most(committed: int, least: float) -> None:
    """The target writes 10 tokens a second; a chain takes a second."""
    pace, seconds, tokens, chains, most = StepPace(0.05), 0.0, 0, 0, 0.0
    for _ in range(3000):
        if pace.pauses:
            pace.generated(10, 1.0)
            tokens += 10
        else:
            pace.ended(committed, 1.0)
            tokens, chains = tokens + committed, chains + 1
        seconds += 1.0
        most = max(most, seconds - 1.05 * tokens / 10)
    assert most <= 2.0 + 1e-9, "the first second, and the chain in which it ends"
    assert chains / 3000 >= least
    assert chains, "the draft may try again"


@pytest.mark.parametrize(("saved", "least", "most"), [(0.0, 0.2, 0.35), (0.03, 0.4, 0.6), (0.08, 0.99, 1.0)])
def test_chains_that_save_little_are_few(saved: float, least: float, most: float) -> None:
    """The target writes 10 tokens a second. A draft that is as fast may write longer texts."""
    pace, chains = StepPace(0.02), 0
    pace.generated(64, 6.4)
    for _ in range(3000):
        if pace.pauses:
            pace.generated(10, 1.0)
        else:
            pace.ended(10, 1 - saved)
            chains += 1
    assert least <= chains / 3000 <= most


def test_a_draft_of_no_use_costs_a_smaller_share_under_load() -> None:
    """The times of 16 requests add up, and a chain of one takes passes from all. All ask at the same time."""
    pace, chains, written = StepPace(0.04), 0, 10_000
    pace.costs.drafted(10, 0.1)
    with ExitStack() as stack:
        for request in range(16):
            stack.enter_context(pace.request(request))
        for _ in range(written):
            pace.generated(10, 1.0)
            speculating = [request for request in range(16) if pace.speculates(request)]
            for request in speculating:
                pace.ended(0, 1.0, request)
            chains += len(speculating)
    assert chains == pytest.approx(5 + 0.01 * written, abs=1), "the first credit and the chain in which it ends"


@pytest.mark.parametrize(("chain_s", "stall_s", "most"), [(0.28, 0.0, 1.05), (0.28, 3.0, 1.05), (0.15, 0.0, 0.8)])
def test_what_the_target_writes_after_rejected_steps_is_not_its_usual_speed(
    chain_s: float, stall_s: float, most: float
) -> None:
    """A chain gives 44 easy tokens. The 3 after them are hard: the target takes five times as long for each. The
    machine may stall in the first control."""
    pace, request, token_s, seconds, tokens = StepPace(0.02), object(), 0.0068, 0.0, 0
    pace.costs.drafted(44, 0.1)
    while seconds < 300:
        if pace.speculates(request):
            pace.tries(request)
            pace.ended(44, chain_s, request)
            pace.generated(3, 3 * 5 * token_s)
            pace.regenerated(3, 3 * 5 * token_s)
            seconds, tokens = seconds + chain_s + 3 * 5 * token_s, tokens + 47
        else:
            pace.generated(16, 16 * token_s + stall_s, control=True)
            seconds, tokens, stall_s = seconds + 16 * token_s, tokens + 16, 0.0
    assert seconds <= most * tokens * token_s


def test_a_control_that_tells_nothing_ends_with_its_request() -> None:
    pace, request = StepPace(0.02), asyncio.Event()
    pace.costs.drafted(10, 0.1)
    with pace.request(request):
        for _ in range(FIRST_CONTROL):
            assert pace.speculates(request)
            pace.tries(request)
            pace.ended(10, 0.01, request)
        assert [pace.speculates(each) for each in (request, request, "another")] == [False, False, True]
    finished = weakref.ref(request)
    del request
    assert finished() is None, "a session does not hold a finished request, and its text"


@pytest.mark.parametrize(("num_tokens", "seconds"), [(1000, 2000.0), (200_000, 10.0)])
def test_writing_earns_a_share_of_its_time_and_slow_writing_no_more(num_tokens: int, seconds: float) -> None:
    """What follows a rejected step is slow to write, and an answer fast."""
    pace = StepPace(0.05)
    pace.generated(32, 0.32, control=True)
    pace.ended(0, 20.0)
    pace.generated(num_tokens, seconds)
    assert pace.pauses


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_text_that_comes_in_one_piece_after_the_prompt_earns_too(is_known: bool) -> None:
    """It says nothing about the target's speed, and may be all that a server ever sends while the draft rests."""
    pace = paused()
    if is_known:
        pace.generated(32, 0.0001)
        while not pace.pauses:
            pace.ended(0, 1.0)
    stage = Stage(chains(1, score={"max_overhead": 0.05}), [], [], [Reply(ONE + END + ANSWER, delay_s=0.05)])
    stage.request.pace = pace
    await stage.play()
    assert not pace.pauses


@dataclass
class Written:
    """What a watch has passed on, with a clock that only it moves."""

    at: float = 0.0
    noted: list[tuple[int, float, bool]] = field(default_factory=list[tuple[int, float, bool]])
    unknown_s: float = 0.0

    def generated(self, num_tokens: int, seconds: float, *, control: bool) -> None:
        self.noted.append((num_tokens, round(seconds, 6), control))

    def generated_at_unknown_speed(self, seconds: float) -> None:
        self.unknown_s += seconds


def watched(chunks: list[tuple[float, int]], *, first: bool = False, thinking: int = 1000) -> Written:
    """Return what a watch says about chunks, each with the wait for it. The thinking ends after some of them. What is
    done with a chunk takes 5 ms."""
    pace: Any = Written()
    watch = WritingWatch(reads_prompt=first, control=True, clock=lambda: pace.at)
    for number, (wait_s, num_tokens) in enumerate(chunks, 1):
        watch.asks()
        pace.at += wait_s
        watch.got(num_tokens)
        pace.at += 0.005
        if number >= thinking:
            watch.thinking_ended(pace)
        watch.tell(pace)
    watch.end(pace)
    return pace


def test_chunks_that_come_together_are_not_written_in_no_time() -> None:
    bundle = [(0.2, 1), *39 * [(0.0, 1)]]  # with what is done with them, 10 ms a token
    for num_tokens, seconds, _ in watched(5 * bundle).noted:
        assert seconds / num_tokens == pytest.approx(0.01)
    assert sum(num_tokens for num_tokens, *_ in watched(5 * bundle).noted) == 160


def test_a_wait_for_the_caller_and_what_the_engine_writes_in_it_are_not_timed() -> None:
    pace: Any = Written()
    watch = WritingWatch(reads_prompt=False, control=True, clock=lambda: pace.at)
    for number in range(61):
        watch.asks()
        pace.at += 0.0 if 30 < number < 40 else 0.02
        watch.got(1)
        if number == 30:
            pace.at += 20.0
            watch.pause(pace)
        watch.tell(pace)
    watch.end(pace)
    assert sum(num_tokens for num_tokens, *_ in pace.noted) == 51
    for num_tokens, seconds, _ in pace.noted:
        assert seconds / num_tokens == pytest.approx(0.02)


@pytest.mark.parametrize("last_s", [0.0, 0.002])
def test_a_text_that_comes_at_a_time_is_timed_as_a_whole(last_s: float) -> None:
    """Its end may come in a chunk of its own. In the first call, reading the prompt may have taken most of the time."""
    chunks = [(5.0, 600), (last_s, 1)]
    ((num_tokens, seconds, control),) = watched(chunks, thinking=1).noted
    assert (num_tokens, seconds, control) == (601, pytest.approx(5.0, abs=0.01), True)
    later = watched(chunks, first=True)
    assert (later.noted, later.unknown_s) == ([], pytest.approx(5.0, abs=0.01))
    assert watched([(5.0, 0)]).noted == watched([]).noted == [], "an empty text"


def test_the_answer_is_no_control() -> None:
    noted = watched(30 * [(0.015, 2)], thinking=16).noted
    assert all(seconds / num_tokens == pytest.approx(0.01) for num_tokens, seconds, _ in noted)
    assert [sum(each[0] for each in noted if each[2] is control) for control in (True, False)] == [28, 30]


def test_a_change_for_the_worse_costs_a_few_chains() -> None:
    pace = StepPace(0.05)
    pace.generated(10, 1.0)
    for _ in range(100):
        pace.ended(50, 1.0)
    wasted = 0
    while not pace.pauses:
        pace.ended(0, 1.0)
        wasted += 1
    assert wasted <= 12


def test_what_speculation_saved_under_load_is_not_spent_where_it_does_not_pay() -> None:
    pace, wasted = StepPace(0.05), 0
    with ExitStack() as stack:
        for number in range(16):
            stack.enter_context(pace.load.request(number))
        pace.generated(32, 3.2)  # 100 ms a token
        for _ in range(20):
            pace.ended(20, 0.5)
    pace.generated(32, 0.32)  # 10 ms a token
    while not pace.pauses and wasted < 20:
        pace.ended(20, 1.0)
        wasted += 1
    assert wasted <= 3


def test_under_load_the_common_throughput_decides() -> None:
    """The target's own speed is that of the time before the machine became slower."""
    pace, rates = StepPace(0.02), {True: 0.1, False: 0.15}
    pace.costs.drafted(10, 0.1)
    now, longest, writing = [0.0], 0, 0
    pace.load._clock = lambda: now[0]
    with ExitStack() as stack:
        for request in range(4):
            stack.enter_context(pace.request(request))
        for turn in range(4000):
            slow = 6.0 if turn > 1000 else 1.0
            modes = [pace.speculates(request) for request in range(4)]
            writing = 0 if any(modes) else writing + 1
            longest = max(longest, writing)
            now[0] += max(rates[mode] for mode in modes) * slow
            for request, mode in enumerate(modes):
                if mode:
                    pace.ended(20, rates[mode] * slow, request)
                else:
                    pace.generated(20, rates[mode] * slow, control=True)
                pace.load.committed(request, 20)
    assert longest <= 15, "no more than an epoch of the target"


def paused() -> StepPace:
    """Return a pace that lets the target write until its speed is known, and then allows almost any overhead."""
    pace = StepPace(1000.0)
    pace.ended(0, 1.0)
    assert pace.pauses
    return pace


async def test_the_target_writes_while_speculation_does_not_pay() -> None:
    """Its speed is known some chunks after the first one, which waits for the prompt. It finishes its open step."""
    writes = [Reply(6 * (ONE + TWO), chunk_size=9, gap_s=0.001), ANSWER]
    stage = Stage(chains(1, score={"max_overhead": 0.05}), [THREE, END], [THREE, END], writes)
    stage.request.pace = paused()
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == 12 * ["target"] + ["draft"]
    writes = [Reply(5 * (TWO + ONE) + TWO + ONE[:-2], chunk_size=9, gap_s=0.001), ONE[-2:], ANSWER]
    stage = Stage(chains(1, score={"max_overhead": 0.05}), [THREE, END], [THREE, END], writes)
    stage.request.pace = paused()
    play = await stage.play()
    assert [origin for origin, *_ in play.steps] == 12 * ["target"] + ["draft"]


async def test_what_the_prompt_takes_to_read_is_not_a_cost_of_speculation() -> None:
    stage, pace = Stage(chains(1), [ONE, END], [Opinion(ONE, delay_s=0.5), END], [ANSWER]), StepPace(0.02)
    pace.generated(100, 1.0)
    for num_tokens in 20 * (4, 8):
        pace.costs.read(num_tokens, 0.001 * num_tokens)
    stage.request.pace, before_s = pace, pace._balance_s
    await stage.play()
    assert pace._balance_s > before_s - 0.1


async def test_a_draft_has_time_to_read_what_it_has_not_read() -> None:
    stage, unread = Stage(chains(1), [ONE, TWO, END], [ONE, TWO, END], [ANSWER]), list[int]()
    prompt = len(stage.request.transcript.buffer)
    stage.request.pace.patience_s = unread.append
    await stage.play()
    assert unread[0] == prompt
    assert unread[1:] == [0, 0]
    pace = StepPace(0.02)
    pace.generated(100, 1.0)
    assert pace.patience_s(10_000) is None, "the first step takes what it takes"
    pace.costs.drafted(64, 5.0)
    assert pace.patience_s(10_000) == pytest.approx(2 * 0.01 * (64 + 10_000 / 16))


@given(st.floats(0.001, 50), st.floats(0.001, 50), st.floats(0.001, 1), st.booleans())
def test_the_first_step_of_a_session_is_allowed_whatever_it_takes(
    draft_s: float, judge_s: float, token_s: float, is_known: bool
) -> None:
    async def played() -> Play:
        draft = [Reply(each, delay_s=draft_s) for each in (ONE, TWO, THREE, END)]
        opinions = [Opinion(each, delay_s=judge_s) for each in (ONE, TWO, THREE, END)]
        writes = Reply(9 * (TWO + ONE) + END + ANSWER, chunk_size=1, gap_s=token_s, delay_s=token_s)
        stage = Stage(chains(1, score={"max_overhead": 0.02}), draft, opinions, [writes] * 9)
        stage.request.pace = StepPace(0.02)
        if is_known:
            stage.request.pace.generated(64, 64 * token_s)
        return await stage.play()

    runner = asyncio.Runner(loop_factory=VirtualLoop)
    with runner, patch.object(time, "perf_counter", runner.get_loop().time):
        result = runner.run(played()).result
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
    stage.request.pace = StepPace(policy.max_overhead)
    if why == "max_overhead":
        stage.request.pace.ended(0, 5.0)
    result = (await stage.play()).result
    assert (result.not_proposed, result.counts.steps_proposed) == (why, int(why is None))
    assert result.counts.abandoned == (why in ("the draft was too slow", "the draft failed")), "one token was abandoned"
    shown = figures(result)
    assert ("proposed" in shown) == (why != "the policy proposes none")
    assert why is None or why == "the policy proposes none" or f"0 steps proposed ({why})" in shown


def test_one_request_at_a_time_tries_a_draft_that_has_not_written_a_step() -> None:
    now = [0.0]
    pace = StepPace(0.05, clock=lambda: now[0])
    assert pace.speculates("a")
    pace.tries("a")
    assert not pace.speculates("b"), "the draft may hang"
    pace.ended(0, 0.1, "a")
    assert pace.speculates("b")
    with pace.request("b"):
        pace.tries("b")
    assert pace.speculates("c"), "the request that tried it was cancelled"
    pace.tries("c")
    now[0] = 60.0
    assert not pace.speculates("e")
    assert pace.why == "another request tries the draft"
    pace.costs.drafted(10, 0.1)
    assert pace.speculates("e")


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
