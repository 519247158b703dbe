"""Pool of worker processes that compare formulas. One that exceeds its limits is killed and replaced."""

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from stepspec.base.extras import install_command
from stepspec.errors import StepSpecError
from stepspec.evaluation.grade.words import GradingLimits

MAX_RETRIES = 2
"""Retries for a question whose worker died for an unrelated reason."""
MAX_FAILED_STARTS = 5
START_SECONDS = 60.0


class WorkerPool:
    """A pool of at most `num_workers` processes, which start on first use. It is safe to use from several threads.

    Args:
        num_workers: the number of questions that are answered concurrently. Other threads wait.
        limits: time and memory limits for a question.
        start_seconds: how long a worker may take to start, in seconds.
    """

    def __init__(self, num_workers: int, limits: GradingLimits, *, start_seconds: float = START_SECONDS) -> None:
        self._limits = limits
        self._start_seconds = start_seconds
        self._slots: queue.LifoQueue[_WorkerProcess | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._alive: set[_WorkerProcess] = set()
        self._closed = False

    def ask(self, gold: str, found: str, seconds: float) -> str:
        """Return within `seconds` on the clock `same` or `different`, or why two formulas could not be compared: `timeout`, `memory`, `died`,
        `gold unreadable`, `answer unreadable` or `failed: ...`.

        Raises:
            StepSpecError: no worker can start, or the pool is closed.
        """
        worker = self._slots.get()
        try:
            for _ in range(1 + MAX_RETRIES):
                idle, worker = worker, None  # a worker that does not start is not put back
                worker = idle or self._started()
                verdict = worker.ask([gold, found], seconds)
                if verdict not in ("timeout", "memory", "died"):
                    return verdict
                self._discard(worker)
                worker = None
                if verdict != "died":
                    return verdict
            return "died"
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Stop all workers. Threads that still wait get a StepSpecError."""
        with self._lock:
            self._closed = True
            alive = [*self._alive]
        for worker in alive:  # the threads that use one notice that it is gone
            worker.kill()

    def worker_ids(self) -> list[int]:
        """Return the process ids of the workers."""
        with self._lock:
            return [worker.process.pid for worker in self._alive]

    def _started(self) -> "_WorkerProcess":
        for _ in range(MAX_FAILED_STARTS):
            with self._lock:
                if self._closed:
                    raise StepSpecError("An answer was still being graded when grading was closed.")
                worker = _WorkerProcess(self._limits)
                self._alive.add(worker)
            ready = worker.read(time.monotonic() + self._start_seconds)
            if ready == "ready":
                return worker
            self._discard(worker)
            if ready == "timeout":
                raise StepSpecError(f"A grading worker took more than {self._start_seconds:g} s to start.")
            if ready != "died":
                raise StepSpecError(f"Symbolic grading needs math-verify: {install_command('eval')} ({ready}).")
        raise StepSpecError(f"A grading worker exited {MAX_FAILED_STARTS} times during startup. Check the free memory.")

    def _discard(self, worker: "_WorkerProcess") -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.kill()
        worker.close()


class _WorkerProcess:
    """One worker process. One thread uses it at a time, but any thread may kill it."""

    def __init__(self, limits: GradingLimits) -> None:
        # `-P` and a path, so that a module in the user's folder cannot replace a library. A separate session shields
        # the worker from Ctrl-C. It exits when its input closes, at the latest when this process exits. The hash seed
        # is fixed because sympy's results may depend on the order of sets.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), json.dumps(asdict(limits))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def ask(self, question: list[str], seconds: float) -> str:
        """Return the reply to a question. After `timeout` and `died`, the worker has no further use."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return "died"
        return self.read(time.monotonic() + seconds)

    def read(self, deadline: float) -> str:
        """Return the next line of the worker."""
        assert self.process.stdout is not None
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return "timeout"
                more = os.read(self.process.stdout.fileno(), 65_536)
                if not more:
                    return "timeout" if self.process.wait() == -signal.SIGVTALRM else "died"
                received += more
        return json.loads(received)

    def kill(self) -> None:
        """Kill the process."""
        with self._lock:
            if self.process.returncode is None:
                self.process.kill()
                self.process.wait()

    def close(self) -> None:
        """Close the pipes. Only the thread that uses the worker may call this."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unwritten data for a process that is gone
                pipe.close()
