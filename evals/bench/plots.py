"""The plots of the documentation, from `evals/results/`."""

# pyright: reportUnknownMemberType=false
# matplotlib's functions are typed in part only.

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from evals.bench import lab
from evals.bench.conversation import Conversations, range_in_words
from evals.bench.results import read_results
from evals.bench.rows import finished_rows
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Plot, canvas, colour
from stepspec.evaluation.report.plots.tradeoff import tradeoff

PLOTS = Path("docs", "images", "plots")
"""Their folder in a checkout."""
MAP_TEMPERATURE = 0.6
MAP_COSTS: Sequence[float] = tuple(np.round(np.geomspace(0.05, 0.6, 16), 3).tolist())
MACHINES = (
    ("two CPU cores, int8", 0.26, 0.065),
    ("8B with 0.6B on a GPU (estimate)", 0.20, 0.0),
    ("32B with 1.5B on a GPU (estimate)", 0.09, 0.0),
)
"""Costs c and r as in `lab.COSTS`. Those of GPUs follow from the bytes of weights that a pass reads."""
METHODS: Mapping[str, str] = {
    "embedded-gsm-mini": "mini/weights/figures.json",
}
"""The figures of the pair, by run of the published methods under `evals/results/presets`."""


def images(root: Path) -> dict[Path, str]:
    """Return the plots of the documents as SVG, by file: accuracy against speed, and speed by context and by cost.

    Raises:
        UsageError: results are missing.
    """
    results = root / "evals" / "results"
    plots: dict[str, Plot] = {}
    for name in ("gsm-mini", *(f"presets/{name}" for name in METHODS)):
        for run, summary in read_results(results / name):
            key = f"{name.replace('/', '-')}-t{run.temperature:g}"
            plots |= {f"front-{key}": plot for plot in tradeoff(key, run, summary)}
    for file in sorted((results / "conversation").glob("*.json")):
        found = Conversations.model_validate_json(file.read_text("utf-8"))
        plots[f"context-{file.stem}"] = speed_by_context(found)
    plots["speed-by-cost"] = speed_by_cost(finished_rows(results / "lab" / "qwen-rows.jsonl.gz", lab.Row))
    return {root / PLOTS / f"{name}.svg": plot.image() for name, plot in plots.items()}


def speed_by_cost(rows: Sequence[lab.Row]) -> Plot:
    """Return a plot of the speed of each rule by the cost of a drafted token, at temperature 0.6."""
    found = lab.by_temperature(rows)[MAP_TEMPERATURE]
    target = found[BASELINE]
    costs = [*((c, 0.0) for c in MAP_COSTS), *((c, r) for _, c, r in MACHINES)]
    known = {
        name: lab.speeds([own[problem] for problem in target if problem in own], [*target.values()], costs)
        for name, own in found.items()
        if name != BASELINE
    }
    names = sorted(known, key=lambda name: -known[name][0][0])
    colours = series(names)
    with canvas(400) as chart:
        axes = chart.axes
        for name in names:
            speeds = known[name][: len(MAP_COSTS)]
            loss = "" if name == "exact" else f" ({100 * lab.paired(found[name], target).difference:+.1f} points)"
            axes.plot(MAP_COSTS, [speed for speed, _ in speeds], color=colour(colours[name]), label=f"{name}{loss}")
            for c, (speed, number) in zip(MAP_COSTS, speeds, strict=True):
                tip = f"{name}, c = {c:.2f}: {speed:.2f}× with {number} drafted tokens"
                chart.tip(axes.plot(c, speed, "o", color=colour(colours[name]), markersize=3)[0], tip)
        on_machines = zip(MACHINES, known["exact"][len(MAP_COSTS) :], "Ds^", strict=True)
        for (words, c, _), (speed, _), marker in on_machines:
            mark = axes.plot(
                [c], [speed], marker, color=colour("ink"), markersize=6, linestyle="none", label=f"exact, {words}"
            )
            chart.tip(mark[0], f"exact, {words}: {speed:.2f}×")
        axes.set_xlabel("cost c of a drafted token, in passes of the target")
        axes.set_ylabel("times as fast as the target alone")
        axes.set_ylim(bottom=1)
        chart.figure.legend(loc="outside upper left", ncols=1)
        return chart.plot("speed-by-cost", "Speed by the cost of a drafted token", "")


def speed_by_context(found: Conversations) -> Plot:
    """Return a plot of speed by the length of the context."""
    edges = list(dict.fromkeys(each.up_to for each in found.results))
    names = list(dict.fromkeys(each.policy for each in found.results))
    points = {
        name: [
            (edges.index(each.up_to), (each.speedup, each.speedup_ci)) for each in found.results if each.policy == name
        ]
        for name in names
    }
    with canvas() as chart:
        chart.lines(
            f"times as fast as {names[0]}",
            points,
            series(names),
            lambda policy, place, value: f"{policy}, {range_in_words(edges[place])}: {value:.2f}×",
        )
        chart.axes.set_xticks(range(len(edges)), list(map(range_in_words, edges)))
        chart.axes.set_xlabel("tokens before the answer")
        return chart.plot("context", "Speed by the length of the context", "")
