"""Figures over subsets of the problems: one level, one subject, or a third of the problems by length."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from stepspec.evaluation.records import BASELINE, Group
from stepspec.evaluation.run.pairs import Pairs
from stepspec.evaluation.run.tally import Compared, Table
from stepspec.evaluation.stats import Paired, Ratio, Share, products_of_sums

LENGTHS = ("short", "middle", "long")

Members = Mapping[str, Sequence[str]]
"""The problem ids of each group, by group name."""


def groups(table: Table, pairs: Pairs) -> Mapping[str, dict[str, list[Group]]]:
    """Return each policy's figures by level, subject and length, if problems differ in them."""
    labels = {problem: table.labels[problem] for problem in table.problems if problem in table.labels}
    kinds = {
        "level": _members_by({problem: level for problem, (level, _) in labels.items()}),
        "subject": _members_by({problem: subject for problem, (_, subject) in labels.items()}),
        "length": _thirds(pairs),
    }
    found: dict[str, dict[str, list[Group]]] = {policy: {} for policy in pairs.compared}
    for kind, members in kinds.items():
        for name, here in members.items() if len(members) > 1 else ():
            for policy, group in _groups_here(name, here, pairs).items():
                found[policy].setdefault(kind, []).append(group)
    return found


def _members_by(labels: Mapping[str, int | None] | Mapping[str, str | None]) -> Members:
    known = [(label, problem) for problem, label in labels.items() if label is not None]
    members = groupby(sorted(known), lambda each: each[0])
    return {str(label): [problem for _, problem in group] for label, group in members}


def _thirds(pairs: Pairs) -> Members:
    """Return thirds of the problems by tokens under all policies, each policy's tokens as shares of its total.

    With thirds by the target's tokens alone, the others would look fast where the target was long by chance.
    """
    lengths = [each.committed / each.committed.sum() for each in pairs.compared.values() if each.committed.any()]
    if not lengths:
        return {}
    problems = next(iter(pairs.compared.values())).problems
    if len(problems) < len(LENGTHS):
        return {}
    thirds = np.array_split(np.argsort(np.sum(lengths, axis=0), kind="stable"), len(LENGTHS))
    members = [[problems[int(place)] for place in third] for third in thirds]
    return dict(zip(LENGTHS, members, strict=True))


def _groups_here(name: str, problems: Sequence[str], pairs: Pairs) -> Mapping[str, Group]:
    """Return the figures of all policies over the same problems, computed from the same resamples."""
    here = {policy: compared.of(set(problems)) for policy, compared in pairs.compared.items()}
    target = here.get(BASELINE)
    others = [policy for policy in here if policy != BASELINE] if target and target.problems else []
    speedups = products_of_sums(
        {policy: compared.wall_s for policy, compared in here.items()},
        {policy: {BASELINE: 1, policy: -1} for policy in others},
        pairs.rng(),
    )
    return {policy: _group(name, here[policy], target, speedups.get(policy)) for policy in here}


def _group(name: str, own: Compared, target: Compared | None, speedup: Ratio | None) -> Group:
    scores = list(own.scores.values())
    accuracy = Share.of(scores)
    delta = Paired.of(scores, list(target.scores.values())) if target and own is not target else None
    return Group(
        name=name,
        n=len(own.scores),
        accuracy=accuracy.value,
        accuracy_ci=accuracy.interval(),
        accuracy_delta=delta and delta.difference,
        accuracy_delta_ci=delta and delta.interval(),
        speedup_vs_target=speedup and speedup.value,
        speedup_vs_target_ci=speedup and speedup.interval,
    )
