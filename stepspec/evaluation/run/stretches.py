"""Figures by output position: speed and the draft's share of the tokens up to 500, 1,000, 2,000, 4,000 and beyond."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from stepspec.evaluation.records import BASELINE, ResultRow, Stretch
from stepspec.evaluation.stats import ratio_of_rates
from stepspec.loop.ledger import POSITIONS


class StretchPart(NamedTuple):
    """What a text has in a stretch."""

    tokens: int
    seconds: float
    from_draft: float
    """Tokens of steps that the draft wrote. A step that lies in two stretches counts in both by its length there."""


Parts = Mapping[int, StretchPart]
"""By the number of the stretch, 0 for the one up to the first position."""


def parts_of(row: ResultRow) -> Parts:
    """Return what the text of a row has in each stretch. A text of one stretch has none of the details."""
    marks = [(0, 0.0), *row.reached]
    if row.tokens.committed > marks[-1][0]:
        marks.append((row.tokens.committed, row.wall_s))
    ends = [0, *accumulate(step.num_tokens for step in row.steps)]
    steps = [(*place, step.num_from_draft) for place, step in zip(pairwise(ends), row.steps, strict=True)]
    return {
        number: StretchPart(after[0] - before[0], after[1] - before[1], _within(steps, before[0], after[0]))
        for number, (before, after) in enumerate(pairwise(marks))
        if after[0] > before[0]
    }


def _within(steps: Sequence[tuple[int, int, int]], low: int, high: int) -> float:
    """Return how many of the draft's tokens of steps, given by begin, end and number, are in a stretch of the text."""
    return sum(
        count * max(0, min(end, high) - max(begin, low)) / (end - begin) for begin, end, count in steps if end > begin
    )


def stretches(
    parts: Mapping[str, Mapping[tuple[str, int], Parts]], rng: np.random.Generator
) -> Mapping[str, list[Stretch]]:
    """Return the figures of each policy by stretch; empty if no text is longer than the first position.

    Args:
        parts: by policy and request.
        rng: for the intervals.
    """
    longest = max((max(each, default=0) for requests in parts.values() for each in requests.values()), default=0)
    if not longest:
        return {}
    target = parts.get(BASELINE, {})
    return {policy: list(_of_policy(own, target, longest, rng)) for policy, own in parts.items()}


def _of_policy(
    own: Mapping[tuple[str, int], Parts],
    target: Mapping[tuple[str, int], Parts],
    longest: int,
    rng: np.random.Generator,
) -> Iterator[Stretch]:
    for number in range(longest + 1):
        here = {key: each[number] for key, each in own.items() if number in each}
        if not here:
            continue
        both = [key for key in here if number in target.get(key, {})]
        ratio, interval = None, None
        if own is not target and both:
            theirs = [target[key][number] for key in both]
            ratio, interval = ratio_of_rates(_columns([here[key] for key in both]), _columns(theirs), rng)
        tokens = sum(each.tokens for each in here.values())
        yield Stretch(
            name=name_of(number),
            n=len({problem for problem, _ in here}),
            tokens=tokens,
            from_draft=sum(each.from_draft for each in here.values()) / tokens,
            tokens_per_s_ratio=ratio,
            tokens_per_s_ratio_ci=interval,
        )


def _columns(parts: Sequence[StretchPart]) -> tuple[Sequence[float], Sequence[float]]:
    return [each.tokens for each in parts], [each.seconds for each in parts]


def name_of(number: int) -> str:
    """Return the name of a stretch."""
    if number == len(POSITIONS):
        return f"from {POSITIONS[-1]:,}"
    low = 0 if number == 0 else POSITIONS[number - 1]
    return f"{low:,} to {POSITIONS[number]:,}"
