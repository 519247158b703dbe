"""A service that gets three times the requests it can answer: what is accepted, what is refused, and how fast."""

import asyncio
from collections.abc import Sequence
from typing import Annotated

import typer

from evals.bench.service.client import Client, Exchange, chat_request
from evals.bench.service.load import open_arrivals, percentiles, poisson_times, share_late
from evals.bench.service.process import Service, raise_file_limit, scripted_command, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.service.script import Script
from stepspec.cli.options import SeedOption
from stepspec.cli.output import JsonOption
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Percentiles, Record

QUESTION = "How many apples are there?"
OVERLOAD = 3.0
"""Offered requests over capacity."""
NORMAL = 0.5
"""The same under normal load."""
BUSY = 503


class OverloadFigures(Record):
    """Figures of an overloaded service. Seconds count from the random time at which a request was to be sent."""

    max_running: int
    max_queued: int
    service_s: float
    """Seconds that an engine takes for a request."""
    capacity_per_s: float
    """Requests a second that the service could answer without any overhead."""
    offered_per_s: float
    seconds: float
    requests: int
    accepted: float
    """Share of the requests that were answered."""
    goodput_per_s: float
    """Answers a second."""
    refused_s: Percentiles | None
    """Until the end of an answer with status 503."""
    accepted_s: Percentiles | None
    normal_s: Percentiles | None
    """The same under half of the capacity."""
    normal_failed: int
    without_retry_after: int
    """Answers with status 503 that do not say when to try again."""
    others: int
    """Requests that got neither an answer nor status 503."""
    late: float
    """Share of requests that the load generator began too late or not."""
    seed: int


class Overload(Scenario):
    """The file that `python -m evals.bench service.overload --json` writes."""

    figures: OverloadFigures
    max_refused_s: float = 0.1
    max_slowdown: float = 2.0
    min_goodput: float = 0.9
    """Least share of the capacity."""
    max_late: float = 0.01

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        found = self.figures
        return (
            f"{found.requests:,} requests at {found.offered_per_s / found.capacity_per_s:g} times the capacity of "
            f"{found.capacity_per_s:g} a second; {found.max_running} run and {found.max_queued} wait"
        )

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`."""
        found, slowdown = self.figures, self.max_slowdown
        refused, accepted, normal = found.refused_s, found.accepted_s, found.normal_s
        medians = accepted and normal and accepted.p50 / normal.p50
        tails = accepted and normal and accepted.p99 / normal.p99
        goodput = found.goodput_per_s / found.capacity_per_s
        return [
            Check(name="share accepted", value=found.accepted),
            Check(name="goodput", value=found.goodput_per_s, unit="requests/s"),
            Check(name="goodput over capacity", value=goodput, limit=self.min_goodput, bound="at least"),
            Check(name="status 503, median", value=refused and refused.p50, unit="s"),
            Check(name="status 503, p99", value=refused and refused.p99, unit="s", limit=self.max_refused_s),
            Check(name="latency under normal load, median", value=normal and normal.p50, unit="s"),
            Check(name="latency of accepted, median", value=accepted and accepted.p50, unit="s"),
            Check(name="accepted over normal, median", value=medians, limit=slowdown),
            Check(name="accepted over normal, p99", value=tails, limit=slowdown),
            Check(name="503 without Retry-After", value=found.without_retry_after, limit=0),
            Check(name="neither answered nor 503", value=found.others + found.normal_failed, limit=0),
            Check(name="share sent late", value=found.late, limit=self.max_late),
        ]


async def overload(
    service: Service, max_running: int, max_queued: int, service_s: float, seconds: float, seed: int
) -> OverloadFigures:
    """Offer random arrivals, first at half of the capacity and then at three times.

    Args:
        service: a service with these limits whose engine takes `service_s` for a request.
        max_running: requests that run concurrently.
        max_queued: requests that wait.
        service_s: seconds that a request takes.
        seconds: seconds of each load.
        seed: random seed of the arrivals.
    """
    request, capacity = chat_request(QUESTION), max_running / service_s
    async with Client(service.address) as client:
        await client.send(request)  # the first request of a process loads what later ones share
        normal = await open_arrivals(client, request, poisson_times(NORMAL * capacity, seconds, seed))
    async with Client(service.address) as client:
        found = await open_arrivals(client, request, poisson_times(OVERLOAD * capacity, seconds, seed + 1))
    accepted, refused = [each for each in found if each.answered], [each for each in found if each.status == BUSY]
    return OverloadFigures(
        max_running=max_running,
        max_queued=max_queued,
        service_s=service_s,
        capacity_per_s=capacity,
        offered_per_s=OVERLOAD * capacity,
        seconds=seconds,
        requests=len(found),
        accepted=len(accepted) / len(found),
        goodput_per_s=len(accepted) / _span(found),
        refused_s=percentiles(each.seconds for each in refused),
        accepted_s=percentiles(each.seconds for each in accepted),
        normal_s=percentiles(each.seconds for each in normal if each.answered),
        normal_failed=sum(not each.answered for each in normal),
        without_retry_after=sum("retry-after" not in each.headers for each in refused),
        others=sum(not each.answered and not (each.status == BUSY and each.refused) for each in found),
        late=max(share_late(normal), share_late(found)),
        seed=seed,
    )


def _span(found: Sequence[Exchange]) -> float:
    """Return the seconds from the first request to the last answer."""
    return max(each.ended or each.due for each in found) - min(each.due for each in found)


def main(
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run concurrently.")] = 16,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that wait.")] = 8,
    service_s: Annotated[float, typer.Option(min=0.01, help="Seconds that the engine takes for a request.")] = 0.2,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 30.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Send three times the requests that the service can answer."""
    raise_file_limit()
    about, limits = conditions(), {"max_running": max_running, "max_queued": max_queued}
    with started(scripted_command(Script(1, service_s), **limits)) as service:
        figures = asyncio.run(overload(service, max_running, max_queued, service_s, seconds, seed))
    found = Overload.model_validate({**about, "figures": figures})
    finish_scenario([scenario_table(found)], found, json_file)
