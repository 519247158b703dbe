"""The ledger of a request: tokens by outcome, seconds by role, and the budget."""

import time

import pytest

from stepspec.chat.events import AnswerDelta
from stepspec.engines.protocol import TokenChunk
from stepspec.loop.counts import Counts
from stepspec.loop.ledger import Ledger
from stepspec.loop.step import Step, StepCommitted, StepProposed


def test_token_counts_satisfy_the_identities() -> None:
    ledger = Ledger(100)
    ledger.add(drafted=14)
    ledger.add(accepted=7, rejected=3, salvaged=2)
    ledger.add(abandoned=4)
    ledger.add(generated=11)
    ledger.add(regenerated=5)
    ledger.add(forced=6)
    ledger.committed(18)
    ledger.counts.check(18)
    assert ledger.counts == Counts(
        accepted=7,
        salvaged=2,
        regenerated=5,
        forced=6,
        drafted=14,
        rejected=3,
        abandoned=4,
        committed=18,
        generated=11,
    )


def test_only_committed_tokens_use_up_the_budget() -> None:
    ledger = Ledger(30)
    ledger.add(accepted=7, rejected=3, salvaged=2)
    ledger.add(abandoned=4)
    ledger.add(regenerated=5)
    ledger.add(forced=6)
    ledger.add(discarded=5)
    assert ledger.remaining == 12


@pytest.mark.parametrize("fate", ["rejected", "abandoned", "discarded"])
def test_a_step_may_be_drafted_while_waste_stays_within_the_committed_tokens_and_two_steps(fate: str) -> None:
    ledger = Ledger(100)
    ledger.add(**{fate: 10})
    assert ledger.may_waste(10)
    ledger.add(**{fate: 1})
    assert not ledger.may_waste(10)
    ledger.add(forced=1)
    assert ledger.may_waste(10)


def test_a_target_call_adds_its_passes_and_its_token_level_counts() -> None:
    ledger = Ledger(10)
    ledger.add_target_call(TokenChunk((1, 2), "length", passes=2, drafted=6, accepted=1))
    ledger.add_target_call(TokenChunk((3,), "length", passes=1))
    counts = ledger.counts
    assert (counts.target_passes, counts.token_drafted, counts.token_accepted) == (3, 6, 1)


def test_an_unknown_count_cannot_be_added() -> None:
    with pytest.raises(KeyError):
        Ledger(10).add(acepted=1)


@pytest.mark.parametrize(
    "wrong",
    [
        Counts(committed=1),
        Counts(drafted=1),
        Counts(generated=1),
        Counts(accepted=1, committed=1, drafted=1, salvaged=2),
        Counts(steps_accepted=1),
        Counts(token_accepted=1),
    ],
)
def test_counts_that_do_not_add_up_are_caught(wrong: Counts) -> None:
    with pytest.raises(AssertionError):
        wrong.check()


def test_more_tokens_than_the_budget_are_caught() -> None:
    Counts(forced=5, committed=5, generated=5).check(5)
    with pytest.raises(AssertionError):
        Counts(forced=5, committed=5, generated=5).check(4)


def test_every_part_is_measured_separately_and_the_rest_is_other() -> None:
    ledger = Ledger(10)
    with ledger.time("controller"):
        time.sleep(0.01)
        with ledger.time("draft"):
            time.sleep(0.03)
        time.sleep(0.01)
        with ledger.time("judge"):
            time.sleep(0.04)
    time.sleep(0.01)
    times = ledger.times()
    assert times.draft >= 0.03
    assert times.judge >= 0.04
    assert times.controller >= 0.02
    assert times.other >= 0.01
    assert times.target == times.queue == times.engine_wait == 0
    parts = times.draft + times.judge + times.controller + times.other
    assert parts == pytest.approx(times.wall, abs=1e-9)


def test_waiting_for_an_engine_is_moved_from_its_role_and_never_more_than_the_role_has() -> None:
    ledger = Ledger(10)
    with ledger.time("target"):
        time.sleep(0.02)
    before = ledger.times().target
    ledger.waited("target", 0.015)
    assert ledger.times().engine_wait == pytest.approx(0.015)
    assert ledger.times().target == pytest.approx(before - 0.015)
    ledger.waited("target", 9.0)
    assert ledger.times().target == 0
    assert ledger.times().engine_wait == pytest.approx(before)


def test_time_is_counted_even_if_the_timed_code_fails() -> None:
    ledger = Ledger(10)

    def fail() -> None:
        with ledger.time("target"):
            time.sleep(0.01)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ledger.times().target >= 0.01


def test_the_first_commit_and_the_longest_time_between_two_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    ledger, step = Ledger(10), StepCommitted(Step(0, "target", "One.", 1, 0, "delimiter"))
    found = list[float | None]()
    for wait_s, event in (
        (3.0, step),
        (1.0, AnswerDelta("a")),
        (2.0, StepProposed(1, "b", 1)),
        (0.5, AnswerDelta("c")),
    ):
        now[0] += wait_s
        ledger.shown(event)
        found.append(ledger.times().longest_gap)
    assert found == [None, 1.0, 1.0, 2.5]
    assert (ledger.times().first_step, ledger.times().first_answer) == (3.0, 4.0)


def test_the_first_token_is_the_first_committed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    ledger = Ledger(10)
    for wait_s, counts in ((1.0, {"drafted": 4}), (2.0, {"forced": 1, "generated": 1}), (4.0, {"accepted": 4})):
        now[0] += wait_s
        ledger.add(**counts)
    assert ledger.times().first_token == 3.0
