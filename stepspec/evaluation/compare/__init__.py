"""Compares two runs problem by problem: accuracy, speed, and the conditions that differ.

    comparison = compare(read_run(a), iter_rows(a), read_run(b), iter_rows(b))

Ratios compare B with A: a speedup above 1 means that B was faster, a length ratio above 1 that it wrote more. Memory
does not grow with the length of the outputs.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from stepspec.base.extras import from_extra
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.records import Record, ResultRow, RunRecord

with from_extra("eval", "A comparison"):
    from stepspec.evaluation.compare.conditions import (
        Difference,
        conclusions,
        data_warning,
        differences,
        refuse_other_data,
    )
    from stepspec.evaluation.compare.figures import PolicyComparison, Side, compare_policies, rows_of

__all__ = ["Comparison", "Difference", "PolicyComparison", "Side", "compare", "policy_pairs"]


class Comparison(Record):
    """The comparison of two runs."""

    version: Literal[1] = 1
    a: RunRecord
    b: RunRecord
    policies: list[PolicyComparison]
    differences: list[Difference]
    """Conditions that differ. All others were the same."""
    conclusions: list[str]
    """Sentences on what the figures allow to conclude and what they do not."""
    warning: str | None = None
    """Set if the runs use different data and were compared anyway."""


def compare(
    a: RunRecord,
    rows_a: Iterable[ResultRow],
    b: RunRecord,
    rows_b: Iterable[ResultRow],
    policies: Sequence[str] = (),
    *,
    force: bool = False,
) -> Comparison:
    """Compare policies of two runs: those named, as `NAME` or `NAME_IN_A=NAME_IN_B`, or all that both have.

    Rows are paired by problem and repeat. With `force`, runs with different data are compared over the problems that
    have the same id and the same right answer.

    Raises:
        UsageError: the data differ; a policy is unknown; or there is no problem that both runs finished.
    """
    if not force:
        refuse_other_data(a, b)
    pairs = policy_pairs(a, b, policies)
    of_a = rows_of(rows_a, {left for left, _ in pairs})
    of_b = rows_of(rows_b, {right for _, right in pairs})
    same_data = a.data_sha256 == b.data_sha256
    compared = [compare_policies(left, of_a[left], right, of_b[right], same_data=same_data) for left, right in pairs]
    comparable = [each for each in compared if each is not None]
    if not comparable:
        names = ", ".join(left if left == right else f"{left}={right}" for left, right in pairs)
        raise UsageError(f"There is no problem that both runs have finished under {names}; nothing can be compared.")
    differing = differences(a, b, pairs)
    return Comparison(
        a=a,
        b=b,
        policies=comparable,
        differences=differing,
        conclusions=conclusions(a, b, differing, comparable),
        warning=data_warning(a, b, comparable),
    )


def policy_pairs(a: RunRecord, b: RunRecord, named: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Return the policies to compare, as pairs of a name in A and a name in B.

    Raises:
        UsageError: a name is unknown, or the runs have no policy in common and none is named.
    """
    if not named:
        common = [(name, name) for name in a.policies if name in b.policies]
        if not common:
            raise UsageError(
                f"The runs have no policy in common (A has {', '.join(a.policies)}; B has {', '.join(b.policies)}); "
                "choose which to compare with --policy NAME_IN_A=NAME_IN_B."
            )
        return common
    pairs: list[tuple[str, str]] = []
    for name in named:
        # Names of variants contain equal signs too.
        splits = [(name[:at], name[at + 1 :] or name[:at]) for at, letter in enumerate(name) if letter == "="]
        known = [(left, right) for left, right in splits if left in a.policies and right in b.policies]
        whole = [(name, name)] if name in a.policies or name in b.policies else []
        left, right = next(iter([*known, *whole, *splits]), (name, name))
        pairs.append((_known("A", a, left), _known("B", b, right)))
    return pairs


def _known(side: str, run: RunRecord, name: str) -> str:
    if name not in run.policies:
        raise UsageError(unknown_name(f"policy in run {side} called", name, run.policies))
    return name
