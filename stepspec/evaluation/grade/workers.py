"""Pool of worker processes that compare formulas. One that exceeds its limits is killed and replaced."""

import json
import os
import queue
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from stepspec.base.extras import install_command
from stepspec.errors import StepSpecError

MAX_TRIES = 3  # of a start and of a question, if the worker dies for an unrelated reason
START_SECONDS = 60.0
MEMORY_BYTES = 2**30  # address space of a worker


class WorkerPool:
    """A pool of at most `num_workers` processes, which start on first use. Threads that find none idle wait for one."""

    def __init__(self, num_workers: int, seconds: float, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._slots: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._alive: list[_Process] = []
        self._closed = False

    def ask(self, gold: str, found: str, seconds: float) -> str:
        """Return `same`, `different`, `timeout` after `seconds` on the clock, or a sentence that says what went wrong.

        Raises:
            StepSpecError: no worker can start, or the pool is closed.
        """
        worker = self._slots.get()
        try:
            for _ in range(MAX_TRIES):
                idle, worker = worker, None  # a worker that does not start is not put back
                worker = idle or self._started()
                verdict = worker.ask(gold, found, self._seconds, seconds)
                if verdict not in ("timeout", "died"):
                    return verdict
                self._discard(worker)
                worker = None
                if verdict == "timeout":
                    return verdict
            return "The process that compares formulas ended again and again."
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Stop all workers. Threads that still wait get a StepSpecError."""
        self._closed = True
        for worker in [*self._alive]:  # the threads that use one notice that it is gone
            worker.kill()

    def worker_ids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.pid for worker in [*self._alive]]

    def _started(self) -> "_Process":
        verdict = "died"
        for _ in range(MAX_TRIES):
            worker = _Process(self._memory_bytes, START_SECONDS)
            self._alive.append(worker)
            verdict = "closed" if self._closed else worker.reply()
            if verdict == "ready" and not self._closed:
                return worker
            self._discard(worker)
            if verdict != "died":
                break
        reasons = {
            "closed": "An answer was still being graded when grading was closed.",
            "timeout": f"A grading worker took more than {START_SECONDS:g} s to start.",
            "died": "A grading worker ended while it started. Check the free memory.",
        }
        verdict = "closed" if self._closed else verdict
        raise StepSpecError(
            reasons.get(verdict, f"Symbolic grading needs math-verify: {install_command('eval')} ({verdict}).")
        )

    def _discard(self, worker: "_Process") -> None:
        self._alive.remove(worker)
        worker.kill()
        with suppress(OSError):  # unwritten data for a process that is gone
            worker.communicate()


class _Process(subprocess.Popen[str]):
    """One worker process, which its own timers end. One thread uses it at a time, but any thread may kill it."""

    def __init__(self, memory_bytes: int, start_seconds: float) -> None:
        # `-P` and a path, so that a module in the user's folder cannot replace a library. A separate session shields
        # the worker from Ctrl-C. It exits when its input closes, at the latest when this process exits. The hash seed
        # is fixed because sympy's results may depend on the order of sets.
        super().__init__(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), f"{memory_bytes}", f"{start_seconds}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            encoding="utf-8",
            start_new_session=True,
        )

    def ask(self, *question: str | float) -> str:
        """Return the reply to a question. After `timeout` and `died`, the worker has no further use."""
        try:
            print(json.dumps(question), file=self.stdin, flush=True)
        except OSError:
            return "died"
        return self.reply()

    def reply(self) -> str:
        """Return the next line of the worker."""
        assert self.stdout is not None
        line = self.stdout.readline()
        if line.endswith("\n"):
            return json.loads(line)
        return "timeout" if self.wait() in (-signal.SIGVTALRM, -signal.SIGALRM) else "died"
