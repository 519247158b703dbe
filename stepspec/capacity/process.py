"""A service or server in a process of its own: its start, its log, its processor time and its end."""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TypeVar

from stepspec.base.extras import from_extra
from stepspec.errors import EngineError

with from_extra("size", "stepspec costs service"):
    import psutil

T = TypeVar("T")

SERVING = re.compile(r"Serving at (http://[\w.]+:\d+)")
START_S = 300.0
"""Seconds that a service or a server may take to load its models."""
STOP_S = 60.0
POLL_S = 0.1


@contextmanager
def started(command: Sequence[str]) -> Generator[tuple[str, int]]:
    """Start a service, wait until it serves, yield its URL without a path and its process id, and end it.

    Raises:
        EngineError: it does not start.
    """
    with running(command, {}) as (process, log):
        yield wait_until(process, log, served_url), process.pid


def served_url(text: str) -> str | None:
    """Return where a service serves, by its log; None if it does not serve yet."""
    match = SERVING.search(text)
    return match[1] if match else None


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextmanager
def running(command: Sequence[str], variables: Mapping[str, str]) -> Generator[tuple[subprocess.Popen[bytes], IO[str]]]:
    """Start a process and yield it with its log. At the end, end it and what it has started."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, **variables})
        try:
            yield process, log
        finally:
            left = _descendants(process.pid)
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_until(process: subprocess.Popen[bytes], log: IO[str], find: Callable[[str], T | None]) -> T:
    """Wait until something is found, in the log or elsewhere, and return it.

    Raises:
        EngineError: the process ends before, or it takes too long.
    """
    end = time.monotonic() + START_S
    while True:
        exited = process.poll() is not None
        # The process writes through the same file offset, so read without moving it.
        text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
        if not exited and (found := find(text)) is not None:
            return found
        if exited or time.monotonic() > end:
            why = f"ended with exit code {process.returncode}" if exited else f"did not start within {START_S:.0f} s"
            raise EngineError(f"The server {why}. Its log ends with: {text.strip()[-500:]}")
        time.sleep(POLL_S)
