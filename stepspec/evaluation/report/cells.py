"""Formatting of figures: a value and its interval, rounded to meaningful digits."""

import re
from typing import Any, TypeVar, cast

from stepspec.base.printable import printable
from stepspec.evaluation.records import Percentiles, Record

UNKNOWN = "–"

Cell = tuple[str, str]
"""A value and its interval; either may be empty."""
Interval = tuple[float, float]
R = TypeVar("R", bound=Record)


def in_markdown(record: R) -> R:
    """Return a record whose texts are no markup in Markdown. Names in a run may come from elsewhere."""
    return type(record).model_validate(_in_markdown(record.model_dump()))


def _in_markdown(value: Any) -> Any:
    if isinstance(value, dict):  # the text of a policy is read, and never shown
        table = cast("dict[Any, Any]", value)
        return {_in_markdown(key): each if key == "text" else _in_markdown(each) for key, each in table.items()}
    if isinstance(value, list | tuple):
        return [_in_markdown(each) for each in cast("list[Any]", value)]
    return escaped(value) if isinstance(value, str) else value


def escaped(text: str) -> str:
    """Return a text as one line of Markdown without markup."""
    return re.sub(r"[\\`*<]|(?<=\])\(", r"\\\g<0>", printable(text))


def percent(value: float | None, *, sign: str = "") -> str:
    """Format a share as a percentage with one decimal."""
    return UNKNOWN if value is None else f"{100 * value:{sign}.1f}%"


def percent_with_interval(value: float | None, interval: Interval | None, *, sign: str = "") -> Cell:
    """Format a share with its interval. With `sign`, format a difference of shares."""
    if value is None or interval is None:
        return percent(value, sign=sign), ""
    return percent(value, sign=sign), f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def times(value: float | None, interval: Interval | None = None) -> Cell:
    """Format a ratio with its interval."""
    if value is None:
        return UNKNOWN, ""
    # The ratio of a policy to itself is 1 by definition and needs no interval.
    wide = interval is not None and interval[0] < interval[1]
    return f"{value:.2f}×", f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval and wide else ""


def number(value: float | None) -> Cell:
    """Format a number with two decimals and without an interval."""
    return (UNKNOWN if value is None else f"{value:.2f}"), ""


def significant(value: float | None, unit: str = "") -> str:
    """Format a number with three significant digits and a unit."""
    if value is None:
        return UNKNOWN
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".") if value else "0"
    return f"{digits} {unit}".rstrip() if "e" not in digits else f"{value:.1e} {unit}".rstrip()


def seconds(value: float | None) -> str:
    """Format a time, in milliseconds if it is below a second."""
    if value is not None and value < 0.9995:
        return significant(1000 * value, "ms")
    return significant(value, "s")


def percentiles(value: Percentiles | None) -> Cell:
    """Format the median, with the 90th and the 99th percentile in place of an interval."""
    if value is None:
        return UNKNOWN, ""
    return seconds(value.p50), f"p90 {seconds(value.p90)}, p99 {seconds(value.p99)}"


def probability(value: float | None) -> str:
    """Format a p-value. Values below 0.001 are not meaningful beyond that."""
    return UNKNOWN if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def count(number: int, noun: str) -> str:
    """Format a count with a noun: `1 problem`, `2,000 problems`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def joined(cell: Cell, separator: str = " ") -> str:
    """Join the value and the interval of a cell. Empty parts are omitted."""
    return separator.join(part for part in cell if part)
