"""What the service adds to a request, with engines that answer instantly: throughput, latency and memory."""

import asyncio
import statistics
import time
from collections.abc import Callable
from itertools import repeat
from typing import Annotated

import typer

from evals.bench.service.client import Client, chat_request
from evals.bench.service.load import closed_loop
from evals.bench.service.process import MIB, Service, scripted_command, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.service.script import POLICY, Script, scripted_pair
from stepspec.api.session import StepSpec
from stepspec.cli.output import JsonOption
from stepspec.cli.progress import make_meter
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Record

QUESTION = "How many apples are there?"
BLOCKS = 10
WARM_UP_BLOCKS = 2
"""Blocks of requests after which memory should not grow any more."""
TURNS = 200
"""Requests of which the median latency counts, after as many that warm up."""
Progress = Callable[[None, int, int], None]


class InstantFigures(Record):
    """Figures of the service with instant engines."""

    concurrency: int
    requests: int
    failed: int
    requests_per_s: float
    cpu_ms: float
    """Processor time of the service for a request."""
    generator_cpu_ms: float
    """The same of the load generator, which uses the processors beside it."""
    http_ms: float
    """Median latency of one request at a time over HTTP."""
    in_process_ms: float
    """The same for the same request through `StepSpec`, alternating with the others."""
    memory_mib: list[float]
    """Memory of the service after each tenth of the requests."""


class Instant(Scenario):
    """The file that `python -m evals.bench service.instant --json` writes."""

    figures: InstantFigures
    min_requests_per_s: float = 300.0
    max_added_ms: float = 5.0
    max_growth_mib: float = 8.0

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        found = self.figures
        return f"{found.requests:,} requests with an instant engine, concurrency {found.concurrency}"

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`."""
        found, memory = self.figures, self.figures.memory_mib
        added_ms, growth_mib = found.http_ms - found.in_process_ms, memory[-1] - memory[WARM_UP_BLOCKS - 1]
        return [
            Check(name="throughput", value=found.requests_per_s, unit="requests/s", limit=self.min_requests_per_s,
                  bound="at least"),
            Check(name="processor time a request", value=found.cpu_ms, unit="ms"),
            Check(name="the same of the load generator", value=found.generator_cpu_ms, unit="ms"),
            Check(name="latency over HTTP, median", value=found.http_ms, unit="ms"),
            Check(name="latency in process, median", value=found.in_process_ms, unit="ms"),
            Check(name="added latency", value=added_ms, unit="ms", limit=self.max_added_ms),
            Check(name="memory at the end", value=memory[-1], unit="MiB"),
            Check(name="growth of memory after warm-up", value=growth_mib, unit="MiB", limit=self.max_growth_mib),
            Check(name="failed requests", value=found.failed, limit=0),
        ]  # fmt: skip


async def instant(
    service: Service, spec: StepSpec, concurrency: int, num_requests: int, progress: Progress
) -> InstantFigures:
    """Measure a service with instant engines.

    Args:
        service: the service.
        spec: a session with the same engines in this process.
        concurrency: requests beside each other.
        num_requests: number of requests; a multiple of `BLOCKS`.
        progress: called with None, and the numbers of finished and of all requests.
    """
    request, memory, failed = chat_request(QUESTION), list[float](), 0
    async with Client(service.address) as client:
        http_ms, in_process_ms = await _latencies(client, spec, request)
        since, cpu_s, own_cpu_s = time.perf_counter(), service.cpu_s, time.process_time()
        for number in range(BLOCKS):
            found = await closed_loop(client, repeat(request, num_requests // BLOCKS), concurrency)
            failed += sum(not each.answered for each in found)
            memory.append(service.memory_bytes / MIB)
            progress(None, (number + 1) * (num_requests // BLOCKS), num_requests)
        seconds, own_cpu_s = time.perf_counter() - since, time.process_time() - own_cpu_s
    return InstantFigures(
        concurrency=concurrency,
        requests=num_requests,
        failed=failed,
        requests_per_s=num_requests / seconds,
        cpu_ms=(service.cpu_s - cpu_s) / num_requests * 1000,
        generator_cpu_ms=own_cpu_s / num_requests * 1000,
        http_ms=http_ms,
        in_process_ms=in_process_ms,
        memory_mib=memory,
    )


async def _latencies(client: Client, spec: StepSpec, request: bytes) -> tuple[float, float]:
    """Return the median milliseconds of a request over HTTP and in process."""
    http, in_process = list[float](), list[float]()
    for _ in range(2 * TURNS):
        http.append((await client.send(request)).seconds)
        since = time.perf_counter()
        await spec.generate(QUESTION)
        in_process.append(time.perf_counter() - since)
    return statistics.median(http[TURNS:]) * 1000, statistics.median(in_process[TURNS:]) * 1000


def main(
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 16,
    requests: Annotated[int, typer.Option(min=10, help="Number of requests.")] = 10_000,
    json_file: JsonOption = None,
) -> None:
    """Measure what the service adds to a request, with engines that answer instantly."""
    about, script = conditions(), Script()
    count = -(-requests // BLOCKS) * BLOCKS
    with started(scripted_command(script)) as service, make_meter() as meter:
        spec = StepSpec(policy=POLICY, pair=scripted_pair(script))
        meter.begin("requests")
        figures = asyncio.run(instant(service, spec, concurrency, count, meter.show))
    found = Instant.model_validate({**about, "figures": figures})
    finish_scenario([scenario_table(found)], found, json_file)
