"""Figures by level, subject and length of the texts, for the tables of Markdown and of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from stepspec.evaluation.records import Group, PolicySummary, Summary
from stepspec.evaluation.report import cells

KINDS: Mapping[str, str] = {"level": "level", "subject": "subject", "length": "length of the texts"}
"""What problems are grouped by, by its name in `PolicySummary.groups`."""


@dataclass(frozen=True)
class GroupLine:
    """A table row: a group with one cell for each policy. A cell has a value, its interval, and a further figure."""

    name: str
    num_problems: int
    cells: Sequence[tuple[str, str, str]]


def group_tables(summary: Summary) -> dict[str, Sequence[GroupLine]]:
    """Return the tables that have rows, by what they are grouped by."""
    tables = {words: _lines(kind, summary) for kind, words in KINDS.items()}
    return {words: lines for words, lines in tables.items() if lines}


def _lines(kind: str, summary: Summary) -> Sequence[GroupLine]:
    known = [
        (policy, {each.name: each for each in policy.groups.get(kind, [])}) for policy in summary.policies.values()
    ]
    return [
        GroupLine(
            name,
            max(parts[name].n for _, parts in known if name in parts),
            [_cell(parts.get(name), policy) for policy, parts in known],
        )
        for name in dict.fromkeys(chain.from_iterable(parts for _, parts in known))
    ]


def _cell(part: Group | None, policy: PolicySummary) -> tuple[str, str, str]:
    """Return accuracy and, if the policy's speed counts, speedup."""
    if part is None:
        return cells.UNKNOWN, "", ""
    speed = cells.joined(cells.times(part.speedup_vs_target, part.speedup_vs_target_ci))
    accuracy = cells.percent_with_interval(part.accuracy, part.accuracy_ci)
    return *accuracy, "" if policy.no_speed is not None else speed
