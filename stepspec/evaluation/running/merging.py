"""Puts together the parts of one run that several processes or machines have written to folders of their own."""

from collections.abc import Sequence
from pathlib import Path

from stepspec.errors import UsageError
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.running.folder import RunFolder, what_differs
from stepspec.evaluation.running.summary import summarise
from stepspec.evaluation.runs import Key, iter_blocks, iter_failures, iter_rows, iter_traces, read_run, says


def merge(parts: Sequence[Path], output: Path) -> Summary:
    """Copies every row of the parts, once, with its trace, and what was measured of rows together; then summarises.

    Times of parts that ran on different machines are compared only within a part, because a part has its problems
    under every policy. An output that was merged before gets what is new.

    Raises:
        UsageError: a part holds no run, or not the same run as the others; or the output is one of the parts.
        StepSpecError: the disk refuses.
    """
    if output.resolve() in {part.resolve() for part in parts}:
        raise UsageError(f"{output} is one of the parts; give another folder for the whole.")
    runs = [read_run(part) for part in parts]
    for part, run in zip(parts[1:], runs[1:], strict=True):
        if differences := what_differs(runs[0], run):
            raise UsageError(f"{part} and {parts[0]} are not parts of one run: they differ in {differences}.")
    with RunFolder(output) as kept:
        kept.begin(_together(runs))
        done = {row.key for row in kept.rows()}
        for part in parts:
            done |= _copy(part, kept, done)
        summary = summarise(runs[0], kept.rows(), kept.blocks(), kept.failures())
        kept.finish(summary)
    return summary


def _together(runs: Sequence[RunRecord]) -> RunRecord:
    """The conditions of all; of the machines each kind once."""
    machines = sorted({str(run.hardware.get("gpu") or run.hardware.get("cpu", "unknown")) for run in runs})
    if len(machines) == 1:
        return runs[0]
    return runs[0].model_copy(update={"hardware": {**runs[0].hardware, "machines": "; ".join(machines)}})


def _copy(part: Path, kept: RunFolder, done: set[Key]) -> set[Key]:
    """Copies what is not there yet; gives the keys of the rows that were copied."""
    fresh = {row.key: row.output_sha256 for row in iter_rows(part) if row.key not in done}
    untold = dict(fresh)  # a part that was killed between a trace and its row has that trace twice
    for trace in iter_traces(part):
        if untold.get(trace.key) == says(trace):
            del untold[trace.key]
            kept.add_trace(trace)
    for row in iter_rows(part):
        if row.key in fresh:
            kept.add_row(row)
    there = {(block.policy, *block.jobs) for block in kept.blocks()}
    for block in iter_blocks(part):
        if (block.policy, *block.jobs) not in there:
            kept.add_block(block)
    known = {failure.key for failure in kept.failures()}
    for failure in iter_failures(part):
        if failure.key not in known:
            kept.add_failure(failure)
    return set(fresh)
