"""Reading the folder of a run: written by one process or several, complete or killed."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.records import ResultRow, StepRecord, Summary, TimeRecord, TokenRecord, Trace
from stepspec.evaluation.runs import (
    TraceIndex,
    find_runs,
    has_gone_on,
    iter_blocks,
    iter_failures,
    iter_rows,
    iter_traces,
    natural_order,
    output_sha256,
    part_files,
    policy_of,
    read_run,
    read_summary,
    reasoning,
    says,
)


def row(problem: str, wall_s: float = 1.0) -> ResultRow:
    return ResultRow(
        problem=problem,
        policy="target",
        status="correct",
        answer="1",
        gold="1",
        finish_reason="stop",
        output_sha256=output_sha256("", ""),
        wall_s=wall_s,
        tokens=TokenRecord(),
        time_s=TimeRecord(target=wall_s),
        num_prompt_tokens=1,
        steps_judged=0,
        steps_accepted=0,
        token_drafted=0,
        token_accepted=0,
        target_passes=1,
    )


def trace(problem: str, text: str) -> Trace:
    step = StepRecord(origin="target", num_tokens=1, num_from_draft=0, text=text)
    return Trace(problem=problem, policy="target", question="?", steps=[step], answer="1")


def write_lines(file: Path, *records: ResultRow | Trace, end: str = "\n") -> None:
    file.write_text("\n".join(record.model_dump_json() for record in records) + end, "utf-8")


def test_counts_that_are_stored_under_former_names_are_read() -> None:
    stored = TokenRecord(drafted=7, accepted=3, abandoned=4).model_dump_json()
    assert TokenRecord.model_validate_json(stored).abandoned == 4
    assert TokenRecord.model_validate_json(stored.replace('"abandoned"', '"cancelled"')).abandoned == 4


def test_policies_of_stored_runs_are_read() -> None:
    folders = [each.parent for each in (Path(__file__).parents[1] / "evals" / "results").rglob("run.json")]
    policies = [policy_of(run, name) for run in map(read_run, folders) for name in run.policies]
    assert len(policies) > 30


@pytest.mark.parametrize(("file", "read"), [("run.json", read_run), ("summary.json", read_summary)])
def test_files_of_an_older_version_are_refused_with_what_to_do(
    tmp_path: Path, file: str, read: Callable[[Path], object]
) -> None:
    (tmp_path / file).write_text('{"version": 1, "benchmark": "sums"}', "utf-8")
    with pytest.raises(UsageError, match=r"is of version 1, in which max_tokens counted.*run 'stepspec eval' again"):
        read(tmp_path)


def test_parts_are_read_in_their_order_and_the_first_row_of_a_key_counts(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows-10of12.jsonl", row("c", 10), row("d", 10))
    write_lines(tmp_path / "rows-2of12.jsonl", row("b", 2), row("c", 2))
    write_lines(tmp_path / "rows.jsonl", row("a", 1), row("b", 1))
    write_lines(tmp_path / "rows-old.jsonl", row("x"))
    assert [(each.problem, each.wall_s) for each in iter_rows(tmp_path)] == [("a", 1), ("b", 1), ("c", 2), ("d", 10)]
    assert [file.name for file in part_files(tmp_path, "rows")] == [
        "rows.jsonl",
        "rows-2of12.jsonl",
        "rows-10of12.jsonl",
    ]


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", row("a"), row("b"), end="")
    assert [each.problem for each in iter_rows(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[" * 200_000, b"\xff\xfe", b'{"problem": 1}', b'{"x": NaN}', b"\0" * 100]
)
def test_the_message_about_a_damaged_line_says_how_to_continue(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    rows = [row(problem).model_dump_json().encode() for problem in "abc"]
    (folder / "rows.jsonl").write_bytes(b"\n".join([rows[0], damage, *rows[1:]]) + b"\n")
    with pytest.raises(UsageError) as caught:
        list(iter_rows(folder))
    assert "\n" not in str(caught.value)
    (command,) = re.findall(r"Delete the line \((.*?)\) and", str(caught.value))
    subprocess.run(shlex.split(command), check=True)
    assert [each.problem for each in iter_rows(folder)] == ["a", "b", "c"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", row("a"), end='\n{"half": \n')
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 2 is not a valid ResultRow") as caught:
        list(iter_rows(tmp_path))
    assert f"--output {tmp_path}" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("wall_s", value) for value in (0, -1, "NaN", "Infinity", "1e400", 10**400, 1e300)),
        *((f"tokens.{name}", value) for name in ("committed", "drafted") for value in (-1, 10**400, 2**62)),
        *(("time_s.draft", value) for value in (-1, "NaN", 1e300)),
        *((name, value) for name in ("steps_judged", "repeat", "target_passes") for value in (-1, 10**400)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_row_with_an_impossible_number_is_named_by_file_and_line(tmp_path: Path, field: str, value: object) -> None:
    damaged = json.loads(row("b").model_dump_json())
    *tables, name = field.split(".")
    inside = damaged
    for table in tables:
        inside = inside[table]
    inside[name] = "HERE" if isinstance(value, str) else value
    text = json.dumps(damaged)
    text = text.replace('"HERE"', value) if isinstance(value, str) else text
    write_lines(tmp_path / "rows.jsonl", row("a"), end=f"\n{text}\n")
    with pytest.raises(UsageError, match=rf"rows\.jsonl, line 2 is not a valid ResultRow \({field}") as caught:
        list(iter_rows(tmp_path))
    assert len(str(caught.value)) < 1000


def test_a_run_without_rows_has_none(tmp_path: Path) -> None:
    for read in (iter_rows, iter_traces, iter_blocks, iter_failures):
        assert list(read(tmp_path)) == []
    assert read_summary(tmp_path) is None


def test_an_index_finds_the_traces_of_a_problem_in_all_parts(tmp_path: Path) -> None:
    write_lines(tmp_path / "traces.jsonl", trace("a", "ä first"), trace("b", "second"))
    write_lines(tmp_path / "traces-1of2.jsonl", trace("b", "third"), trace("a", "fourth"))
    index = TraceIndex(tmp_path)
    assert [each.steps[0].text for each in index.of("a")] == ["ä first", "fourth"]
    assert [each.steps[0].text for each in index.of("b")] == ["second", "third"]
    assert (len(index), "b" in index, "c" in index, index.of("c")) == (2, True, False, [])


def test_runs_of_a_sweep_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("c16-t0.6", "c4-t0.6", "c1-t0.6"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}", "utf-8")
    assert [run.name for run in find_runs(tmp_path)] == ["c1-t0.6", "c4-t0.6", "c16-t0.6"]
    assert find_runs(tmp_path / "c4-t0.6") == [tmp_path / "c4-t0.6"]


def test_a_folder_without_a_valid_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        find_runs(tmp_path)
    with pytest.raises(UsageError, match="no run"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text('{"version": 9}', "utf-8")
    with pytest.raises(UsageError, match="damaged"):
        read_run(tmp_path)
    (tmp_path / "rows.jsonl").mkdir()
    with pytest.raises(StepSpecError, match="Cannot read"):
        list(iter_rows(tmp_path))


def write_summary(folder: Path, num_rows: int | None) -> Summary:
    summary = Summary(
        benchmark="b", n=1, temperature=0, concurrency=1, pair="p", policies={}, num_rows=num_rows, num_repeats=1
    )
    (folder / "summary.json").write_text(summary.model_dump_json(), "utf-8")
    return summary


def test_a_summary_of_all_rows_of_all_parts_is_trusted(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows-1of2.jsonl", row("a"), row("b"))
    write_lines(tmp_path / "rows-2of2.jsonl", row("c"))
    assert not has_gone_on(tmp_path, write_summary(tmp_path, 3))
    assert has_gone_on(tmp_path, write_summary(tmp_path, 2)), "it is newer than all rows, but lacks one of them"
    assert not has_gone_on(tmp_path, write_summary(tmp_path, None)), "without a row count, only its time is compared"


def test_a_summary_that_is_older_than_a_row_is_not_trusted(tmp_path: Path) -> None:
    summaries = [write_summary(tmp_path, num_rows) for num_rows in (None, 1)]
    assert not any(has_gone_on(tmp_path, summary) for summary in summaries), "the folder has no rows, only the summary"
    write_lines(tmp_path / "rows.jsonl", row("a"))
    os.utime(tmp_path / "summary.json", (1, 1))
    assert all(has_gone_on(tmp_path, summary) for summary in summaries)


def test_a_trace_has_the_text_and_hash_of_its_row() -> None:
    assert reasoning(trace("a", "so")) == "so"
    assert says(trace("a", "so")) == output_sha256("so", "1")
    assert sorted(["l-10", "l-2", "k-30"], key=natural_order) == ["k-30", "l-2", "l-10"]
