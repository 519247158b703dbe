"""Worker processes that compare formulas, and can be killed: what takes too long holds up nobody for longer."""

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
from typing import Any

from stepspec.errors import StepSpecError
from stepspec.evaluation.grade.compare import Question
from stepspec.evaluation.grade.words import Limits

MAX_RETRIES = 2
"""Of a question whose worker died of something else than the question."""
MAX_FAILED_STARTS = 5
START_SECONDS = 60.0

_PROGRAM = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Reply:
    """`same`, `different`, `gold unreadable`, `answer unreadable`, `memory`, `timeout`, `died` or `failed: ...`."""

    verdict: str


class _Died(Exception):
    """A worker, or its child, is gone that should have replied."""


class _TookTooLong(Exception):
    """A worker has not replied in time."""


class WorkerPool:
    """At most `num_workers` processes, started when they are needed. Any thread may ask.

    Args:
        num_workers: how many questions are answered at once; other threads wait.
        limits: what a question may cost.
        start_seconds: how long a worker may take until it can be asked.
    """

    def __init__(self, num_workers: int, limits: Limits, *, start_seconds: float = START_SECONDS) -> None:
        self._limits = limits
        self._start_seconds = start_seconds
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._slots.put(None)
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self._closed = False

    def ask(self, question: Question) -> Reply:
        """What computer algebra says, or why it says nothing.

        Raises:
            StepSpecError: workers cannot be started, or the pool is closed.
        """
        worker = self._slots.get()
        try:
            for _ in range(1 + MAX_RETRIES):
                # What is not ready is discarded, and must not go back to the others.
                unchecked, worker = worker, None
                worker = self._ready(unchecked)
                try:
                    reply = worker.ask(question, self._limits.seconds)
                except _TookTooLong:
                    reply = Reply("timeout")
                except _Died:
                    continue
                return reply
            return Reply("died")
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Ends all workers. Threads that still wait get a StepSpecError."""
        with self._lock:
            self._closed = True
            for worker in self._alive:
                worker.kill()
        # The others are in use: their threads see that they are gone.
        idle = list[_Worker | None]()
        with suppress(queue.Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for worker in idle:
            if worker is not None:
                self._discard(worker)
            self._slots.put(None)

    def worker_ids(self) -> list[int]:
        """The process ids of the workers that can be asked or are being asked."""
        with self._lock:
            return [worker.child for worker in self._alive if worker.child is not None]

    def _ready(self, worker: "_Worker | None") -> "_Worker":
        """The worker, or a new one in its place, once it can be asked."""
        for _ in range(MAX_FAILED_STARTS):
            worker = worker or self._spawn()
            try:
                worker.wait_until_ready(self._start_seconds)
                return worker
            except _Died:
                self._discard(worker)
                worker = None
            except StepSpecError:
                self._discard(worker)
                raise
        raise StepSpecError(f"A grading worker ended {MAX_FAILED_STARTS} times while it started; is there memory left?")

    def _spawn(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise StepSpecError("An answer was still being graded when grading was closed.")
            worker = _Worker(self._limits)
            self._alive.add(worker)
            return worker

    def _discard(self, worker: "_Worker") -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.kill()
        worker.close()


class _Worker:
    """One process. Used by one thread at a time, but killed by any."""

    def __init__(self, limits: Limits) -> None:
        # `-P` and a path, because a module of the user's own folder must not take the place of a library. A session
        # of its own keeps Ctrl-C from it; it ends with its input, which ends with us.
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
        """Who answers; None while it is not known who does."""
        self._num_questions = 0

    def wait_until_ready(self, seconds: float) -> None:
        """Once there is a child that can be asked; the time for that counts for no question."""
        if not self._has_limits:
            self._write(asdict(self._limits))
            self._has_limits = True
        # What was written while nobody asked tells of a child that died idle, and of the one in its place.
        with suppress(_TookTooLong):
            while self.child is not None:
                self._take(self._read(deadline=0.0))
        try:
            while self.child is None:
                self._take(self._read(time.monotonic() + seconds))
        except _TookTooLong as error:
            raise StepSpecError(f"A grading worker took more than {seconds:g} s to start.") from error

    def ask(self, question: Question, seconds: float) -> Reply:
        """Only if it is ready. Without a reply in time the child is killed."""
        self._num_questions += 1
        deadline = time.monotonic() + seconds
        child = self.child
        try:
            self._write({"id": self._num_questions, **asdict(question)})
            while self.child == child:
                message = self._read(deadline)
                self._take(message)
                if message.get("id") == self._num_questions:
                    return Reply(message["verdict"])
        except _TookTooLong:
            self._kill_child()
            raise
        except _Died:
            self.child = None
            raise
        raise _Died

    def _take(self, message: Mapping[str, Any]) -> None:
        """Keeps track of who answers. What a child replied that is gone since is passed over."""
        if "failed" in message:
            raise StepSpecError(
                f"Symbolic grading needs math-verify: pip install 'stepspec[eval]' ({message['failed']})."
            )
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
        """Ends the process and its child."""
        # Once waited for, its number may be another's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Gives the pipes back; only for the thread that uses the worker."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what could not be written to one that is gone
                pipe.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise _Died from error

    def _read(self, deadline: float) -> Mapping[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise _TookTooLong
                received = os.read(stdout.fileno(), 65_536)
                if not received:
                    raise _Died
                self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _environment() -> dict[str, str]:
    """Ours, with one order of sets for all workers: sympy's results may depend on it."""
    return {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
