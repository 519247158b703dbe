"""The figures of two policies over the problems and repeats that both runs finished."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median

import numpy as np

from stepspec.evaluation.records import Record, ResultRow
from stepspec.evaluation.stats import Answered, Paired, Powers, Ratio, Share, products_of_sums

SEED = 0
"""Random seed of the resamples, so that a repeated comparison gives the same result."""

Key = tuple[str, int]
"""Problem and repeat."""


def rows_of(rows: Iterable[ResultRow], policies: Collection[str]) -> Mapping[str, Mapping[Key, ResultRow]]:
    """Return the rows of these policies, by policy and without their steps."""
    by_policy: dict[str, dict[Key, ResultRow]] = {policy: {} for policy in policies}
    for row in rows:
        if row.policy in by_policy:
            by_policy[row.policy][row.problem, row.repeat] = row.without_steps()
    return by_policy


class Side(Record):
    """One run's figures over the rows that both runs finished.

    `wall_s` and `tokens` are sums; `first_step_s`, `first_answer_s` and `longest_gap_s` are medians.
    """

    policy: str
    accuracy: float
    accuracy_ci: tuple[float, float]
    no_answer: int
    truncated: int
    wall_s: float
    tokens: int
    """Committed tokens."""
    first_step_s: float | None
    first_answer_s: float | None
    longest_gap_s: float | None
    step_acceptance: float | None
    token_acceptance: float | None
    num_unpaired: int
    """Number of rows that only this run has. No figure includes them."""


class PolicyComparison(Record):
    """A policy of run A and one of run B. Intervals are 95%; those of ratios are bootstrapped over problems."""

    a: Side
    b: Side
    num_problems: int
    num_rows: int
    """Number of row pairs: problems times repeats."""
    num_other_answers: int
    """Number of problems left out because the runs have different right answers to them."""
    num_apart: int = 0
    """Number of row pairs that ran on different machines of a Ray cluster, or only one of them on Ray."""
    accuracy_delta: float
    """B's accuracy minus A's."""
    accuracy_delta_ci: tuple[float, float]
    accuracy_p: float
    """p value of the hypothesis that both are equally accurate."""
    speedup: float | None
    """A's wall seconds over B's: above 1 if B was faster."""
    speedup_ci: tuple[float, float] | None
    no_speed: str | None = None
    """One sentence on why the speedup does not count: one side left requests unanswered that the other answered."""
    length_ratio: float | None
    """B's committed tokens over A's."""
    length_ratio_ci: tuple[float, float] | None
    tokens_per_s_ratio: float | None
    """B's committed tokens per second over A's; speedup = tokens_per_s_ratio / length_ratio."""
    tokens_per_s_ratio_ci: tuple[float, float] | None


def compare_policies(
    policy_a: str,
    table_a: Mapping[Key, ResultRow],
    policy_b: str,
    table_b: Mapping[Key, ResultRow],
    *,
    same_data: bool,
) -> PolicyComparison | None:
    """Compare the rows of two policies; None if both runs finished no common problem.

    With different data, only problems with the same right answer count. With the same data all do, even if graders
    wrote the right answer differently.
    """
    shared = [key for key in table_a if key in table_b]
    others = set[str]() if same_data else {key[0] for key in shared if table_a[key].gold != table_b[key].gold}
    keys = sorted(key for key in shared if key[0] not in others)
    if not keys:
        return None
    problems = [list(repeats) for _, repeats in groupby(keys, key=itemgetter(0))]
    scores_a, scores_b = (_scores(table, problems) for table in (table_a, table_b))
    paired = Paired.of(scores_b, scores_a)
    ratios = _ratios(table_a, table_b, problems)
    speedup, length, rate = (ratios.get(name) for name in ("speedup", "length", "rate"))
    return PolicyComparison(
        a=_side(policy_a, [table_a[key] for key in keys], scores_a, num_unpaired=len(table_a) - len(shared)),
        b=_side(policy_b, [table_b[key] for key in keys], scores_b, num_unpaired=len(table_b) - len(shared)),
        num_problems=len(problems),
        num_rows=len(keys),
        num_other_answers=len(others),
        num_apart=sum(table_a[key].node != table_b[key].node for key in keys),
        accuracy_delta=paired.difference,
        accuracy_delta_ci=paired.interval(),
        accuracy_p=paired.p_value(np.random.default_rng(SEED)),
        speedup=speedup and speedup.value,
        speedup_ci=speedup and speedup.interval,
        no_speed=_no_speed([(table_a[key], table_b[key]) for key in keys]),
        length_ratio=length and length.value,
        length_ratio_ci=length and length.interval,
        tokens_per_s_ratio=rate and rate.value,
        tokens_per_s_ratio_ci=rate and rate.interval,
    )


def _no_speed(rows: Sequence[tuple[ResultRow, ResultRow]]) -> str | None:
    """Return why the speedup does not count, by the rule of reports, applied to both sides; None if it counts."""
    answered = Counter((a.is_answered, b.is_answered) for a, b in rows)
    b_against_a = Answered(
        both=answered[True, True],
        only_target=answered[True, False],
        only_policy=answered[False, True],
        neither=answered[False, False],
    )
    for side, other, answers in (("B", "A", b_against_a), ("A", "B", b_against_a.mirrored())):
        if why := answers.why_no_speed(other):
            return f"The speed of {side} does not count: {why}."
    return None


def _scores(table: Mapping[Key, ResultRow], problems: Sequence[Sequence[Key]]) -> list[list[float]]:
    return [[float(table[key].status == "correct") for key in keys] for keys in problems]


def _side(policy: str, rows: Sequence[ResultRow], scores: Sequence[Sequence[float]], num_unpaired: int) -> Side:
    share = Share.of(scores)
    return Side(
        policy=policy,
        accuracy=share.value,
        accuracy_ci=share.interval(),
        no_answer=sum(row.status == "no_answer" for row in rows),
        truncated=sum(row.finish_reason == "length" for row in rows),
        wall_s=sum(row.wall_s for row in rows),
        tokens=sum(row.tokens.committed for row in rows),
        first_step_s=_median(row.first_step_s for row in rows),
        first_answer_s=_median(row.first_answer_s for row in rows),
        longest_gap_s=_median(row.longest_gap_s for row in rows),
        step_acceptance=_share((row.steps_accepted, row.steps_judged) for row in rows),
        token_acceptance=_share((row.token_accepted, row.token_drafted) for row in rows),
        num_unpaired=num_unpaired,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _share(counts: Iterable[tuple[int, int]]) -> float | None:
    parts, wholes = zip(*counts, strict=True)
    return sum(parts) / sum(wholes) if sum(wholes) else None


FIGURES: Mapping[str, Callable[[ResultRow], float]] = {
    "wall_s": lambda row: row.wall_s,
    "committed": lambda row: row.tokens.committed,
}


def _ratios(
    a: Mapping[Key, ResultRow], b: Mapping[Key, ResultRow], problems: Sequence[Sequence[Key]]
) -> Mapping[str, Ratio]:
    """Return speedup, length ratio and ratio of tokens per second, without those that cannot be computed."""
    columns = {
        f"{figure} {side}": [sum(value(table[key]) for key in keys) for keys in problems]
        for figure, value in FIGURES.items()
        for side, table in (("a", a), ("b", b))
    }
    figures: Mapping[str, Powers] = {
        "speedup": {"wall_s a": 1, "wall_s b": -1},
        "length": {"committed b": 1, "committed a": -1},
        "rate": {"committed b": 1, "wall_s b": -1, "committed a": -1, "wall_s a": 1},
    }
    known = {
        name: powers
        for name, powers in figures.items()
        if all(any(columns[column]) for column, power in powers.items() if power < 0)
    }
    return products_of_sums(columns, known, np.random.default_rng(SEED)) if known else {}
