"""The bound by betting: worked out by hand, ordered as it should be, and right as often as it says."""

from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepspec.evaluation.stats.bets import MAX_BET, certified_after, log_wealth, loss_upper_by_betting

LOSSES = st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=60)


def test_without_a_loss_the_wealth_grows_by_the_bet_times_the_limit() -> None:
    wealth = log_wealth(np.zeros(2000), 0.01, 10)
    assert wealth[0] == pytest.approx(log(1 + MAX_BET * 0.01))
    assert wealth[-1] == pytest.approx(2000 * log(1 + MAX_BET * 0.01))
    assert certified_after(np.zeros(2000), 0.01, 10) == 601  # ln 20 / ln 1.005
    assert certified_after(np.zeros(600), 0.01, 10) is None


@settings(max_examples=200)
@given(losses=LOSSES, planned=st.integers(1, 1000), confidence=st.sampled_from([0.8, 0.95, 0.999]))
def test_the_bound_is_where_the_problems_just_rule_the_limit_out(
    losses: list[float], planned: int, confidence: float
) -> None:
    found = np.array(losses)
    bound = loss_upper_by_betting(found, planned, confidence)
    assert -1 < bound <= 1
    if bound < 1:
        assert certified_after(found, bound + 1e-9, planned, confidence)
    if bound > -1 + 1e-9:
        assert certified_after(found, bound - 1e-9, planned, confidence) is None
    lost = np.append(found, 1.0)
    assert loss_upper_by_betting(lost, planned, confidence) == pytest.approx(bound), "what was ruled out stays so"


def test_a_bet_depends_only_on_earlier_problems() -> None:
    rng = np.random.default_rng(0)
    losses = rng.choice([-1.0, 0.0, 1.0], 50, p=[0.1, 0.8, 0.1])
    other = losses.copy()
    other[30:] = np.where(losses[30:] == 1, -1.0, 1.0)
    wealth, other_wealth = log_wealth(losses, 0.1, 5_000), log_wealth(other, 0.1, 5_000)  # no bet is the largest
    assert np.array_equal(wealth[:30], other_wealth[:30])
    bet, other_bet = (
        np.expm1(after[30] - after[29]) / (0.1 - loss[30]) for after, loss in ((wealth, losses), (other_wealth, other))
    )
    assert bet == pytest.approx(other_bet)


@pytest.mark.parametrize("limit", [0.005, 0.02, 0.2])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
def test_a_policy_that_loses_just_the_limit_is_certified_in_at_most_5_percent(limit: float, spread: float) -> None:
    """`spread` is the share of problems that either model loses besides. 3,000 runs: 6.2% are three errors above."""
    rng = np.random.default_rng(1)
    lost, won = limit + spread / 2, spread / 2
    runs = rng.choice([1.0, 0.0, -1.0], (3000, 400), p=[lost, 1 - lost - won, won])
    certified = sum(certified_after(run, limit, 400) is not None for run in runs)
    assert certified / 3000 <= 0.062


@pytest.mark.parametrize("discordant", [0.0, 0.02, 0.05])
def test_a_policy_without_loss_is_certified_at_one_point_with_6000_problems(discordant: float) -> None:
    rng = np.random.default_rng(2)
    runs = rng.choice([1.0, 0.0, -1.0], (300, 6000), p=[discordant / 2, 1 - discordant, discordant / 2])
    assert sum(certified_after(run, 0.01, 6000) is not None for run in runs) / 300 >= 0.8
