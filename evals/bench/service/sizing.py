"""The simulation of `stepspec size` against real runs: replicas with scripted engines on a local Ray.

Costs are measured on one replica. Then agents that think between their requests use 1, 2 and 4 replicas, and the
simulation predicts their throughput and latency from the costs alone.
"""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Annotated, Any

import typer
from rich.table import Table

from evals.bench.service.client import CHAT, Client, Exchange, http_request
from evals.bench.service.process import StartedService, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.service.replicas import cpu_s, ray_command
from evals.bench.service.script import POLICY, Script
from evals.bench.speed import cells_table
from stepspec.capacity.costs import PASSING, Costs, LoadCosts, nearest_rank
from stepspec.capacity.measurement import Body, chat_body, load_costs, make_client
from stepspec.capacity.simulation import SimulatedService, Station, replica_of, simulate
from stepspec.cli.options import SeedOption
from stepspec.cli.output import JsonOption
from stepspec.cli.progress import make_meter
from stepspec.errors import EngineError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Record
from stepspec.evaluation.report.cells import count, seconds

REPLICAS: Sequence[int] = (1, 2, 4)
MAX_RUNNING = 4
CONCURRENCIES: Sequence[int] = (1, 2, 4)
SCRIPT = Script(num_steps=4, first_s=0.1, step_s=0.1, varies=True, slowdown=0.25)
"""At most 5.7 requests/s of a replica, so that four of them with the load generator leave a core of two idle."""
THINK_S = 1.0
LOADS = {"below saturation": 4, "near saturation": 8}
"""Agents of each replica."""
WARM_UP = 3
"""Requests of each agent before measuring begins."""


class Compared(Record):
    """A real run and its simulation."""

    load: str
    replicas: int
    agents: int
    requests: int
    failed: int
    requests_per_s: float
    simulated_requests_per_s: float
    p50_s: float
    simulated_p50_s: float
    p95_s: float
    simulated_p95_s: float

    @property
    def ratios(self) -> tuple[float, float]:
        """Simulated throughput and p95 over the real ones."""
        return self.simulated_requests_per_s / self.requests_per_s, self.simulated_p95_s / self.p95_s


class SizingCheck(Scenario):
    """The file that `python -m evals.bench service.sizing --json` writes."""

    costs: Costs
    think_s: float
    results: list[Compared]
    max_error: float = 0.15

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        return (
            f"Simulated replicas against real ones on a local Ray, which run {self.costs.max_running} requests each; "
            f"agents think {self.think_s:g} s"
        )

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`."""
        found = [Check(name="failed requests", value=sum(each.failed for each in self.results), limit=0)]
        for each in self.results:
            about = f"{count(each.replicas, 'replica')}, {each.load}"
            for name, ratio in zip(("requests/s", "p95"), each.ratios, strict=True):
                found.append(Check(name=f"error of {name}, {about}", value=abs(ratio - 1), limit=self.max_error))
        return found

    @property
    def details(self) -> tuple[Sequence[str], list[list[str]]]:
        """See `Scenario.details`."""
        return HEADS, rows_of(self)


async def replica_costs(service: StartedService, requests: int) -> list[LoadCosts]:
    """Measure what requests to a replica cost."""
    async with make_client("http://{}:{}".format(*service.address)) as client:
        await load_costs(client, [_body(0)] * 20, 2, lambda: cpu_s(service))  # warms up
        return [
            await load_costs(client, [*map(_body, range(number + requests))], number, lambda: cpu_s(service))
            for number in CONCURRENCIES
        ]


def measured_costs(conditions: dict[str, Any], requests: int) -> Costs:
    """Measure the costs of one replica with scripted engines."""
    with started(_command(1)) as service:
        loads = asyncio.run(replica_costs(service, requests))
    about = {"policy": POLICY, "benchmark": "scripted steps", "temperature": 0.0, "max_running": MAX_RUNNING}
    return Costs.model_validate({**conditions, **about, "engines": {}, "memory": {}, "loads": loads})


def compared(costs: Costs, load: str, replicas: int, requests: int, seed: int) -> Compared:
    """Run agents against real replicas, and simulate the same."""
    agents = LOADS[load] * replicas
    with started(_command(replicas)) as service:
        found, requests_per_s = asyncio.run(_used(service, agents, requests, seed))
    durations = sorted(each.seconds for each in found if each.answered)
    stations = [Station(costs.passing_s(part), 1) for part in PASSING]
    simulated = simulate(SimulatedService(agents, THINK_S, replicas, replica_of(costs, MAX_RUNNING), stations), seed)
    return Compared(
        load=load,
        replicas=replicas,
        agents=agents,
        requests=len(found),
        failed=len(found) - len(durations),
        requests_per_s=requests_per_s,
        simulated_requests_per_s=simulated.requests_per_s,
        p50_s=nearest_rank(durations, 0.5),
        simulated_p50_s=simulated.p50_s,
        p95_s=nearest_rank(durations, 0.95),
        simulated_p95_s=simulated.p95_s,
    )


async def _used(service: StartedService, agents: int, requests: int, seed: int) -> tuple[list[Exchange], float]:
    async with Client(service.address) as client:
        return await use(client, cycle(map(_asked, range(requests))), agents, THINK_S, requests, seed)


async def use(
    client: Client, asked: Iterator[bytes], agents: int, think_s: float, requests: int, seed: int
) -> tuple[list[Exchange], float]:
    """Let agents send requests and think, and return the measured exchanges and how many ended a second.

    Args:
        client: a client of the service.
        asked: requests without an end.
        agents: number of agents.
        think_s: mean seconds between an answer and the next request, exponentially distributed.
        requests: exchanges to measure, after `WARM_UP` of each agent.
        seed: random seed of the agents.

    Raises:
        EngineError: the service answers no request.
    """
    found, rng, enough = list[Exchange](), random.Random(seed), asyncio.Event()
    warm_up = WARM_UP * agents

    async def agent() -> None:
        while True:
            await asyncio.sleep(rng.expovariate(1 / think_s) if think_s else 0)
            found.append(await client.send(next(asked)))
            if len(found) >= warm_up + requests:
                enough.set()

    work = [asyncio.create_task(agent()) for _ in range(agents)]
    ending = asyncio.create_task(enough.wait())
    done, _ = await asyncio.wait([ending, *work], return_when=asyncio.FIRST_COMPLETED)
    for task in (ending, *work):
        task.cancel()
    await asyncio.wait([ending, *work])
    for task in done - {ending}:
        task.result()  # an agent ends by an error only
    measured = found[warm_up : warm_up + requests]
    if not any(each.answered for each in measured):
        raise EngineError("The service answered no request of the agents. Read its log.")
    first, last = found[warm_up - 1].ended, measured[-1].ended
    assert first is not None
    assert last is not None
    return measured, len(measured) / (last - first)


def _command(replicas: int) -> list[str]:
    options = {"steps": SCRIPT.num_steps, "delay": SCRIPT.step_s, "slowdown": SCRIPT.slowdown}
    return [*ray_command(replicas, max_running=MAX_RUNNING, **options), "--varies"]


def _body(number: int) -> Body:
    return chat_body(f"How many apples are in basket {number}?")


def _asked(number: int) -> bytes:
    return http_request(CHAT, json.dumps(_body(number)).encode())


HEADS = ("load", "replicas", "agents", "requests", "requests/s", "simulated", "p50", "simulated", "p95", "simulated")


def rows_of(found: SizingCheck) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.load,
            str(each.replicas),
            str(each.agents),
            f"{each.requests:,}",
            *(f"{value:.2f}" for value in (each.requests_per_s, each.simulated_requests_per_s)),
            *map(seconds, (each.p50_s, each.simulated_p50_s, each.p95_s, each.simulated_p95_s)),
        ]
        for each in found.results
    ]


def sizing_table(found: SizingCheck) -> Table:
    """Return a terminal table of real and simulated figures."""
    return cells_table(found.title, *found.details)


def main(
    requests: Annotated[int, typer.Option(min=20, help="Measured requests of each run.")] = 1000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare the simulation of `stepspec size` with real replicas on a local Ray."""
    about, runs = conditions(), [(load, replicas) for replicas in REPLICAS for load in LOADS]
    with make_meter() as meter:
        meter.begin("costs and runs")
        meter.show(None, 0, 1 + len(runs))
        costs, results = measured_costs(about, requests), list[Compared]()
        for done, (load, replicas) in enumerate(runs, 1):
            meter.show(None, done, 1 + len(runs))
            results.append(compared(costs, load, replicas, requests, seed))
        meter.show(None, 1 + len(runs), 1 + len(runs))
    found = SizingCheck.model_validate({**about, "costs": costs, "think_s": THINK_S, "results": results})
    finish_scenario([sizing_table(found), scenario_table(found)], found, json_file)
