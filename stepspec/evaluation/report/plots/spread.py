"""How a figure spreads over problems or requests: one small histogram a policy, below each other, on one axis."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from matplotlib.ticker import NullLocator

from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Canvas, Plot, canvas, colour, label

NUM_BINS = 36
ROW_HEIGHT = 34
LONGEST_RATIO = 4.0
RATIOS = (0.25, 0.33, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4)
SECONDS = [digit * 10.0**power for power in range(-4, 5) for digit in (1, 2, 5)]


def length_ratios(key: str, ratios: Mapping[str, Sequence[float]]) -> Iterator[Plot]:
    """By problem, tokens over the target's; the target itself is left out."""
    shown = {name: each for name, each in ratios.items() if len(each) > 1}
    if not shown:
        return
    limit = LONGEST_RATIO
    clipped = {name: np.clip(each, 1 / limit, limit).tolist() for name, each in shown.items()}
    with _ridges(clipped, series(["target", *ratios])) as drawn:
        drawn.axes.axvline(1, color=colour("muted"), linewidth=1.2, linestyle="--", zorder=1)
        _log_ticks(drawn, clipped, {ratio: f"{ratio:g}×" for ratio in RATIOS})
        drawn.axes.set_xlabel("tokens over the target's, by problem")
        yield drawn.plot(
            f"{key}-lengths",
            "Length",
            "Tokens committed over the target's, a problem at a time; the tick is the median. Ratios beyond "
            f"{limit:g} to either side are in the outermost bars.",
        )


def latencies(key: str, walls: Mapping[str, Sequence[float]]) -> Iterator[Plot]:
    """Seconds of the requests."""
    shown = {name: [each for each in values if each > 0] for name, values in walls.items()}
    shown = {name: values for name, values in shown.items() if len(values) > 1}
    if not shown:
        return
    with _ridges(shown, series(list(walls))) as drawn:
        _log_ticks(drawn, shown, {each: f"{each:g} s" if each >= 1 else f"{1000 * each:g} ms" for each in SECONDS})
        drawn.axes.set_xlabel("wall time of a request")
        yield drawn.plot(
            f"{key}-latency",
            "Latency",
            "Wall time of every request, waiting included, on a logarithmic scale; the tick is the median.",
        )


@contextmanager
def _ridges(values: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> Generator[Canvas]:
    """A row a policy, the first at the top; the axis is logarithmic."""
    low, high = min(map(min, values.values())), max(map(max, values.values()))
    edges = np.geomspace(low / 1.02, high * 1.02, NUM_BINS + 1)
    with canvas(76 + ROW_HEIGHT * len(values)) as drawn:
        for row, (name, each) in enumerate(values.items()):
            heights = np.histogram(each, edges)[0]
            base = float(len(values) - 1 - row)
            drawn.axes.stairs(
                base + 0.86 * heights / heights.max(), edges, baseline=base, fill=True, color=colour(colours[name])
            )
            median = float(np.median(each))
            mark = drawn.axes.plot([median, median], [base - 0.06, base + 0.5], color=colour("ink"), linewidth=2)[0]
            drawn.tip(mark, f"{name}: median {median:.3g}")
        drawn.axes.set_xscale("log")
        drawn.axes.set_yticks([len(values) - 1 - row + 0.25 for row in range(len(values))], list(map(label, values)))
        drawn.axes.set_ylim(-0.15, len(values))
        drawn.axes.grid(visible=False, axis="y")
        drawn.only_left_labels()
        yield drawn


def _log_ticks(drawn: Canvas, values: Mapping[str, Sequence[float]], ticks: Mapping[float, str]) -> None:
    """Ticks at round values inside the data, no more than fit."""
    low, high = min(map(min, values.values())), max(map(max, values.values()))
    inside = [tick for tick in ticks if low / 1.02 <= tick <= high * 1.02] or [low, high]
    step = -(-len(inside) // 6)
    first = inside.index(1) % step if 1 in inside else 0
    shown = inside[first::step]
    drawn.axes.set_xticks(shown, [ticks.get(tick, f"{tick:.3g}") for tick in shown])
    drawn.axes.xaxis.set_minor_locator(NullLocator())
