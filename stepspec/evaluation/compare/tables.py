"""Tables of a comparison for a terminal: the conditions that differ, and the figures of each policy."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from stepspec.evaluation.compare.conditions import Difference
from stepspec.evaluation.compare.figures import PolicyComparison, Side
from stepspec.evaluation.report.cells import (
    UNKNOWN,
    count,
    joined,
    percent,
    percent_with_interval,
    probability,
    seconds,
    significant,
    times,
)


def differences_table(differences: Sequence[Difference]) -> Table:
    """Return a table of the conditions that differ."""
    table = _table("Not the same in both runs", ["A", "B"])
    for each in differences:
        table.add_row(each.name, *(Text(value or UNKNOWN, overflow="fold") for value in (each.a, each.b)))
    return table


def policy_table(compared: PolicyComparison) -> Table:
    """Return a table of two policies side by side, and B against A. Sums are shown per row."""
    a, b, n = compared.a, compared.b, compared.num_rows
    table = _table(_title(compared), ["A", "B", "B against A"])
    gain = percent_with_interval(compared.accuracy_delta, compared.accuracy_delta_ci, sign="+")
    against = f"{joined(gain)}\np {probability(compared.accuracy_p)}"
    _add(table, "accuracy", _accuracy(a), _accuracy(b), against)
    _add(table, "no answer", f"{a.no_answer:,}", f"{b.no_answer:,}")
    _add(table, "cut short", f"{a.truncated:,}", f"{b.truncated:,}")
    speed = _ratio(compared.speedup, compared.speedup_ci, "as fast")
    _add(table, "time", seconds(a.wall_s / n), seconds(b.wall_s / n), UNKNOWN if compared.no_speed else speed)
    if compared.no_speed:
        table.caption, table.caption_justify = Text(compared.no_speed), "left"
    length = _ratio(compared.length_ratio, compared.length_ratio_ci, "as long")
    _add(table, "tokens", significant(a.tokens / n), significant(b.tokens / n), length)
    rate = _ratio(compared.tokens_per_s_ratio, compared.tokens_per_s_ratio_ci, "the rate")
    _add(table, "tokens a second", _rate(a), _rate(b), rate)
    _add(table, "to the first step, median", seconds(a.first_step_s), seconds(b.first_step_s))
    _add(table, "to the answer, median", seconds(a.first_answer_s), seconds(b.first_answer_s))
    _add(table, "longest gap, median", seconds(a.longest_gap_s), seconds(b.longest_gap_s))
    _add(table, "steps accepted", percent(a.step_acceptance), percent(b.step_acceptance))
    _add(table, "tokens accepted", percent(a.token_acceptance), percent(b.token_acceptance))
    return table


def _title(compared: PolicyComparison) -> str:
    """Return the policies and the problems and rows that they are compared over."""
    a, b = compared.a, compared.b
    name = a.policy if a.policy == b.policy else f"{a.policy} in A and {b.policy} in B"
    scope = count(compared.num_problems, "problem")
    if compared.num_rows != compared.num_problems:
        scope += f" with {count(compared.num_rows, 'row')}"
    left_out = [
        f"{count(side.num_unpaired, 'row')} only in {letter}"
        for letter, side in (("A", a), ("B", b))
        if side.num_unpaired
    ]
    return f"{name}: {scope} in both, 95% intervals{''.join(f'; {each} left out' for each in left_out)}"


def _accuracy(side: Side) -> str:
    return joined(percent_with_interval(side.accuracy, side.accuracy_ci), "\n")


def _rate(side: Side) -> str:
    return significant(side.tokens / side.wall_s if side.wall_s else None)


def _ratio(value: float | None, interval: tuple[float, float] | None, meaning: str) -> str:
    return UNKNOWN if value is None else f"{joined(times(value, interval))} {meaning}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _add(table: Table, title: str, *cells: str) -> None:
    """Add a table row, unless it is unknown for both runs."""
    if any(cell != UNKNOWN for cell in cells):
        table.add_row(title, *map(Text, cells))
