"""Speed by concurrency: one line for each policy over the settings of a sweep."""

from collections.abc import Callable, Iterator, Sequence

from matplotlib.ticker import FixedLocator, NullLocator

from stepspec.evaluation.records import PolicySummary, Summary
from stepspec.evaluation.report.cells import significant
from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Plot, Value, canvas


def sweep_plots(key: str, summaries: Sequence[Summary]) -> Iterator[Plot]:
    """Yield plots of throughput and speedups by concurrency, if the runs have different concurrencies."""
    yield from _lines(
        f"{key}-problems-per-s",
        "Throughput",
        "Problems finished per second at each concurrency, including idle time at the ends of blocks.",
        "problems/s",
        summaries,
        lambda each: (each.throughput.problems_per_s, None) if each.throughput else None,
    )
    yield from _lines(
        f"{key}-throughput-ratio",
        "Throughput over the target's",
        "Problems per second over those of the target alone at the same concurrency, with 95% intervals.",
        "times the target's",
        summaries,
        _throughput_ratio,
    )
    yield from _lines(
        f"{key}-speedup",
        "Speedup of a request",
        "Wall time of a request with the target alone over the wall time with the policy, with 95% intervals.",
        "times as fast",
        summaries,
        lambda each: (each.speedup_vs_target, each.speedup_vs_target_ci) if each.speedup_vs_target else None,
    )


def _throughput_ratio(policy: PolicySummary) -> Value | None:
    rate = policy.throughput
    if rate is None or rate.speedup_vs_target is None:
        return None
    return rate.speedup_vs_target, rate.speedup_vs_target_ci


def _lines(
    key: str,
    title: str,
    caption: str,
    unit: str,
    summaries: Sequence[Summary],
    value: Callable[[PolicySummary], Value | None],
) -> Iterator[Plot]:
    ordered = sorted(summaries, key=lambda summary: summary.concurrency)
    concurrencies = sorted({summary.concurrency for summary in ordered})
    policies = list(dict.fromkeys(name for summary in ordered for name in summary.policies))
    points = {
        name: [
            (summary.concurrency, found)
            for summary in ordered
            if name in summary.policies and summary.policies[name].no_speed is None
            if (found := value(summary.policies[name])) is not None
        ]
        for name in policies
    }
    if len(concurrencies) < 2 or not any(points.values()):
        return
    with canvas() as chart:
        chart.lines(
            unit,
            points,
            series(policies),
            lambda name, concurrency, estimate: f"{name}, concurrency {concurrency}: {significant(estimate)}",
        )
        chart.axes.set_xscale("log")
        chart.axes.xaxis.set_major_locator(FixedLocator(concurrencies))
        chart.axes.xaxis.set_minor_locator(NullLocator())
        chart.axes.xaxis.set_major_formatter(lambda concurrency, _: f"{concurrency:g}")
        chart.axes.set_xlabel("requests in flight")
        yield chart.plot(key, title, caption)
