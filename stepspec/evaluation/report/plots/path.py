"""The path of a calibration: the loss of each tested setting with its upper bound, by predicted speedup."""

from collections.abc import Iterator

from stepspec.evaluation.calibrate.records import Calibrated
from stepspec.evaluation.report.plots.canvas import Plot, canvas, colour

STATUS_COLOURS = {"certified": "draft", "loses more": "rejected", "unknown": "muted"}


def path_plot(key: str, results: Calibrated) -> Iterator[Plot]:
    """Yield a plot of the tested settings of a calibration; none if no setting was tested."""
    tested = [(each, 100 * each.loss) for each in results.path if each.loss is not None]
    if not tested:
        return
    limit = 100 * results.identity.max_loss
    with canvas() as chart:
        for each, loss in tested:
            at, name = each.setting.predicted_speedup, colour(STATUS_COLOURS[each.status])
            mark = chart.axes.plot(at, loss, "o", color=name, markersize=6)[0]
            chart.tip(mark, f"{each.setting.name}, {each.status}: {loss:.2f} points on {each.num_problems:,} problems")
            if each.loss_upper is not None:
                chart.axes.plot([at, at], [loss, 100 * each.loss_upper], color=name, linewidth=1.3)
                chart.axes.plot(at, 100 * each.loss_upper, "_", color=name, markersize=12)
        chart.axes.axhline(limit, color=colour("muted"), linewidth=1.2, linestyle="--")
        chart.axes.set_xlabel("predicted speedup over the target")
        chart.axes.set_ylabel("loss, points")
        yield chart.plot(
            f"{key}-path",
            "What the settings cost",
            f"Share of answers lost against the target on the same problems, in points, with its upper bound at "
            f"{100 * results.identity.confidence:g}% confidence. Below zero is a gain. Dashed line: the limit of "
            f"{limit:g} points. Settings are tested from left to right, until one is not certified.",
        )
