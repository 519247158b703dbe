"""`run` and `eval` on the embedded pair: output, folders, bad input, and the interruption of processes."""

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import stepspec

from stepspec.evaluation.records import ResultRow, RunRecord, Summary

QUESTION = (
    "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples do Ann and Ben have together?"
)
NUM_PROBLEMS = 2
MAX_FILE_BYTES = 8192
POLICIES = ["target", "token", "specreason", "steady"]
NAMED = [part for name in ("specreason", str(Path(__file__).with_name("steady.toml"))) for part in ("--policy", name)]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "stepspec", *map(str, arguments)]


def rows_of(folder: Path) -> list[ResultRow]:
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [ResultRow.model_validate_json(line) for line in lines]


def comparable(rows: list[ResultRow]) -> dict[object, tuple[object, ...]]:
    """Return the rows without times and scores; with greedy decoding they are the same in every run."""
    return {
        row.key: (
            row.status,
            row.answer,
            row.output_sha256,
            row.tokens,
            [(step.origin, step.num_tokens, step.num_from_draft) for step in row.steps],
        )
        for row in rows
    }


def assert_same(rows: list[ResultRow], complete: list[ResultRow]) -> None:
    """Check that rows equal those of another run. Scores may differ by rounding, since chunking varies."""
    expected = [row for row in complete if row.key in comparable(rows)]
    assert comparable(rows) == comparable(expected)
    assert scores_of(rows) == pytest.approx(scores_of(expected), abs=1e-3)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = stepspec("eval", "gsm-mini", "--limit", str(NUM_PROBLEMS), *NAMED, "--output", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_an_evaluation_leaves_a_complete_run_folder(undisturbed: Path):
    rows = rows_of(undisturbed)
    assert {row.policy for row in rows} == set(POLICIES)
    assert len(rows) == len({row.key for row in rows}) == NUM_PROBLEMS * len(POLICIES)
    run = RunRecord.model_validate_json((undisturbed / "run.json").read_text(encoding="utf-8"))
    summary = Summary.model_validate_json((undisturbed / "summary.json").read_text(encoding="utf-8"))
    assert run.pair == summary.pair
    assert summary.n == NUM_PROBLEMS
    assert set(summary.policies) == set(POLICIES)
    assert "specreason" in (undisturbed / "report.md").read_text(encoding="utf-8")


def test_token_level_speculation_writes_what_the_target_writes(undisturbed: Path):
    outputs = {(row.policy, row.problem): row.output_sha256 for row in rows_of(undisturbed)}
    problems = {problem for _, problem in outputs}
    assert all(outputs["token", problem] == outputs["target", problem] for problem in problems)


def test_a_finished_run_is_resumed_without_running_anything_again(undisturbed: Path):
    before = (undisturbed / "rows.jsonl").read_bytes()
    done = stepspec("eval", "gsm-mini", "--limit", str(NUM_PROBLEMS), *NAMED, "--output", undisturbed)
    assert done.returncode == 0, done.stderr
    assert (undisturbed / "rows.jsonl").read_bytes() == before


def test_another_run_is_not_written_into_a_folder(undisturbed: Path):
    refused = stepspec("eval", "gsm-mini", "--limit", str(NUM_PROBLEMS + 1), *NAMED, "--output", undisturbed)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr


def killed_and_resumed(folder: Path, limit: int, num_kills: int, seed: int) -> list[ResultRow]:
    """Kill the evaluation at random moments after its first new row, then let it finish."""
    moments = random.Random(seed)
    arguments = ("eval", "gsm-mini", "--limit", str(limit), *NAMED, "--output", folder)
    for _ in range(num_kills):
        process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        size = (folder / "rows.jsonl").stat().st_size if (folder / "rows.jsonl").exists() else 0
        while process.poll() is None:
            if (folder / "rows.jsonl").exists() and (folder / "rows.jsonl").stat().st_size > size:
                time.sleep(moments.uniform(0, 1.5))
                process.kill()
                break
            time.sleep(0.01)
        process.wait()
    done = stepspec(*arguments)
    assert done.returncode == 0, done.stderr
    return rows_of(folder)


def test_a_killed_evaluation_resumes_to_the_same_rows(undisturbed: Path, tmp_path: Path):
    rows = killed_and_resumed(tmp_path / "killed", limit=NUM_PROBLEMS, num_kills=1, seed=0)
    assert_same(rows, rows_of(undisturbed))
    assert len(rows) == len(comparable(rows)) == len(rows_of(undisturbed))


@pytest.mark.soak
def test_an_evaluation_killed_ten_times_resumes_to_the_same_rows(tmp_path: Path):
    done = stepspec("eval", "gsm-mini", "--limit", "40", *NAMED, "--output", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    rows = killed_and_resumed(tmp_path / "killed", limit=40, num_kills=10, seed=1)
    assert_same(rows, rows_of(tmp_path / "whole"))
    assert len(rows) == len(comparable(rows)) == len(rows_of(tmp_path / "whole"))


def test_an_interrupted_evaluation_keeps_its_rows_and_says_how_to_resume(tmp_path: Path):
    folder, is_over = tmp_path / "interrupted", threading.Event()

    def interrupt() -> None:
        while not (folder / "rows.jsonl").exists() or (folder / "rows.jsonl").stat().st_size == 0:
            if is_over.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        watcher.start()
        done = stepspec("eval", "gsm-mini", "--limit", "200", "--output", folder)
    finally:
        is_over.set()
        watcher.join()
        signal.signal(signal.SIGINT, usual)
    assert done.returncode == 130
    assert str(folder) in done.stderr
    assert "Traceback" not in done.stderr
    assert rows_of(folder)


def test_concurrent_requests_give_the_same_texts_as_single_ones(undisturbed: Path, tmp_path: Path):
    arguments = ("eval", "gsm-mini", "--limit", str(NUM_PROBLEMS), *NAMED, "--concurrency", "2")
    done = stepspec(*arguments, "--output", tmp_path / "c2")
    assert done.returncode == 0, done.stderr
    together, alone = rows_of(tmp_path / "c2"), rows_of(undisturbed)
    assert {row.key: (row.output_sha256, row.tokens) for row in together} == {
        row.key: (row.output_sha256, row.tokens) for row in alone
    }
    # A pass over several batch rows rounds differently from a pass over one, so scores agree only up to rounding.
    assert scores_of(together) == pytest.approx(scores_of(alone), abs=1e-3)


def scores_of(rows: list[ResultRow]) -> dict[object, float | None]:
    return {
        (*row.key, index, name): score
        for row in rows
        for index, step in enumerate(row.steps)
        for name, score in step.scores.items()
    }


def refused(*arguments: str | Path, code: int = 2) -> str:
    done = stepspec(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    assert str(tmp_path) in refused("run", QUESTION, "--target", f"torch:{tmp_path}", "--policy", "target").replace(
        "\n", ""
    )


def test_a_prompt_longer_than_the_context_is_refused():
    assert "context" in refused("run", QUESTION * 100)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_output_folder_is_refused(tmp_path: Path):
    tmp_path.chmod(0o500)
    assert "Cannot store the run" in refused("eval", "gsm-mini", "--limit", "1", "--output", tmp_path / "run", code=1)


def test_a_full_disk_keeps_the_finished_rows(undisturbed: Path, tmp_path: Path):
    """A limit on the file size stands in for a full disk: the system refuses the write in the same way."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, usual[1]))
    try:
        done = stepspec("eval", "gsm-mini", "--limit", str(NUM_PROBLEMS), *NAMED, "--output", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < len(rows_of(tmp_path / "run")) < len(rows_of(undisturbed))
    assert_same(rows_of(tmp_path / "run"), rows_of(undisturbed))
