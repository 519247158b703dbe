"""The service on Ray: what a second replica adds, what a request costs, and what happens when a replica is killed."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import psutil
import typer

from evals.bench.service.client import Client, Exchange, chat_request
from evals.bench.service.load import closed_loop, percentiles
from evals.bench.service.process import StartedService, flags, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from stepspec.cli.output import JsonOption
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Percentiles, Record

QUESTION = "How many apples are there?"
CONCURRENCY = 32
PARTS: Sequence[str] = ("proxy", "front", "models")
"""Processes of the application. The proxy is Ray's."""
BACK_S = 60.0
"""Seconds to wait for a killed replica."""
SETTLE_S = 3.0
POLL_S = 0.2


class OfReplicas(Record):
    """What a number of replicas answered."""

    replicas: int
    requests: int
    failed: int
    requests_per_s: float
    seconds: Percentiles | None
    cpu_ms: dict[str, float]
    """Processor time of a request in milliseconds, by part of the application."""


class Killed(Record):
    """What became of the requests while a replica was killed."""

    requests: int
    answered: int
    refused: int
    """With an error in OpenAI's format."""
    lost: int
    """With neither an answer nor such an error."""
    back_s: float | None
    """Seconds from the kill until there were as many replicas as before."""


class Replicas(Scenario):
    """The file that `python -m evals.bench service.replicas --json` writes."""

    max_running: int
    service_s: float
    """Seconds that an engine takes for a request."""
    results: list[OfReplicas]
    killed: Killed
    min_gain: float = 1.8
    max_back_s: float = 30.0

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        return (
            f"Replicas on a local Ray, {CONCURRENCY} concurrent requests of {self.service_s:g} s, of which a replica "
            f"runs {self.max_running}"
        )

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`."""
        one, two, killed = self.results[0], self.results[-1], self.killed
        gain, speed = two.requests_per_s / one.requests_per_s, "requests/s"
        return [
            Check(name="one replica", value=one.requests_per_s, unit=speed),
            Check(name="two replicas", value=two.requests_per_s, unit=speed),
            Check(name="two over one", value=gain, limit=self.min_gain, bound="at least"),
            *(Check(name=f"processor time a request, {part}", value=two.cpu_ms[part], unit="ms") for part in PARTS),
            Check(name="failed requests", value=one.failed + two.failed, limit=0),
            Check(name="requests while a replica was killed", value=killed.requests),
            Check(name="of these, errors in OpenAI's format", value=killed.refused),
            Check(name="of these, lost", value=killed.lost, limit=0),
            Check(name="replica back after", value=killed.back_s, unit="s", limit=self.max_back_s),
        ]


def ray_command(replicas: int, **options: float) -> list[str]:
    """Return the command of a Ray cluster with scripted replicas. `options` are its options, such as `delay`."""
    return [sys.executable, "-m", "evals.bench", "service.ray_server", *flags({"replicas": replicas, **options})]


def processes(service: StartedService, part: str) -> list[psutil.Process]:
    """Return the processes of a part of the application."""
    titles = {"proxy": "ray::ProxyActor", **{name: f"ServeReplica:default:{name}" for name in ("front", "models")}}
    found: list[psutil.Process] = []
    for process in psutil.Process(service.pid).children(recursive=True):
        try:
            if titles[part] in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def cpu_s(service: StartedService) -> dict[str, float]:
    """Return the processor seconds so far of each part of the application."""
    spent = dict.fromkeys(PARTS, 0.0)
    for part in PARTS:
        for process in processes(service, part):
            times = process.cpu_times()
            spent[part] += times.user + times.system
    return spent


def of_replicas(replicas: int, requests: int, max_running: int, service_s: float) -> OfReplicas:
    """Measure the throughput of a number of replicas."""
    with started(ray_command(replicas, delay=service_s, max_running=max_running)) as service:
        return asyncio.run(_throughput(service, replicas, requests))


async def _throughput(service: StartedService, replicas: int, requests: int) -> OfReplicas:
    asked = chat_request(QUESTION)
    async with Client(service.address) as client:
        await closed_loop(client, [asked] * CONCURRENCY * 2, CONCURRENCY)
        before, since = cpu_s(service), time.perf_counter()
        found = await closed_loop(client, [asked] * requests, CONCURRENCY)
        seconds, after = time.perf_counter() - since, cpu_s(service)
    answered = [each for each in found if each.answered]
    return OfReplicas(
        replicas=replicas,
        requests=requests,
        failed=requests - len(answered),
        requests_per_s=len(answered) / seconds,
        seconds=percentiles(each.seconds for each in answered),
        cpu_ms={part: 1000 * (after[part] - before[part]) / requests for part in PARTS},
    )


def killed(seconds: float, max_running: int, service_s: float) -> Killed:
    """Kill one of two replicas under load, see `under_kill`."""
    with started(ray_command(2, delay=service_s, max_running=max_running)) as service:
        return asyncio.run(under_kill(service, seconds))


async def under_kill(service: StartedService, seconds: float) -> Killed:
    """Kill a replica of a running service under load. It goes on for some seconds, and until the replica is back: a
    service that scales by its load would not start another one."""
    whole, stream = chat_request(QUESTION), chat_request(QUESTION, stream=True)
    found: list[Exchange] = []
    async with Client(service.address) as client:
        await closed_loop(client, [whole] * CONCURRENCY, CONCURRENCY)
        end, waiting = time.perf_counter() + seconds, True

        async def load(asked: bytes) -> None:
            while waiting or time.perf_counter() < end:
                found.append(await client.send(asked))

        work = [asyncio.create_task(load(whole if number % 2 else stream)) for number in range(CONCURRENCY // 2)]
        await asyncio.sleep(min(SETTLE_S, seconds / 3))
        victim, num_before = processes(service, "models")[0], len(processes(service, "models"))
        victim.kill()
        since, back_s = time.perf_counter(), None
        while back_s is None and time.perf_counter() - since < BACK_S:
            await asyncio.sleep(POLL_S)
            living = [each for each in processes(service, "models") if each.pid != victim.pid]
            if len(living) == num_before and await _report(client, num_before):
                back_s = time.perf_counter() - since
        waiting = False
        await asyncio.gather(*work)
    return Killed(
        requests=len(found),
        answered=sum(each.answered for each in found),
        refused=sum(not each.answered and each.refused for each in found),
        lost=sum(not each.answered and not each.refused for each in found),
        back_s=back_s,
    )


async def _report(client: Client, replicas: int) -> bool:
    """Whether so many replicas report metrics."""
    text = await client.get("/metrics")
    names = {line.partition('replica="')[2].partition('"')[0] for line in text.splitlines() if 'replica="' in line}
    return len(names) >= replicas


def main(
    requests: Annotated[int, typer.Option(min=100, help="Requests for each number of replicas.")] = 1000,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that a replica runs concurrently.")] = 4,
    service_s: Annotated[float, typer.Option(min=0.01, help="Seconds that the engine takes for a request.")] = 0.2,
    seconds: Annotated[float, typer.Option(min=5, help="Least seconds of load while a replica is killed.")] = 30.0,
    json_file: JsonOption = None,
) -> None:
    """Compare two replicas on a local Ray with one, and kill one of two under load."""
    about = conditions()
    results = [of_replicas(replicas, requests, max_running, service_s) for replicas in (1, 2)]
    figures = {"results": results, "killed": killed(seconds, max_running, service_s)}
    about |= {"max_running": max_running, "service_s": service_s}
    found = Replicas.model_validate({**about, **figures})
    finish_scenario([scenario_table(found)], found, json_file)
