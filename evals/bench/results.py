"""Finished runs, and the blocks of a document that are made from them."""

from collections.abc import Sequence
from pathlib import Path

from stepspec.errors import UsageError
from stepspec.evaluation.records import Conditions, RunRecord, Summary
from stepspec.evaluation.report.cells import count
from stepspec.evaluation.report.conditions import commit_in_words, hardware_in_words, models_in_words
from stepspec.evaluation.runs import find_runs, read_run, read_summary

Results = Sequence[tuple[RunRecord, Summary]]
"""Conditions and summaries of one benchmark's runs, such as those at several temperatures."""


def with_block(text: str, kind: str, benchmark: str, block: str) -> str:
    """Return the text with a new block between the markers of this kind and benchmark.

    Raises:
        UsageError: a marker is missing.
    """
    marker, end_marker = f"<!-- {kind}:{benchmark} -->", f"<!-- /{kind} -->"
    before, found, rest = text.partition(marker)
    _, end, after = rest.partition(end_marker)
    if not found or not end:
        raise UsageError(f"The file has no {marker} followed by {end_marker}. Add both where the block belongs.")
    return f"{before}{marker}\n{block}\n{end_marker}{after}"


def read_results(folder: Path) -> Results:
    """Load conditions and summaries of finished runs: of the folder itself, or of its direct subfolders.

    Raises:
        UsageError: a folder does not contain both.
    """
    return [(read_run(each), _finished_summary(each)) for each in find_runs(folder)]


def _finished_summary(folder: Path) -> Summary:
    summary = read_summary(folder)
    if summary is None:
        raise UsageError(f"{folder} contains no finished run: summary.json is missing.")
    return summary


def runs_in_words(runs: Sequence[RunRecord]) -> str:
    """Return one sentence with the conditions of runs that differ in temperature, concurrency or size alone."""
    run, sizes = runs[0], sorted({run.num_problems for run in runs})
    problems = " and ".join([*(f"{each:,}" for each in sizes[:-1]), count(sizes[-1], "problem")])
    temperatures = " and ".join(f"{each:g}" for each in sorted({run.temperature for run in runs}))
    parts = [
        f"{run.benchmark}, {problems} under every policy",
        f"temperature {temperatures}, seed {run.seed}, at most {run.max_tokens:,} tokens a problem",
        models_in_words(run.engines),
        *dict.fromkeys(map(machine_in_words, runs)),
    ]
    return f"{'; '.join(parts)}."


def machine_in_words(found: Conditions | RunRecord) -> str:
    """Return the hardware and the commit of a measurement. Its file has the versions of packages, too."""
    return f"{hardware_in_words(found.hardware)}; {commit_in_words(found.commit)}"
