"""How fast token-level speculation should be, by the formula of arXiv:2211.17192 (theorem 3.8), with wide passes.

With acceptance a of a token, a round of k drafted tokens emits (1 - a^(k+1)) / (1 - a) tokens. It takes c k + v(k)
passes of plain decoding, where c is what drafting a token costs and v(k) what a pass over k + 1 tokens does. The paper
takes v(k) = 1; here it is measured. What looks tokens up drafts in a share h of the rounds only, and the others are
plain: a round then emits 1 + h (a + .. + a^k) and takes h (c k + v(k)) + 1 - h. The paper's formula is that of h = 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MOST_TOKENS = 16
"""Longer drafts than these are not considered."""


@dataclass(frozen=True)
class Costs:
    """c and v(k): what drafting a token costs, and a pass by its width, both in passes over one token."""

    drafting: float
    pass_over_one: Mapping[int, float]

    def verifying(self, num_tokens: int) -> float:
        """v(k), on straight lines through what was measured; a wider pass never counts as cheaper than one token."""
        widths = sorted(self.pass_over_one)
        if not widths:
            return 1.0
        return max(1.0, float(np.interp(num_tokens + 1, widths, [self.pass_over_one[width] for width in widths])))


def expected_tokens(acceptance: float, num_tokens: int, coverage: float = 1.0) -> float:
    """Tokens that a round emits, on average.

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return 1 + coverage * sum(acceptance**place for place in range(1, num_tokens + 1))


def speedup(acceptance: float, costs: Costs, num_tokens: int, coverage: float = 1.0) -> float:
    """Tokens a second over plain decoding's.

    >>> round(speedup(0.8, Costs(0.1, {1: 1.0, 8: 1.0}), 4), 2)
    2.4
    """
    taken = coverage * (costs.drafting * num_tokens + costs.verifying(num_tokens)) + 1 - coverage
    return expected_tokens(acceptance, num_tokens, coverage) / taken


def best_num_tokens(acceptance: float, costs: Costs, coverage: float = 1.0) -> tuple[int, float]:
    """The number of drafted tokens with the largest speedup, and that speedup; (0, 1.0) if none is above 1."""
    by_count = [(speedup(acceptance, costs, count, coverage), -count) for count in range(1, MOST_TOKENS + 1)]
    best, count = max(by_count)
    return (-count, best) if best > 1 else (0, 1.0)


def ideal_speedup(costs: Costs) -> float:
    """The largest speedup that a drafter could give whose every token is accepted; it may be below 1."""
    return max(speedup(1.0, costs, count) for count in range(1, MOST_TOKENS + 1))


def needed_acceptance(costs: Costs, wanted: float, coverage: float = 1.0) -> float | None:
    """The smallest acceptance, to a percent, that gives the wanted speedup; None if none does."""
    for percent in range(101):
        if best_num_tokens(percent / 100, costs, coverage)[1] >= wanted:
            return percent / 100
    return None
