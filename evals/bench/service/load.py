"""Load on a service: a closed loop with a number of requests beside each other, or arrivals at given times."""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate

from evals.bench.service.client import Client, Exchange
from stepspec.capacity.costs import nearest_rank
from stepspec.evaluation.records import Percentiles

MAX_OPEN = 2000
"""Most requests of open arrivals that run beside each other. Further ones are not sent and count as failed."""
LATE_S = 0.05
"""A request that begins this much later than it was due shows that the generator is too slow."""


async def closed_loop(client: Client, requests: Iterable[bytes], concurrency: int) -> list[Exchange]:
    """Send all requests, a number of them beside each other, and return the exchanges in the order of their ends."""
    waiting, found = iter(requests), list[Exchange]()

    async def work() -> None:
        for request in waiting:
            found.append(await client.send(request))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return found


async def open_arrivals(
    client: Client, request: bytes, times: Sequence[float], max_open: int = MAX_OPEN
) -> list[Exchange]:
    """Send a request at each of the given times, in seconds from now, however long the answers take.

    Latencies count from these times. Otherwise a slow generator would hide a slow service.
    """
    start, running = time.perf_counter(), set[asyncio.Task[Exchange]]()
    found = list[Exchange]()
    for each in times:
        due = start + each
        if (rest := due - time.perf_counter()) > 0:
            await asyncio.sleep(rest)
        if len(running) >= max_open:
            found.append(Exchange(due, ended=due, failure="not sent"))
            continue
        task = asyncio.create_task(client.send(request, due))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(lambda task: found.append(task.result()))
    while running:
        await asyncio.wait(running)
    await asyncio.sleep(0)  # for the callbacks of the last one
    return found


def poisson_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of random arrivals at a rate, in seconds."""
    rng = random.Random(seed)
    gaps = (rng.expovariate(rate) for _ in range(int(2 * rate * seconds) + 100))
    return [each for each in accumulate(gaps) if each < seconds]


def even_times(rate: float, count: int) -> list[float]:
    """Return the times of arrivals with equal gaps, in seconds."""
    return [number / rate for number in range(count)]


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """Return percentiles (nearest rank); None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (nearest_rank(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50=p50, p90=p90, p99=p99)


def share_late(found: Sequence[Exchange]) -> float:
    """Return the share of requests that the generator began too late or not."""
    return sum(each.sent is None or each.sent - each.due > LATE_S for each in found) / len(found)
