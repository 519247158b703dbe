"""Rows of problems as they lie in files: jsonl, also gzipped, csv with a header, or parquet, one at a time."""

import csv
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stepspec.base.extras import from_extra
from stepspec.errors import UsageError

SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".parquet")

_SURROGATE = re.compile("[\ud800-\udfff]")

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class DataRow:
    """What one row says. `where` is how a person finds it."""

    where: str
    fields: Fields


def read_rows(path: Path) -> Iterator[DataRow]:
    """The rows of a file, read as they are asked for.

    Raises:
        UsageError: the file's name ends in none of `SUFFIXES`, it cannot be read, or a row is not of its form.
    """
    readers = (_json_rows, _json_rows, _csv_rows, _parquet_rows)
    reader = next((each for end, each in zip(SUFFIXES, readers, strict=True) if path.name.lower().endswith(end)), None)
    if reader is None:
        raise UsageError(f"Problems are read from .jsonl, .jsonl.gz, .csv and .parquet files; {path} is none of them.")
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error


def text_of(row: DataRow, key: str) -> str:
    """A text of a row.

    Raises:
        UsageError: there is none, or it is no text that a model could be given.
    """
    value = _value(row, key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{row.where}: key {key!r} must be text that is not empty.")
    if _SURROGATE.search(value):
        raise UsageError(f"{row.where}: key {key!r} holds half of a surrogate pair, which is no text.")
    return value


def text_or_number_of(row: DataRow, key: str) -> str:
    """The same, but a number is taken as it is written, so that 5 in one form of file is "5" in another.

    Raises:
        UsageError: there is neither, or it is no text that a model could be given.
    """
    value = _value(row, key)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return text_of(row, key)


def _value(row: DataRow, key: str) -> Any:
    if key not in row.fields:
        raise UsageError(f"{row.where}: key {key!r} is missing.")
    return row.fields[key]


def content_line(*texts: str) -> bytes:
    """A row as content hashes take it: one line of JSON, which says the same for every form of file."""
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _json_rows(path: Path) -> Iterator[DataRow]:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            if text.strip():
                yield DataRow(where, _json_object(text, where))


def _json_object(text: str, where: str) -> Fields:
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error.msg} at character {error.pos + 1}.") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{where} is not a JSON object.")
    return cast(Fields, value)


def _csv_rows(path: Path) -> Iterator[DataRow]:
    number = 0
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            for number, fields in enumerate(csv.DictReader(lines, strict=True), 1):
                where = f"{path}, row {number}"
                if None in fields:
                    raise UsageError(f"{where} has more cells than the header.")
                yield DataRow(where, fields)
        except csv.Error as error:
            raise UsageError(f"{path}, row {number + 1} is not CSV: {error}.") from error


def _parquet_rows(path: Path) -> Iterator[DataRow]:
    with from_extra("eval", f"Reading {path}"):
        from stepspec.evaluation.running.parquet import read_parquet
    for number, fields in enumerate(read_parquet(path), 1):
        yield DataRow(f"{path}, row {number}", fields)
