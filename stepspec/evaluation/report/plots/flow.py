"""Token flow as a Sankey diagram: from the model that wrote the tokens, by their outcome, to committed or thrown away.

The columns balance by the identities of `stepspec.loop.counts`: drafted = accepted + rejected + abandoned, generated =
regenerated + forced + discarded, committed = accepted + regenerated + forced.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from stepspec.evaluation.records import PolicySummary, TokenRecord
from stepspec.evaluation.report.cells import percent
from stepspec.evaluation.report.plots.canvas import Canvas, Plot, canvas, colour

COLUMNS_AT = (0.0, 0.47, 0.94)
BAR_WIDTH = 0.05
OUTER_GAP, INNER_GAP = 0.16, 0.06
"""Gaps between the bars of a column, as shares of all tokens."""
LABEL_HEIGHT = 0.07
KEPT, LOST = "committed", "thrown away"


@dataclass(frozen=True)
class Band:
    """Tokens with the same outcome."""

    name: str
    source: str
    end: str
    num_tokens: int
    colour: str


def token_flow(key: str, policy: PolicySummary) -> Iterator[Plot]:
    """Yield the diagram of a policy with judged steps."""
    bands = fates(policy.tokens)
    if policy.step_acceptance is not None and bands:
        yield _flow(f"{key}-flow", bands, policy.tokens)


def fates(tokens: TokenRecord) -> list[Band]:
    """Return the tokens by outcome. Outcomes without tokens are omitted."""
    bands = [
        Band("accepted", "draft", KEPT, tokens.accepted - tokens.salvaged, "draft"),
        Band("salvaged", "draft", KEPT, tokens.salvaged, "salvaged"),
        Band("regenerated", "target", KEPT, tokens.regenerated, "target"),
        Band("answer and other", "target", KEPT, tokens.forced, "controller"),
        Band("rejected", "draft", LOST, tokens.rejected, "rejected"),
        Band("abandoned", "draft", LOST, tokens.abandoned, "abandoned"),
        Band("discarded", "target", LOST, tokens.discarded, "abandoned"),
    ]
    return [band for band in bands if band.num_tokens > 0]


def _flow(key: str, bands: Sequence[Band], tokens: TokenRecord) -> Plot:
    total = sum(band.num_tokens for band in bands)
    by_source = sorted(bands, key=lambda band: band.source)
    starts = _stack(by_source, [band.source for band in by_source], total, OUTER_GAP)
    middles = _stack(bands, [band.name for band in bands], total, INNER_GAP)
    ends = _stack(bands, [band.end for band in bands], total, OUTER_GAP)
    left, middle, right = COLUMNS_AT
    with canvas(340) as chart:
        for band in bands:
            height, top = band.num_tokens / total, middles[band.name]
            _ribbon(chart, (left + BAR_WIDTH, starts[band.name]), (middle, top), height, band)
            _ribbon(chart, (middle + BAR_WIDTH, top), (right, ends[band.name]), height, band)
            _bar(chart, middle, top, height, band.colour)
        labels = _fate_labels(chart, bands, middles, total)
        lowest = min(labels)
        _outer_bars(chart, [(band.source, band, starts[band.name]) for band in by_source], left, total, lowest)
        _outer_bars(chart, [(band.end, band, ends[band.name]) for band in bands], right, total, lowest)
        chart.axes.set_xlim(-0.01, 1.01)
        chart.axes.set_ylim(-0.72, 0.78)
        chart.axes.axis("off")
        return chart.plot(
            key,
            "Where the tokens went",
            f"{percent(tokens.accepted / (tokens.drafted or 1))} of the draft's tokens were accepted, and "
            f"{percent(tokens.accepted / (tokens.committed or 1))} of the committed tokens are the draft's. Shares are "
            f"of all {total:,} generated tokens, without the tokens drafted by token-level speculation.",
        )


def _stack(bands: Sequence[Band], groups: Sequence[str], total: int, gap: float) -> dict[str, float]:
    """Return the top of each band in a column, stacked around the middle with a gap between groups."""
    top = (1 + gap * (len(dict.fromkeys(groups)) - 1)) / 2
    tops: dict[str, float] = {}
    for index, band in enumerate(bands):
        if index and groups[index] != groups[index - 1]:
            top -= gap
        tops[band.name] = top
        top -= band.num_tokens / total
    return tops


def _ribbon(chart: Canvas, start: tuple[float, float], end: tuple[float, float], height: float, band: Band) -> None:
    (left, from_top), (right, to_top) = start, end
    middle = (left + right) / 2
    upper = [(left, from_top), (middle, from_top), (middle, to_top), (right, to_top)]
    lower = [
        (right, to_top - height),
        (middle, to_top - height),
        (middle, from_top - height),
        (left, from_top - height),
    ]
    codes = [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3, Path.CLOSEPOLY]
    path = Path([*upper, *lower, upper[0]], codes)
    ribbon = chart.axes.add_patch(PathPatch(path, facecolor=colour(band.colour), alpha=0.3, linewidth=0))
    chart.tip(ribbon, f"{band.name}: {band.num_tokens:,} tokens, from the {band.source}, {band.end}")


def _bar(chart: Canvas, left: float, top: float, height: float, name: str) -> None:
    chart.axes.add_patch(Rectangle((left, top - height), BAR_WIDTH, height, facecolor=colour(name)))


def _fate_labels(chart: Canvas, bands: Sequence[Band], tops: Mapping[str, float], total: int) -> list[float]:
    """Label the bars of the middle column, moving labels down where two would overlap. Return their y positions."""
    positions: list[float] = []
    for band in bands:
        share = band.num_tokens / total
        positions.append(min([tops[band.name] - share / 2, *(each - LABEL_HEIGHT for each in positions)]))
        chart.axes.text(COLUMNS_AT[1] + BAR_WIDTH + 0.015, positions[-1], f"{band.name} {percent(share)}", va="center")
    return positions


def _outer_bars(
    chart: Canvas, members: Sequence[tuple[str, Band, float]], left: float, total: int, lowest: float
) -> None:
    """Draw the bars of the left or the right column with their names."""
    for group in dict.fromkeys(name for name, _, _ in members):
        inside = [(band.num_tokens, top) for name, band, top in members if name == group]
        num_tokens, top = sum(size for size, _ in inside), max(top for _, top in inside)
        _bar(chart, left, top, num_tokens / total, "muted")
        at_the_left = left < COLUMNS_AT[1]
        # The name of the lost tokens goes below the bar, because labels of the middle column are above it.
        below = group == LOST
        chart.axes.text(
            left if at_the_left else left + BAR_WIDTH,
            min(top - num_tokens / total, lowest - LABEL_HEIGHT / 2) - 0.02 if below else top + 0.02,
            f"{group} {percent(num_tokens / total)}",
            ha="left" if at_the_left else "right",
            va="top" if below else "bottom",
            color=colour("muted"),
        )
