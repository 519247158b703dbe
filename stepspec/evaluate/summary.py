"""What rows come to: accuracies with intervals, speedups over the same problems, rates and sums.

Definitions: a policy's own figures are over all its rows. Paired figures are over the (problem, repeat) pairs
that are finished under every policy, added up per problem. The target is not compared with itself in
accuracy: those are null.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from stepspec.records import PolicySummary, Row, RunRecord, Summary, TimeRecord, TokenRecord
from stepspec.stats import Interval, Paired, ratio_of_sums, wilson

R = TypeVar("R", TokenRecord, TimeRecord)
Key = tuple[str, int]  # problem, repeat

BASELINE = "target"
TOKEN_LEVEL = "token"


def summarise(run: RunRecord, rows: Sequence[Row]) -> Summary:
    """The summary of a run, whole or not; policies without a row are left out."""
    tables: dict[str, dict[Key, Row]] = {policy: {} for policy in run.policies}
    for row in rows:
        tables[row.policy][row.problem, row.repeat] = row
    common = set[Key].intersection(*(set(table) for table in tables.values()))
    pairs = {policy: [table[key] for key in sorted(common)] for policy, table in tables.items()}
    return Summary(
        benchmark=run.benchmark,
        n=len({problem for problem, _ in common}),
        temperature=run.temperature,
        concurrency=run.concurrency,
        pair=run.pair,
        policies={
            policy: _summarise_policy(
                list(table.values()),
                pairs[policy],
                pairs.get(BASELINE, []),
                pairs.get(TOKEN_LEVEL, []),
                run.seed,
                exact=run.policies[policy].token_level_exact,
            )
            for policy, table in tables.items()
            if table
        },
    )


def _summarise_policy(
    rows: Sequence[Row],
    own: Sequence[Row],
    baseline: Sequence[Row],
    token_level: Sequence[Row],
    seed: int,
    *,
    exact: bool,
) -> PolicySummary:
    scores = _scores(rows)
    tokens, time_s = (
        _total(TokenRecord, (row.tokens for row in rows)),
        _total(TimeRecord, (row.time_s for row in rows)),
    )
    wall_s = _sum(rows, lambda row: row.wall_s)
    delta = None if own is baseline else _paired_accuracy(own, baseline)
    speedup, speedup_ci = _ratio(baseline, own, lambda row: row.wall_s, seed)
    speedup_vs_token, speedup_vs_token_ci = _ratio(token_level, own, lambda row: row.wall_s, seed)
    length_ratio, _ = _ratio(own, baseline, lambda row: row.tokens.committed, seed)
    return PolicySummary(
        n=len(scores),
        accuracy=sum(scores) / len(scores),
        accuracy_ci=wilson(sum(scores), len(scores)),
        accuracy_delta=delta and delta.difference,
        accuracy_delta_ci=delta and delta.interval(),
        accuracy_loss_upper95=delta and delta.loss_upper(),
        wall_s=wall_s,
        speedup_vs_target=speedup,
        speedup_vs_target_ci=speedup_ci,
        speedup_vs_token=speedup_vs_token,
        speedup_vs_token_ci=speedup_vs_token_ci,
        length_ratio=length_ratio,
        tokens_per_s_ratio=speedup * length_ratio if speedup is not None and length_ratio is not None else None,
        step_acceptance=_share(rows, lambda row: row.steps_accepted, lambda row: row.steps_judged),
        token_acceptance=_share(rows, lambda row: row.token_accepted, lambda row: row.token_drafted),
        token_level_exact=exact,
        tokens_per_target_pass=_share(rows, lambda row: row.tokens.committed, lambda row: row.target_passes),
        judge_controller_share=(time_s.judge + time_s.controller) / wall_s if wall_s else 0.0,
        tokens=tokens,
        time_s=time_s,
        truncated=sum(row.finish_reason == "length" for row in rows),
        no_answer=sum(row.status == "no_answer" for row in rows),
    )


def _by_problem(rows: Iterable[Row], value: Callable[[Row], float]) -> list[list[float]]:
    """A value in every repeat of each problem, in the order of the problems' ids."""
    grouped: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        grouped[row.problem].append(value(row))
    return [values for _, values in sorted(grouped.items())]


def _scores(rows: Iterable[Row]) -> list[float]:
    """The share of correct repeats of each problem."""
    return [sum(repeats) / len(repeats) for repeats in _by_problem(rows, lambda row: float(row.status == "correct"))]


def _paired_accuracy(own: Sequence[Row], baseline: Sequence[Row]) -> Paired | None:
    if not own or not baseline:
        return None
    return Paired.of(_scores(own), _scores(baseline))


def _ratio(
    above: Sequence[Row], below: Sequence[Row], value: Callable[[Row], float], seed: int
) -> tuple[float | None, Interval | None]:
    if not above or not below or not _sum(below, value):
        return None, None
    # A generator of its own for every figure, so that none depends on which policies are in the run.
    rng = np.random.default_rng(seed)
    sums = [[sum(repeats) for repeats in _by_problem(rows, value)] for rows in (above, below)]
    return ratio_of_sums(sums[0], sums[1], rng)


def _share(rows: Sequence[Row], part: Callable[[Row], int], whole: Callable[[Row], int]) -> float | None:
    total = _sum(rows, whole)
    return _sum(rows, part) / total if total else None


def _sum(rows: Iterable[Row], value: Callable[[Row], float]) -> float:
    return sum(value(row) for row in rows)


def _total(model: type[R], records: Iterable[R]) -> R:
    listed = list(records)
    return model(**{name: sum(getattr(record, name) for record in listed) for name in model.model_fields})
