"""Where the tokens went, as one picture: from who wrote them, by what became of them, to the text or to nowhere.

The columns balance by the identities of `stepspec.loop.step`: drafted = accepted + rejected + cancelled, written by the
target = regenerated + forced + discarded, committed = accepted + regenerated + forced.
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
"""Between the bars of a column, as shares of all tokens."""
LABEL_HEIGHT = 0.07
KEPT, LOST = "committed", "thrown away"


@dataclass(frozen=True)
class Band:
    """Tokens of one fate."""

    name: str
    source: str
    end: str
    num_tokens: int
    colour: str


def token_flow(key: str, policy: PolicySummary) -> Iterator[Plot]:
    """The picture, of a policy under which steps were judged."""
    bands = fates(policy.tokens)
    if policy.step_acceptance is not None and bands:
        yield _flow(f"{key}-flow", bands, policy.tokens)


def fates(tokens: TokenRecord) -> list[Band]:
    """What became of the tokens, as far as there are any of each fate."""
    bands = [
        Band("accepted", "draft", KEPT, tokens.accepted - tokens.salvaged, "draft"),
        Band("salvaged", "draft", KEPT, tokens.salvaged, "salvaged"),
        Band("regenerated", "target", KEPT, tokens.regenerated, "target"),
        Band("answer and other", "target", KEPT, tokens.forced, "controller"),
        Band("rejected", "draft", LOST, tokens.rejected, "rejected"),
        Band("cancelled", "draft", LOST, tokens.cancelled, "cancelled"),
        Band("discarded", "target", LOST, tokens.discarded, "cancelled"),
    ]
    return [band for band in bands if band.num_tokens > 0]


def _flow(key: str, bands: Sequence[Band], tokens: TokenRecord) -> Plot:
    total = sum(band.num_tokens for band in bands)
    by_source = sorted(bands, key=lambda band: band.source)
    starts = _stack(by_source, [band.source for band in by_source], total, OUTER_GAP)
    middles = _stack(bands, [band.name for band in bands], total, INNER_GAP)
    ends = _stack(bands, [band.end for band in bands], total, OUTER_GAP)
    left, middle, right = COLUMNS_AT
    with canvas(340) as drawn:
        for band in bands:
            height, top = band.num_tokens / total, middles[band.name]
            _ribbon(drawn, (left + BAR_WIDTH, starts[band.name]), (middle, top), height, band)
            _ribbon(drawn, (middle + BAR_WIDTH, top), (right, ends[band.name]), height, band)
            _bar(drawn, middle, top, height, band.colour)
        labels = _fate_labels(drawn, bands, middles, total)
        lowest = min(labels)
        _outer_bars(drawn, [(band.source, band, starts[band.name]) for band in by_source], left, total, lowest)
        _outer_bars(drawn, [(band.end, band, ends[band.name]) for band in bands], right, total, lowest)
        drawn.axes.set_xlim(-0.01, 1.01)
        drawn.axes.set_ylim(-0.72, 0.78)
        drawn.axes.axis("off")
        return drawn.plot(
            key,
            "Where the tokens went",
            f"Of what the draft wrote {percent(tokens.accepted / (tokens.drafted or 1))} was kept, and "
            f"{percent(tokens.accepted / (tokens.committed or 1))} of the committed text is the draft's. Shares are of "
            f"all {total:,} tokens written; tokens drafted inside the target's writing are not among them.",
        )


def _stack(bands: Sequence[Band], groups: Sequence[str], total: int, gap: float) -> dict[str, float]:
    """The top of each band in a column: one below the other, with a gap between groups, around the middle."""
    top = (1 + gap * (len(dict.fromkeys(groups)) - 1)) / 2
    tops: dict[str, float] = {}
    for index, band in enumerate(bands):
        if index and groups[index] != groups[index - 1]:
            top -= gap
        tops[band.name] = top
        top -= band.num_tokens / total
    return tops


def _ribbon(drawn: Canvas, start: tuple[float, float], end: tuple[float, float], height: float, band: Band) -> None:
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
    ribbon = drawn.axes.add_patch(PathPatch(path, facecolor=colour(band.colour), alpha=0.3, linewidth=0))
    drawn.tip(ribbon, f"{band.name}: {band.num_tokens:,} tokens, from the {band.source}, {band.end}")


def _bar(drawn: Canvas, left: float, top: float, height: float, name: str) -> None:
    drawn.axes.add_patch(Rectangle((left, top - height), BAR_WIDTH, height, facecolor=colour(name)))


def _fate_labels(drawn: Canvas, bands: Sequence[Band], tops: Mapping[str, float], total: int) -> list[float]:
    """Beside each bar of the middle, or a little below it where two would overlap; returns where they are."""
    places: list[float] = []
    for band in bands:
        share = band.num_tokens / total
        places.append(min([tops[band.name] - share / 2, *(place - LABEL_HEIGHT for place in places)]))
        drawn.axes.text(COLUMNS_AT[1] + BAR_WIDTH + 0.015, places[-1], f"{band.name} {percent(share)}", va="center")
    return places


def _outer_bars(
    drawn: Canvas, members: Sequence[tuple[str, Band, float]], left: float, total: int, lowest: float
) -> None:
    """The bars of who wrote or of what it came to, each with its name above it."""
    for group in dict.fromkeys(name for name, _, _ in members):
        inside = [(band.num_tokens, top) for name, band, top in members if name == group]
        num_tokens, top = sum(size for size, _ in inside), max(top for _, top in inside)
        _bar(drawn, left, top, num_tokens / total, "muted")
        at_the_left = left < COLUMNS_AT[1]
        # What is thrown away has its name below it; above it are those of the middle.
        below = group == LOST
        drawn.axes.text(
            left if at_the_left else left + BAR_WIDTH,
            min(top - num_tokens / total, lowest - LABEL_HEIGHT / 2) - 0.02 if below else top + 0.02,
            f"{group} {percent(num_tokens / total)}",
            ha="left" if at_the_left else "right",
            va="top" if below else "bottom",
            color=colour("muted"),
        )
