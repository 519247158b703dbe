"""Score intervals match published values and scipy, and keep their properties for fractional counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from stepspec.evaluation.stats import Paired, wilson, z_value
from stepspec.evaluation.stats.intervals import least_n, spread_known, tango

COUNTS = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
TABLES = st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 500)).filter(any)


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_matches_the_values_published_by_newcombe(successes: int, n: int, interval: tuple[float, float]) -> None:
    """R. G. Newcombe, Statistics in Medicine 17, 1998, 857-872, table I, method 3."""
    assert wilson(successes, n) == pytest.approx(interval, abs=5e-5)


@given(COUNTS, st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_matches_scipy(counts: tuple[int, int], confidence: float) -> None:
    expected = binomtest(*counts).proportion_ci(confidence, method="wilson")
    assert wilson(*counts, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(COUNTS)
def test_wilson_is_symmetric_in_right_and_wrong(counts: tuple[int, int]) -> None:
    successes, n = counts
    low, high = wilson(successes, n)
    assert low <= successes / n <= high
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(
    ("only_first", "only_second", "n", "interval"),
    [
        # M. W. Fagerland, S. Lydersen, P. Laake, BMC Medical Research Methodology 13, 2013, and Statistics in
        # Medicine 33, 2014; the second also in the tests of their R package, contingencytables.
        (1, 7, 21, (-0.517, -0.026)),
        (6, 16, 161, (-0.1240, -0.0054)),
    ],
)
def test_tango_matches_published_values(
    only_first: int, only_second: int, n: int, interval: tuple[float, float]
) -> None:
    places = 5e-4 if n == 21 else 5e-5
    assert tango(only_first, only_second, n) == pytest.approx(interval, abs=places)


@pytest.mark.parametrize("n", [1, 30, 1000])
def test_two_policies_that_always_agree_still_have_an_interval(n: int) -> None:
    z = z_value(0.95)
    bound = z * z / (n + z * z)
    assert Paired(0, 0, n).interval() == pytest.approx((-bound, bound))
    assert Paired(0, 0, n).loss_upper() > 0


@given(TABLES)
def test_swapping_the_policies_mirrors_the_interval(table: tuple[int, int, int]) -> None:
    b, c, alike = table
    low, high = Paired(b, c, b + c + alike).interval()
    assert Paired(c, b, b + c + alike).interval() == pytest.approx((-high, -low))


@given(TABLES)
def test_the_interval_contains_the_difference_and_stays_between_minus_one_and_one(table: tuple[int, int, int]) -> None:
    b, c, alike = table
    paired = Paired(b, c, b + c + alike)
    low, high = paired.interval()
    assert -1 <= low <= paired.difference + 1e-12
    assert paired.difference - 1e-12 <= high <= 1
    assert low < high


@given(TABLES)
def test_more_confidence_gives_a_wider_interval_and_a_larger_loss_bound(table: tuple[int, int, int]) -> None:
    b, c, alike = table
    paired = Paired(b, c, b + c + alike)
    narrow, wide = paired.interval(0.9), paired.interval(0.99)
    assert -1 <= wide[0] <= narrow[0]
    assert narrow[1] <= wide[1] <= 1
    assert paired.loss_upper(0.95) == pytest.approx(-narrow[0])
    assert paired.loss_upper(0.99) >= paired.loss_upper(0.95)


def test_least_n_is_the_first_sufficient_number() -> None:
    assert least_n(lambda n: n >= 1) == 1
    assert least_n(lambda n: n >= 739) == 739


def test_a_spread_estimated_from_few_problems_counts_for_less() -> None:
    """Student's t with 9 degrees of freedom is 2.262 at 95%."""
    assert spread_known(0.95, 10) == pytest.approx((1.95996 / 2.26216) ** 2, rel=1e-4)
    assert spread_known(0.95, 1) == 0
    assert spread_known(0.95, 100_000) == pytest.approx(1, abs=1e-4)
