"""Time split: mean seconds of a request by what it waited for, with a bar for each policy."""

from collections.abc import Iterator

from stepspec.evaluation.records import Summary, TimeRecord
from stepspec.evaluation.report.cells import percent, seconds
from stepspec.evaluation.report.figures import num_rows
from stepspec.evaluation.report.plots.canvas import Plot, canvas, colour, label

PARTS = tuple(TimeRecord.model_fields)
ROW_HEIGHT = 34


def time_split(key: str, summary: Summary) -> Iterator[Plot]:
    """Yield a plot of the exclusive seconds per request on the critical path."""
    names = list(summary.policies)
    bars = {part: [getattr(each.time_s, part) / num_rows(each) for each in summary.policies.values()] for part in PARTS}
    totals = [sum(parts) for parts in zip(*bars.values(), strict=True)]
    if not any(totals):
        return
    rows = list(range(len(names)))[::-1]
    with canvas(96 + ROW_HEIGHT * len(names)) as chart:
        left = [0.0] * len(names)
        for part in PARTS:
            bar_patches = chart.axes.barh(rows, bars[part], 0.62, left, color=colour(part), label=part)
            for bar, name, value, total in zip(bar_patches, names, bars[part], totals, strict=True):
                chart.tip(bar, f"{name}, {part}: {seconds(value)}, {percent(value / total if total else None)}")
            left = [start + width for start, width in zip(left, bars[part], strict=True)]
        for row, total in zip(rows, totals, strict=True):
            chart.axes.annotate(seconds(total), (total, row), (5, 0), textcoords="offset points", va="center")
        chart.axes.set_yticks(rows, list(map(label, names)))
        chart.axes.set_xlim(0, 1.2 * max(totals))
        chart.axes.set_xlabel("seconds per problem")
        chart.axes.grid(visible=False, axis="y")
        chart.only_left_labels()
        chart.figure.legend(loc="outside upper left", ncols=3)
        yield chart.plot(
            f"{key}-time",
            "Where the time went",
            "Mean seconds of a request by what it waited for. The parts do not overlap and add up to the wall time.",
        )
