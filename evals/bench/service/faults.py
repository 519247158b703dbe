"""A service among faulty and hostile clients, and at its end: what it leaks, and whether every request ends."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated

import typer
from rich.table import Table

from evals.bench.service.client import CLOSE, Client, Exchange, chat_request
from evals.bench.service.process import MIB, Service, StartedService, raise_file_limit, scripted_command, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.service.script import Script
from evals.bench.service.visits import EXPECTED, MAX_BODY_BYTES, QUESTION, VISITS, Outcome, Visitor
from evals.bench.speed import cells_table
from stepspec.cli.options import SeedOption
from stepspec.cli.output import JsonOption
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Record

CONCURRENCY = 32
OTHERS = 20
"""Disconnects for each visit of every other kind."""
SETTLE_S = 15.0
"""Seconds after which what is left counts as leaked."""
LOAD_S = 1.5
"""Seconds under load before SIGTERM."""
ACCEPTED_S = 0.2
"""A request that was sent this long before SIGTERM was accepted, even if no answer had begun."""


class VisitCount(Record):
    """How the visits of one kind ended."""

    kind: str
    answered: int
    refused: int
    """With an error in OpenAI's format."""
    left: int
    """By the client, as planned."""
    wrong: int
    """In a way that this kind must not end."""


class FaultFigures(Record):
    """What a service had left after the visits, over what it had after a first round of them."""

    seed: int
    visits: list[VisitCount]
    in_flight: int
    """Requests that still run or wait."""
    tasks: int
    """Further asyncio tasks."""
    descriptors: int
    """Further file descriptors."""
    memory_mib: float
    """Further memory."""


class EndFigures(Record):
    """What became of the requests when SIGTERM ended a service under load."""

    accepted: int
    answered: int
    refused: int
    cut_off: int
    """Accepted requests without an answer or an error in OpenAI's format."""
    seconds: float
    """From SIGTERM to the end of the process."""


class Faults(Scenario):
    """The file that `python -m evals.bench service.faults --json` writes."""

    faults: FaultFigures
    end: EndFigures
    max_memory_mib: float = 16.0
    max_end_s: float = 10.0

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        count = sum(each.answered + each.refused + each.left + each.wrong for each in self.faults.visits)
        return f"{count:,} visits of faulty clients, and SIGTERM under load"

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`."""
        found, end = self.faults, self.end
        return [
            Check(name="visits that ended wrong", value=sum(each.wrong for each in found.visits), limit=0),
            Check(name="requests left", value=found.in_flight, limit=0),
            Check(name="tasks left", value=found.tasks, limit=0),
            Check(name="descriptors left", value=found.descriptors, limit=0),
            Check(name="growth of memory", value=found.memory_mib, unit="MiB", limit=self.max_memory_mib),
            Check(name="accepted at SIGTERM", value=end.accepted, limit=1, bound="at least"),
            Check(name="cut off at SIGTERM", value=end.cut_off, limit=0),
            Check(name="end after SIGTERM", value=end.seconds, unit="s", limit=self.max_end_s),
        ]


@dataclass(frozen=True)
class Usage:
    """What a service uses."""

    in_flight: int
    tasks: int
    descriptors: int
    memory_bytes: int


async def faults(
    service: Service, request_s: float, num_disconnects: int, seed: int, settle_s: float = SETTLE_S
) -> FaultFigures:
    """Let faulty clients visit a service, in random order, and return what that left.

    Args:
        service: the service.
        request_s: seconds that a request takes.
        num_disconnects: number of clients that leave at a random time.
        seed: random seed of the visits.
        settle_s: seconds after which what is left counts as leaked.
    """
    await _visit(service, request_s, num_disconnects // 4, seed + 1)  # what is loaded or pooled once is no leak
    before = await _settled(service, None, settle_s)
    ended = await _visit(service, request_s, num_disconnects, seed)
    after = await _settled(service, before, settle_s)
    return FaultFigures(
        seed=seed,
        visits=[_count(kind, ended) for kind in VISITS],
        in_flight=after.in_flight,
        tasks=after.tasks - before.tasks,
        descriptors=after.descriptors - before.descriptors,
        memory_mib=(after.memory_bytes - before.memory_bytes) / MIB,
    )


async def _visit(service: Service, request_s: float, num_disconnects: int, seed: int) -> Counter[tuple[str, Outcome]]:
    """Make visits of all kinds, and return how they ended."""
    rng, ended = random.Random(seed), Counter[tuple[str, Outcome]]()
    others = max(1, num_disconnects // OTHERS)
    kinds = [*chain.from_iterable(repeat(kind, num_disconnects if kind == "disconnect" else others) for kind in VISITS)]
    rng.shuffle(kinds)
    visits = iter([(kind, Visitor(service.address, request_s, random.Random(rng.random()))) for kind in kinds])

    async def work() -> None:
        for kind, visitor in visits:
            try:
                outcome = await VISITS[kind](visitor)
            except OSError:  # the service takes no connection
                outcome = "wrong"
            ended[kind, outcome] += 1

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return ended


def _count(kind: str, ended: Counter[tuple[str, Outcome]]) -> VisitCount:
    outcomes: tuple[Outcome, ...] = ("answered", "refused", "left")
    found = {outcome: ended[kind, outcome] if outcome in EXPECTED[kind] else 0 for outcome in outcomes}
    total = sum(count for (name, _), count in ended.items() if name == kind)
    return VisitCount(kind=kind, **found, wrong=total - sum(found.values()))


async def _settled(service: Service, before: Usage | None, settle_s: float) -> Usage:
    """Return what a service uses when its requests have ended and it is back at what it used before, or at a limit."""
    end = time.monotonic() + settle_s
    while True:
        await asyncio.sleep(min(1.0, settle_s / 5))
        found = await _usage(service)
        is_back = before is None or (found.tasks <= before.tasks and found.descriptors <= before.descriptors)
        if (not found.in_flight and is_back) or time.monotonic() > end:
            return found


async def _usage(service: Service) -> Usage:
    async with Client(service.address) as client:
        in_flight, tasks = await service.num_in_flight(client), await service.num_tasks(client)
    await asyncio.sleep(0.05)  # until the service has closed the connections of these two requests
    return Usage(in_flight, tasks, service.num_descriptors, service.memory_bytes)


async def end_under_load(service: StartedService, concurrency: int = CONCURRENCY, load_s: float = LOAD_S) -> EndFigures:
    """Send SIGTERM to a service after some seconds under load, and return what became of the requests.

    Every request has a connection of its own: one that is sent on an idle connection while the service closes it was
    not accepted, and looks like a lost one.
    """
    found, ending = list[Exchange](), asyncio.Event()

    async def work(number: int) -> None:
        request = chat_request(QUESTION, headers=[CLOSE], stream=bool(number % 2))
        async with Client(service.address) as client:
            while not ending.is_set():
                exchange = await client.send(request)
                found.append(exchange)
                if exchange.failure is not None:
                    return

    working = [asyncio.create_task(work(number)) for number in range(concurrency)]
    await asyncio.sleep(load_s)
    sent = time.perf_counter()
    stopping = asyncio.create_task(asyncio.to_thread(service.stop))
    await asyncio.sleep(0.1)  # requests that come while the service ends are part of the load
    ending.set()
    await asyncio.gather(*working)
    seconds = await stopping
    accepted = [each for each in found if each.status is not None or (each.sent or sent) < sent - ACCEPTED_S]
    answered, refused = sum(each.answered for each in accepted), sum(each.refused for each in accepted)
    return EndFigures(
        accepted=len(accepted),
        answered=answered,
        refused=refused,
        cut_off=len(accepted) - answered - refused,
        seconds=seconds,
    )


VISIT_HEADS = ("visits", "answered", "refused", "left", "wrong")


def visits_table(found: Faults) -> Table:
    """Return a terminal table of how the visits ended."""
    rows = [
        [each.kind, *(f"{count:,}" for count in (each.answered, each.refused, each.left, each.wrong))]
        for each in found.faults.visits
    ]
    return cells_table("how visits ended", VISIT_HEADS, rows)


def main(
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that leave at a random time.")] = 1000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Let faulty and hostile clients visit the service, and look for what they leave."""
    raise_file_limit()
    about, script = conditions(), Script(4, 0.05, 0.05)
    with started(scripted_command(script, max_body_bytes=MAX_BODY_BYTES)) as service:
        left = asyncio.run(faults(service, script.seconds, disconnects, seed))
    with started(scripted_command(script, max_running=8)) as service:
        end = asyncio.run(end_under_load(service))
    found = Faults.model_validate({**about, "faults": left, "end": end})
    finish_scenario([visits_table(found), scenario_table(found)], found, json_file)
