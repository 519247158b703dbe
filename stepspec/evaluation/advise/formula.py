"""Predicts the speedup of token-level speculation by arXiv:2211.17192 (theorem 3.8), with measured pass costs.

With acceptance a of a token, a round of k drafted tokens emits (1 - a^(k+1)) / (1 - a) tokens. It costs c k + v(k)
passes of plain decoding: c is the cost of drafting a token, v(k) the cost of a pass over k + 1 tokens. The paper
assumes v(k) = 1; here it is measured.

Lookup drafters draft in only a share h of the rounds; the others are plain decoding. A round then emits
1 + h (a + .. + a^k) tokens and costs h (c k + v(k)) + 1 - h. With h = 1 this is the paper's formula.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MAX_TOKENS = 16
"""Longer drafts than these are not considered."""


@dataclass(frozen=True)
class RelativeCosts:
    """The cost c of drafting a token and the cost of a pass by its width, both in passes over one token."""

    drafting: float
    pass_over_one: Mapping[int, float]

    def verifying(self, num_tokens: int) -> float:
        """Return v(k), interpolated linearly between measured widths and at least 1."""
        widths = sorted(self.pass_over_one)
        if not widths:
            return 1.0
        return max(1.0, float(np.interp(num_tokens + 1, widths, [self.pass_over_one[width] for width in widths])))


def expected_tokens(acceptance: float, num_tokens: int, coverage: float = 1.0) -> float:
    """Return the average number of tokens that a round emits.

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return 1 + coverage * sum(acceptance**position for position in range(1, num_tokens + 1))


def speedup(acceptance: float, costs: RelativeCosts, num_tokens: int, coverage: float = 1.0) -> float:
    """Return tokens per second over those of plain decoding.

    >>> round(speedup(0.8, Costs(0.1, {1: 1.0, 8: 1.0}), 4), 2)
    2.4
    """
    cost = coverage * (costs.drafting * num_tokens + costs.verifying(num_tokens)) + 1 - coverage
    return expected_tokens(acceptance, num_tokens, coverage) / cost


def best_num_tokens(acceptance: float, costs: RelativeCosts, coverage: float = 1.0) -> tuple[int, float]:
    """Return the number of drafted tokens with the largest speedup, and that speedup; (0, 1.0) if none is above 1."""
    by_count = [(speedup(acceptance, costs, count, coverage), -count) for count in range(1, MAX_TOKENS + 1)]
    best, count = max(by_count)
    return (-count, best) if best > 1 else (0, 1.0)


def ideal_speedup(costs: RelativeCosts) -> float:
    """Return the largest possible speedup if every drafted token is accepted. It may be below 1."""
    return max(speedup(1.0, costs, count) for count in range(1, MAX_TOKENS + 1))


def needed_acceptance(costs: RelativeCosts, wanted: float, coverage: float = 1.0) -> float | None:
    """Return the smallest acceptance, in steps of 1%, that gives the wanted speedup; None if none does."""
    for percent in range(101):
        if best_num_tokens(percent / 100, costs, coverage)[1] >= wanted:
            return percent / 100
    return None
