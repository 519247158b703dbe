"""Pool of worker processes that compare formulas. A worker that exceeds its time limit is killed."""

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stepspec.base.extras import install_command
from stepspec.errors import StepSpecError
from stepspec.evaluation.grade.words import GradingLimits

MAX_RETRIES = 2
"""Retries for a question whose worker died for an unrelated reason."""
MAX_FAILED_STARTS = 5
START_SECONDS = 60.0

_PROGRAM = Path(__file__).with_name("worker.py")


class Question(NamedTuple):
    """Two formulas to compare."""

    gold: str
    found: str


@dataclass(frozen=True)
class GradingReply:
    """A worker's reply.

    `verdict` is `same`, `different`, `gold unreadable`, `answer unreadable`, `memory`, `timeout`, `died` or
    `failed: ...`.
    """

    verdict: str


class _WorkerDied(Exception):
    """A worker or its child exited before it replied."""


class _WorkerTimeout(Exception):
    """A worker did not reply in time."""


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
        self._slots: queue.LifoQueue[_GradingProcess | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._alive: set[_GradingProcess] = set()
        self._closed = False

    def ask(self, question: Question, seconds: float) -> GradingReply:
        """Return the verdict of computer algebra, or the reason why there is none.

        Raises:
            StepSpecError: no worker can start, or the pool is closed.
        """
        worker = self._slots.get()
        try:
            for _ in range(1 + MAX_RETRIES):
                # `_ready` discards a worker that is not ready, so do not put it back into the pool.
                unchecked, worker = worker, None
                worker = self._ready(unchecked)
                try:
                    reply = worker.ask(question, seconds)
                except _WorkerTimeout:
                    reply = GradingReply("timeout")
                except _WorkerDied:
                    continue
                return reply
            return GradingReply("died")
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Stop all workers. Threads that still wait get a StepSpecError."""
        with self._lock:
            self._closed = True
            for worker in self._alive:
                worker.kill()
        # The other workers are in use. Their threads notice that the processes are gone.
        idle = list[_GradingProcess | None]()
        with suppress(queue.Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for worker in idle:
            if worker is not None:
                self._discard(worker)
            self._slots.put(None)

    def worker_ids(self) -> list[int]:
        """Return the process ids of the children that are ready or busy."""
        with self._lock:
            return [worker.child for worker in self._alive if worker.child is not None]

    def _ready(self, worker: "_GradingProcess | None") -> "_GradingProcess":
        """Return the worker, or a replacement, as soon as it is ready."""
        for _ in range(MAX_FAILED_STARTS):
            worker = worker or self._spawn()
            try:
                worker.wait_until_ready(self._start_seconds)
                return worker
            except _WorkerDied:
                self._discard(worker)
                worker = None
            except StepSpecError:
                self._discard(worker)
                raise
        raise StepSpecError(f"A grading worker exited {MAX_FAILED_STARTS} times during startup. Check the free memory.")

    def _spawn(self) -> "_GradingProcess":
        with self._lock:
            if self._closed:
                raise StepSpecError("An answer was still being graded when grading was closed.")
            worker = _GradingProcess(self._limits)
            self._alive.add(worker)
            return worker

    def _discard(self, worker: "_GradingProcess") -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.kill()
        worker.close()


class _GradingProcess:
    """One worker process. One thread uses it at a time, but any thread may kill it."""

    def __init__(self, limits: GradingLimits) -> None:
        # `-P` and a path, so that a module in the user's folder cannot replace a library. A separate session shields
        # the worker from Ctrl-C. The worker exits when its input closes, at the latest when this process exits.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        self._limits = limits
        self._unread = b""
        self._has_limits = False
        self.child: int | None = None
        """Process id of the child that answers questions; None while it is unknown."""
        self._num_questions = 0

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until a child is ready. This time does not count toward any question.

        Raises:
            StepSpecError: the worker takes more than `seconds` to start.
        """
        if not self._has_limits:
            self._write(asdict(self._limits))
            self._has_limits = True
        # Messages from idle time report a child that died and its replacement.
        with suppress(_WorkerTimeout):
            while self.child is not None:
                self._handle(self._read(deadline=0.0))
        try:
            while self.child is None:
                self._handle(self._read(time.monotonic() + seconds))
        except _WorkerTimeout as error:
            raise StepSpecError(f"A grading worker took more than {seconds:g} s to start.") from error

    def ask(self, question: Question, seconds: float) -> GradingReply:
        """Send a question to a worker that is ready. Kill the child if it does not reply in time."""
        self._num_questions += 1
        deadline = time.monotonic() + seconds
        child = self.child
        try:
            self._write({"id": self._num_questions, **question._asdict()})
            while self.child == child:
                message = self._read(deadline)
                self._handle(message)
                if message.get("id") == self._num_questions:
                    return GradingReply(message["verdict"])
        except _WorkerTimeout:
            self._kill_child()
            raise
        except _WorkerDied:
            self.child = None
            raise
        raise _WorkerDied

    def _handle(self, message: Mapping[str, Any]) -> None:
        """Track the child that answers. Replies of children that have exited are ignored."""
        if "failed" in message:
            raise StepSpecError(f"Symbolic grading needs math-verify: {install_command('eval')} ({message['failed']}).")
        if "ready" in message:
            self.child = message["ready"]
        elif message["retire"]:
            self.child = None

    def _kill_child(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its child."""
        # After the process is reaped, the system may reuse its process id.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close the pipes. Only the thread that uses the worker may call this."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unwritten data for a process that is gone
                pipe.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise _WorkerDied from error

    def _read(self, deadline: float) -> Mapping[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _WorkerTimeout
                received = os.read(stdout.fileno(), 65_536)
                if not received:
                    raise _WorkerDied
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _environment() -> dict[str, str]:
    """Return this process's environment with a fixed hash seed, because sympy's results may depend on set order."""
    return {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
