"""The plots of the page. Each function yields no plot if there is no data for it."""

from collections.abc import Mapping, Sequence

from stepspec.errors import UsageError
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report.plots.bars import time_split, token_split
from stepspec.evaluation.report.plots.canvas import Plot
from stepspec.evaluation.report.plots.judges import risk_plot, score_plots
from stepspec.evaluation.report.plots.path import path_plot
from stepspec.evaluation.report.plots.sweep import sweep_plots
from stepspec.evaluation.report.plots.tradeoff import replay_plot, tradeoff
from stepspec.evaluation.report.source import Source, settings_of
from stepspec.evaluation.report.tally import PolicyTally, RunTally
from stepspec.evaluation.runs import policy_of
from stepspec.loop.judge import ThresholdJudge

__all__ = ["Plot", "path_plot", "plot_sections", "plots_of", "replay_plot", "risk_plot", "sweep_plots"]


def plot_sections(key: str, run: RunRecord, summary: Summary, tally: RunTally) -> dict[str, Sequence[Plot]]:
    """Return the plots of a run by section. `key` identifies the run on the page."""
    sections: dict[str, Sequence[Plot]] = {
        "All policies": [*tradeoff(key, run, summary), *time_split(key, summary), *token_split(key, summary)]
    }
    for number, name in enumerate(summary.policies):
        judged = tally.policies.get(name, PolicyTally())
        sections[f"Under {name}"] = [*score_plots(f"{key}-{number}", judged, _thresholds(run, name))]
    return {section: plots for section, plots in sections.items() if plots}


def plots_of(sources: Sequence[Source]) -> list[tuple[str, Plot]]:
    """Return all plots of runs, each with a title that says of what it is."""
    settings = settings_of([source.run for source in sources], [source.folder for source in sources])
    found = [
        (" ".join(filter(None, (setting, section, plot.title))), plot)
        for number, (setting, source) in enumerate(zip(settings, sources, strict=True))
        for section, plots in plot_sections(f"r{number}", source.run, source.summary, source.tally).items()
        for plot in plots
    ]
    return [*found, *((plot.title, plot) for plot in sweep_plots("sweep", [source.summary for source in sources]))]


def _thresholds(run: RunRecord, name: str) -> Mapping[str, float]:
    """Return the thresholds of a policy's judges by judge; none for a policy of a later or earlier version."""
    try:
        judges = policy_of(run, name).judges
    except UsageError:
        return {}
    return {judge.name: judge.threshold for judge in judges if isinstance(judge, ThresholdJudge)}
