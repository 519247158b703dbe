"""The processes of services and servers that a measurement starts, and what they use."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import IO, TypeVar

from evals.bench.service.client import Address, Client
from evals.bench.service.script import Script
from stepspec.base.extras import from_extra
from stepspec.errors import EngineError

with from_extra("dev", "stepspec bench service"):
    import psutil

T = TypeVar("T")

HOST = "127.0.0.1"
SERVING = re.compile(r"Serving at http://([\w.]+):(\d+)")
START_S = 300.0
"""Seconds that a service or a server may take to load its models."""
STOP_S = 60.0
POLL_S = 0.1
HEALTH_S = 5.0
"""Seconds that a server may take to answer `GET /health`."""
MIB = 2**20


@dataclass(frozen=True)
class Service:
    """A running service."""

    address: Address
    pid: int

    @property
    def memory_bytes(self) -> int:
        """Resident memory."""
        return psutil.Process(self.pid).memory_info().rss

    @property
    def num_descriptors(self) -> int:
        """Number of open file descriptors."""
        return psutil.Process(self.pid).num_fds()

    @property
    def cpu_s(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    async def num_in_flight(self, client: Client) -> int:
        """Return the number of requests that run or wait, by its metrics."""
        lines = (await client.get("/metrics")).splitlines()
        names = ("stepspec_requests_running", "stepspec_requests_queued")
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(names))

    async def num_tasks(self, client: Client) -> int:
        """Return its number of asyncio tasks. Only a scripted service reports it."""
        return int(await client.get("/tasks"))


@dataclass(frozen=True)
class StartedService(Service):
    """A service that this process has started."""

    process: "subprocess.Popen[bytes]"

    def stop(self) -> float:
        """Send SIGTERM, wait for the end, and return the seconds it took."""
        since = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S)
        return time.perf_counter() - since


def scripted_command(script: Script, **options: float) -> list[str]:
    """Return the command of a service whose engines play a script. `options` are its options, such as `max_running`."""
    given: Mapping[str, float] = {
        "steps": script.num_steps,
        "delay": script.first_s,
        "step_delay": script.step_s,
        **options,
    }
    return [sys.executable, "-m", "evals.bench.service.scripted_server", "--port", "0", *flags(given)]


def flags(options: Mapping[str, float]) -> list[str]:
    """Return options by name as arguments of a command line."""
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", f"{value:g}")]


@contextmanager
def started(command: Sequence[str]) -> Generator[StartedService]:
    """Start a service, wait until it serves, and end it.

    Raises:
        EngineError: it does not start.
    """
    with _running(command, {}) as (process, log):
        yield StartedService(_when(process, log, _address), process.pid, process)


@contextmanager
def healthy(commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> Generator[list[Address]]:
    """Start servers beside each other on free ports, wait until each answers `GET /health`, and end them.

    Args:
        commands: the command of each server, which gets `--host` and `--port`.
        variables: environment variables that they get besides those of this process.

    Raises:
        EngineError: one of them does not start.
    """
    with ExitStack() as stack:
        addresses = [Address(HOST, free_port()) for _ in commands]
        whole = [
            [*command, "--host", HOST, "--port", str(address.port)]
            for command, address in zip(commands, addresses, strict=True)
        ]
        running = [stack.enter_context(_running(each, variables)) for each in whole]
        for (process, log), address in zip(running, addresses, strict=True):
            _when(process, log, lambda _, address=address: _is_healthy(address) or None)
        yield addresses


def free_port() -> int:
    """Return a port of the loopback address on which no process listens."""
    with socket.create_server((HOST, 0)) as free:
        return free.getsockname()[1]


def _is_healthy(address: Address) -> bool:
    with closing(HTTPConnection(*address, timeout=HEALTH_S)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False


@contextmanager
def _running(
    command: Sequence[str], variables: Mapping[str, str]
) -> Generator[tuple["subprocess.Popen[bytes]", IO[str]]]:
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


def _when(process: "subprocess.Popen[bytes]", log: IO[str], find: Callable[[str], T | None]) -> T:
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


def _address(text: str) -> Address | None:
    """Return where a service serves, by its log; None if it does not serve yet."""
    match = SERVING.search(text)
    return Address(match[1], int(match[2])) if match else None
