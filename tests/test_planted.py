"""Synthetic runs with known differences: summaries and reports find these at the rates that they state.

Every simulated problem has its own difficulty and length, shared by all policies, as in real runs. A correct program
passes each bound on a rate with a probability of more than 99.7%. `make test` simulates fewer runs than `make soak`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runs import make_problems, make_run

from stepspec.evaluation.records import ResultRow, Summary, TimeRecord, TokenRecord
from stepspec.evaluation.report import markdown_report
from stepspec.evaluation.run import summarise


@dataclass(frozen=True)
class Difference:
    """The true difference between a policy and the target."""

    lost: float = 0.0
    """Share of problems that only the target gets right."""
    gained: float = 0.0
    """Share of problems that only the policy gets right."""
    speedup: float = 1.0


def make_rows(
    rng: np.random.Generator, n: int, differences: dict[str, Difference], num_repeats: int = 1
) -> list[ResultRow]:
    """Return rows of the target, right on about 80% of the problems, and of policies with these differences."""
    rows: list[ResultRow] = []
    for problem in range(n):
        solvable, length_s = rng.random() < 0.8, float(rng.lognormal(0.0, 0.6))
        fates = {name: rng.random() for name in differences}
        for repeat in range(num_repeats):
            rows.append(make_row(problem, "target", repeat, solvable, length_s * float(rng.lognormal(0.0, 0.1))))
            for name, truth in differences.items():
                # `lost` is a share of all problems, but only the 80% that the target gets right can be lost.
                lost, gained = fates[name] < truth.lost / 0.8, fates[name] < truth.gained / 0.2
                right = not lost if solvable else gained
                wall_s = length_s * float(rng.lognormal(-np.log(truth.speedup), 0.1))
                rows.append(make_row(problem, name, repeat, right, wall_s))
    return rows


def make_row(problem: int, policy: str, repeat: int, right: bool, wall_s: float) -> ResultRow:
    tokens = TokenRecord(committed=100, forced=100)
    return ResultRow.model_construct(
        problem=f"p{problem}",
        policy=policy,
        repeat=repeat,
        status="correct" if right else "incorrect",
        answer=None,
        finish_reason="stop",
        wall_s=wall_s,
        tokens=tokens,
        time_s=TimeRecord(target=wall_s),
        steps_judged=0,
        steps_accepted=0,
        token_drafted=0,
        token_accepted=0,
        target_passes=100,
    )


def simulated(differences: dict[str, Difference], n: int, num_runs: int, num_repeats: int = 1) -> list[Summary]:
    """Return summaries of runs that differ from each other only by chance."""
    run = make_run(make_problems(n), ["target", *differences], num_repeats=num_repeats)
    rng = np.random.default_rng(20261122)
    return [
        summarise(run.model_copy(update={"seed": seed}), make_rows(rng, n, differences, num_repeats))
        for seed in range(num_runs)
    ]


def share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


def covers(interval: tuple[float, float] | None, truth: float) -> bool:
    assert interval is not None
    return interval[0] <= truth <= interval[1]


@pytest.mark.parametrize(("num_runs", "least"), [(16, 0.75), pytest.param(80, 0.86, marks=pytest.mark.soak)])
@pytest.mark.parametrize("num_repeats", [1, 3])
def test_known_differences_lie_in_their_intervals_as_often_as_stated(
    num_repeats: int, num_runs: int, least: float
) -> None:
    difference = Difference(lost=0.06, gained=0.02, speedup=1.6)
    found = [each.policies["other"] for each in simulated({"other": difference}, 120, num_runs, num_repeats)]
    # With intervals of 95% coverage, the probability that fewer cover is less than 0.001.
    assert share([covers(each.accuracy_delta_ci, -0.04) for each in found]) >= least
    assert share([covers(each.speedup_vs_target_ci, 1.6) for each in found]) >= least
    assert share([covers(each.speedup_median_ci, 1.6) for each in found]) >= least
    noise = (80 / num_runs) ** 0.5
    assert np.mean([each.accuracy_delta for each in found]) == pytest.approx(-0.04, abs=0.008 * noise)
    assert np.mean([each.speedup_vs_target for each in found]) == pytest.approx(1.6, rel=0.01 * noise)


@pytest.mark.parametrize(("num_runs", "most"), [(20, 0.2), pytest.param(80, 0.135, marks=pytest.mark.soak)])
def test_a_difference_of_zero_is_rarely_found(num_runs: int, most: float) -> None:
    difference = Difference(lost=0.05, gained=0.05, speedup=1.0)
    found = [each.policies["other"] for each in simulated({"other": difference}, 120, num_runs)]
    # McNemar's exact test errs in less than 5% of the runs. More errors have a probability of 0.003, 0.002 of 80 runs.
    assert share([each.accuracy_p is not None and each.accuracy_p < 0.05 for each in found]) <= most
    assert share([not covers(each.speedup_vs_target_ci, 1.0) for each in found]) <= most


@pytest.mark.parametrize(("num_runs", "least"), [(12, 0.8), pytest.param(50, 0.86, marks=pytest.mark.soak)])
def test_a_real_difference_is_found_as_often_as_its_size_predicts(num_runs: int, least: float) -> None:
    difference = Difference(lost=0.09, gained=0.01, speedup=1.3)
    found = [each.policies["other"] for each in simulated({"other": difference}, 200, num_runs)]
    # About 18 of 200 problems are lost and 2 gained: the exact test has a power of 98%.
    assert share([each.accuracy_p is not None and each.accuracy_p < 0.05 for each in found]) >= least
    assert all(each.speedup_vs_target_ci is not None and each.speedup_vs_target_ci[0] > 1.1 for each in found)


@pytest.mark.parametrize(("num_runs", "most"), [(15, 0.27), pytest.param(60, 0.15, marks=pytest.mark.soak)])
def test_policies_that_lose_more_than_a_point_rarely_pass_as_matched(num_runs: int, most: float) -> None:
    lossy = {f"lossy-{index}": Difference(lost=0.025, gained=0.005, speedup=2.0 + index / 10) for index in range(2)}
    found = simulated(lossy, 200, num_runs)
    assert all(each.matched is not None for each in found)
    passed = [each.matched is not None and each.matched.policy != "target" for each in found]
    # Each policy loses two points. The bound holds for both together in 95% of the runs. That it fails in more than 4
    # of 15 runs, or 9 of 60, has a probability of 0.001.
    assert share(passed) <= most


@pytest.mark.parametrize(("num_few", "num_many"), [(10, 3), pytest.param(30, 8, marks=pytest.mark.soak)])
def test_a_policy_that_loses_nothing_passes_as_matched_once_there_are_enough_problems(
    num_few: int, num_many: int
) -> None:
    differences = {"harmless": Difference(lost=0.002, gained=0.002, speedup=2.0)}
    few, many = simulated(differences, 60, num_few), simulated(differences, 1500, num_many)
    assert share([each.matched is not None and each.matched.policy == "harmless" for each in few]) <= 0.1
    assert share([each.matched is not None and each.matched.policy == "harmless" for each in many]) >= 0.8


@settings(max_examples=20)
@given(
    lost=st.floats(0.0, 0.2),
    gained=st.floats(0.0, 0.1),
    speedup=st.floats(0.3, 4.0),
    n=st.integers(30, 120),
    num_repeats=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_summary_and_report_agree_for_any_difference(
    lost: float, gained: float, speedup: float, n: int, num_repeats: int, seed: int
) -> None:
    run = make_run(make_problems(n), ["target", "other"], num_repeats=num_repeats)
    rows = make_rows(np.random.default_rng(seed), n, {"other": Difference(lost, gained, speedup)}, num_repeats)
    summary = summarise(run, rows)
    other, target = summary.policies["other"], summary.policies["target"]
    assert other.accuracy_delta == pytest.approx(other.accuracy - target.accuracy)
    for value, interval in (
        (other.accuracy, other.accuracy_ci),
        (other.accuracy_delta, other.accuracy_delta_ci),
        (other.speedup_vs_target, other.speedup_vs_target_ci),
        (other.speedup_median, other.speedup_median_ci),
        (other.tokens_per_s_ratio, other.tokens_per_s_ratio_ci),
    ):
        assert value is not None
        assert interval is not None
        assert interval[0] <= value <= interval[1]
    assert other.speedup_vs_target == pytest.approx(other.tokens_per_s_ratio / other.length_ratio)
    # The bound is six standard deviations of the noise. The report shows the figures of the summary.
    assert abs(other.speedup_vs_target / speedup - 1) < 0.9 / n**0.5
    text = markdown_report(run, summary)
    assert f"{other.speedup_vs_target:.2f}×" in text
    assert f"{100 * other.accuracy:.1f}%" in text
    assert f"{100 * other.accuracy_delta:+.1f}%" in text
