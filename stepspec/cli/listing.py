"""`stepspec policies` and `stepspec benchmarks`: what there is, each with its summary."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepspec.evaluation.benchmark import Benchmark


def list_policies() -> None:
    """List the policies that come with stepspec."""
    from stepspec.base.files import list_data_files
    from stepspec.loop.policy import Policy, load_toml

    _print((name, load_toml(path, Policy)[0].summary) for name, path in list_data_files("policies").items())


def list_benchmarks() -> None:
    """List the benchmarks that come with stepspec: how many problems, where from, and what they are."""
    from stepspec.base.files import list_data_files
    from stepspec.evaluation.benchmark import Benchmark
    from stepspec.loop.policy import load_toml

    loaded = {name: load_toml(path, Benchmark)[0] for name, path in list_data_files("evals").items()}
    _print((name, _size(each), _source(each), each.summary) for name, each in loaded.items())


def _size(benchmark: "Benchmark") -> str:
    from stepspec.evaluation.benchmark import RowsTable

    data = benchmark.data
    size = data.rows if isinstance(data, RowsTable) else benchmark.default_limit
    return f"{size:,} problems" if size else "any problems"


def _source(benchmark: "Benchmark") -> str:
    data = benchmark.data
    if data.kind == "hub":
        return f"{data.repository} or --data"
    return "needs --data" if data.kind == "file" and data.path is None else "no data needed"


def _print(table: Iterable[Sequence[str]]) -> None:
    rows = list(table)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
