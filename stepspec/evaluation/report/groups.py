"""Figures by level, subject, length of the texts and output position, for the tables of Markdown and of the page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stepspec.evaluation.records import Group, PolicySummary, Stretch, Summary
from stepspec.evaluation.report import cells

POSITION = "output position"
PARTS: Mapping[str, Callable[[PolicySummary], Sequence[Group | Stretch]]] = {
    "level": lambda policy: policy.groups.get("level", []),
    "subject": lambda policy: policy.groups.get("subject", []),
    "length of the texts": lambda policy: policy.groups.get("length", []),
    POSITION: lambda policy: policy.stretches,
}
"""The parts of a policy's figures, by what they are grouped by."""


@dataclass(frozen=True)
class GroupLine:
    """A table row: a group with one cell for each policy. A cell has a value, its interval, and a further figure."""

    name: str
    num_problems: int
    cells: Sequence[tuple[str, str, str]]


def group_tables(summary: Summary) -> dict[str, Sequence[GroupLine]]:
    """Return the tables that have rows, by what they are grouped by."""
    tables = {words: _lines(parts, summary) for words, parts in PARTS.items()}
    return {words: lines for words, lines in tables.items() if lines}


def _lines(parts: Callable[[PolicySummary], Sequence[Group | Stretch]], summary: Summary) -> Sequence[GroupLine]:
    known = [(policy, {each.name: each for each in parts(policy)}) for policy in summary.policies.values()]
    return [
        GroupLine(
            name,
            max(parts[name].n for _, parts in known if name in parts),
            [_cell(parts.get(name), policy) for policy, parts in known],
        )
        for name in dict.fromkeys(chain.from_iterable(parts for _, parts in known))
    ]


def _cell(part: Group | Stretch | None, policy: PolicySummary) -> tuple[str, str, str]:
    """Return accuracy and, if the policy's speed counts, speedup; of a stretch, speed and the draft's share."""
    if part is None:
        return cells.UNKNOWN, "", ""
    if isinstance(part, Stretch):
        speed = cells.joined(cells.times(part.tokens_per_s_ratio, part.tokens_per_s_ratio_ci))
        share = f"{cells.percent(part.from_draft)} of the draft" if part.from_draft else ""
        return ", ".join(text for text in (speed, share) if text and text != cells.UNKNOWN) or cells.UNKNOWN, "", ""
    speed = cells.joined(cells.times(part.speedup_vs_target, part.speedup_vs_target_ci))
    accuracy = cells.percent_with_interval(part.accuracy, part.accuracy_ci)
    return *accuracy, "" if policy.no_speed is not None else speed
