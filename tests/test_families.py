"""The families beside `score`, run with engines that answer by the text so far: what is committed, and at what cost."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import PROMPT, Call, LetterTokenizer, Opinion, Play, Reply, ScriptedEngine, Stage, WordTokenizer

from stepspec import Pair, StepSpec
from stepspec.errors import EngineError, TargetError
from stepspec.loop.families import FAMILIES
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import Policy
from stepspec.loop.policy_tables import StepTable
from stepspec.loop.step import StepCommitted, StepJudged

pytestmark = pytest.mark.anyio

Plan = Callable[[int, str], Reply | str]
"""What a model writes next, by the number of steps so far and their text."""

ALIKE = {"kind": "equivalence", "threshold": 0.5}
END, ANSWER = "</think>", "So 9.<|end|>"
OWN = ("One two.\n\n", "Three four.\n\n", "Five six.\n\n", "Seven eight.\n\n")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Planned(ScriptedEngine):
    """Writes what its plan says after the text so far. Steps are alike for it if they start with the same letter."""

    plan: Plan
    fails_to_compare: EngineError | None = None
    hangs_to_verify = False

    def _reply_to(self, call: Call) -> Reply | str:
        written = call.prompt.removeprefix(PROMPT)
        thinking, ended, _ = written.partition(END)
        if ended:
            return ANSWER
        reply = self.plan(thinking.count("\n\n"), thinking)
        if isinstance(reply, str) and call.stop is not None and not call.stop.delimiters:
            while END not in reply:  # everything up to the answer
                following = self.plan((thinking + reply).count("\n\n"), thinking + reply)
                reply += following if isinstance(following, str) else following.text
        return reply

    def _opinion_on(self, call: Call) -> Opinion | str:
        if self.hangs_to_verify:
            return Opinion(hangs=True)
        if not call.probes:
            before, own = call.prompt.removeprefix(PROMPT), ""
            while own.count("\n\n") < 2 and END not in own:  # the step, and what comes after it
                following = self.plan((before + own).count("\n\n"), before + own)
                own += following if isinstance(following, str) else following.text
            return Opinion(own)
        first, second = (line.partition(": ")[2] for line in call.probes[0].splitlines() if ": " in line)
        return Opinion(digits={0: 0.9, 1: 0.1} if first[0] == second[0] else {1: 1.0}, fails=self.fails_to_compare)


def steps(written: Sequence[str], end: str = END) -> Plan:
    """Return a plan that writes these steps, then ends the thinking, for any text before."""
    return lambda number, _: written[number] if number < len(written) else end + ANSWER


def compare(**settings: Any) -> Policy:
    tables = {"judges": (ALIKE,), "compare": {"depth": 3}} | settings
    return Policy.model_validate({"version": 1, "summary": "a test", "family": "compare"} | tables)


def staged(policy: Policy, target: Plan, draft: Plan, **settings: Any) -> Stage:
    stage = Stage(policy, **settings)
    for engine, plan in ((stage.target, target), (stage.draft, draft)):
        engine.__class__ = Planned
        engine.plan = plan  # type: ignore[attr-defined]
    return stage


def origins(play: Play) -> list[tuple[str, str]]:
    return [(step.origin, step.text) for step in play.result.steps]


# Compare


async def test_steps_that_say_the_same_are_the_draft_s_and_the_target_s_own_follows_the_run() -> None:
    other = [step.replace("One", "Oh one").replace("Five", "Fine five") for step in OWN]
    play = await staged(compare(), steps(OWN), steps(other)).play()
    assert origins(play) == [*(("draft", text) for text in other[:3]), ("target", OWN[3])]
    assert play.result.answer == "So 9."
    counts = play.result.counts
    assert (counts.steps_judged, counts.steps_accepted) == (3, 3)  # the last draft step only ends the thinking
    assert counts.regenerated == 0  # no step was rejected
    assert counts.discarded > 0


async def test_the_first_step_that_differs_is_the_target_s_own_and_what_follows_it_is_dropped() -> None:
    wrong = [OWN[0], "Xx four.\n\n", *OWN[2:]]
    play = await staged(compare(), steps(OWN), steps(wrong)).play()
    assert origins(play) == [("draft", OWN[0]), ("target", OWN[1]), ("draft", OWN[2]), ("draft", OWN[3])]
    assert play.result.steps[1].scores == {"equivalence": 0.0}
    assert play.result.counts.rejected == play.result.steps[1].num_tokens
    judged = [event.accepted for event in play.events if isinstance(event, StepJudged)]
    assert judged[:3] == [True, False, True]


async def test_steps_with_the_same_words_need_no_question() -> None:
    shouted = [step.upper() for step in OWN]
    play = await staged(compare(judges=({"kind": "never"},)), steps(OWN), steps(shouted)).play()
    assert [origin for origin, _ in origins(play)] == [*["draft"] * 3, "target"]
    assert not [call for call in play.target.calls if call.probes]


async def test_what_follows_a_run_is_written_while_the_run_is_written() -> None:
    """Three steps take as long as one: the target writes all of them at the same time."""
    slow = [Reply(step, delay_s=0.2) for step in OWN]

    def own(number: int, _: str) -> Reply | str:
        return slow[number] if number < 4 else END + ANSWER

    play = await staged(compare(), own, steps(OWN)).play()
    times = play.result.times
    assert [origin for origin, _ in origins(play)] == [*["draft"] * 3, "target"]
    assert 0.2 <= times.wall < 0.45
    assert times.target - 0.05 <= times.busy_target < 0.45


@pytest.mark.parametrize("ends", [1, 2, 4])
async def test_the_draft_does_not_end_the_thinking(ends: int) -> None:
    play = await staged(compare(), steps(OWN), steps(OWN[:ends])).play()
    assert play.result.reasoning == "".join(OWN)
    assert play.result.answer == "So 9."


async def test_of_a_model_without_tags_the_last_step_is_the_target_s_own() -> None:
    """Its last step is its answer, and only the target gives that."""

    def plan(*written: str) -> Plan:
        return lambda number, _: written[number] if number < len(written) else "<|end|>"

    own, draft = plan("One.\n\n", "So 7.\n\n"), plan("Fine one.\n\n", "So 5.\n\n")
    play = await staged(compare(judges=({"kind": "always"},)), own, draft, tags=False).play()
    assert play.result.answer == "Fine one.\n\nSo 7.\n\n"


async def test_a_repeated_step_and_one_that_was_cut_never_stand() -> None:
    again = [OWN[0], OWN[0]]
    play = await staged(compare(judges=({"kind": "always"},)), steps(OWN), steps([*again, *OWN[2:]])).play()
    assert origins(play)[1] == ("target", OWN[1])
    long = ["One two three four five six.\n\n", *OWN[1:]]
    policy = compare(judges=({"kind": "always"},), step={"max_step_tokens": 5})
    play = await staged(policy, steps(OWN), steps(long)).play()
    assert origins(play)[0] == ("target", OWN[0])


async def test_a_draft_that_fails_leaves_the_target_alone() -> None:

    def broken(number: int, _: str) -> Reply | str:
        return Reply(OWN[0][:3], fails=EngineError("no")) if number == 1 else steps(OWN)(number, _)

    play = await staged(compare(), steps(OWN), broken).play()
    assert play.result.reasoning == "".join(OWN)
    assert play.result.counts.abandoned > 0


async def test_a_question_that_fails_rejects() -> None:
    stage = staged(compare(), steps(OWN), steps(["Oh one.\n\n", *OWN[1:]]))
    stage.target.fails_to_compare = EngineError("no")  # type: ignore[attr-defined]
    play = await stage.play()
    assert origins(play)[0] == ("target", OWN[0])
    assert play.result.steps[0].scores == {"equivalence": None}


async def test_a_target_that_fails_is_an_error_with_the_committed_text() -> None:

    def broken(number: int, _: str) -> Reply | str:
        return OWN[number] if number < 2 else Reply(fails=EngineError("It broke."))

    stage = staged(compare(compare={"depth": 1}), broken, steps(OWN))
    with pytest.raises(TargetError) as caught:
        await stage.play()
    assert caught.value.committed == OWN[0] + OWN[1]
    assert stage.target.num_open == stage.draft.num_open == 0


async def test_closing_a_request_closes_all_calls() -> None:

    def hanging(number: int, _: str) -> Reply | str:
        return OWN[number] if number < 2 else Reply(hangs=True)

    stage = staged(compare(compare={"depth": 1}), hanging, hanging)
    events = stage.events()
    async for event in events:
        if isinstance(event, StepCommitted):
            break
    await events.aclose()
    assert stage.target.num_open == stage.draft.num_open == 0


@pytest.mark.parametrize("max_tokens", [*range(1, 30, 4), 200])
async def test_the_budget_holds(max_tokens: int) -> None:
    play = await staged(compare(), steps(OWN), steps(OWN), max_tokens=max_tokens).play()
    play.result.counts.check(max_tokens)
    if play.result.finish_reason == "length":
        assert play.result.counts.committed == max_tokens


async def test_the_deadline_holds() -> None:

    def slow(number: int, _: str) -> Reply | str:
        return Reply(OWN[number % 4], delay_s=0.05)

    stage = staged(compare(), slow, slow)
    stage.request.limits.options = RequestOptions(deadline_s=0.2)
    started = asyncio.get_running_loop().time()
    play = await stage.play()
    assert play.result.limit == "deadline"
    assert asyncio.get_running_loop().time() - started < 0.4


# Route


def route(**settings: Any) -> Policy:
    return Policy.model_validate({"version": 1, "summary": "a test", "family": "route", "route": settings})


def sure(text: str, logprob: float) -> Reply:
    """Return a reply whose first token has this log-prob; its entropy is -2 times as high."""
    return Reply(text, logprobs={0: logprob})


async def test_a_step_with_an_uncertain_first_token_is_the_target_s() -> None:
    def draft(number: int, text: str) -> Reply | str:
        if text and not text.endswith("\n\n"):
            return OWN[number][len(text.rpartition("\n\n")[2]) :]
        return sure(OWN[number].replace("Three", "Four"), -0.4 if number == 1 else -0.1) if number < 4 else END

    play = await staged(route(threshold=0.5), steps(OWN), draft).play()
    assert origins(play) == [("draft", OWN[0]), ("target", OWN[1]), ("draft", OWN[2]), ("draft", OWN[3])]
    assert play.result.answer == "So 9."
    assert play.result.counts.rejected == 1  # the uncertain token
    assert play.result.counts.steps_judged == 0


@pytest.mark.parametrize(
    ("opening", "by_target"), [("Fine", 0), ("Wait no", 3), ("Yeah it", 3), ("Think again now", 5), ("Therefore it", 0)]
)
async def test_words_of_doubt_and_checking_are_the_target_s(opening: str, by_target: int) -> None:
    def draft(number: int, text: str) -> Reply | str:
        last = text.rpartition("\n\n")[2]
        return f"{opening} this is a step.\n\n" if not last else " and so on.\n\n"

    target = "Aa bb cc dd ee ff gg.\n\n"
    policy = route(signal="words", opening_tokens=3, checking_tokens=5)
    play = await staged(policy, lambda number, _: target, draft, max_tokens=60).play()
    first = play.result.steps[0]
    assert first.num_tokens - first.num_from_draft == by_target
    assert first.origin == ("salvaged" if by_target else "draft")


async def test_after_many_doubts_the_target_is_asked_to_check() -> None:
    policy = route(signal="words", opening_tokens=2, checking_tokens=4, doubts=3)

    def draft(number: int, text: str) -> str:
        return f"Wait, so {number}.\n\n"

    play = await staged(policy, lambda number, _: f"Step {number}.\n\n", draft, max_tokens=80).play()
    asked = [step.index for step in play.result.steps if step.text.startswith("Let me check whether")]
    assert asked[:2] == [2, 5]


async def test_a_step_of_nothing_but_a_control_token_is_no_step_in_any_count() -> None:
    """Both models write it and end the thinking, so it is committed."""
    plan = steps(OWN[:1], "<|user|>" + END)
    play = await staged(compare(), plan, plan).play()
    counts = play.result.counts
    assert (counts.steps_proposed, counts.steps_judged, counts.steps_accepted) == (1, 1, 1)
    assert play.result.reasoning == OWN[0]


async def test_the_draft_of_a_route_neither_ends_the_thinking_nor_repeats_forever() -> None:
    play = await staged(route(), steps(OWN), lambda *_: sure(END, -0.1)).play()
    assert origins(play) == [("target", step) for step in OWN]
    again = await staged(route(), steps(OWN), lambda *_: sure(OWN[0], -0.1), max_tokens=60).play()
    assert "target" in [origin for origin, _ in origins(again)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 15, 40])
@pytest.mark.parametrize("signal", ["words", "first-entropy"])
async def test_the_budget_of_a_route_holds(max_tokens: int, signal: str) -> None:
    policy = route(signal=signal, **({"opening_tokens": 3} if signal == "words" else {}))
    play = await staged(policy, steps(OWN), lambda *_: sure("Wait a step.\n\n", -0.1), max_tokens=max_tokens).play()
    if play.result.finish_reason == "length":
        assert play.result.counts.committed == max_tokens


async def test_a_draft_of_a_route_that_fails_leaves_the_target_alone() -> None:
    play = await staged(route(), steps(OWN), lambda *_: Reply(fails=EngineError("no"))).play()
    assert play.result.reasoning == "".join(OWN)


# What holds in all of them


def of_family(family: str, **settings: Any) -> Policy:
    judges = [{"kind": "always"}] if FAMILIES[family].table.judged else []
    return Policy.model_validate({"version": 1, "summary": "a test", "family": family, "judges": judges} | settings)


SPECULATING = [name for name, family in FAMILIES.items() if family.table.speculates]


@pytest.mark.parametrize("family", SPECULATING)
async def test_the_target_writes_the_first_steps(family: str) -> None:
    play = await staged(of_family(family, first_target_steps=2), letters_of(OWN), letters_of(OWN)).play()
    assert [origin for origin, _ in origins(play)][:2] == ["target", "target"]
    assert play.result.reasoning == "".join(OWN)
    assert all(call.prompt.startswith(PROMPT + OWN[0] + OWN[1]) for call in play.draft.calls)
    assert play.draft.calls


@pytest.mark.parametrize("family", SPECULATING)
async def test_the_time_for_the_thinking_cuts_off_a_pass_that_hangs(family: str) -> None:
    judges = {"score": [{"kind": "likelihood", "threshold": -3.0}], "compare": [ALIKE]}.get(family, [])
    other = [step.replace("One", "Oh one") for step in OWN[:2]]
    stage = staged(of_family(family, judges=judges), letters_of(OWN), steps(other) if judges else letters_of(other))
    stage.target.hangs_to_verify = True  # type: ignore[attr-defined]
    stage.request.limits.options = RequestOptions(max_thinking_s=0.2)
    async with asyncio.timeout(2):
        play = await stage.play()
    assert play.result.limit == "max_thinking_s"
    assert play.result.answer == "So 9."


async def test_a_draft_that_is_never_right_is_used_no_more() -> None:
    own = [f"Step {chr(97 + number)} is here.\n\n" for number in range(26)]
    wrong = [f"Xx {chr(97 + number)} no no no no no no.\n\n" for number in range(26)]
    policy = score(judges=[{"kind": "never"}], step={"max_step_tokens": 12})
    play = await staged(policy, steps(own), steps(wrong)).play()
    assert play.result.reasoning == "".join(own)
    assert 0 < len(play.draft.calls) < len(own)


@pytest.mark.parametrize("family", SPECULATING)
async def test_a_draft_may_have_another_vocabulary(family: str) -> None:
    target, draft = Planned(WordTokenizer(), name="target"), Planned(LetterTokenizer(), name="draft")
    target.plan = draft.plan = letters_of(OWN)
    pair = Pair(target, draft, one_vocabulary=False)
    result = await StepSpec(policy=of_family(family), pair=pair).generate("How many?")
    result.counts.check()
    assert (result.reasoning, result.answer) == ("".join(OWN), "So 9.")
    assert result.counts.accepted > 0


@pytest.mark.parametrize(
    ("period", "origin"), [(2, ["target", "draft"] * 2), (3, ["target", *["draft"] * 2, "target"])]
)
async def test_the_models_take_turns(period: int, origin: list[str]) -> None:
    policy = of_family("alternate", alternate={"period": period})
    play = await staged(policy, letters_of(OWN), letters_of(OWN)).play()
    assert [each for each, _ in origins(play)] == origin
    assert play.result.reasoning == "".join(OWN)
    assert play.result.counts.steps_judged == 0


async def test_after_two_equal_steps_the_target_writes_out_of_turn() -> None:
    policy = of_family("alternate", alternate={"period": 5})
    play = await staged(policy, steps(OWN), lambda *_: OWN[0], max_tokens=60).play()
    assert [each for each, _ in origins(play)][:4] == ["target", "draft", "target", "draft"]


def letters_of(written: Sequence[str]) -> Plan:
    """Return a plan that continues a text, which may end inside a step, to the end of its step."""
    whole = "".join(written)

    def continued(number: int, text: str) -> str:
        rest = whole[len(text) :]
        return f"{rest.partition(chr(10) * 2)[0]}\n\n" if rest else END + ANSWER

    return continued


# Score: steps that are aborted


def score(**settings: Any) -> Policy:
    tables = {"judges": ({"kind": "likelihood", "threshold": -3.0},)} | settings
    return Policy.model_validate({"version": 1, "summary": "a test", "family": "score"} | tables)


async def test_a_step_that_repeats_itself_is_aborted() -> None:
    endless = Reply("so it is " * 400, chunk_size=6, hangs=True)
    stage = staged(score(), steps(OWN), lambda *_: endless)
    play = await stage.play()
    assert play.result.reasoning == "".join(OWN)
    assert 32 <= play.result.counts.abandoned / (len(OWN) + 1) < 48
    assert play.result.counts.steps_judged == 0


async def test_a_draft_that_is_slower_than_the_target_is_not_waited_for() -> None:
    play = await staged(compare(), steps(OWN), lambda *_: Reply(OWN[0], delay_s=2.0)).play()
    assert [origin for origin, _ in origins(play)] == ["target"] * 4
    assert play.result.times.wall < 1.0


async def test_a_draft_of_a_route_that_hangs_is_used_no_more() -> None:
    def draft(number: int, text: str) -> Reply | str:
        return Reply(hangs=True) if text and not text.endswith("\n\n") else sure(OWN[number], -0.1)

    policy = route().model_copy(update={"step": StepTable(draft_deadline_s=0.1)})
    play = await staged(policy, steps(OWN), draft).play()
    assert play.result.times.wall < 0.5
    assert len(play.draft.calls) == 2
