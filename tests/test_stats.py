"""Intervals agree with published values, and cover in simulations what they say they cover."""

from math import exp

import numpy as np
import pytest

from stepspec.stats import MIN_FOR_BOOTSTRAP, Paired, ratio_of_sums, wilson, z_value


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_gives_the_values_that_newcombe_published(successes: int, n: int, interval: tuple[float, float]) -> None:
    """R. G. Newcombe, Statistics in Medicine 17, 1998, 857-872, table I, method 3."""
    assert wilson(successes, n) == pytest.approx(interval, abs=5e-5)


def test_wilson_is_symmetric_in_right_and_wrong() -> None:
    low, high = wilson(3, 40)
    assert wilson(37, 40) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("only_first", "only_second", "n", "interval"),
    [
        # M. W. Fagerland, S. Lydersen, P. Laake, BMC Medical Research Methodology 13, 2013, and Statistics in
        # Medicine 33, 2014; the second also in the tests of their R package, contingencytables.
        (1, 7, 21, (-0.517, -0.026)),
        (6, 16, 161, (-0.1240, -0.0054)),
    ],
)
def test_tango_gives_the_values_that_were_published(
    only_first: int, only_second: int, n: int, interval: tuple[float, float]
) -> None:
    places = 5e-4 if n == 21 else 5e-5
    assert Paired(only_first, only_second, n).interval() == pytest.approx(interval, abs=places)


@pytest.mark.parametrize("n", [1, 10, 30, 1000])
def test_two_policies_that_always_agree_still_have_an_interval(n: int) -> None:
    z = z_value(0.95)
    bound = z * z / (n + z * z)
    assert Paired(0, 0, n).interval() == pytest.approx((-bound, bound))
    assert Paired(0, 0, n).loss_upper() > 0


def test_exchanging_the_policies_mirrors_the_interval() -> None:
    low, high = Paired(9, 4, 60).interval()
    assert Paired(4, 9, 60).interval() == pytest.approx((-high, -low))


@pytest.mark.parametrize("only_first", [0, 1, 15, 29, 30])
def test_the_interval_holds_the_difference_and_stays_between_minus_one_and_one(only_first: int) -> None:
    paired = Paired(only_first, 30 - only_first, 30)
    low, high = paired.interval()
    assert -1 <= low <= paired.difference <= high <= 1
    assert low < high


def test_repeats_are_averaged_per_problem() -> None:
    paired = Paired.of([1.0, 0.5, 0.0, 1.0], [1.0, 0.0, 0.25, 0.0])
    assert (paired.only_first, paired.only_second, paired.n) == (1.5, 0.25, 4)
    assert paired.difference == pytest.approx(1.25 / 4)


@pytest.mark.parametrize(("lost", "won", "n"), [(0.0, 0.0, 50), (0.01, 0.0, 100), (0.05, 0.03, 60), (0.2, 0.1, 40)])
def test_tango_covers_the_true_difference(lost: float, won: float, n: int) -> None:
    """2,000 draws each. Coverage must be 93.5% two-sided, and 92.5% for the one-sided bound, which is coarse
    where few problems are discordant. At a coverage of 95%, chance alone fails this once in 700 times."""
    rng = np.random.default_rng(20)
    draws = rng.multinomial(n, [lost, won, 1 - lost - won], size=2_000)
    results: dict[tuple[int, int], tuple[bool, bool]] = {}
    covered = np.zeros(2)
    for worse, better, _ in draws.tolist():
        if (worse, better) not in results:
            paired = Paired(better, worse, n)
            low, high = paired.interval()
            results[worse, better] = low <= won - lost <= high, paired.loss_upper() >= lost - won
        covered += results[worse, better]
    two_sided, one_sided = covered / len(draws)
    assert two_sided >= 0.935
    assert one_sided >= 0.925


def test_wilson_covers_the_true_share_on_average() -> None:
    """Over 2,000 shares drawn evenly. At a coverage of 95%, chance alone fails this once in 50 times."""
    rng = np.random.default_rng(1)
    shares = rng.uniform(0.02, 0.98, size=2_000)
    intervals = [wilson(int(rng.binomial(80, share)), 80) for share in shares]
    covered = [low <= share <= high for share, (low, high) in zip(shares, intervals, strict=True)]
    assert np.mean(covered) >= 0.94


def test_a_ratio_of_sums_is_that_and_its_interval_is_around_it() -> None:
    rng = np.random.default_rng(3)
    below = rng.lognormal(size=200)
    above = below * rng.lognormal(0.5, 0.3, size=200)
    ratio, interval = ratio_of_sums(above.tolist(), below.tolist(), np.random.default_rng(0))
    assert ratio == pytest.approx(above.sum() / below.sum())
    assert interval is not None
    assert interval[0] < ratio < interval[1]


def test_the_same_generator_gives_the_same_interval() -> None:
    values = np.random.default_rng(4).lognormal(size=(2, 50)).tolist()
    first, second = (ratio_of_sums(*values, np.random.default_rng(9)) for _ in range(2))
    assert first == second


def test_a_constant_ratio_has_no_width_because_problems_are_drawn_in_pairs() -> None:
    values = [1.0, 5.0, 20.0] * 10
    ratio, interval = ratio_of_sums([2 * value for value in values], values, np.random.default_rng(0))
    assert ratio == 2
    assert interval == pytest.approx((2, 2))


def test_too_few_problems_have_a_ratio_and_no_interval() -> None:
    few = [1.0] * (MIN_FOR_BOOTSTRAP - 1)
    assert ratio_of_sums(few, few, np.random.default_rng(0)) == (1.0, None)


def test_many_problems_are_resampled_in_little_memory() -> None:
    import tracemalloc

    values = np.random.default_rng(5).lognormal(size=(2, 20_000)).tolist()
    tracemalloc.start()
    ratio_of_sums(*values, np.random.default_rng(0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


def test_the_bootstrap_covers_the_true_ratio() -> None:
    """200 runs of 40 problems. The percentile bootstrap covers a little less than 95% at this size; at 94%,
    chance alone fails this once in 450 times."""
    rng = np.random.default_rng(6)
    true = exp(0.6 + 0.3**2 / 2)  # the mean of the factor, which is independent of the problem's length
    covered = 0
    for _ in range(200):
        below = rng.lognormal(0, 0.5, size=40)
        above = below * rng.lognormal(0.6, 0.3, size=40)
        _, interval = ratio_of_sums(above.tolist(), below.tolist(), rng)
        assert interval is not None
        covered += interval[0] <= true <= interval[1]
    assert covered / 200 >= 0.89
