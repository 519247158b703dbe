"""Distributions over problems or requests: one histogram for each policy, stacked on a common axis."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from matplotlib.ticker import NullLocator

from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Canvas, Plot, canvas, colour, label

NUM_BINS = 36
ROW_HEIGHT = 34
MAX_RATIO = 4.0
RATIOS = (0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4)
SECONDS = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]


def length_ratios(key: str, ratios: Mapping[str, Sequence[float]]) -> Iterator[Plot]:
    """Yield a plot of the ratio of tokens to the target's, by problem. The target itself is not shown."""
    shown = {name: each for name, each in ratios.items() if len(each) > 1}
    if not shown:
        return
    limit = MAX_RATIO
    clipped = {name: np.clip(each, 1 / limit, limit).tolist() for name, each in shown.items()}
    with _ridges(clipped, series(["target", *ratios])) as chart:
        chart.axes.axvline(1, color=colour("muted"), linewidth=1.2, linestyle="--", zorder=1)
        _log_ticks(chart, clipped, {ratio: f"{ratio:g}×" for ratio in RATIOS})
        chart.axes.set_xlabel("tokens over the target's, by problem")
        yield chart.plot(
            f"{key}-lengths",
            "Length",
            "Tokens committed over the target's, by problem; the tick is the median. Ratios above "
            f"{limit:g} or below 1/{limit:g} are in the outermost bars.",
        )


def latencies(key: str, walls: Mapping[str, Sequence[float]]) -> Iterator[Plot]:
    """Yield a plot of the wall times of requests, in seconds."""
    shown = {name: [each for each in values if each > 0] for name, values in walls.items()}
    shown = {name: values for name, values in shown.items() if len(values) > 1}
    if not shown:
        return
    with _ridges(shown, series(list(walls))) as chart:
        _log_ticks(chart, shown, {each: f"{each:g} s" if each >= 1 else f"{1000 * each:g} ms" for each in SECONDS})
        chart.axes.set_xlabel("wall time of a request")
        yield chart.plot(
            f"{key}-latency",
            "Latency",
            "Wall time of every request, including waiting, on a logarithmic scale; the tick is the median.",
        )


@contextmanager
def _ridges(values: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> Generator[Canvas]:
    """Yield a chart with a histogram for each policy, the first at the top, on a logarithmic axis."""
    low, high = min(map(min, values.values())), max(map(max, values.values()))
    edges = np.geomspace(low / 1.02, high * 1.02, NUM_BINS + 1)
    with canvas(76 + ROW_HEIGHT * len(values)) as chart:
        for row, (name, each) in enumerate(values.items()):
            heights = np.histogram(each, edges)[0]
            base = float(len(values) - 1 - row)
            chart.axes.stairs(
                base + 0.86 * heights / heights.max(), edges, baseline=base, fill=True, color=colour(colours[name])
            )
            median = float(np.median(each))
            mark = chart.axes.plot([median, median], [base - 0.06, base + 0.5], color=colour("ink"), linewidth=2)[0]
            chart.tip(mark, f"{name}: median {median:.3g}")
        chart.axes.set_xscale("log")
        chart.axes.set_yticks([len(values) - 1 - row + 0.25 for row in range(len(values))], list(map(label, values)))
        chart.axes.set_ylim(-0.15, len(values))
        chart.axes.grid(visible=False, axis="y")
        chart.only_left_labels()
        yield chart


def _log_ticks(chart: Canvas, values: Mapping[str, Sequence[float]], ticks: Mapping[float, str]) -> None:
    """Set ticks at round values in the range of the data, as many as fit."""
    low, high = min(map(min, values.values())), max(map(max, values.values()))
    inside = [tick for tick in ticks if low / 1.02 <= tick <= high * 1.02] or [low, high]
    step = -(-len(inside) // 6)
    first = inside.index(1) % step if 1 in inside else 0
    shown = inside[first::step]
    chart.axes.set_xticks(shown, [ticks.get(tick, f"{tick:.3g}") for tick in shown])
    chart.axes.xaxis.set_minor_locator(NullLocator())
