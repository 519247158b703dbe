"""Merges the parts of one run that several processes or machines wrote to separate folders."""

from collections.abc import Sequence
from pathlib import Path

from stepspec.errors import UsageError
from stepspec.evaluation.records import Node, Summary
from stepspec.evaluation.run.folder import RunFolder, node_of, what_differs
from stepspec.evaluation.run.summary import summary_of
from stepspec.evaluation.runs import Key, iter_blocks, iter_failures, iter_rows, iter_traces, read_run, says


def merge(parts: Sequence[Path], output: Path) -> Summary:
    """Copy every row of the parts once, with its trace, failures and blocks, then write and return the summary.

    Times from different machines are compared only within a part, because each part has its problems under every
    policy. An output that was merged before gets only what is new.

    Raises:
        UsageError: a part holds no run or a different run from the others; or the output is one of the parts.
        StepSpecError: a file cannot be read or written.
    """
    if output.resolve() in {part.resolve() for part in parts}:
        raise UsageError(f"{output} is one of the parts; give another output folder.")
    runs = [read_run(part) for part in parts]
    for part, run in zip(parts[1:], runs[1:], strict=True):
        if differences := what_differs(runs[0], run):
            raise UsageError(f"{part} and {parts[0]} are not parts of one run: they differ in {differences}.")
    with RunFolder(output) as merged:
        first = merged.begin(runs[0])  # of an earlier merge, perhaps on another machine than the parts
        for each in (each for run in runs for each in (run.conditions, *run.resumed)):
            merged.note(each)
        done = {row.key for row in iter_rows(output)}
        for part, run in zip(parts, runs, strict=True):
            done |= _copy(part, merged, done, node_of(first, run.conditions))
        summary = summary_of(first, output)
        merged.finish(summary)
    return summary


def _copy(part: Path, merged: RunFolder, done: set[Key], node: Node | None) -> set[Key]:
    """Copy what is not in the output yet. Return the keys of the copied rows.

    Args:
        part: the folder of the part.
        merged: the output.
        done: keys of rows in the output.
        node: the machine of the part, if it is not that of the output.
    """
    fresh = {row.key: row.output_sha256 for row in iter_rows(part) if row.key not in done}
    without_trace = dict(fresh)  # a part that was killed between a trace and its row has that trace twice
    for trace in iter_traces(part):
        if without_trace.get(trace.key) == says(trace):
            del without_trace[trace.key]
            merged.add_trace(trace)
    for row in iter_rows(part):
        if row.key in fresh:
            merged.add_row(row.on(node))
    known_blocks = {(block.policy, *block.jobs) for block in iter_blocks(merged.path)}
    for block in iter_blocks(part):
        if (block.policy, *block.jobs) not in known_blocks:
            merged.add_block(block.on(node))
    known_failures = {failure.key for failure in iter_failures(merged.path)}
    for failure in iter_failures(part):
        if failure.key not in known_failures:
            merged.add_failure(failure)
    return set(fresh)
