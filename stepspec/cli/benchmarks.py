"""`stepspec benchmarks`: the benchmarks that come with stepspec."""

from stepspec.base.file_model import load_toml
from stepspec.base.files import list_data_files
from stepspec.cli.output import print_columns
from stepspec.evaluation.benchmark import Benchmark, RowsTable


def main() -> None:
    """List the benchmarks that come with stepspec: their size, their source and a summary."""
    loaded = {name: load_toml(path, Benchmark)[0] for name, path in list_data_files("evals").items()}
    print_columns((name, _size(each), _source(each), each.summary) for name, each in loaded.items())


def _size(benchmark: Benchmark) -> str:
    data = benchmark.data
    size = data.rows if isinstance(data, RowsTable) else benchmark.default_limit
    return f"{size:,} problems" if size else "any problems"


def _source(benchmark: Benchmark) -> str:
    data = benchmark.data
    if data.kind == "hub":
        return f"{data.repository} or --data"
    return "needs --data" if data.kind == "file" and data.path is None else "no data needed"
