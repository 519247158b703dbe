"""`report.md`: the findings, the tables, the meanings of their figures, and the conditions."""

from collections.abc import Sequence
from dataclasses import replace

from stepspec.evaluation.records import Group, PolicySummary, RunRecord, Stretch, Summary
from stepspec.evaluation.report import cells
from stepspec.evaluation.report.conditions import conditions_sentence, nodes_in_words
from stepspec.evaluation.report.figures import COLUMNS, Extra, named
from stepspec.evaluation.report.findings import findings
from stepspec.evaluation.report.tables import further_columns, further_table, markdown_table, readme_table

POSITION = "output position"
GROUPED_BY = {"level": "level", "subject": "subject", "length": "length of the texts"}


def markdown_report(run: RunRecord, summary: Summary, *, setting: str = "", extras: Sequence[Extra] = ()) -> str:
    """Return the Markdown report of one run. `setting` distinguishes it from other runs in the same file."""
    run, summary, setting = cells.in_markdown(run), cells.in_markdown(summary), cells.escaped(setting)
    extras = [replace(each, cells={cells.escaped(name): cell for name, cell in each.cells.items()}) for each in extras]
    found = findings(run, summary)
    columns = [*named(COLUMNS, summary), *further_columns(summary)]
    meanings = [f"- **{column.title}**: {column.meaning}" for column in (*columns, *extras)]
    blocks = [
        f"# {run.benchmark}{f', {setting}' if setting else ''}",
        f"{found.headline} {' '.join(found.details)}",
        found.exactness,
        "\n".join(f"- {warning}" for warning in found.warnings),
        readme_table(run, summary),
        further_table(summary, extras),
        "Intervals are 95%; those of ratios are bootstrapped over problems.",
        *_groups(summary),
        *_stretches(summary),
        "## What the figures mean",
        "\n".join(meanings),
        "## Conditions",
        conditions_sentence(run, summary),
        nodes_in_words(summary),
        f"Started {run.started}.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _groups(summary: Summary) -> list[str]:
    return [part for kind, words in GROUPED_BY.items() for part in _groups_by(kind, words, summary)]


def _stretches(summary: Summary) -> list[str]:
    """Return a table of the policies by output position; empty for short texts."""
    by_policy = {name: {each.name: each for each in policy.stretches} for name, policy in summary.policies.items()}
    names = list(dict.fromkeys(name for stretches in by_policy.values() for name in stretches))
    if not names:
        return []
    rows = [[name, *(stretch_cell(stretches.get(name)) for stretches in by_policy.values())] for name in names]
    return [f"## By {POSITION}", markdown_table(["tokens", *by_policy], rows)]


def stretch_cell(stretch: Stretch | None) -> str:
    """Return the speed over the target's, and the draft's share of the tokens."""
    if stretch is None:
        return cells.UNKNOWN
    speed = cells.joined(cells.times(stretch.tokens_per_s_ratio, stretch.tokens_per_s_ratio_ci))
    share = f"{cells.percent(stretch.from_draft)} of the draft" if stretch.from_draft else ""
    return ", ".join(part for part in (speed, share) if part and part != cells.UNKNOWN) or cells.UNKNOWN


def _groups_by(kind: str, words: str, summary: Summary) -> list[str]:
    groups = {name: policy.groups.get(kind, []) for name, policy in summary.policies.items()}
    names = list(dict.fromkeys(group.name for listed in groups.values() for group in listed))
    if not names:
        return []
    tables = {policy: {group.name: group for group in listed} for policy, listed in groups.items()}
    rows = [
        [name, *(_group_cell(tables[policy].get(name), summary.policies[policy]) for policy in groups)]
        for name in names
    ]
    return [f"## By {words}", markdown_table([words, *groups], rows)]


def _group_cell(group: Group | None, policy: PolicySummary) -> str:
    """Return the accuracy, and the speedup if the policy's speed counts."""
    if group is None:
        return cells.UNKNOWN
    accuracy = cells.joined(cells.percent_with_interval(group.accuracy, group.accuracy_ci))
    if policy.no_speed is not None:
        return accuracy
    return f"{accuracy}, {cells.joined(cells.times(group.speedup_vs_target, group.speedup_vs_target_ci))}"
