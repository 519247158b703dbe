"""Loads the problems of a benchmark: shipped, from the Hugging Face hub, or from a file checked against its hash."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from stepspec.base.extras import install_command
from stepspec.base.file_model import load_toml
from stepspec.base.files import data_folder, find_data_file
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import Benchmark, FileData, HubData, RowsTable, ShippedData, Split
from stepspec.evaluation.run.data import read_rows
from stepspec.evaluation.run.problem_reader import EvalProblem, ProblemReader, ProblemSet

SHA256: Mapping[Split, str] = {
    "test": "ec03e50d60e905cd57304f7503d0162ce62446ea243b1d71b950e0bd634b2286",
    "calibration": "de5c9933b945f3b2251c00b42750d7fa2319cee1cda75a81765e793d1d6ddd29",
    "train": "5e77e84cbdeada6ecf6d1465ade688359b01fd76e75461f2395ac70650355e3c",
}
"""Hash of the file of each split of gsm-mini. Training problems are the first of an endless split."""


def load_benchmark(name_or_file: str) -> tuple[str, Benchmark]:
    """Load a benchmark by name or from a user's file. Return its name in results and the benchmark.

    Raises:
        UsageError: there is no such benchmark, or the file is invalid.
    """
    path = find_data_file("evals", name_or_file)
    benchmark, _ = load_toml(path, Benchmark)
    data = benchmark.data
    if isinstance(data, FileData) and data.path is not None:
        data = data.model_copy(update={"path": str(path.parent / data.path)})
    if isinstance(data, HubData) and data.copy_path is not None:
        data = data.model_copy(update={"copy_path": str(path.parent / data.copy_path)})
    return path.stem, benchmark.model_copy(update={"data": data})


def load_problems(benchmark: Benchmark, data_file: Path | None, limit: int | None) -> ProblemSet:
    """Load the first `limit` problems of a benchmark; None means its default limit. All rows are read and checked.

    Raises:
        UsageError: the benchmark takes no file; it needs a file and none is given; the hub download fails; or the
            file cannot be read, is empty, holds different problems, or has an invalid row.
    """
    limit = limit if limit is not None else benchmark.default_limit
    data = benchmark.data
    if isinstance(data, ShippedData):
        if data_file is not None:
            raise UsageError(f"{benchmark.title} has its own problems; leave out --data.")
        return _shipped(data, limit)
    if data_file is None and isinstance(data, FileData) and data.path is not None:
        data_file = Path(data.path)
    if data_file is None and isinstance(data, HubData) and data.copy_path and Path(data.copy_path).is_file():
        data_file = Path(data.copy_path)
    if data_file is not None:
        return _from_file(benchmark, data, data_file, limit)
    if isinstance(data, FileData):
        raise UsageError(f"{benchmark.title} needs a file of problems; give it with --data FILE.")
    return _from_hub(benchmark, data, limit)


def _shipped(data: ShippedData, limit: int | None) -> ProblemSet:
    path = data_folder("evals") / "data" / f"{data.kind}-{data.split}.jsonl.gz"
    if not path.is_file() or _hash_file(path) != SHA256[data.split]:
        raise UsageError(f"{path} is missing or damaged. Install stepspec again.")
    rows = (row.fields for row in itertools.islice(read_rows(path), limit))
    problems = tuple(EvalProblem(row["id"], row["question"], row["answer"], row["level"]) for row in rows)
    # Hash without `subject`, which these problems lack, so that runs from before that field can still be resumed.
    hashed = [{key: value for key, value in asdict(problem).items() if key != "subject"} for problem in problems]
    return ProblemSet(problems, hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest())


def _from_file(benchmark: Benchmark, data: RowsTable, path: Path, limit: int | None) -> ProblemSet:
    rows = ProblemReader(benchmark.grader, data, limit)
    rows.read(path)
    if not rows.num_problems:
        raise UsageError(f"{path} has no problems; it needs rows with a question and an answer.")
    different = _difference(benchmark, data, path, rows)
    if different is not None:
        raise UsageError(
            f"{path} {different}; give the whole split as it was published, or, to ask other problems on purpose, "
            "use the benchmark 'questions' or one of your own."
        )
    return rows.problem_set()


def _difference(benchmark: Benchmark, data: RowsTable, path: Path, rows: ProblemReader) -> str | None:
    """Return why a file is not the benchmark's data, by pinned hashes and row counts; None if nothing differs."""
    published = data.files[0].sha256 if isinstance(data, HubData) and len(data.files) == 1 else None
    if rows.sha256 == data.sha256 or (published and _hash_file(path) == published):
        return None
    if data.rows not in (None, rows.num_rows):
        return f"has {rows.num_rows:,} rows, where {benchmark.title} has {data.rows:,}"
    if data.sha256 is not None:
        return _differs(benchmark, "content", rows.sha256, data.sha256)
    return _differs(benchmark, "file", _hash_file(path), published) if published else None


def _differs(benchmark: Benchmark, what: str, found: str, pinned: str) -> str:
    return f"is not the data of {benchmark.title} (its {what} hash begins {found[:12]}, the pinned one {pinned[:12]})"


def _from_hub(benchmark: Benchmark, data: HubData, limit: int | None) -> ProblemSet:
    rows = ProblemReader(benchmark.grader, data, limit)
    for path in _fetched(benchmark, data):
        rows.read(path)
    if not rows.num_problems:
        raise _missing(benchmark, data, "the downloaded data has no problems")
    if data.rows not in (None, rows.num_rows):
        raise _missing(benchmark, data, f"the downloaded data has {rows.num_rows:,} rows instead of {data.rows:,}")
    if data.sha256 not in (None, rows.sha256) and not all(file.sha256 for file in data.files):
        raise _missing(benchmark, data, "the downloaded data does not match the pinned hash")
    return rows.problem_set()


def _fetched(benchmark: Benchmark, data: HubData) -> Iterator[Path]:
    try:
        from stepspec.evaluation.run.hub import FetchError, fetch_file
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed ({install_command('eval')})"
        raise _missing(benchmark, data, why) from error
    for file in data.files:
        try:
            path = fetch_file(data.repository, data.revision, file.path)
        except FetchError as error:
            raise _missing(benchmark, data, str(error)) from error
        if file.sha256 not in (None, _hash_file(path)):
            raise _missing(benchmark, data, f"the downloaded file {path} does not match its pinned hash")
        yield path


def _missing(benchmark: Benchmark, data: HubData, why: str) -> UsageError:
    files = " and ".join(file.path for file in data.files)
    them = "it" if len(data.files) == 1 else "all their rows in one file"
    return UsageError(
        f"The data of {benchmark.title} cannot be fetched: {why}; download {files} of the dataset {data.repository}, "
        f"revision {data.revision}, from the Hugging Face hub, and give {them} with --data FILE."
    )


def _hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
