"""Tables of a summary, for a terminal and in Markdown."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stepspec.evaluation.records import PolicySummary, RunRecord, Summary
from stepspec.evaluation.report import cells
from stepspec.evaluation.report.conditions import problems_in_words
from stepspec.evaluation.report.figures import CLOSING, COLUMNS, FURTHER, Column, Extra, is_known, named, repeat_columns
from stepspec.evaluation.report.findings import (
    not_run,
    speeds_that_do_not_count,
    steps_not_proposed,
    variants_on_front,
)

MAX_POLICIES = 7
"""Most policies that have a column each in a terminal table."""
MAIN = COLUMNS[:8]
"""The columns of a terminal table of more policies."""


def closing_table(summary: Summary, *, setting: str = "") -> Table:
    """Return the terminal table at the end of an evaluation, with the most important figures."""
    return _table(summary, CLOSING, setting, ())


def full_table(summary: Summary, *, setting: str = "", extras: Sequence[Extra] = ()) -> Table:
    """Return a terminal table with every figure that was measured."""
    further = [column for column in further_columns(summary) if column not in CLOSING]
    return _table(summary, (*CLOSING, *further), setting, extras)


def _table(summary: Summary, columns: Sequence[Column], setting: str, extras: Sequence[Extra]) -> Table:
    """Return a terminal table with a row for each figure, so that several policies fit into 80 columns, or with a row
    for each of many policies."""
    run = f"{summary.benchmark}, {setting}" if setting else summary.benchmark
    title = Text(f"{run}: {problems_in_words(summary)}, 95% intervals")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    if notes := [*speeds_that_do_not_count(summary), *steps_not_proposed(summary), *variants_on_front(summary)]:
        table.caption, table.caption_justify = Text("\n".join(notes)), "left"
    table.add_column("")
    if len(summary.policies) > MAX_POLICIES:
        for column in (shown := named(MAIN, summary)):
            table.add_column(column.title, justify="right")
        for name, each in summary.policies.items():
            table.add_row(Text(name), *(_lines(column.cell(each)) for column in shown))
        return table
    for name in summary.policies:
        table.add_column(Text(name), justify="right", overflow="fold")
    for column in named(columns, summary):
        table.add_row(column.title, *(_lines(column.cell(policy)) for policy in summary.policies.values()))
    for extra in extras:
        table.add_row(Text(extra.title), *(_lines(extra.cells[name]) for name in summary.policies))
    return table


def _lines(cell: cells.Cell) -> Text:
    """Return the value, with the interval or each percentile on its own line below."""
    return Text(cells.joined(cell, "\n").replace(", p99", "\np99"))


def further_columns(summary: Summary) -> list[Column]:
    """Return the columns beyond `COLUMNS` that were measured."""
    return [*(column for column in FURTHER if is_known(column, summary.policies)), *repeat_columns(summary)]


def readme_table(run: RunRecord, summary: Summary, draft: str = "") -> str:
    """Return a Markdown table with a row for each policy, without a final newline.

    Args:
        run: the conditions of the run.
        summary: its summary.
        draft: the accuracy of the draft alone in another run, for a run without it.
    """
    rows = [[name, *(written(column, policy) for column in COLUMNS)] for name, policy in summary.policies.items()]
    rows += not_run_rows(run, len(COLUMNS), draft)
    return markdown_table(["policy", *(column.title for column in named(COLUMNS, summary))], rows)


def not_run_rows(run: RunRecord, num_columns: int, draft: str) -> list[list[str]]:
    """Return table rows for the policies that did not run, see `readme_table`."""
    names, dashes = not_run(run), [cells.UNKNOWN] * (num_columns - 1)
    known = ["draft"] if draft and "draft" in names else []
    others = [name for name in names if name not in known]
    rows = [(known, draft), (others, "not run")]
    return [[", ".join(listed), words, *dashes] for listed, words in rows if listed]


def further_table(summary: Summary, extras: Sequence[Extra] = ()) -> str:
    """Return a Markdown table of the columns beyond `COLUMNS`, a row for each figure. Empty if none was measured."""
    rows = [
        [column.title, *(written(column, policy) for policy in summary.policies.values())]
        for column in further_columns(summary)
    ]
    rows += [[extra.title, *(cells.joined(extra.cells[name]) for name in summary.policies)] for extra in extras]
    return markdown_table(["", *summary.policies], rows) if rows else ""


def written(column: Column, policy: PolicySummary) -> str:
    """Return a cell of a Markdown table."""
    return cells.joined(column.cell(policy))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with the first column left-aligned and the others right-aligned."""
    return "\n".join(map(_markdown_row, [head, [":--", *("--:" for _ in head[1:])], *rows]))


def _markdown_row(texts: Sequence[str]) -> str:
    escaped = [text.replace("|", "\\|") for text in texts]
    return f"| {' | '.join(escaped)} |"
