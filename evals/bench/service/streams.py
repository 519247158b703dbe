"""Many concurrent streams that each get a chunk a second: how soon they begin, and whether chunks come in time."""

import asyncio
import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import typer

from evals.bench.service.client import Client, Exchange, chat_request
from evals.bench.service.load import even_times, open_arrivals, percentiles, share_late
from evals.bench.service.process import MIB, Service, raise_file_limit, scripted_command, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.service.script import Script
from stepspec.cli.output import JsonOption
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Percentiles, Record

QUESTION = "How many apples are there?"


class StreamFigures(Record):
    """Figures of many streams. Seconds count from the time at which a stream was to be opened."""

    streams: int
    rate: float
    """Streams opened a second."""
    seconds: float
    """Seconds that a stream lasts."""
    chunk_s: float
    """Seconds between two chunks."""
    incomplete: int
    """Streams that did not end with their answer."""
    late: float
    """Share of streams that the load generator opened too late, so that it and not the service was slow."""
    status_s: Percentiles | None
    """Until the status line."""
    content_s: Percentiles | None
    """Until the first text."""
    longest_gap_s: Percentiles | None
    """The longest time between two chunks, over streams."""
    peak_memory_mib: float
    service_cpu: float
    """Processors that the service kept busy, of which it can use one."""


class Streams(Scenario):
    """The file that `python -m evals.bench service.streams --json` writes."""

    figures: StreamFigures
    max_first_s: float = 0.25
    """Limit of the 99th percentiles, and of what a gap may last beyond the time between two chunks."""
    max_late: float = 0.01

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        found = self.figures
        return f"{found.streams:,} streams of {found.seconds:g} s, {found.rate:g} opened a second"

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`."""
        found, most = self.figures, self.max_first_s
        status, content, gap = found.status_s, found.content_s, found.longest_gap_s
        return [
            Check(name="status line, median", value=status and status.p50, unit="s"),
            Check(name="status line, p99", value=status and status.p99, unit="s", limit=most),
            Check(name="first text, median", value=content and content.p50, unit="s"),
            Check(name="first text, p99", value=content and content.p99, unit="s", limit=most),
            Check(name="longest gap, p99", value=gap and gap.p99, unit="s", limit=found.chunk_s + most),
            Check(name="incomplete streams", value=found.incomplete, limit=0),
            Check(name="share opened late", value=found.late, limit=self.max_late),
            Check(name="processors of the service", value=found.service_cpu),
            Check(name="memory of the service, peak", value=found.peak_memory_mib, unit="MiB"),
        ]


async def streams(service: Service, script: Script, count: int, rate: float) -> StreamFigures:
    """Open streams at a rate and read them to their ends.

    Args:
        service: a service that plays the script.
        script: the script.
        count: number of streams.
        rate: streams opened a second.
    """
    request, memory = chat_request(QUESTION, stream=True), list[int]()

    async def watch() -> None:
        while True:
            memory.append(service.memory_bytes)
            await asyncio.sleep(0.5)

    async with Client(service.address) as client:
        await client.send(request)  # the first request of a process loads what later ones share
        watching = asyncio.create_task(watch())
        gc.freeze()  # so that a full collection does not stop the generator among many connections
        since, cpu_s = time.perf_counter(), service.cpu_s
        found = await open_arrivals(client, request, even_times(rate, count), max_open=count)
        service_cpu = (service.cpu_s - cpu_s) / (time.perf_counter() - since)
        gc.unfreeze()
        watching.cancel()
    return StreamFigures(
        streams=count,
        rate=rate,
        seconds=script.seconds,
        chunk_s=script.step_s,
        incomplete=sum(not each.answered for each in found),
        late=share_late(found),
        status_s=percentiles(each.status_at - each.due for each in found if each.status_at is not None),
        content_s=percentiles(each.content_at - each.due for each in found if each.content_at is not None),
        longest_gap_s=percentiles(_longest_gaps(found)),
        peak_memory_mib=max(memory) / MIB,
        service_cpu=service_cpu,
    )


def _longest_gaps(found: Sequence[Exchange]) -> list[float]:
    return [max(after - before for before, after in pairwise(each.chunks)) for each in found if len(each.chunks) > 1]


def main(
    number: Annotated[int, typer.Option("--streams", min=1, help="Number of streams.")] = 1000,
    rate: Annotated[float, typer.Option(min=0.1, help="Streams opened a second.")] = 100.0,
    chunks: Annotated[int, typer.Option(min=2, max=120, help="Steps of each stream, one a second.")] = 16,
    json_file: JsonOption = None,
) -> None:
    """Open many streams that get a chunk a second, and measure how soon they begin."""
    raise_file_limit()
    about, script = conditions(), Script(chunks, 0.0, 1.0)
    with started(scripted_command(script, max_running=number)) as service:
        figures = asyncio.run(streams(service, script, number, rate))
    found = Streams.model_validate({**about, "figures": figures})
    finish_scenario([scenario_table(found)], found, json_file)
