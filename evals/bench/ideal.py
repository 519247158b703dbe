"""How fast step-level speculation could be with a run's own costs and acceptance, and how fast it was.

A token of the text takes the drafting and the judging of D / C drafted tokens and, for a share 1 - A / C of the text,
the target's writing with token-level speculation. D, A and C are drafted, accepted and committed tokens. With c and v
for the seconds of a drafted and of a judged token over those of a token of the target alone, and s for the speedup of
token-level speculation, the ideal speedup is 1 / (c D / C + v D / C + (1 - A / C) / s). What the controller takes is
not in it.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from evals.bench.results import runs_in_words
from evals.bench.speed import cells_table
from stepspec.cli.output import JsonOption, finish
from stepspec.errors import UsageError
from stepspec.evaluation.records import BASELINE, Record, ResultRow, RunRecord
from stepspec.evaluation.report.tables import markdown_table
from stepspec.evaluation.runs import iter_rows, read_run


class Ideal(Record):
    """The ideal and the measured speedup of a policy over the target alone, in tokens a second."""

    policy: str
    draft_cost: float
    """c."""
    judge_cost: float
    """v."""
    drafted: float
    """D / C."""
    accepted: float
    """A / C."""
    token_level: float
    """s."""
    ideal: float
    measured: float

    @property
    def reached(self) -> float:
        """The measured speedup as a share of the ideal one."""
        return self.measured / self.ideal


class Ideals(Record):
    """The file that `python -m evals.bench ideal --json` writes."""

    version: Literal[2] = 2
    run: RunRecord
    policies: list[Ideal]


class Sums:
    """Sums over the rows of a policy."""

    def __init__(self, rows: Iterable[ResultRow]) -> None:
        found = [*rows]
        self.wall_s = sum(row.wall_s for row in found)
        self.draft_s, self.judge_s = (sum(getattr(row.time_s, part) for row in found) for part in ("draft", "judge"))
        self.committed, self.drafted, self.accepted = (
            sum(getattr(row.tokens, name) for row in found) for name in ("committed", "drafted", "accepted")
        )

    @property
    def token_s(self) -> float:
        """Seconds a committed token."""
        return self.wall_s / self.committed


def ideals(folder: Path) -> Ideals:
    """Return the ideal of each policy of a run that drafts steps.

    Raises:
        UsageError: the run has no such policy, or lacks the target alone or token-level speculation.
        StepSpecError: the run cannot be read.
    """
    run, rows = read_run(folder), [*iter_rows(folder)]
    kinds = {name: policy.kind for name, policy in run.policies.items()}
    sums = {name: Sums(row for row in rows if row.policy == name) for name in kinds}
    sums = {name: each for name, each in sums.items() if each.committed}
    exact = [name for name in sums if kinds[name] == "token" and run.policies[name].exact]
    steps = [name for name in sums if kinds[name] == "step" and sums[name].drafted]
    if BASELINE not in sums or not exact or not steps:
        raise UsageError(
            f"{str(folder)!r} needs rows under {BASELINE!r}, under an exact token-level policy and under one that "
            "drafts steps."
        )
    target_s = sums[BASELINE].token_s
    token_level = target_s / min(sums[name].token_s for name in exact)
    return Ideals(run=run, policies=[_ideal(name, sums[name], target_s, token_level) for name in steps])


def _ideal(policy: str, found: Sums, target_s: float, token_level: float) -> Ideal:
    drafted, accepted = found.drafted / found.committed, found.accepted / found.committed
    draft_cost, judge_cost = (seconds / found.drafted / target_s for seconds in (found.draft_s, found.judge_s))
    seconds = (draft_cost + judge_cost) * drafted + (1 - accepted) / token_level
    return Ideal(
        policy=policy,
        draft_cost=draft_cost,
        judge_cost=judge_cost,
        drafted=drafted,
        accepted=accepted,
        token_level=token_level,
        ideal=1 / seconds,
        measured=target_s / found.token_s,
    )


HEADS = ("policy", "draft cost c", "judge cost v", "D / C", "A / C", "token level s", "ideal", "measured", "share")


def rows_of(found: Iterable[Ideal]) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.policy,
            *(f"{value:.3f}" for value in (each.draft_cost, each.judge_cost, each.drafted, each.accepted)),
            *(f"{value:.2f}×" for value in (each.token_level, each.ideal, each.measured)),
            f"{each.reached:.0%}",
        ]
        for each in found
    ]


def ideals_table(found: Iterable[Ideal]) -> Table:
    """Return a terminal table of ideals."""
    return cells_table("speedup over the target alone, in tokens a second", HEADS, rows_of(found))


def ideals_block(folder: Path) -> str:
    """Return a Markdown table of the files in a folder that `python -m evals.bench ideal --json` wrote."""
    found = [Ideals.model_validate_json(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    rows = [[each.run.benchmark, f"{each.run.temperature:g}", *row] for each in found for row in rows_of(each.policies)]
    alike: dict[str, list[RunRecord]] = {}
    for each in found:
        alike.setdefault(each.run.pair, []).append(each.run)
    table = markdown_table(["benchmark", "temperature", *HEADS], rows)
    return "\n\n".join([table, *map(runs_in_words, alike.values())])


def main(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")], json_file: JsonOption = None
) -> None:
    """Compare the speed of step-level policies with the best that the run's own costs and acceptance allow."""
    found = ideals(run)
    finish([ideals_table(found.policies)], found, json_file)
