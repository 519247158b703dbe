"""Workers can hang, be killed or run out of memory: every call returns, and other calls do not wait."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from stepspec.errors import StepSpecError
from stepspec.evaluation.grade import Grade, Grading, workers
from stepspec.evaluation.grade.workers import WorkerPool

HANGS = ("x+1", r"(a+b+c+1)^{99}(a+c+x+2)^{99}(x+y+3)^{99}", 4.0)
EQUAL = ("x+1", "1+x", 60.0)


def is_running(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text("utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(process_ids: list[int], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(map(is_running, process_ids)):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, seconds=2)
    yield pool
    pool.close()


def test_a_worker_that_hangs_is_stopped_while_the_event_loop_runs_and_the_next_question_answered(
    pool: WorkerPool,
) -> None:
    async def ask_and_tick() -> tuple[str, int]:
        answer = asyncio.create_task(asyncio.to_thread(pool.ask, *HANGS))
        ticks = 0
        while not answer.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return (await answer), ticks

    assert pool.ask(*EQUAL) == "same"
    verdict, ticks = asyncio.run(ask_and_tick())
    assert verdict == "timeout"
    assert ticks > 20
    assert pool.ask(*EQUAL) == "same"


def test_a_worker_that_starts_too_slowly_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_SECONDS", 0.001)

    def children() -> set[int]:
        return {int(task) for file in Path("/proc/self/task").glob("*/children") for task in file.read_text().split()}

    before = children()
    pool = WorkerPool(1, seconds=2)
    try:
        for _ in range(2):
            with pytest.raises(StepSpecError, match="s to start"):
                pool.ask(*EQUAL)
            assert children() <= before
    finally:
        pool.close()


def test_no_answer_is_lost_when_workers_are_killed_at_random() -> None:
    rows = [(f"{a}x+{b}", f"{b}+{a if a % 3 else a + 1}x") for a in range(2, 38) for b in range(2, 7)]
    rng = random.Random(0)
    num_killed, kill_at, num_done = 0, 5, 0
    # Kill only workers that already ran at the previous kill. A worker that is still starting has the question of the
    # killed one, and the pool gives up on a question after two retries.
    established: list[int] = []
    counting = threading.Lock()
    # The time limit is generous for busy machines: the test is that a repeated question gets one answer.
    with Grading("math", num_workers=2, seconds=60) as grading, ThreadPoolExecutor(4) as threads:

        def grade_and_kill(row: tuple[str, str]) -> Grade:
            nonlocal num_killed, kill_at, num_done, established
            grade = grading.grade(rf"\boxed{{{row[1]}}}", row[0])
            with counting:
                num_done += 1
                workers = grading.worker_ids()
                if num_done >= kill_at:
                    if running := sorted({*workers} & {*established}):
                        with suppress(ProcessLookupError):  # the worker killed last, which is not replaced yet
                            os.kill(rng.choice(running), signal.SIGKILL)
                            kill_at = num_done + rng.randint(12, 20)
                            num_killed += 1
                    established = workers
            return grade

        grades = list(threads.map(grade_and_kill, rows))
    assert num_killed > 5
    expected = ["correct" if a % 3 else "incorrect" for a in range(2, 38) for _ in range(2, 7)]
    assert [(grade.status, grade.why) for grade in grades if grade.status not in ("correct", "incorrect")] == []
    assert [grade.status for grade in grades] == expected


def test_memory_is_limited() -> None:
    pool = WorkerPool(1, seconds=20, memory_bytes=2**28)
    try:
        assert pool.ask(*EQUAL) == "same"
        assert pool.ask("x", r"2^{2^{34}}", 20.0) != "same"
        assert pool.ask(*EQUAL) == "same"
        limits = Path(f"/proc/{pool.worker_ids()[0]}/limits")
        if limits.exists():
            line = next(line for line in limits.read_text("utf-8").splitlines() if line.startswith("Max address space"))
            assert int(line.split()[3]) < 2**30
    finally:
        pool.close()


def test_closing_stops_the_workers_and_releases_waiting_calls() -> None:
    pool = WorkerPool(1, seconds=600)
    pool.ask(*EQUAL)
    workers = pool.worker_ids()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(pool.ask, *HANGS) for _ in range(2)]
        time.sleep(0.3)
        pool.close()
        for each in waiting:
            with pytest.raises(StepSpecError, match="closed"):
                each.result(timeout=30)
    assert wait_until_gone(workers)


def test_workers_start_only_for_formulas() -> None:
    with Grading("math") as grading:
        assert grading.grade(r"\boxed{12}", "12").status == "correct"
        assert grading.worker_ids() == []
        grading.grade(r"\boxed{x+1}", "1+x")
        assert len(grading.worker_ids()) == 1


ASKS = """
import sys, time
from stepspec.evaluation.grade import Grading
grading = Grading("math")
grading.grade(r"\\boxed{x+1}", "1+x")
print(*grading.worker_ids(), flush=True)
time.sleep(600)
"""


def test_workers_end_with_their_parent_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ASKS], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert workers
        assert all(map(is_running, workers))
        parent.kill()
    assert wait_until_gone(workers)


def test_workers_import_no_module_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("sympy", "json", "math_verify", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger was imported')", "utf-8")
    program = (
        "from stepspec.evaluation.grade import Grading\n"
        "with Grading('math') as g: print(g.grade(r'\\boxed{x+1}', '1+x').status)"
    )
    command = [sys.executable, "-P", "-c", program]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.stdout == "correct\n", process.stderr
