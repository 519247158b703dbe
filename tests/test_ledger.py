"""The books of a request: tokens by fate, seconds by role, and the budget."""

import time

import pytest

from stepspec.engine import Chunk
from stepspec.ledger import Ledger
from stepspec.step import Counts, Times


def test_the_fates_of_tokens_keep_the_identities() -> None:
    ledger = Ledger(100)
    ledger.drafted(accepted=7, rejected=3, salvaged=2)
    ledger.abandoned(4)
    ledger.wrote("regenerated", 5)
    ledger.wrote("forced", 6)
    ledger.counts.check()
    assert ledger.counts == Counts(
        accepted=7,
        salvaged=2,
        regenerated=5,
        forced=6,
        drafted=14,
        rejected=3,
        cancelled=4,
        committed=18,
        target_generated=11,
    )


def test_everything_generated_uses_up_the_budget() -> None:
    ledger = Ledger(30)
    ledger.drafted(accepted=7, rejected=3, salvaged=2)
    ledger.abandoned(4)
    ledger.wrote("regenerated", 5)
    ledger.wrote("forced", 6)
    assert ledger.remaining == 5
    ledger.add(discarded=5, target_generated=5)
    assert ledger.remaining == 0


def test_a_target_call_brings_its_passes_and_its_token_level_counts() -> None:
    ledger = Ledger(10)
    ledger.add_target_call(Chunk((1, 2), "length", passes=2, drafted=6, accepted=1))
    ledger.add_target_call(Chunk((3,), "length", passes=1))
    counts = ledger.counts
    assert (counts.target_passes, counts.token_drafted, counts.token_accepted) == (3, 6, 1)


def test_an_unknown_count_cannot_be_added() -> None:
    with pytest.raises(AttributeError):
        Ledger(10).add(acepted=1)


@pytest.mark.parametrize(
    "wrong",
    [
        Counts(committed=1),
        Counts(drafted=1),
        Counts(target_generated=1),
        Counts(accepted=1, committed=1, drafted=1, salvaged=2),
        Counts(steps_accepted=1),
        Counts(token_accepted=1),
    ],
)
def test_books_that_do_not_add_up_are_caught(wrong: Counts) -> None:
    with pytest.raises(AssertionError):
        wrong.check()


def test_seconds_go_to_their_roles_and_the_rest_to_the_controller() -> None:
    ledger = Ledger(10)
    with ledger.time("draft"):
        time.sleep(0.02)
    with ledger.time("judge"):
        time.sleep(0.03)
    time.sleep(0.01)
    times = ledger.times()
    times.check()
    assert times.draft >= 0.02
    assert times.judge >= 0.03
    assert times.controller >= 0.01
    assert times.target == times.queue == 0


def test_waiting_is_moved_from_its_role_to_the_queue_and_never_more_than_the_role_has() -> None:
    ledger = Ledger(10)
    with ledger.time("target"):
        time.sleep(0.02)
    before = ledger.times().target
    ledger.waited("target", 0.015)
    assert ledger.times().queue == pytest.approx(0.015)
    assert ledger.times().target == pytest.approx(before - 0.015)
    ledger.waited("target", 9.0)
    assert ledger.times().target == 0
    assert ledger.times().queue == pytest.approx(before)
    ledger.times().check()


def test_time_is_booked_when_what_was_timed_fails() -> None:
    ledger = Ledger(10)

    def fail() -> None:
        with ledger.time("target"):
            time.sleep(0.01)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert ledger.times().target >= 0.01


@pytest.mark.parametrize("wall", [0.98, 1.02])
def test_times_that_miss_the_wall_by_more_than_a_percent_are_caught(wall: float) -> None:
    with pytest.raises(AssertionError):
        Times(draft=0.5, target=0.5, wall=wall).check()
    Times(draft=0.5, target=0.5, wall=1.005).check()
