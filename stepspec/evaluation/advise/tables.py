"""Tables of the measurements for a terminal."""

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stepspec.evaluation.advise.findings import Candidate, Findings, LoadFindings, ModelCosts
from stepspec.evaluation.report.cells import UNKNOWN, joined, percent, percent_with_interval, seconds, times

Cell = Callable[[Candidate], str]
SPEEDS = ("speedup", "throughput")
"""Columns with a dash if a speed does not count."""


def policies_table(load: LoadFindings, *, graded: bool) -> Table:
    """Return a table of the policies that ran at one load."""
    columns: Sequence[tuple[str, Cell]] = (
        ("speedup", lambda each: joined(times(each.speedup, each.speedup_ci))),
        ("throughput", lambda each: times(each.throughput)[0]),
        ("tokens accepted", lambda each: percent(each.token_acceptance)),
        ("steps accepted", lambda each: percent(each.step_acceptance)),
        (
            "accuracy" if graded else "agreement",
            lambda each: joined(percent_with_interval(each.accuracy, each.accuracy_ci)),
        ),
        ("length", lambda each: times(each.length_ratio)[0]),
        ("cut short", lambda each: f"{each.num_cut_short:,}"),
    )
    concurrency = load.costs.concurrency
    table = _table(f"{load.num_prompts} prompts, {concurrency} concurrent, 95% intervals")
    table.add_column("")
    for title, _ in columns:
        table.add_column(title, justify="right")
    for each in load.candidates:
        name = f"{each.name}{'' if each.exact else ' (not exact)'}"
        without = SPEEDS if each.no_speed else ()
        table.add_row(Text(name), *(Text(UNKNOWN if title in without else cell(each)) for title, cell in columns))
    return table


def costs_table(findings: Findings) -> Table:
    """Return a table of the time per token of both models, by load."""
    widths = sorted({width for load in findings.loads for width in load.costs.target.pass_over_one if width > 1})
    table = _table("what a token takes")
    models = [costs for load in findings.loads for costs in (load.costs.target, load.costs.draft) if costs is not None]
    distant = ["round trip"] if any(costs.round_trip_s is not None for costs in models) else []
    for title in ("", "to write", "to read", *distant, *(f"a pass over {width}" for width in widths)):
        table.add_column(title, justify="right" if title else "left")
    for load in findings.loads:
        suffix = f", {load.costs.concurrency} concurrent" if len(findings.loads) > 1 else ""
        for role, costs in (("target", load.costs.target), ("draft", load.costs.draft)):
            if costs is not None:
                table.add_row(role + suffix, *_costs_row(costs, widths, distant=bool(distant)))
    return table


def _costs_row(costs: ModelCosts, widths: Sequence[int], *, distant: bool) -> list[str]:
    passes = [costs.pass_over_one.get(width) for width in widths]
    trips = [seconds(costs.round_trip_s)] if distant else []
    return [
        seconds(costs.write_s),
        seconds(costs.read_s),
        *trips,
        *("" if each is None else f"{each:.1f}" for each in passes),
    ]


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
