"""Plots of the judges: scores, and correct answers by the lowest accepted score."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from stepspec.evaluation.report.cells import count, percent
from stepspec.evaluation.report.plots.canvas import Canvas, Plot, canvas, colour, label
from stepspec.evaluation.report.tally import PolicyTally, ScoreTally
from stepspec.evaluation.stats import auc, reliability

MAX_POINTS = 24
MIN_JUDGED = 10
"""Fewest accepted steps that led to a correct answer, and to a wrong one, for a plot of their scores."""
MIN_REQUESTS = 20


def risk_plot(key: str, risks: Mapping[str, Mapping[int, float]]) -> Plot:
    """Return a plot with a row for each judge: the share of wrong steps among the accepted ones, by the percentage
    accepted. All rows have one scale."""
    peak = max((risk for each in risks.values() for risk in each.values()), default=0.0) or 1.0
    with canvas(76 + 28 * len(risks)) as chart:
        for row, each in enumerate(risks.values()):
            chart.axes.fill_between([*each], [0.9 * y / peak - row for y in each.values()], -row, color=colour("bad"))
        chart.axes.set_yticks([0.3 - row for row in range(len(risks))], [*map(label, risks)])
        chart.axes.set_xlabel(f"accepted, % (highest peak: {percent(peak)} wrong)")
        return chart.plot(key, "Risk by coverage", "The share of wrong steps among those with the highest scores.")


def score_plots(key: str, tally: PolicyTally, thresholds: Mapping[str, float]) -> Iterator[Plot]:
    """Yield plots for each judge of a policy: its scores, those of accepted steps by the answer that they led to, and
    correct answers by the lowest accepted score. `thresholds` are those of the policy, by judge."""
    for number, (judge, scores) in enumerate(tally.scores.items()):
        threshold = thresholds.get(judge)
        yield _distribution(f"{key}-scores-{number}", judge, scores, threshold)
        yield from _by_answer(f"{key}-answers-{number}", judge, scores, threshold)
        yield from _calibration(f"{key}-calibration-{number}", judge, scores, threshold)


def _distribution(key: str, judge: str, scores: ScoreTally, threshold: float | None) -> Plot:
    accepted, rejected = np.asarray(scores.accepted), np.asarray(scores.refused)
    edges = _edges(np.concatenate([accepted, rejected]))
    with canvas() as chart:
        heights = [np.histogram(np.clip(each, edges[0], edges[-1]), edges)[0] for each in (rejected, accepted)]
        bottom = np.zeros(len(edges) - 1)
        for height, name, legend in zip(heights, ("rejected", "draft"), ("rejected", "accepted"), strict=True):
            width = 0.92 * np.diff(edges)
            chart.axes.bar(edges[:-1] + np.diff(edges) / 2, height, width, bottom, color=colour(name), label=legend)
            bottom = bottom + height
        place = _draw_threshold(chart, threshold)
        chart.axes.grid(visible=False, axis="x")
        chart.axes.set_xlabel(f"score of {judge}")
        chart.axes.set_ylabel("steps")
        chart.figure.legend(loc="outside upper left", ncols=2)
        share = len(accepted) / (len(accepted) + len(rejected))
        return chart.plot(
            key,
            f"Scores of {judge}",
            f"{count(len(accepted) + len(rejected), 'score')}, {percent(share)} of the steps accepted. "
            f"The outermost bars include all scores beyond them.{place}",
        )


def _by_answer(key: str, judge: str, scores: ScoreTally, threshold: float | None) -> Iterator[Plot]:
    values, correct = np.asarray(scores.accepted), np.asarray(scores.led_to_correct) == 1
    groups = {"correct": values[correct], "wrong": values[~correct]}
    if min(map(len, groups.values())) < MIN_JUDGED:
        return
    edges = _edges(values)
    colours = {"correct": "draft", "wrong": "rejected"}
    with canvas() as chart:
        for name, group in groups.items():
            shares = 100 * np.histogram(np.clip(group, edges[0], edges[-1]), edges)[0] / len(group)
            chart.axes.stairs(shares, edges, color=colour(colours[name]), label=f"{name} answer", linewidth=1.8)
        place = _draw_threshold(chart, threshold)
        chart.axes.grid(visible=False, axis="x")
        chart.axes.set_xlabel(f"score of {judge}")
        chart.axes.set_ylabel("accepted steps, %")
        chart.figure.legend(loc="outside upper left", ncols=2)
        sizes = " and ".join(f"{len(group):,} to a {name} one" for name, group in groups.items())
        yield chart.plot(
            key,
            "Scores by the answer",
            f"Scores of accepted steps by the answer that their request came to: {sizes}. Each outline adds up to "
            f"100%.{place}",
        )


def _draw_threshold(chart: Canvas, threshold: float | None) -> str:
    """Draw the threshold unless it lies outside of the scores. Return a sentence about it."""
    low, high = chart.axes.get_xlim()
    if threshold is None:
        return ""
    if not low <= threshold <= high:
        return f" The threshold is {threshold:g}."
    chart.axes.axvline(threshold, color=colour("ink"), linewidth=1.2, linestyle=":")
    chart.axes.set_xlim(low, high)
    return f" Dotted line: the threshold, {threshold:g}."


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the edges of the bars: one bar for each score if scores are few integers, else bars of equal width.

    The latter start at the 1% quantile.
    """
    distinct = np.unique(values)
    are_integers = np.equal(distinct, np.round(distinct)).all()
    if are_integers and distinct[-1] - distinct[0] < MAX_POINTS:
        return np.arange(distinct[0] - 0.5, distinct[-1] + 1.5)
    low, high = np.quantile(values, [0.01, 1.0])
    return np.linspace(low, high if high > low else low + 1, MAX_POINTS + 1)


def _calibration(key: str, judge: str, scores: ScoreTally, threshold: float | None) -> Iterator[Plot]:
    if len(scores.lowest) < MIN_REQUESTS:
        return
    bins = reliability(scores.lowest, scores.correct, scores.problems, num_bins=6)
    if len(bins) < 2:
        return
    shares = [100 * each.outcome.value for each in bins]
    intervals = [each.outcome.interval() for each in bins]
    overall = 100 * sum(scores.correct) / len(scores.correct)
    with canvas() as chart:
        chart.axes.axhline(overall, color=colour("muted"), linewidth=1.2, linestyle="--")
        whiskers = [
            [max(0, share - 100 * low) for share, (low, _) in zip(shares, intervals, strict=True)],
            [max(0, 100 * high - share) for share, (_, high) in zip(shares, intervals, strict=True)],
        ]
        means = [each.mean_score for each in bins]
        chart.axes.errorbar(means, shares, whiskers, fmt="o-", color=colour("draft"), elinewidth=1.3, markersize=5)
        place = _draw_threshold(chart, threshold)
        chart.axes.set_xlabel(f"lowest accepted score of {judge}")
        chart.axes.set_ylabel("correct answers, %")
        yield chart.plot(
            key,
            "Do low scores cost answers?",
            f"Share of correct answers by the lowest accepted score of the request, in bins of about equal "
            f"count, with 95% intervals. Dashed line: all {len(scores.lowest):,} requests.{place} "
            f"{_area_in_words(scores)}",
        )


def _area_in_words(scores: ScoreTally) -> str:
    found = auc(scores.lowest, scores.correct, scores.problems)
    if found.value is None or found.interval is None:
        return f"The area under the curve is unknown: {found.why}."
    low, high = found.interval
    return f"Area under the curve {found.value:.2f} [{low:.2f}, {high:.2f}]; 0.5 is chance level."
