"""The plots of the documentation, from `evals/results/`."""

# pyright: reportUnknownMemberType=false
# matplotlib's functions are typed in part only.

from collections.abc import Mapping
from pathlib import Path

from evals.bench.conversation import Conversations, range_in_words
from evals.bench.results import read_results
from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Plot, canvas
from stepspec.evaluation.report.plots.tradeoff import tradeoff

PLOTS = Path("docs", "images", "plots")
"""Their folder in a checkout."""
METHODS: Mapping[str, str] = {
    "embedded-gsm-mini": "mini/weights/figures.json",
}
"""The figures of the pair, by run of the published methods under `evals/results/presets`."""


def images(root: Path) -> dict[Path, str]:
    """Return the plots of the documents as SVG, by file: accuracy against speed of the results, and speed by context.

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
    return {root / PLOTS / f"{name}.svg": plot.image() for name, plot in plots.items()}


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
