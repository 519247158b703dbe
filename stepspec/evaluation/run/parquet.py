# pyright: basic
"""Reads rows of parquet files. Requires pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from stepspec.errors import UsageError

BATCH_ROWS = 256


def read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, with one batch at a time in memory.

    Raises:
        UsageError: the file is missing or is not a parquet file.
    """
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        reason = " ".join(str(error).split()).removesuffix(".")
        raise UsageError(f"Cannot read {path}: {reason}.") from error
