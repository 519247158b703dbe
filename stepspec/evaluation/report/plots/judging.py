"""What the judges did: acceptance by step index, the scores, and whether an accepted low score costs answers."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from stepspec.evaluation.report.cells import count, percent
from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Canvas, Plot, canvas, colour, label
from stepspec.evaluation.report.tally import PolicyTally, ScoreTally
from stepspec.evaluation.stats import Share, auc, reliability

MAX_POINTS = 24
MIN_JUDGED = 10
"""Steps of one index, below which their share says nothing worth a point."""
MIN_REQUESTS = 20


def acceptance_by_index(key: str, tallies: Mapping[str, PolicyTally]) -> Iterator[Plot]:
    """The share of judged steps that were accepted, by their place in the request."""
    shown = {name: points for name, tally in tallies.items() if (points := places_accepted(tally))}
    if not shown:
        return
    names = series(list(tallies))
    with canvas() as drawn:
        for name, points in shown.items():
            _draw_shares(drawn, points, names[name], label(name))
        drawn.axes.set_xlabel("step")
        drawn.axes.set_ylabel("accepted, %")
        drawn.axes.set_ylim(0, 104)
        drawn.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(shown) > 1:
            drawn.figure.legend(loc="outside upper left", ncols=2)
        yield drawn.plot(
            f"{key}-index",
            "Acceptance by step",
            f"Share of judged steps that were accepted, by their place in the request, with 95% intervals over "
            f"problems, as steps of one problem depend on each other; places with fewer than {MIN_JUDGED} judged steps "
            f"are left out.",
        )


def places_accepted(tally: PolicyTally) -> list[tuple[float, Share]]:
    """The share accepted by place, counted from 1; several places make a point, at their mean, where there are many.

    The unit is the problem: its steps and repeats depend on each other. Fewer than `MIN_JUDGED` steps make no point.
    """
    longest = max((len(places.judged) for places in tally.places.values()), default=0)
    size = max(1, -(-longest // MAX_POINTS))
    points: list[tuple[float, Share]] = []
    for start in range(0, longest, size):
        judged = [sum(places.judged[start : start + size]) for places in tally.places.values()]
        accepted = [sum(places.accepted[start : start + size]) for places in tally.places.values()]
        if sum(judged) >= MIN_JUDGED:
            points.append((1 + start + (size - 1) / 2, Share.pooled(accepted, judged)))
    return points


def _draw_shares(drawn: Canvas, points: Sequence[tuple[float, Share]], name: str, words: str) -> None:
    places, shares = zip(*points, strict=True)
    low, high = zip(*(share.interval() for share in shares), strict=True)
    drawn.axes.fill_between(
        places, 100 * np.asarray(low), 100 * np.asarray(high), color=colour(name), alpha=0.16, linewidth=0
    )
    values = [100 * share.value for share in shares]
    drawn.axes.plot(places, values, color=colour(name), label=words, marker="o", markersize=3.5)


def score_plots(key: str, tally: PolicyTally) -> Iterator[Plot]:
    """Two plots for each judge of a policy: its scores, and right answers by the lowest accepted one."""
    for number, (judge, scores) in enumerate(tally.scores.items()):
        yield _distribution(f"{key}-scores-{number}", judge, scores)
        yield from _calibration(f"{key}-calibration-{number}", judge, scores)


def _distribution(key: str, judge: str, scores: ScoreTally) -> Plot:
    accepted, refused = np.asarray(scores.accepted), np.asarray(scores.refused)
    edges = _edges(np.concatenate([accepted, refused]))
    with canvas() as drawn:
        heights = [np.histogram(np.clip(each, edges[0], edges[-1]), edges)[0] for each in (refused, accepted)]
        bottom = np.zeros(len(edges) - 1)
        for height, name, words in zip(heights, ("rejected", "draft"), ("refused", "accepted"), strict=True):
            width = 0.92 * np.diff(edges)
            drawn.axes.bar(edges[:-1] + np.diff(edges) / 2, height, width, bottom, color=colour(name), label=words)
            bottom = bottom + height
        drawn.axes.grid(visible=False, axis="x")
        drawn.axes.set_xlabel(f"score of {judge}")
        drawn.axes.set_ylabel("steps")
        drawn.figure.legend(loc="outside upper left", ncols=2)
        share = len(accepted) / (len(accepted) + len(refused))
        return drawn.plot(
            key,
            f"Scores of {judge}",
            f"{count(len(accepted) + len(refused), 'score')}, {percent(share)} of the steps accepted. "
            "Scores beyond the outermost bars are in them.",
        )


def _edges(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A bar for each score where they are digits or the like; else equal ones over all but the lowest hundredth."""
    distinct = np.unique(values)
    whole = np.equal(distinct, np.round(distinct)).all()
    if whole and distinct[-1] - distinct[0] < MAX_POINTS:
        return np.arange(distinct[0] - 0.5, distinct[-1] + 1.5)
    low, high = np.quantile(values, [0.01, 1.0])
    return np.linspace(low, high if high > low else low + 1, MAX_POINTS + 1)


def _calibration(key: str, judge: str, scores: ScoreTally) -> Iterator[Plot]:
    if len(scores.lowest) < MIN_REQUESTS:
        return
    bins = reliability(scores.lowest, scores.correct, scores.problems, num_bins=6)
    if len(bins) < 2:
        return
    shares = [100 * each.outcome.value for each in bins]
    intervals = [each.outcome.interval() for each in bins]
    overall = 100 * sum(scores.correct) / len(scores.correct)
    with canvas() as drawn:
        drawn.axes.axhline(overall, color=colour("muted"), linewidth=1.2, linestyle="--")
        whiskers = [
            [max(0, share - 100 * low) for share, (low, _) in zip(shares, intervals, strict=True)],
            [max(0, 100 * high - share) for share, (_, high) in zip(shares, intervals, strict=True)],
        ]
        means = [each.mean_score for each in bins]
        drawn.axes.errorbar(means, shares, whiskers, fmt="o-", color=colour("draft"), elinewidth=1.3, markersize=5)
        drawn.axes.set_xlabel(f"lowest accepted score of {judge}")
        drawn.axes.set_ylabel("right answers, %")
        yield drawn.plot(
            key,
            "Do low scores cost answers?",
            f"Share of right final answers by the lowest score accepted in the request, in bins of about equal "
            f"count, with 95% intervals; dashed: all {len(scores.lowest):,} requests. {_area_in_words(scores)}",
        )


def _area_in_words(scores: ScoreTally) -> str:
    found = auc(scores.lowest, scores.correct, scores.problems)
    if found.value is None or found.interval is None:
        return f"No area under the curve is given: {found.why}."
    low, high = found.interval
    return f"Area under the curve {found.value:.2f} [{low:.2f}, {high:.2f}]; 0.5 means that the scores say nothing."
