"""How many tokens are drafted: the count that pays most by what is known, for all rows of a round together."""

from itertools import pairwise

import pytest

from stepspec.engine import Drafting, Sampling, Stop, TokenBuffer
from stepspec.stops import StopWatch
from stepspec.torch_engine.pace import (
    FIRST_REST,
    LONGEST_REST,
    LONGEST_RUN,
    MARGIN,
    MAX_TOKENS,
    PRIOR_ACCEPTANCE,
    Belief,
    Costs,
    Pacer,
    best_count,
    between,
    expected_tokens,
    worth_verifying,
)
from stepspec.torch_engine.row import Row

FLAT = Costs(verify={1: 1.0, 9: 1.4}, draft={1: 0.1, 4: 0.4})
"""Verifying eight tokens more costs 0.4 of a pass, drafting one 0.1."""


def new_row() -> Row:
    buffer = TokenBuffer([1])
    return Row(buffer, 1, Sampling(), Drafting(), StopWatch(Stop(9), str, frozenset()))


def test_costs_between_and_beyond_measured_points_lie_on_straight_lines() -> None:
    assert between({1: 1.0, 3: 2.0, 9: 5.0}, 2) == pytest.approx(1.5)
    assert between({1: 1.0, 3: 2.0, 9: 5.0}, 6) == pytest.approx(3.5)
    assert between({1: 1.0, 3: 2.0, 9: 5.0}, 11) == pytest.approx(6.0)
    assert between({4: 2.5}, 11) == 2.5
    assert FLAT.round_s[0] == FLAT.verify_s[0] == 1.0
    assert len(FLAT.round_s) == MAX_TOKENS + 1
    assert FLAT.round_s[4] == pytest.approx(0.4 + 1.2)


@pytest.mark.parametrize("acceptance", [0.05, 0.3, 0.6, 0.8, 0.95])
def test_the_count_is_the_one_with_the_most_tokens_a_second(acceptance: float) -> None:
    speeds = [expected_tokens(acceptance, count) / FLAT.round_s[count] for count in range(MAX_TOKENS + 1)]
    best = speeds.index(max(speeds)) if max(speeds) > MARGIN * speeds[0] else 0
    assert best_count([acceptance], [MAX_TOKENS], FLAT.round_s) == best


def test_nothing_is_drafted_where_it_does_not_pay_and_more_where_it_pays_more() -> None:
    counts = [best_count([acceptance], [MAX_TOKENS], FLAT.round_s) for acceptance in (0.0, 0.4, 0.7, 0.9, 1.0)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == MAX_TOKENS


def test_rows_that_share_a_round_go_for_what_is_best_for_all_of_them() -> None:
    alone = best_count([0.9], [MAX_TOKENS], FLAT.round_s)
    assert best_count([0.9, 0.0], [MAX_TOKENS] * 2, FLAT.round_s) < alone
    assert best_count([0.9] + 15 * [0.0], [MAX_TOKENS] * 16, FLAT.round_s) == 0


def test_what_was_found_for_a_few_rows_only_is_not_verified_where_all_would_pay_for_it() -> None:
    good = Belief(8.0, 10.0)
    assert worth_verifying([good], [4], FLAT) == 4
    assert worth_verifying([good] * 16, [4] * 16, FLAT) == 4
    assert worth_verifying([good] * 16, [4] + 15 * [0], FLAT) == 0


def test_a_drafter_that_is_always_wrong_is_found_out_and_then_tried_less_and_less() -> None:
    pacer, row = Pacer(), new_row()
    counts = []
    for _ in range(3000):
        counts.append(pacer.count([pacer.belief(row)], FLAT))
        if counts[-1]:
            pacer.note(row, counts[-1], 0)
    assert counts[0] > 1
    beginning = next(index for index, count in enumerate(counts) if count == 0)
    assert beginning < LONGEST_RUN
    trials = [index for index, count in enumerate(counts) if index > beginning and count]
    assert {counts[index] for index in trials} == {1}
    rests = [later - earlier for earlier, later in pairwise(trials)]
    assert rests == sorted(rests)
    assert FIRST_REST < rests[0] < rests[-1] <= LONGEST_REST + 1


def test_a_drafter_that_becomes_useful_is_used_again() -> None:
    pacer, row = Pacer(), new_row()
    counts = []
    for number in range(6000):
        counts.append(pacer.count([pacer.belief(row)], FLAT))
        if counts[-1]:
            pacer.note(row, counts[-1], counts[-1] if number > 1000 else 0)
    assert max(counts[-2:]) > 1


def test_now_and_then_a_round_goes_without_drafting_even_where_that_pays() -> None:
    pacer, row = Pacer(), new_row()
    counts = []
    for _ in range(10 * LONGEST_RUN):
        counts.append(pacer.count([pacer.belief(row)], FLAT))
        if counts[-1]:
            pacer.note(row, counts[-1], counts[-1])
    plain = [index for index, count in enumerate(counts) if count == 0]
    assert {later - earlier for earlier, later in pairwise(plain)} == {LONGEST_RUN + 1}


def test_costs_follow_how_fast_the_machine_is_and_how_the_two_kinds_of_rounds_compare() -> None:
    costs = Costs(verify={1: 1.0, 9: 1.4}, draft={1: 0.1, 4: 0.4})
    for number in range(4000):
        if number % 20:
            costs.note(4, 2.4, usual=True)
        else:
            costs.note(0, 0.8, usual=False)
    assert costs.round_s[0] == costs.verify_s[0] == pytest.approx(0.8, rel=0.02)
    assert costs.round_s[4] == pytest.approx(2.4, rel=0.02)
    assert costs.round_s[2] == pytest.approx(1.875 * 0.8 * 1.3, rel=0.04)
    costs.note(0, 1000.0, usual=True)
    assert costs.round_s[0] < 1.0, "one round that something held up says little"


def test_a_trial_says_nothing_about_costs() -> None:
    costs = Costs(verify={1: 1.0, 9: 1.4}, draft={1: 0.1, 4: 0.4})
    costs.note(1, 1000.0, usual=False)
    assert costs.round_s == FLAT.round_s


def test_a_machine_that_slows_down_does_not_change_what_is_best() -> None:
    costs = Costs(verify={1: 1.0, 9: 1.4}, draft={1: 0.1, 4: 0.4})
    before = best_count([0.8], [MAX_TOKENS], costs.round_s)
    for _ in range(50):
        costs.note(before, 3 * FLAT.round_s[before], usual=True)
    assert best_count([0.8], [MAX_TOKENS], costs.round_s) == before
    assert costs.round_s[0] == pytest.approx(3.0, rel=0.02)


def test_costs_are_measured_once_for_each_number_of_rows() -> None:
    pacer, measured = Pacer(), list[int]()

    def measure(num_rows: int) -> Costs:
        measured.append(num_rows)
        return Costs({1: 1.0 * num_rows}, {1: 0.1})

    for _ in range(3):
        for num_rows in (1, 4):
            assert pacer.costs(num_rows, lambda num_rows=num_rows: measure(num_rows)).round_s[0] == num_rows
    assert measured == [1, 4]


def test_a_new_call_begins_with_what_other_calls_have_learned() -> None:
    pacer = Pacer()
    assert pacer.belief(new_row()).acceptance == pytest.approx(PRIOR_ACCEPTANCE)
    first = new_row()
    for _ in range(300):
        pacer.note(first, 4, 0)
    assert pacer.belief(new_row()).acceptance < 0.05
