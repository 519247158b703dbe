"""Where a policy's time and tokens went: a stacked bar for each policy, whose parts do not overlap."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from stepspec.evaluation.records import Summary, TimeRecord, TokenRecord
from stepspec.evaluation.report.cells import percent, seconds, significant
from stepspec.evaluation.report.figures import num_rows
from stepspec.evaluation.report.plots.canvas import Plot, canvas, colour, label

ROW_HEIGHT = 34
FATES: Mapping[str, str] = {
    "accepted": "draft",
    "salvaged": "salvaged",
    "regenerated": "target",
    "answer and other": "controller",
    "rejected": "rejected",
    "abandoned": "abandoned",
    "discarded": "queue",
}
"""What becomes of tokens, and the page's color of each: the first four are committed."""


def time_split(key: str, summary: Summary) -> Iterator[Plot]:
    """Yield a plot of the exclusive seconds per request on the critical path."""
    yield from _bars(
        f"{key}-time",
        "Where the time went",
        "Mean seconds of a request by what it waited for. The parts do not overlap and add up to the wall time.",
        "seconds per problem",
        {part: part for part in TimeRecord.model_fields},
        {name: [*each.time_s.model_dump().values()] for name, each in summary.policies.items()},
        summary,
        seconds,
    )


def token_split(key: str, summary: Summary) -> Iterator[Plot]:
    """Yield a plot of the generated tokens by what became of them, if steps were judged under some policy."""
    if any(each.step_acceptance is not None for each in summary.policies.values()):
        yield from _bars(
            f"{key}-tokens",
            "Where the tokens went",
            "Mean tokens that both models generated for a request, without those drafted by token-level speculation. "
            "Accepted and salvaged tokens are the draft's. Rejected, abandoned and discarded ones were thrown away.",
            "tokens per problem",
            FATES,
            {name: fates(each.tokens) for name, each in summary.policies.items()},
            summary,
            significant,
        )


def fates(tokens: TokenRecord) -> list[int]:
    """Return the numbers of generated tokens, in the order of `FATES`. See the identities of `stepspec.loop.counts`."""
    return [
        tokens.accepted - tokens.salvaged,
        tokens.salvaged,
        tokens.regenerated,
        tokens.forced,
        tokens.rejected,
        tokens.abandoned,
        tokens.discarded,
    ]


def _bars(
    key: str,
    title: str,
    caption: str,
    unit: str,
    parts: Mapping[str, str],
    sums: Mapping[str, Sequence[float]],
    summary: Summary,
    in_words: Callable[[float], str],
) -> Iterator[Plot]:
    """Yield a plot of sums over rows as means, unless all are 0.

    Args:
        key: identifies the plot on the page.
        title: its title.
        caption: its caption.
        unit: label of the values.
        parts: the page's color of each part.
        sums: the sums of the parts, by policy.
        summary: the summary of the rows.
        in_words: formats a value.
    """
    means = {name: [each / num_rows(summary.policies[name]) for each in sums[name]] for name in sums}
    totals = {name: sum(each) for name, each in means.items()}
    if not any(totals.values()):
        return
    rows = list(range(len(means)))[::-1]
    with canvas(96 + ROW_HEIGHT * len(means)) as chart:
        left = [0.0] * len(means)
        for (part, shade), widths in zip(parts.items(), zip(*means.values(), strict=True), strict=True):
            bars = chart.axes.barh(rows, widths, 0.62, left, color=colour(shade), label=part)
            for bar, width, (name, total) in zip(bars, widths, totals.items(), strict=True):
                share = percent(width / total if total else None)
                chart.tip(bar, f"{name}, {part}: {in_words(width)}, {share}")
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, total in zip(rows, totals.values(), strict=True):
            chart.axes.annotate(in_words(total), (total, row), (5, 0), textcoords="offset points", va="center")
        chart.axes.set_yticks(rows, list(map(label, means)))
        chart.axes.set_xlim(0, 1.2 * max(totals.values()))
        chart.axes.set_xlabel(unit)
        chart.axes.grid(visible=False, axis="y")
        chart.only_left_labels()
        chart.figure.legend(loc="outside upper left", ncols=3)
        yield chart.plot(key, title, caption)
