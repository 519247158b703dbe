"""Accuracy against speed, with intervals and the Pareto front."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.transforms import Bbox

from stepspec.evaluation.records import PolicySummary, RunRecord, Summary
from stepspec.evaluation.replay.totals import Replayed, departures
from stepspec.evaluation.report.cells import joined, percent_with_interval, times
from stepspec.evaluation.report.colours import series, values_of, without_values
from stepspec.evaluation.report.findings import not_run
from stepspec.evaluation.report.plots.canvas import FONT_SIZE, Canvas, Plot, canvas, colour, label
from stepspec.evaluation.stats import pareto_front

_LABEL_SPOTS = [(side * 9, up) for up in (9, -9, 22, -22, 36, -36) for side in (1, -1)] + [
    (0, 17),
    (0, -17),
    (0, 32),
    (0, -32),
]
"""Possible label offsets from a point, in pixels and in order of preference."""


@dataclass(frozen=True)
class _Point:
    name: str
    x: float
    y: float
    x_interval: tuple[float, float]
    y_interval: tuple[float, float]
    exact: bool
    tip: str


def tradeoff(key: str, run: RunRecord, summary: Summary) -> Iterator[Plot]:
    """Yield the plot if at least two policies have a speed."""
    points = [
        _point(name, policy, run.is_exact(name))
        for name, policy in summary.policies.items()
        if policy.speedup_vs_target is not None and policy.no_speed is None
    ]
    if len(points) < 2:
        return
    missing = f"\n(not run: {', '.join(names)})" if (names := not_run(run)) else ""
    with canvas() as chart:
        chart.axes.set_xlabel(f"times as fast as the target alone{missing}")
        chart.axes.set_ylabel(f"{summary.named('correct answers')}, %")
        _draw(chart, points, series(list(summary.policies), without_values))
        yield chart.plot(
            f"{key}-tradeoff",
            "Accuracy against speed",
            "Better is up and to the right; the bars are 95% intervals. Circles are exact, diamonds are not. "
            "The dashed line joins the policies that no other beats in both. Speeds that do not count are not shown.",
        )


def replay_plot(replayed: Sequence[Replayed]) -> Iterator[Plot]:
    """Yield a plot of replayed policies: departure from the target against speed, if there are at least two."""
    points = [
        _Point(each.name, each.speedup, -by, each.speedup_ci or (each.speedup, each.speedup), (-by, -by), False, tip)
        for each, by in zip(replayed, departures(replayed), strict=True)
        for tip in [f"{each.name}: {by:.3g}, {joined(times(each.speedup, each.speedup_ci))}"]
    ]
    if len(points) < 2:
        return
    has_nats = all(each.departure is not None for each in replayed)
    with canvas() as chart:
        chart.axes.set_xlabel("times as fast as the target alone, estimated")
        chart.axes.set_ylabel("departure, nats a request" if has_nats else "steps accepted, share of the judged")
        chart.axes.yaxis.set_major_formatter(lambda value, _: f"{0 - value:g}")
        _draw(chart, points, series([each.name for each in replayed], without_values))
        yield chart.plot("replay", "Departure against speed", "Better is up and to the right.")


def _draw(chart: Canvas, points: Sequence[_Point], colours: dict[str, str]) -> None:
    _draw_front(chart, points)
    for point in points:
        _draw_point(chart, point, colours[point.name])
    groups = {without_values(name): shade for name, shade in colours.items() if values_of(name)}
    for name, shade in groups.items():
        chart.axes.scatter([], [], color=colour(shade), label=name)
    if groups:
        chart.figure.legend(loc="outside upper left")
    chart.axes.margins(0.12, 0.15)
    _draw_labels(chart, points, colours)


def _point(name: str, policy: PolicySummary, exact: bool) -> _Point:
    speedup = policy.speedup_vs_target or 0.0
    low, high = policy.accuracy_ci
    tip = (
        f"{name}: {joined(percent_with_interval(policy.accuracy, policy.accuracy_ci))} correct, "
        f"{joined(times(speedup, policy.speedup_vs_target_ci))}"
    )
    x_interval = policy.speedup_vs_target_ci or (speedup, speedup)
    return _Point(name, speedup, 100 * policy.accuracy, x_interval, (100 * low, 100 * high), exact, tip)


def _draw_front(chart: Canvas, points: Sequence[_Point]) -> None:
    front = pareto_front((point.x, point.y) for point in points)
    if len(front) > 1:
        chart.axes.plot(*zip(*front, strict=True), "--", color=colour("muted"), linewidth=1.2, zorder=1)


def _draw_point(chart: Canvas, point: _Point, name: str) -> None:
    low, high = point.x_interval
    bottom, top = point.y_interval
    x_bars = [[point.x - low], [high - point.x]]
    y_bars = [[max(0, point.y - bottom)], [max(0, top - point.y)]]
    bars = chart.axes.errorbar(point.x, point.y, y_bars, x_bars, fmt="none", ecolor=colour(name), elinewidth=1.3)
    for line in bars.lines[2]:
        line.set_alpha(0.55)
    marker = chart.axes.scatter(
        point.x,
        point.y,
        s=58,
        marker="o" if point.exact else "D",
        color=colour(name),
        edgecolor=colour("card"),
        zorder=3,
    )
    chart.tip(marker, point.tip)


def _draw_labels(chart: Canvas, points: Sequence[_Point], colours: dict[str, str]) -> None:
    chart.figure.draw_without_rendering()
    bounds = chart.axes.bbox
    at = {point.name: chart.axes.transData.transform((point.x, point.y)) for point in points}
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in at.values()]
    for point in points:
        x, y = at[point.name]
        text = label(values_of(point.name) or point.name)
        spots = [(spot, _label_box(text, x, y, spot)) for spot in _LABEL_SPOTS]
        spot, box = min(spots, key=lambda each: _cost(each[1], taken, bounds))
        taken.append(box)
        chart.axes.annotate(
            text,
            (point.x, point.y),
            spot,
            textcoords="offset points",
            ha=_side(spot[0]),
            va="center",
            color=colour(colours[point.name]),
            fontweight="bold",
        )


def _side(offset: float) -> str:
    return "left" if offset > 0 else "right" if offset < 0 else "center"


def _label_box(text: str, x: float, y: float, spot: tuple[int, int]) -> Bbox:
    width, height = 0.62 * FONT_SIZE * len(text), 1.2 * FONT_SIZE
    left = x + spot[0] - {"left": 0.0, "right": width, "center": width / 2}[_side(spot[0])]
    return Bbox.from_bounds(left, y + spot[1] - height / 2, width, height)


def _cost(box: Bbox, taken: Sequence[Bbox], bounds: Bbox) -> float:
    overlap = sum(_area(Bbox.intersection(box, other)) for other in taken)
    return overlap + 3 * (_area(box) - _area(Bbox.intersection(box, bounds)))


def _area(box: Bbox | None) -> float:
    return 0.0 if box is None else abs(box.width * box.height)
