"""How figures are written: a value and its interval, with as many digits as it deserves."""

from stepspec.evaluation.records import Percentiles

UNKNOWN = "–"

Cell = tuple[str, str]
"""A value and its interval; either may be empty."""
Interval = tuple[float, float]


def percent(value: float | None, *, sign: str = "") -> str:
    """A share as per cent with one decimal."""
    return UNKNOWN if value is None else f"{100 * value:{sign}.1f}%"


def percent_with_interval(value: float | None, interval: Interval | None, *, sign: str = "") -> Cell:
    """A share, or with a sign a difference of shares."""
    if value is None or interval is None:
        return percent(value, sign=sign), ""
    return percent(value, sign=sign), f"[{100 * interval[0]:{sign}.1f}, {100 * interval[1]:{sign}.1f}]"


def times(value: float | None, interval: Interval | None = None) -> Cell:
    """A ratio."""
    if value is None:
        return UNKNOWN, ""
    # A policy against itself is 1 by definition, with nothing to estimate.
    wide = interval is not None and interval[0] < interval[1]
    return f"{value:.2f}×", f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval and wide else ""


def number(value: float | None) -> Cell:
    """With two decimals."""
    return (UNKNOWN if value is None else f"{value:.2f}"), ""


def significant(value: float | None, unit: str = "") -> str:
    """With three significant digits, never as a power of ten."""
    if value is None:
        return UNKNOWN
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".") if value else "0"
    return f"{digits} {unit}".rstrip() if "e" not in digits else f"{value:.1e} {unit}".rstrip()


def seconds(value: float | None) -> str:
    """In milliseconds below a second."""
    if value is not None and value < 0.9995:
        return significant(1000 * value, "ms")
    return significant(value, "s")


def percentiles(value: Percentiles | None) -> Cell:
    """The median, and behind it the 90th and the 99th percentile."""
    if value is None:
        return UNKNOWN, ""
    return seconds(value.p50), f"p90 {seconds(value.p90)}, p99 {seconds(value.p99)}"


def probability(value: float | None) -> str:
    """A p-value; below a thousandth its size says nothing."""
    return UNKNOWN if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def count(number: int, noun: str) -> str:
    """`1 problem`, `2,000 problems`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def joined(cell: Cell, separator: str = " ") -> str:
    """Both parts of a cell in one text."""
    return separator.join(part for part in cell if part)
