"""A discrete-event simulation of agents that use replicas.

An agent thinks, sends a request, waits for the answer, and thinks again. A request passes the proxy and the front,
which each work on one request after the other. It then goes to the less busy one of two random replicas. A replica
shares its speed equally between its running requests; further ones wait.
"""

import heapq
import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from stepspec.base.extras import from_extra
from stepspec.capacity.costs import PASSING, Costs, nearest_rank
from stepspec.evaluation.records import Record

with from_extra("size", "stepspec size"):
    import simpy

CYCLES = 2
"""Requests of each agent before measuring begins, on average."""
MIN_REQUESTS = 20_000
"""Fewest requests that are measured. With 20,000, a p95 varies by 1% to 3% (one standard deviation) between seeds."""


@dataclass(frozen=True)
class Station:
    """Processes that every request passes, each with one request at a time.

    Attributes:
        seconds: processor seconds of a request.
        processes: their number.
    """

    seconds: float
    processes: int


@dataclass(frozen=True)
class ReplicaSpeed:
    """The total speed of a replica by its running requests. One request alone has speed 1.

    Attributes:
        points: numbers of running requests and speeds, in increasing order. The speed is interpolated between them, and
            constant after the last one.
    """

    points: Sequence[tuple[float, float]]

    def at(self, running: int) -> float:
        """Return the speed with so many running requests."""
        place = bisect_left(self.points, (running, 0.0))
        if place == len(self.points):
            return self.points[-1][1]
        if place == 0:
            return self.points[0][1] * running / self.points[0][0]
        (low, slow), (high, fast) = self.points[place - 1 : place + 1]
        return slow + (fast - slow) * (running - low) / (high - low)


@dataclass(frozen=True)
class SimulatedReplica:
    """What is known of a replica.

    Attributes:
        works_s: seconds of requests that run alone in it, to sample from.
        speed: its speed.
        max_running: most requests that run concurrently.
    """

    works_s: Sequence[float]
    speed: ReplicaSpeed
    max_running: int

    @property
    def mean_s(self) -> float:
        """Mean seconds of a request that runs alone."""
        return sum(self.works_s) / len(self.works_s)

    @property
    def most_per_s(self) -> float:
        """Requests a second that it answers at its highest speed."""
        most = min(self.max_running, math.ceil(self.speed.points[-1][0]))  # the speed is constant beyond
        return max(self.speed.at(number) for number in range(1, most + 1)) / self.mean_s


@dataclass(frozen=True)
class SimulatedService:
    """What is simulated.

    Attributes:
        agents: number of agents.
        think_s: mean seconds between an answer and the agent's next request, exponentially distributed.
        replicas: number of replicas.
        replica: what is known of each.
        stations: what a request passes before it.
    """

    agents: int
    think_s: float
    replicas: int
    replica: SimulatedReplica
    stations: Sequence[Station] = ()


class Simulated(Record):
    """What a simulation found. Seconds of a request are from its sending to its answer."""

    agents: int
    replicas: int
    requests: int
    """Measured requests."""
    requests_per_s: float
    mean_s: float
    p50_s: float
    p95_s: float
    busy: float
    """Share of time in which a replica runs a request."""
    running: float
    """Mean number of running requests of a replica."""
    waiting: float
    """Mean number of requests that wait at a replica."""


def replica_of(costs: Costs, max_running: int) -> SimulatedReplica:
    """Return what measured costs say about a replica.

    The processor seconds of what a request passes before are not part of its work. At a number of concurrent
    requests, those of them are in the replica that are not in these processes: the requests a second times the seconds.
    """
    passing_s = sum(costs.passing_s(part) for part in PASSING)
    works = [max(seconds - passing_s, 0.05 * seconds) for seconds in costs.alone.durations_s]
    mean_s = sum(works) / len(works)
    points = [(1.0, 1.0)]
    for each in sorted(costs.loads, key=lambda load: load.concurrency):
        number = each.concurrency - each.requests_per_s * passing_s
        if each.concurrency > 1 and number > points[-1][0]:
            points.append((number, each.requests_per_s * mean_s))
    largest = costs.busiest.concurrency
    if len(points) > 1 and points[-1][0] < largest:  # a replica with a queue runs as many all the time
        (low, slow), (high, fast) = points[-2:]
        points.append((largest, fast + (fast - slow) * (largest - high) / (high - low)))
    return SimulatedReplica(works, ReplicaSpeed(points), max_running)


def simulate(setting: SimulatedService, seed: int = 0, requests: int | None = None) -> Simulated:
    """Simulate a setting until a number of requests is measured, by default `MIN_REQUESTS` or one of each agent.

    The same seed gives the same result.
    """
    return _Simulation(setting, seed).run(requests or max(MIN_REQUESTS, setting.agents))


class _SharedProcessor:
    """A replica in a simulation: processor sharing in virtual time.

    Virtual time passes as fast as each running request is served. A request ends when as much virtual time has passed
    as its work, so only the first of them needs an event of the simulation.
    """

    def __init__(self, environment: simpy.Environment, rates: Sequence[float]) -> None:
        """`rates` are the speeds of each request by the number of running ones, from 0 to the most that run."""
        self._environment = environment
        self._rates = rates
        self._running: list[tuple[float, int, simpy.Event]] = []
        """By the virtual time of their ends."""
        self._waiting: deque[tuple[float, simpy.Event]] = deque()
        self._virtual = self._since = 0.0
        self._number = self._version = 0
        self.busy_s = self.running_s = self.waiting_s = 0.0

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    def answer(self, work_s: float) -> simpy.Event:
        """Take a request, and return the event of its answer."""
        answered = self._environment.event()
        self.advance()
        self._waiting.append((work_s, answered))
        self._start()
        return answered

    def advance(self) -> None:
        """Let the time since the last event pass."""
        now, running = self._environment.now, len(self._running)
        passed = now - self._since
        self._since = now
        self._virtual += passed * self._rates[running]
        self.busy_s += passed * (running > 0)
        self.running_s += passed * running
        self.waiting_s += passed * len(self._waiting)

    def _start(self) -> None:
        while self._waiting and len(self._running) < len(self._rates) - 1:
            work_s, answered = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._virtual + work_s, self._number, answered))
        self._version += 1
        if not self._running:
            return
        rest = max(0.0, self._running[0][0] - self._virtual) / self._rates[len(self._running)]
        timeout: Any = self._environment.timeout(rest, self._version)
        timeout.callbacks.append(self._end)

    def _end(self, event: Any) -> None:
        if event.value != self._version:  # another request has come or gone since
            return
        self.advance()
        end, _, answered = heapq.heappop(self._running)
        self._virtual = max(self._virtual, end)
        answered.succeed()
        self._start()


class _StationQueue:
    """A station in a simulation. It works in the order of arrival, so the end of a request is known when it comes."""

    def __init__(self, station: Station) -> None:
        self._seconds = station.seconds
        self._free = [0.0] * station.processes

    def passed(self, now: float) -> float:
        """Take a request, and return the seconds until it has passed."""
        end = max(now, self._free[0]) + self._seconds
        heapq.heapreplace(self._free, end)
        return end - now


class _Simulation:
    def __init__(self, setting: SimulatedService, seed: int) -> None:
        self._setting, self._random = setting, random.Random(seed)
        self._environment = simpy.Environment()
        replica, most = setting.replica, min(setting.replica.max_running, setting.agents)
        rates = [0.0, *(replica.speed.at(number) / number for number in range(1, most + 1))]
        self._servers = [_SharedProcessor(self._environment, rates) for _ in range(setting.replicas)]
        self._queues = [_StationQueue(each) for each in setting.stations if each.seconds]
        self._durations: list[float] = []
        self._ended = 0
        self._next: tuple[int, simpy.Event] = (0, self._environment.event())

    def run(self, requests: int) -> Simulated:
        for _ in range(self._setting.agents):
            self._environment.process(self._agent())
        self._run_until(max(CYCLES * self._setting.agents, requests // 20))
        since, before = self._environment.now, self._totals()
        self._durations.clear()
        self._run_until(requests)
        passed, after = self._environment.now - since, self._totals()
        busy, running, waiting = ((b - a) / passed / len(self._servers) for a, b in zip(before, after, strict=True))
        ordered = sorted(self._durations)
        return Simulated(
            agents=self._setting.agents,
            replicas=self._setting.replicas,
            requests=len(ordered),
            requests_per_s=len(ordered) / passed,
            mean_s=sum(ordered) / len(ordered),
            p50_s=nearest_rank(ordered, 0.5),
            p95_s=nearest_rank(ordered, 0.95),
            busy=busy,
            running=running,
            waiting=waiting,
        )

    def _run_until(self, requests: int) -> None:
        """Run until so many further requests have ended."""
        self._next = self._ended + requests, self._environment.event()
        self._environment.run(self._next[1])

    def _totals(self) -> tuple[float, float, float]:
        for each in self._servers:
            each.advance()
        busy, running, waiting = zip(*((e.busy_s, e.running_s, e.waiting_s) for e in self._servers), strict=True)
        return sum(busy), sum(running), sum(waiting)

    def _agent(self) -> Generator[simpy.Event, Any, None]:
        environment, setting, sampled = self._environment, self._setting, self._random
        works, rate = setting.replica.works_s, 1 / setting.think_s if setting.think_s else 0.0
        while True:
            if rate:
                yield environment.timeout(sampled.expovariate(rate))
            since = environment.now
            for queue in self._queues:
                yield environment.timeout(queue.passed(environment.now))
            yield self._chosen().answer(sampled.choice(works))
            self._durations.append(environment.now - since)
            self._ended += 1
            if self._ended == self._next[0]:
                self._next[1].succeed()

    def _chosen(self) -> _SharedProcessor:
        """Return the less busy one of two replicas."""
        count = len(self._servers)
        if count == 1:
            return self._servers[0]
        place = int(self._random.random() * count)
        other = (place + 1 + int(self._random.random() * (count - 1))) % count
        first, second = self._servers[place], self._servers[other]
        return first if first.num_requests <= second.num_requests else second
