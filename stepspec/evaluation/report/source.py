"""One run as a report takes it: its records, what was gathered from its rows, and where its traces are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report.figures import Extra, num_rows
from stepspec.evaluation.report.prices import Prices, cost_figure, costs
from stepspec.evaluation.report.tally import RunTally
from stepspec.evaluation.runs import TraceIndex, iter_blocks, iter_rows, read_run


@dataclass(frozen=True)
class Source:
    """A run and what reports say of it."""

    folder: Path
    run: RunRecord
    summary: Summary
    tally: RunTally
    traces: TraceIndex | None
    """None where they are not wanted."""
    extras: Sequence[Extra]


def read_source(folder: Path, summary: Summary, *, traces: bool = True, prices: Prices | None = None) -> Source:
    """Reads a run's rows once and finds its traces; `summary` is of the same rows.

    Raises:
        UsageError: the folder holds no run, or a damaged one.
        StepSpecError: the disk refuses.
    """
    index = TraceIndex(folder) if traces else None
    extras: list[Extra] = []
    if prices is not None:
        rows = {name: num_rows(policy) for name, policy in summary.policies.items()}
        extras.append(cost_figure(costs(iter_blocks(folder), prices), rows, prices))
    return Source(folder, read_run(folder), summary, RunTally.of(iter_rows(folder)), index, extras)


def settings_of(runs: Sequence[RunRecord], folders: Sequence[Path]) -> list[str]:
    """What tells each of several runs from the others, such as `concurrency 4`; empty for a single run."""
    if len(runs) < 2:
        return ["" for _ in runs]
    told = [
        [run.benchmark, f"concurrency {run.concurrency}", f"temperature {run.temperature:g}", f"seed {run.seed}"]
        for run in runs
    ]
    different = [place for place, texts in enumerate(zip(*told, strict=True)) if len(set(texts)) > 1]
    names = [", ".join(texts[place] for place in different) for texts in told]
    if len(set(names)) == len(names):
        return names
    return [
        ", ".join(part for part in (name, str(folder)) if part) for name, folder in zip(names, folders, strict=True)
    ]
