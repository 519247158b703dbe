"""Two runs against each other, problem by problem: accuracy beside speed, and what differed between the runs.

    comparison = compare(read_run(a), iter_rows(a), read_run(b), iter_rows(b))

Ratios are of B against A: a speedup above 1 says that B was faster, a length ratio above 1 that it wrote more. Of a
row only its figures are kept, so memory does not grow with what the models wrote.
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
    from stepspec.evaluation.compare.figures import PolicyComparison, RunFigures, Side, compare_policies

__all__ = ["Comparison", "Difference", "PolicyComparison", "Side", "compare", "policy_pairs"]


class Comparison(Record):
    """What is known of two runs together."""

    version: Literal[1] = 1
    a: RunRecord
    b: RunRecord
    policies: list[PolicyComparison]
    differences: list[Difference]
    """In the conditions; whatever is not listed was the same."""
    conclusions: list[str]
    """What can be concluded from the figures and what cannot, in sentences."""
    warning: str | None = None
    """Set where the runs are of other data and were compared all the same."""


def compare(
    a: RunRecord,
    rows_a: Iterable[ResultRow],
    b: RunRecord,
    rows_b: Iterable[ResultRow],
    policies: Sequence[str] = (),
    *,
    force: bool = False,
) -> Comparison:
    """Compares policies of two runs: those named, as `NAME` or `NAME_IN_A=NAME_IN_B`, or all that both have.

    Rows are paired by problem and repeat. Runs of other data are compared if `force` is set, over the problems of the
    same id and with the same right answer.

    Raises:
        UsageError: other data; an unknown policy; nothing that both runs have finished.
    """
    if not force:
        refuse_other_data(a, b)
    pairs = policy_pairs(a, b, policies)
    figures_a = RunFigures.of(rows_a, {left for left, _ in pairs})
    figures_b = RunFigures.of(rows_b, {right for _, right in pairs})
    same_data = a.data_sha256 == b.data_sha256
    compared = [compare_policies(figures_a, left, figures_b, right, same_data=same_data) for left, right in pairs]
    found = [each for each in compared if each is not None]
    if not found:
        names = ", ".join(left if left == right else f"{left}={right}" for left, right in pairs)
        raise UsageError(f"There is no problem that both runs have finished under {names}; nothing can be compared.")
    differing = differences(a, b, pairs)
    return Comparison(
        a=a,
        b=b,
        policies=found,
        differences=differing,
        conclusions=conclusions(a, b, differing),
        warning=data_warning(a, b, found),
    )


def policy_pairs(a: RunRecord, b: RunRecord, named: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The policies to compare, of A and of B.

    Raises:
        UsageError: a name is unknown, or the runs have no policy in common and none is named.
    """
    if not named:
        common = [(name, name) for name in a.policies if name in b.policies]
        if not common:
            raise UsageError(
                f"The runs have no policy in common (A has {', '.join(a.policies)}; B has {', '.join(b.policies)}); "
                "say which to compare with --policy NAME_IN_A=NAME_IN_B."
            )
        return common
    pairs: list[tuple[str, str]] = []
    for name in named:
        left, _, right = name.partition("=")
        pairs.append((_known("A", a, left), _known("B", b, right or left)))
    return pairs


def _known(side: str, run: RunRecord, name: str) -> str:
    if name not in run.policies:
        raise UsageError(unknown_name(f"policy in run {side} called", name, run.policies))
    return name
