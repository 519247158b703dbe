"""The data that the page template shows for a run: texts, tables and figures, without markup except SVG."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report import cells
from stepspec.evaluation.report.cells import Cell
from stepspec.evaluation.report.colours import series, without_values
from stepspec.evaluation.report.conditions import (
    commit_in_words,
    device_in_words,
    hardware_in_words,
    machine_in_words,
    nodes_in_words,
)
from stepspec.evaluation.report.figures import (
    ACCURACY,
    ACCURACY_GAIN,
    GROUPS,
    SPEEDUP,
    SPEEDUP_VS_TOKEN,
    STEPS_ACCEPTED,
    is_known,
    named,
    repeat_columns,
)
from stepspec.evaluation.report.findings import ReportFindings, chosen_policy, findings
from stepspec.evaluation.report.groups import group_tables
from stepspec.evaluation.report.page_data import PageData
from stepspec.evaluation.report.plots import Plot, plot_sections
from stepspec.evaluation.report.source import Source
from stepspec.loop.policy import PolicyKind

KINDS: Mapping[PolicyKind | None, str] = {
    "target": "target alone",
    "token": "tokens",
    "draft": "draft alone",
    "step": "steps",
    None: "unknown",
}


@dataclass(frozen=True)
class ColumnHead:
    """The header of a policy's column."""

    name: str
    kind: str
    exact: str
    colour: str
    chosen: bool


@dataclass(frozen=True)
class TableLine:
    """A table row: a figure with one cell for each policy."""

    title: str
    meaning: str
    cells: Sequence[Cell]

    @property
    def unbroken(self) -> list[Cell]:
        """The cells, whose intervals break lines only between percentiles."""
        return [(value, interval.replace(" ", "\xa0").replace(",\xa0p99", ", p99")) for value, interval in self.cells]


@dataclass(frozen=True)
class Tile:
    """A key figure of the chosen policy, shown at the top of the page."""

    value: str
    interval: str
    words: str


@dataclass(frozen=True)
class RunView:
    """The data of one run on the page."""

    key: str
    setting: str
    run: RunRecord
    summary: Summary
    found: ReportFindings
    headline: Sequence[str]
    """The headline in parts: texts at even indices, intervals at odd indices."""
    tiles: Sequence[Tile]
    heads: Sequence[ColumnHead]
    table: Mapping[str, Sequence[TableLine]]
    plots: Mapping[str, Sequence[Plot]]
    groups: Mapping[str, Sequence[TableLine]]
    conditions: Mapping[str, str]
    embedded: PageData
    levels: Sequence[int]
    repeats: Sequence[int]
    has_traces: bool
    here: str
    """The policy that is selected initially in the list of problems."""


def view_of(key: str, setting: str, source: Source, embedded: PageData) -> RunView:
    """Return the view of a run. `key` identifies the run on the page."""
    run, summary, problems = source.run, source.summary, source.tally.problems.values()
    found = findings(run, summary)
    repeats = {repeat for problem in problems for outcomes in problem.outcomes.values() for repeat in outcomes}
    return RunView(
        key=key,
        setting=setting,
        run=run,
        summary=summary,
        found=found,
        headline=re.split(r"(\[.*?\])", found.headline),
        tiles=_tiles(summary),
        heads=_heads(run, summary),
        table=_table(source),
        plots=plot_sections(key, run, summary, source.tally),
        groups=_groups(summary),
        conditions=_conditions(run, summary),
        embedded=embedded,
        levels=sorted({problem.level for problem in problems if problem.level is not None}),
        repeats=sorted(repeats),
        has_traces=bool(embedded.chunks),
        here=_initial_policy(run, summary),
    )


def _initial_policy(run: RunRecord, summary: Summary) -> str:
    """Return the chosen policy. If it is exact, it repeats the target, so return the last policy that is not."""
    names = [chosen_policy(summary), *reversed(summary.policies)]
    return next((name for name in names if name and not run.is_exact(name)), next(iter(summary.policies)))


def _tiles(summary: Summary) -> list[Tile]:
    chosen = chosen_policy(summary)
    policy = summary.policies.get(chosen or "")
    if policy is None or chosen == "target":
        return []
    wanted = {
        SPEEDUP: "as fast as the target alone",
        SPEEDUP_VS_TOKEN: "as fast as token-level speculation",
        ACCURACY: summary.named("of the answers are correct"),
        ACCURACY_GAIN: "difference in accuracy from the target",
        STEPS_ACCEPTED: "of the draft's steps are accepted",
    }
    tiles = [Tile(*column.cell(policy), words) for column, words in wanted.items()]
    # A ratio without an interval compares a policy with itself.
    return [tile for tile in tiles if tile.value != cells.UNKNOWN and (tile.interval or "×" not in tile.value)][:4]


def _heads(run: RunRecord, summary: Summary) -> list[ColumnHead]:
    colours, chosen = series(list(summary.policies), without_values), chosen_policy(summary)
    return [
        ColumnHead(
            name,
            KINDS[run.kind_of(name)],
            run.exactness(name),
            colours[name],
            name == chosen,
        )
        for name in summary.policies
    ]


def _table(source: Source) -> dict[str, Sequence[TableLine]]:
    policies = source.summary.policies
    table: dict[str, Sequence[TableLine]] = {
        group: [
            TableLine(column.title, column.meaning, [*map(column.cell, policies.values())])
            for column in named(columns, source.summary)
            if is_known(column, policies)
        ]
        for group, columns in {**GROUPS, "Repeats": repeat_columns(source.summary)}.items()
    }
    if source.extras:
        table["Money"] = [
            TableLine(extra.title, extra.meaning, [extra.cells[name] for name in policies]) for extra in source.extras
        ]
    return {group: lines for group, lines in table.items() if lines}


def _groups(summary: Summary) -> dict[str, Sequence[TableLine]]:
    """Return the tables of groups. The interval of a cell and its further figure have a line each."""
    return {
        f"By {words}": [
            TableLine(
                line.name,
                cells.count(line.num_problems, "problem"),
                [
                    (value, "\n".join(part for part in parts if part not in ("", cells.UNKNOWN)))
                    for value, *parts in line.cells
                ],
            )
            for line in lines
        ]
        for words, lines in group_tables(summary).items()
    }


def _conditions(run: RunRecord, summary: Summary) -> dict[str, str]:
    """Return the contents of `run.json` without the policy files, and the machines of a run on several."""
    conditions = {
        "benchmark": f"{run.benchmark}, {cells.count(run.num_problems, 'problem')}",
        "data": run.data_sha256,
        "prompt": f"{run.prompt_id}, version {run.prompt_version}",
        "grader": run.grader + (f", {run.reading} reading" if run.reading else ""),
        "sampling": f"temperature {run.temperature:g}, top-p {run.top_p:g}, seed {run.seed}",
        "token limit": f"{run.max_tokens:,} committed tokens a problem",
        "requests in flight": str(run.concurrency),
        "repeats": str(run.num_repeats),
    }
    for role, engine in run.engines.items():
        if engine is not None:
            parts = [engine.name, engine.dtype, device_in_words(engine)]
            conditions[role] = ", ".join(part for part in parts if part)
            conditions[f"{role}'s weights"] = engine.weights or "not known"
    return conditions | {
        "pair": run.pair,
        "hardware": hardware_in_words(run.hardware),
        **{f"hardware: {name}": str(value) for name, value in run.hardware.items()},
        **({"machines": nodes_in_words(summary)} if summary.nodes else {}),
        **({"resumed on": " / ".join(map(machine_in_words, run.resumed))} if run.resumed else {}),
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "code": commit_in_words(run.commit).removeprefix("commit "),
        "started": run.started,
    }
