"""The data of one run for a report: its records, a tally of its rows, and an index of its traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report.figures import GROUPS, Extra, num_rows, repeat_columns
from stepspec.evaluation.report.findings import front
from stepspec.evaluation.report.prices import Prices, cost_figure, costs
from stepspec.evaluation.report.tally import RunTally
from stepspec.evaluation.runs import TraceIndex, iter_blocks, iter_rows, read_run


@dataclass(frozen=True)
class Source:
    """The data of a run for reports."""

    folder: Path
    run: RunRecord
    summary: Summary
    tally: RunTally
    traces: TraceIndex | None
    """None if the report does not include traces."""
    extras: Sequence[Extra]


def read_source(folder: Path, summary: Summary, *, traces: bool = True, prices: Prices | None = None) -> Source:
    """Read the rows of a run once and index its traces.

    Args:
        folder: the folder of the run.
        summary: the summary of the same rows.
        traces: whether to index the traces.
        prices: prices for the cost figure; None omits it.

    Raises:
        UsageError: the folder contains no run, or a damaged one.
        StepSpecError: a file cannot be read.
    """
    index = TraceIndex(folder) if traces else None
    extras: list[Extra] = []
    if prices is not None:
        rows = {name: num_rows(policy) for name, policy in summary.policies.items()}
        extras.append(cost_figure(costs(iter_blocks(folder), prices), rows, prices))
    return Source(folder, read_run(folder), summary, RunTally.of(iter_rows(folder)), index, extras)


def figure_rows(source: Source) -> list[dict[str, object]]:
    """Return the figures of each policy of a run as numbers, by the titles of the tables."""
    summary, best = source.summary, front(source.summary)
    columns = [*chain(*GROUPS.values()), *repeat_columns(summary)]
    about = source.run.model_dump(include={"benchmark", "temperature", "max_tokens", "concurrency", "seed", "commit"})
    models = {role: engine and engine.name for role in ("target", "draft") for engine in [source.run.engines.get(role)]}
    return [
        {
            **about,
            **models,
            "reading": summary.reading,
            "policy": name,
            "problems": policy.n,
            "rows": num_rows(policy),
            **{title: number for column in columns for title, number in column.numbers(policy).items()},
            **{extra.title: extra.numbers.get(name) for extra in source.extras},
            "front": name in best,
            "why no speed": policy.no_speed,
        }
        for name, policy in summary.policies.items()
    ]


def settings_of(runs: Sequence[RunRecord], folders: Sequence[Path]) -> list[str]:
    """Return the settings that distinguish each run, such as `concurrency 4`. The text is empty for a single run."""
    if len(runs) < 2:
        return ["" for _ in runs]
    settings = [
        [run.benchmark, f"concurrency {run.concurrency}", f"temperature {run.temperature:g}", f"seed {run.seed}"]
        for run in runs
    ]
    different = [index for index, texts in enumerate(zip(*settings, strict=True)) if len(set(texts)) > 1]
    names = [", ".join(texts[index] for index in different) for texts in settings]
    if len(set(names)) == len(names):
        return names
    return [
        ", ".join(part for part in (name, str(folder)) if part) for name, folder in zip(names, folders, strict=True)
    ]
