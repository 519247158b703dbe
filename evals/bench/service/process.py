"""The processes of services and servers that a measurement starts, and what they use."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

import psutil

from evals.bench.service.client import Address, Client
from evals.bench.service.script import Script
from stepspec.capacity.process import STOP_S, cpu_s, running, served_url, wait_until

HOST = "127.0.0.1"
HEALTH_S = 5.0
"""Seconds that a server may take to answer `GET /health`."""
MIB = 2**20
NUM_FILES = 16_384
"""Open files that a process may have, for a connection of each stream."""


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
        return cpu_s(self.pid)

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
    return [sys.executable, "-m", "evals.bench", "service.scripted_server", "--port", "0", *flags(given)]


def flags(options: Mapping[str, float]) -> list[str]:
    """Return options by name as arguments of a command line."""
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", f"{value:g}")]


@contextmanager
def started(command: Sequence[str]) -> Generator[StartedService]:
    """Start a service, wait until it serves, and end it.

    Raises:
        EngineError: it does not start.
    """
    with running(command, {}) as (process, log):
        url = urlsplit(wait_until(process, log, served_url))
        yield StartedService(Address(url.hostname or HOST, url.port or 80), process.pid, process)


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
        processes = [stack.enter_context(running(each, variables)) for each in whole]
        for (process, log), address in zip(processes, addresses, strict=True):
            wait_until(process, log, lambda _, address=address: _is_healthy(address) or None)
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


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open more files, where the system permits it."""
    with suppress(ImportError, OSError, ValueError):  # not on Windows, or not permitted
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, most) if most > 0 else NUM_FILES, most))
