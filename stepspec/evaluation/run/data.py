"""Reads rows of problems from files, one at a time: jsonl (also gzipped), csv with a header, or parquet."""

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
    """The fields of one row. `where` names its file and line for error messages."""

    where: str
    fields: Fields


def read_rows(path: Path) -> Iterator[DataRow]:
    """Yield the rows of a file, read lazily.

    Raises:
        UsageError: the file name ends in none of `SUFFIXES`, the file cannot be read, or a row is malformed.
    """
    readers = (_json_rows, _json_rows, _csv_rows, _parquet_rows)
    by_suffix = zip(SUFFIXES, readers, strict=True)
    reader = next((each for suffix, each in by_suffix if path.name.lower().endswith(suffix)), None)
    if reader is None:
        raise UsageError(f"Problems are read from .jsonl, .jsonl.gz, .csv and .parquet files; {path} is none of them.")
    try:
        yield from reader(path)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error


def text_of(row: DataRow, key: str) -> str:
    """Return the text at a key of a row.

    Raises:
        UsageError: the key is missing, or its value is empty, not text, or not valid Unicode.
    """
    value = _value(row, key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{row.where}: key {key!r} must be text that is not empty.")
    if _SURROGATE.search(value):
        raise UsageError(f"{row.where}: key {key!r} contains a lone surrogate, which is not valid text.")
    return value


def text_or_number_of(row: DataRow, key: str) -> str:
    """Return the text at a key of a row, or a number as text, so that 5 in one file format equals "5" in another.

    Raises:
        UsageError: the key is missing, or its value is neither a finite number nor text that `text_of` accepts.
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
    """Return a row as content hashes use it: one line of JSON, the same for every file format."""
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
        from stepspec.evaluation.run.parquet import read_parquet
    for number, fields in enumerate(read_parquet(path), 1):
        yield DataRow(f"{path}, row {number}", fields)
