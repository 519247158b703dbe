"""The process of a service that a measurement starts, and what it uses."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from stepspec.base.extras import from_extra
from stepspec.bench.service.client import Address, Client
from stepspec.bench.service.script import Script
from stepspec.errors import EngineError

with from_extra("dev", "stepspec bench service"):
    import psutil

SERVING = re.compile(r"Serving at http://([\w.]+):(\d+)")
START_S = 300.0
"""Seconds that a service may take to load its models."""
STOP_S = 60.0
POLL_S = 0.1
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
    return [sys.executable, "-m", "stepspec.bench.service.scripted_server", "--port", "0", *flags(given)]


def flags(options: Mapping[str, float]) -> list[str]:
    """Return options by name as arguments of a command line."""
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", f"{value:g}")]


@contextmanager
def started(command: Sequence[str]) -> Generator[StartedService]:
    """Start a service, wait until it serves, and end it.

    Raises:
        EngineError: it does not start.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            yield StartedService(_address(process, log), process.pid, process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[bytes]", log: IO[str]) -> Address:
    """Wait until the service serves, and return its address."""
    end = time.monotonic() + START_S
    while True:
        exited = process.poll() is not None
        # The service writes through the same file offset, so read without moving it.
        text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
        if match := SERVING.search(text):
            return Address(match[1], int(match[2]))
        if exited or time.monotonic() > end:
            why = f"ended with exit code {process.returncode}" if exited else f"did not start within {START_S:.0f} s"
            raise EngineError(f"The service {why}. Its log ends with: {text.strip()[-500:]}")
        time.sleep(POLL_S)
