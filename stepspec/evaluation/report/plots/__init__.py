"""The plots of the page. Each function yields no plot if there is no data for it."""

from collections.abc import Mapping, Sequence

from stepspec.errors import UsageError
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report.plots.bars import time_split, token_split
from stepspec.evaluation.report.plots.canvas import Plot
from stepspec.evaluation.report.plots.judges import acceptance_by_index, risk_plot, score_plots
from stepspec.evaluation.report.plots.path import path_plot
from stepspec.evaluation.report.plots.spread import latencies, length_ratios
from stepspec.evaluation.report.plots.sweep import sweep_plots
from stepspec.evaluation.report.plots.tradeoff import tradeoff
from stepspec.evaluation.report.tally import PolicyTally, RunTally
from stepspec.evaluation.runs import policy_of
from stepspec.loop.judge import ThresholdJudge

__all__ = ["Plot", "path_plot", "plot_sections", "risk_plot", "sweep_plots"]


def plot_sections(key: str, run: RunRecord, summary: Summary, tally: RunTally) -> dict[str, Sequence[Plot]]:
    """Return the plots of a run by section. `key` identifies the run on the page."""
    names = list(summary.policies)
    judged = {name: tally.policies.get(name, PolicyTally()) for name in names}
    sections: dict[str, Sequence[Plot]] = {
        "All policies": [
            *tradeoff(key, run, summary),
            *time_split(key, summary),
            *token_split(key, summary),
            *latencies(key, {name: tally.walls(name) for name in names}),
            *length_ratios(key, {name: tally.length_ratios(name, "target") for name in names if name != "target"}),
            *acceptance_by_index(key, judged),
        ]
    }
    for number, (name, each) in enumerate(judged.items()):
        sections[f"Under {name}"] = [*score_plots(f"{key}-{number}", each, _thresholds(run, name))]
    return {section: plots for section, plots in sections.items() if plots}


def _thresholds(run: RunRecord, name: str) -> Mapping[str, float]:
    """Return the thresholds of a policy's judges by judge; none for a policy of a later or earlier version."""
    try:
        judges = policy_of(run, name).judges
    except UsageError:
        return {}
    return {judge.name: judge.threshold for judge in judges if isinstance(judge, ThresholdJudge)}
