"""Speed and the draft's share by output position: one line for each policy over the stretches of the texts."""

from collections.abc import Callable, Iterator, Sequence

from stepspec.evaluation.records import PolicySummary, Stretch, Summary
from stepspec.evaluation.report.cells import percent, significant
from stepspec.evaluation.report.colours import series
from stepspec.evaluation.report.plots.canvas import Plot, Value, canvas


def position_plots(key: str, summary: Summary) -> Iterator[Plot]:
    """Yield plots of speed and of the draft's share by output position, if some texts are long enough."""
    names = list(dict.fromkeys(each.name for policy in summary.policies.values() for each in policy.stretches))
    if len(names) < 2:
        return
    yield from _lines(
        f"{key}-speed-by-position",
        "Speed by position",
        "Tokens per second over the target's, by output position, with 95% intervals.",
        "times the target's",
        summary,
        names,
        _speed,
        significant,
    )
    yield from _lines(
        f"{key}-draft-by-position",
        "The draft's share by position",
        "Share of the tokens that the draft wrote, by output position, of policies under which it wrote any.",
        "% of tokens",
        summary,
        names,
        lambda _, each: (100 * each.from_draft, None),
        lambda share: percent(share / 100),
    )


def _speed(policy: PolicySummary, stretch: Stretch) -> Value | None:
    if policy.no_speed is not None or stretch.tokens_per_s_ratio is None:
        return None
    return stretch.tokens_per_s_ratio, stretch.tokens_per_s_ratio_ci


def _lines(
    key: str,
    title: str,
    caption: str,
    unit: str,
    summary: Summary,
    names: Sequence[str],
    value: Callable[[PolicySummary, Stretch], Value | None],
    in_words: Callable[[float], str],
) -> Iterator[Plot]:
    points = {
        name: [(names.index(each.name), found) for each in policy.stretches if (found := value(policy, each))]
        for name, policy in summary.policies.items()
    }
    points = {policy: known for policy, known in points.items() if any(estimate for _, (estimate, _) in known)}
    if not points:
        return
    with canvas() as chart:
        chart.lines(
            unit,
            points,
            series(list(summary.policies)),
            lambda policy, place, estimate: f"{policy}, tokens {names[place]}: {in_words(estimate)}",
        )
        chart.name_places(names, "output tokens")
        yield chart.plot(key, title, caption)
