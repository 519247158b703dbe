"""`report.md`: the findings, the tables, the meanings of their figures, and the conditions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report import cells
from stepspec.evaluation.report.conditions import conditions_sentence, nodes_in_words
from stepspec.evaluation.report.figures import COLUMNS, Extra, named
from stepspec.evaluation.report.findings import findings
from stepspec.evaluation.report.groups import group_tables
from stepspec.evaluation.report.tables import further_columns, further_table, markdown_table, readme_table


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
        "## What the figures mean",
        "\n".join(meanings),
        "## Conditions",
        conditions_sentence(run, summary),
        nodes_in_words(summary),
        f"Started {run.started}.",
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _groups(summary: Summary) -> Iterator[str]:
    """Yield the headings and tables of groups."""
    for words, lines in group_tables(summary).items():
        rows = [
            [line.name, *(cells.joined((cells.joined(each[:2]), each[2]), ", ") for each in line.cells)]
            for line in lines
        ]
        yield f"## By {words}"
        yield markdown_table([words, *summary.policies], rows)
