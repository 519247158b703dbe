"""Exported logs have the fields that inspect_ai reads, the figures of the run's rows, and texts if they were stored.

The fields are those of inspect_ai 0.3.285, written down by hand. If it is installed, it reads the logs too.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stepspec.cli.export import main as export_run
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.export import export
from stepspec.evaluation.records import (
    Block,
    EngineRecord,
    ModelUsage,
    PolicyRecord,
    Record,
    ResultRow,
    RunRecord,
    StepRecord,
    TimeRecord,
    TokenRecord,
    Trace,
)
from stepspec.evaluation.runs import output_sha256

POLICIES = ("target", "step_spec")
PROBLEMS = ("line-2", "line-10", "line-1")

LOG_FIELDS = ["version", "status", "eval", "plan", "results", "stats", "samples"]
"""Fields of inspect_ai's `EvalLog`, in the order that inspect_ai relies on."""


def make_run(num_repeats: int = 1) -> RunRecord:
    return RunRecord(
        benchmark="my_sums",
        data_sha256="d" * 64,
        num_problems=len(PROBLEMS),
        prompt_id="boxed",
        prompt_version="abc",
        policies={policy: PolicyRecord(text=f"# {policy}", sha256=policy, kind="step") for policy in POLICIES},
        engines={
            "target": EngineRecord(name="org/big model", weights="w", dtype="float32", device="cpu"),
            "draft": EngineRecord(name="small", weights=None, dtype=None, device=None),
        },
        pair="pair",
        temperature=0.7,
        top_p=0.9,
        max_tokens=640,
        seed=5,
        concurrency=2,
        grader="integer",
        num_repeats=num_repeats,
        versions={"python": "3.11", "transformers": "5"},
        commit="c" * 40,
        hardware={"cpu": "A Processor", "cores": 2},
        started="2026-01-02T03:04:05+00:00",
    )


def make_trace(problem: str, policy: str, repeat: int = 0, word: str = "First") -> Trace:
    steps = [
        StepRecord(origin="draft", num_tokens=3, num_from_draft=3, scores={"rating": 8.0}, text=f"{word}.\n\n"),
        StepRecord(origin="target", num_tokens=4, num_from_draft=0, scores={"rating": None}, text="“Then”.\n\n"),
    ]
    answer = f"It is \\boxed{{{repeat}}}."
    return Trace(problem=problem, policy=policy, repeat=repeat, question=f"{problem}?", steps=steps, answer=answer)


def make_row(trace: Trace, **changed: object) -> ResultRow:
    reasoning = "".join(step.text or "" for step in trace.steps)
    row = ResultRow(
        problem=trace.problem,
        policy=trace.policy,
        repeat=trace.repeat,
        level=3,
        status="correct",
        answer="7",
        gold="7",
        finish_reason="stop",
        output_sha256=output_sha256(reasoning, trace.answer),
        wall_s=2.0,
        tokens=TokenRecord(committed=10),
        time_s=TimeRecord(queue=0.5, target=1.5),
        num_prompt_tokens=6,
        steps_judged=2,
        steps_accepted=1,
        token_drafted=0,
        token_accepted=0,
        target_passes=9,
        steps=[step.model_copy(update={"text": None}) for step in trace.steps],
    )
    return row.model_copy(update=changed)


def write_lines(file: Path, records: Iterable[Record]) -> None:
    file.write_text("".join(record.model_dump_json() + "\n" for record in records), "utf-8")


def write_run(
    folder: Path, rows: Iterable[ResultRow], traces: Iterable[Trace] = (), run: RunRecord | None = None
) -> Path:
    """Write the folder of a run with these rows and traces."""
    folder.mkdir()
    (folder / "run.json").write_text((run or make_run()).model_dump_json(), "utf-8")
    write_lines(folder / "rows.jsonl", rows)
    if traces:
        write_lines(folder / "traces.jsonl", traces)
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A finished run with traces; under `step_spec` one problem has no answer and another is cut off."""
    traces = [make_trace(problem, policy) for problem in PROBLEMS for policy in POLICIES]
    ends: Mapping[tuple[str, str], Mapping[str, object]] = {
        ("line-10", "step_spec"): {"status": "no_answer", "answer": None, "why": "There is no box."},
        ("line-1", "step_spec"): {"status": "timeout", "finish_reason": "length", "wall_s": 5.0},
    }
    rows = [make_row(trace, **ends.get((trace.problem, trace.policy), {})) for trace in traces]
    return write_run(tmp_path / "run", rows, traces)


def read_inspect(folder: Path, policy: str) -> dict[str, Any]:
    (file,) = folder.glob(f"2026-01-02T03-04-05+00-00_my-sums_{policy.replace('_', '-')}_*.json")
    assert re.fullmatch(r"[0-9a-f]{22}", file.stem.rpartition("_")[2])
    return json.loads(file.read_text("utf-8"))


def test_a_log_of_inspect_has_its_fields_with_the_samples_last(run_folder: Path, tmp_path: Path) -> None:
    export(run_folder, tmp_path / "logs")
    for policy in POLICIES:
        log = read_inspect(tmp_path / "logs", policy)
        assert list(log) == LOG_FIELDS
        assert (log["version"], log["status"]) == (2, "success")
        spec = log["eval"]
        assert {"created", "task", "dataset", "model", "config"} <= set(spec)  # the fields without a default
        assert (spec["task"], spec["solver"]) == ("my_sums", policy)
        assert spec["model"] == f"stepspec/org/big-model+{policy}"
        assert spec["model_roles"]["draft"]["model"] == "small"
        assert spec["metadata"]["policy"] == f"# {policy}"
        assert (spec["config"]["epochs"], spec["dataset"]["samples"]) == (1, 3)
    logs = [read_inspect(tmp_path / "logs", policy)["eval"] for policy in POLICIES]
    assert logs[0]["run_id"] == logs[1]["run_id"]
    assert len({each["eval_id"] for each in logs}) == len({each["task_id"] for each in logs}) == 2


def test_a_sample_of_inspect_has_reasoning_answer_score_and_time(run_folder: Path, tmp_path: Path) -> None:
    export(run_folder, tmp_path / "logs")
    sample = read_inspect(tmp_path / "logs", "step_spec")["samples"][0]
    assert (sample["id"], sample["epoch"], sample["input"], sample["target"]) == ("line-2", 1, "line-2?", "7")
    question, reply = sample["messages"]
    assert (question["role"], question["content"]) == ("user", "line-2?")
    assert (reply["role"], reply["content"]) == (
        "assistant",
        [
            {"type": "reasoning", "reasoning": "First.\n\n“Then”.\n\n"},
            {"type": "text", "text": "It is \\boxed{0}."},
        ],
    )
    assert sample["output"]["choices"] == [{"message": reply, "stop_reason": "stop"}]
    assert sample["output"]["usage"] == {
        "input_tokens": 6,
        "output_tokens": 10,
        "total_tokens": 16,
        "reasoning_tokens": 7,
    }
    assert sample["scores"]["integer"]["value"] == "C"
    assert (sample["total_time"], sample["working_time"], sample["limit"]) == (2.0, 1.5, None)
    steps = [(step["origin"], step["scores"], step["text"]) for step in sample["metadata"]["steps"]]
    assert steps == [("draft", {"rating": 8.0}, "First.\n\n"), ("target", {"rating": None}, "“Then”.\n\n")]
    assert sample["metadata"]["tokens"]["committed"] == 10


def test_grades_and_limits_of_inspect_follow_the_rows(run_folder: Path, tmp_path: Path) -> None:
    export(run_folder, tmp_path / "logs")
    log = read_inspect(tmp_path / "logs", "step_spec")
    _, unanswered, cut = log["samples"]
    score = unanswered["scores"]["integer"]
    assert (score["value"], score["answer"], score["explanation"]) == ("N", None, "There is no box.")
    assert (cut["scores"]["integer"]["value"], cut["scores"]["integer"]["metadata"]) == ("I", {"status": "timeout"})
    assert (cut["limit"], cut["output"]["choices"][0]["stop_reason"]) == ({"type": "token", "limit": 640}, "max_tokens")
    metrics = log["results"]["scores"][0]["metrics"]
    assert {name: metric["value"] for name, metric in metrics.items()} == pytest.approx(
        {"accuracy": 1 / 3, "stderr": 1 / 3}
    )
    assert (log["results"]["total_samples"], log["results"]["completed_samples"]) == (3, 3)


def test_a_log_of_inspect_adds_up_usage_and_ends_after_the_policy_s_own_time(run_folder: Path, tmp_path: Path) -> None:
    export(run_folder, tmp_path / "without")
    stats = read_inspect(tmp_path / "without", "step_spec")["stats"]
    assert stats["model_usage"]["stepspec/org/big-model+step_spec"]["total_tokens"] == 48
    assert (stats["started_at"], stats["completed_at"]) == ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:09+00:00")
    usage = {"target": ModelUsage(prompt_tokens=10, cached_tokens=4, generated_tokens=3)}
    blocks = [Block(policy="step_spec", jobs=[], wall_s=30.0, committed_tokens=0, usage=usage) for _ in range(2)]
    write_lines(run_folder / "blocks.jsonl", blocks)
    export(run_folder, tmp_path / "with")
    stats = read_inspect(tmp_path / "with", "step_spec")["stats"]
    assert stats["completed_at"] == "2026-01-02T03:05:05+00:00"
    assert stats["role_usage"] == {
        "target": {"input_tokens": 12, "input_tokens_cache_read": 8, "output_tokens": 6, "total_tokens": 26}
    }
    assert read_inspect(tmp_path / "with", "target")["stats"]["role_usage"] == {}


def test_repeats_are_epochs_of_inspect_and_an_unfinished_run_is_cancelled(tmp_path: Path) -> None:
    traces = [make_trace("line-1", "target", repeat) for repeat in range(2)]
    rows = [make_row(trace, status="correct" if trace.repeat else "incorrect") for trace in traces]
    exported = export(write_run(tmp_path / "run", rows, traces, make_run(num_repeats=2)), tmp_path / "logs")
    log = read_inspect(tmp_path / "logs", "target")
    assert [sample["epoch"] for sample in log["samples"]] == [1, 2]
    assert len({sample["uuid"] for sample in log["samples"]}) == 2
    assert log["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.5
    assert (log["status"], log["results"]["total_samples"]) == ("cancelled", 6)
    assert list(exported.logs) == ["target"]  # the other policy has no row


def test_exporting_a_run_again_gives_the_same_files(run_folder: Path) -> None:
    def contents() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in (run_folder / "inspect").rglob("*") if file.is_file()}

    exported = export(run_folder)
    first = contents()
    assert set(first) == {log.file for log in exported.logs.values()}
    export(run_folder)
    assert contents() == first


def test_without_traces_texts_are_empty_and_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [make_row(make_trace(problem, "target")) for problem in PROBLEMS]
    export_run(write_run(tmp_path / "run", rows), tmp_path / "logs")
    assert "These rows have no texts, because the run was made without --traces." in capsys.readouterr().out
    (sample, *_) = read_inspect(tmp_path / "logs", "target")["samples"]
    assert (sample["input"], sample["messages"], sample["output"]["choices"]) == ("", [], [])
    assert [step["origin"] for step in sample["metadata"]["steps"]] == ["draft", "target"]


def test_of_two_traces_the_one_of_the_row_is_exported(tmp_path: Path) -> None:
    lost, right = (make_trace("line-1", "target", word=word) for word in ("Lost", "Right"))
    for name, traces in (("before", [lost, right]), ("after", [right, lost])):
        run = write_run(tmp_path / name, [make_row(right)], traces)
        export(run, tmp_path / f"{name}-logs")
        (sample,) = read_inspect(tmp_path / f"{name}-logs", "target")["samples"]
        assert sample["messages"][1]["content"][0]["reasoning"].startswith("Right.")


def test_a_sweep_is_exported_setting_by_setting(run_folder: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for name in ("c1", "c4"):
        (sweep / name).symlink_to(run_folder, target_is_directory=True)
    export_run(sweep, tmp_path / "logs")
    for name in ("c1", "c4"):
        assert len(read_inspect(tmp_path / "logs" / name, "target")["samples"]) == 3


def test_invalid_exports_are_refused(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        export_run(tmp_path / "missing")
    with pytest.raises(UsageError, match="no finished rows"):
        export(write_run(tmp_path / "empty", []))
    (tmp_path / "file").touch()
    with pytest.raises(StepSpecError, match="Cannot write to"):
        export(run_folder, tmp_path / "file")


def test_inspect_itself_reads_its_logs(run_folder: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip("inspect_ai.log", reason="inspect_ai is too much to install for this alone")
    export(run_folder, tmp_path / "logs")
    found = reader.list_eval_logs(str(tmp_path / "logs"))
    assert len(found) == len(POLICIES)
    for each in found:
        log, head = (asyncio.run(reader.read_eval_log_async(each, header_only=only)) for only in (False, True))
        assert (head.eval, head.results, head.stats) == (log.eval, log.results, log.stats)
        assert len(log.samples) == 3
