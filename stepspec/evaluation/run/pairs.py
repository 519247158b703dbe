"""Compares policies over the problems that all of them finished."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from stepspec.evaluation.records import BASELINE, Matched, RunRecord
from stepspec.evaluation.run.tally import Compared, Table
from stepspec.evaluation.stats import (
    Interval,
    MatchedPolicy,
    Paired,
    Powers,
    Ratio,
    corrected_confidence,
    fastest,
    median_of_ratios,
    products_of_sums,
)

MATCHED_LOSS = 0.01
"""Upper bound of the accuracy that an accuracy-matched policy may lose: one point."""

Figure = Literal["speedup", "speedup vs token", "length", "rate"]


class Pairs:
    """Ratios and accuracy differences between policies. All ratios come from the same resamples.

    Figures are None if no problem is finished under all policies.
    """

    def __init__(self, run: RunRecord, table: Table) -> None:
        self._run = run
        self.compared: Mapping[str, Compared] = table.compared if table.problems else {}
        self._why_no_speed = {policy: table.why_no_speed(policy) for policy in self.compared}
        self._has_times = BASELINE in self.compared and bool(self.compared[BASELINE].problems)
        self.token_baseline = self._fastest_token_level()
        self._ratios: Mapping[tuple[Figure, str], Ratio] = self._compute_ratios() if self._has_times else {}

    def rng(self) -> np.random.Generator:
        """Return a new generator for one figure, so that no figure depends on which others are computed."""
        return np.random.default_rng(self._run.seed)

    def _fastest_token_level(self) -> str | None:
        known = [
            name
            for name, policy in self._run.policies.items()
            if name in self.compared and self._why_no_speed[name] is None and policy.kind == "token" and policy.exact
        ]
        return min(known, key=lambda name: float(self.compared[name].wall_s.sum()), default=None)

    def _compute_ratios(self) -> Mapping[tuple[Figure, str], Ratio]:
        columns = {f"{policy} s": compared.wall_s for policy, compared in self.compared.items()}
        columns |= {f"{policy} tokens": compared.committed for policy, compared in self.compared.items()}
        wanted: dict[tuple[Figure, str], Powers] = {
            (figure, policy): powers for policy in self.compared for figure, powers in self._powers(policy).items()
        }
        named = {f"{figure} of {policy}": powers for (figure, policy), powers in wanted.items()}
        found = products_of_sums(columns, named, self.rng())
        return dict(zip(wanted, found.values(), strict=True))

    def _powers(self, policy: str) -> Mapping[Figure, Powers]:
        """Return each figure of a policy as powers of sums. A policy against itself has no powers: its figure is 1."""
        figures: dict[Figure, Powers] = {"speedup": _quotient(f"{BASELINE} s", f"{policy} s")}
        if self.token_baseline is not None:
            figures["speedup vs token"] = _quotient(f"{self.token_baseline} s", f"{policy} s")
        if self.compared[BASELINE].committed.any():
            figures["length"] = _quotient(f"{policy} tokens", f"{BASELINE} tokens")
            figures["rate"] = {**figures["length"], **figures["speedup"]}
        return figures

    def ratio(self, figure: Figure, policy: str) -> tuple[float | None, Interval | None]:
        """Return a ratio of a policy to the target or to the fastest token-level policy, with its interval."""
        found = self._ratios.get((figure, policy))
        return (found.value, found.interval) if found else (None, None)

    def accuracy(self, policy: str) -> Paired | None:
        """Return the paired accuracies of a policy and the target; None for the target itself."""
        if policy == BASELINE or BASELINE not in self.compared:
            return None
        own, target = self.compared[policy].scores, self.compared[BASELINE].scores
        return Paired.of(list(own.values()), list(target.values()))

    def median_speedup(self, policy: str) -> tuple[float | None, Interval | None]:
        """Return the median over problems of the speedup, with its interval."""
        if not self._has_times:
            return None, None
        return median_of_ratios(self.compared[BASELINE].wall_s, self.compared[policy].wall_s)

    def candidates(self, throughputs: Mapping[str, float | None]) -> Sequence[MatchedPolicy]:
        """Return all policies but the target as candidates of `stats.fastest`; none if the target did not run.

        Args:
            throughputs: throughput over the target's by policy; empty if requests ran one at a time.
        """
        if BASELINE not in self.compared:
            return []
        others = [policy for policy in self.compared if policy != BASELINE]
        confidence = corrected_confidence(sum(not self._run.is_exact(policy) for policy in others))
        return [
            MatchedPolicy(
                policy,
                *self.ratio("speedup", policy),
                loss_upper=paired.loss_upper(confidence) if (paired := self.accuracy(policy)) else None,
                exact=self._run.is_exact(policy),
                why_no_speed=self._why_no_speed[policy],
                throughput=throughputs.get(policy),
            )
            for policy in others
        ]

    def matched(self, candidates: Sequence[MatchedPolicy]) -> Matched | None:
        """Return the fastest policy that keeps the target's accuracy within a point, by the rule of `stats.fastest`."""
        if BASELINE not in self.compared:
            return None
        found = fastest(candidates, MATCHED_LOSS)
        policy = found.name if found else BASELINE
        speedup, interval = self.ratio("speedup", policy)
        return Matched(loss=MATCHED_LOSS, policy=policy, speedup=speedup, speedup_ci=interval)


def _quotient(above: str, below: str) -> Powers:
    return {} if above == below else {above: 1, below: -1}
