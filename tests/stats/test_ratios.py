"""Ratios of sums, their products, medians and percentiles: values, missing intervals and memory use."""

import tracemalloc
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stepspec.evaluation.records import Percentiles
from stepspec.evaluation.run.tally import percentiles_of
from stepspec.evaluation.stats import (
    MIN_FOR_BOOTSTRAP,
    Resamples,
    median_of_ratios,
    products_of_sums,
    quantile_interval,
    ratio_of_sums,
)

RNG = np.random.default_rng
LATENCIES = RNG(4).lognormal(size=(2, 200))
SPEEDUP = {"target_s": 1, "own_s": -1}


def test_a_ratio_of_sums_lies_inside_its_interval() -> None:
    above, below = LATENCIES
    ratio, interval = ratio_of_sums(above.tolist(), below.tolist(), RNG(0))
    assert ratio == pytest.approx(above.sum() / below.sum())
    assert interval is not None
    assert interval[0] < ratio < interval[1]


def test_the_same_generator_gives_the_same_interval() -> None:
    first, second = (ratio_of_sums(*LATENCIES, RNG(9)) for _ in range(2))
    assert first == second


def test_swapping_the_sums_inverts_the_interval() -> None:
    above, below = LATENCIES
    ratio, interval = ratio_of_sums(above, below, RNG(0))
    inverse, inverse_interval = ratio_of_sums(below, above, RNG(0))
    assert interval is not None
    assert (inverse, inverse_interval) == (pytest.approx(1 / ratio), pytest.approx((1 / interval[1], 1 / interval[0])))


@pytest.mark.parametrize("factor", [2, 1.1, 1 / 3])
def test_a_constant_ratio_has_no_width_because_problems_are_resampled_in_pairs(factor: float) -> None:
    values = [1.0, 5.0, 20.0, 0.3] * 10
    ratio, interval = ratio_of_sums([factor * value for value in values], values, RNG(0))
    assert ratio == pytest.approx(factor)
    assert interval == (ratio, ratio)


def test_too_few_problems_have_a_ratio_and_no_interval() -> None:
    few = [1.0] * (MIN_FOR_BOOTSTRAP - 1)
    assert ratio_of_sums(few, few, RNG(0)) == (1.0, None)


@pytest.mark.parametrize("values", [[0.0] * 20, [0.0] * 19 + [1.0]])
def test_no_interval_if_almost_all_values_are_zero(values: list[float]) -> None:
    ratio, interval = ratio_of_sums(values, [1.0] * 20, RNG(0))
    assert (ratio, interval) == (sum(values) / 20, None)


def test_for_many_problems_the_interval_matches_the_linearized_one() -> None:
    above, below = RNG(5).lognormal(0, 0.3, (2, 2000))
    ratio, interval = ratio_of_sums(above, below, RNG(0))
    error = np.std(above / above.mean() - below / below.mean()) / sqrt(2000)
    assert interval == pytest.approx((ratio * np.exp(-1.96 * error), ratio * np.exp(1.96 * error)), rel=0.01)


def test_figures_over_the_same_problems_are_consistent() -> None:
    own_s, target_s, own_tokens, target_tokens = RNG(6).lognormal(size=(4, 100))
    columns = {"own_s": own_s, "target_s": target_s, "own": own_tokens, "target": target_tokens}
    lengths, rates = {"own": 1, "target": -1}, {"own": 1, "own_s": -1, "target": -1, "target_s": 1}
    found = products_of_sums(columns, {"speedup": SPEEDUP, "length": lengths, "rate": rates}, RNG(0))
    assert found["rate"].value == pytest.approx(found["speedup"].value * found["length"].value)
    alone = ratio_of_sums(target_s, own_s, RNG(0))
    assert (found["speedup"].value, found["speedup"].interval) == (alone[0], pytest.approx(alone[1]))


def test_a_ratio_of_tokens_per_second_is_narrow_if_time_is_proportional_to_length() -> None:
    own_tokens, target_tokens = RNG(7).lognormal(size=(2, 100))
    columns = {"own_s": own_tokens * 0.01, "target_s": target_tokens * 0.02, "own": own_tokens, "target": target_tokens}
    rate = products_of_sums(columns, {"rate": {"own": 1, "own_s": -1, "target": -1, "target_s": 1}}, RNG(0))["rate"]
    assert rate.value == pytest.approx(2)
    assert rate.interval == pytest.approx((2, 2), abs=1e-6)


def test_unknown_columns_and_a_division_by_zero_are_rejected() -> None:
    with pytest.raises(AssertionError):
        products_of_sums({"own_s": [1.0]}, {"speedup": SPEEDUP}, RNG(0))
    with pytest.raises(ZeroDivisionError):
        products_of_sums({"own_s": [0.0] * 20, "target_s": [1.0] * 20}, {"speedup": SPEEDUP}, RNG(0))


def test_resampling_many_problems_uses_little_memory() -> None:
    values = RNG(5).lognormal(size=(100_000, 2))
    tracemalloc.start()
    sums = Resamples(100_000, seed=0, num_resamples=50).sums(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert sums.mean(axis=0) == pytest.approx(values.sum(axis=0), rel=0.01)


def test_resamples_are_reproducible_and_have_the_given_number_of_problems() -> None:
    resamples = Resamples.drawn_by(RNG(0), 30)
    values = RNG(1).random((30, 2))
    sums = resamples.sums(np.column_stack([values, np.ones(30)]))
    assert (sums[:, :2] == resamples.sums(values)).all() or np.allclose(sums[:, :2], resamples.sums(values), rtol=1e-12)
    assert (sums[:, 2] == 30).all()


def test_percentiles_of_a_mean_match_scipys_bootstrap_except_for_the_expansion() -> None:
    values = RNG(2).exponential(size=300)
    resamples = Resamples.drawn_by(RNG(0), 300)
    found = resamples.interval(resamples.sums(values[:, None])[:, 0] / 300)
    expected = stats.bootstrap((values,), np.mean, method="percentile", rng=RNG(0)).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.01)
    assert resamples.interval(np.full(10_000, np.inf)) is None


def test_the_interval_of_a_median_of_ratios_lies_between_two_ratios() -> None:
    ratios = RNG(3).permutation(np.arange(1.0, 102.0))
    assert median_of_ratios(ratios, np.ones(101)) == (51, (41, 61))


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=80))
def test_a_median_interval_contains_the_median_and_scales_with_the_values(values: list[float]) -> None:
    interval = quantile_interval(values, 0.5)
    assert interval is not None
    assert interval[0] <= float(np.median(values)) <= interval[1]
    doubled = quantile_interval([2 * each for each in reversed(values)], 0.5)
    assert doubled == (2 * interval[0], 2 * interval[1])


@pytest.mark.parametrize(("quantile", "least"), [(0.5, 6), (0.9, 36), (0.99, 368)])
def test_a_quantile_of_too_few_values_has_no_interval(quantile: float, least: int) -> None:
    assert quantile_interval(np.arange(least - 1), quantile) is None
    assert quantile_interval(np.arange(least), quantile) is not None


def test_percentiles_match_numpy() -> None:
    assert percentiles_of(list(range(101))) == Percentiles(p50=50, p90=90, p99=99)
