"""`stepspec policies`, `stepspec benchmarks` and `stepspec docs`: list what is available, and where it is."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from stepspec.cli.completion import names_of

if TYPE_CHECKING:
    from stepspec.evaluation.benchmark import Benchmark


def list_policies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|FILE]", help="Print the file of this policy.", autocompletion=names_of("policies")
        ),
    ] = None,
) -> None:
    """List the policies that ship with stepspec, or print one: its text, and its path on stderr."""
    from stepspec.base.file_model import load_toml
    from stepspec.base.files import find_data_file, list_data_files
    from stepspec.loop.policy import Policy, load_policy

    if name is not None:
        print(load_policy(name)[1], end="")
        print(find_data_file("policies", name), file=sys.stderr)
        return
    _print((name, load_toml(path, Policy)[0].summary) for name, path in list_data_files("policies").items())


def show_docs() -> None:
    """Print where the documentation is."""
    from stepspec.base.files import package_folder

    checkout = package_folder().parent
    site, pages = checkout / "build" / "site" / "index.html", checkout / "docs" / "index.md"
    if site.is_file():
        print(site.as_uri())
    elif pages.is_file():
        print(pages)
        print("`make docs` builds a site of these pages.", file=sys.stderr)
    else:
        print("The documentation is in the docs folder of the stepspec source. Every command has --help.")


def list_benchmarks() -> None:
    """List the benchmarks that come with stepspec: their size, their source and a summary."""
    from stepspec.base.file_model import load_toml
    from stepspec.base.files import list_data_files
    from stepspec.evaluation.benchmark import Benchmark

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
