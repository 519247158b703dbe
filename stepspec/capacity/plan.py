"""The smallest number of replicas for a number of agents, by simulations, and the most agents for some replicas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepspec.capacity.costs import PASSING, Costs, nearest_rank
from stepspec.capacity.simulation import MIN_REQUESTS, Simulated, SimulatedService, Station, replica_of, simulate
from stepspec.errors import UsageError
from stepspec.evaluation.records import Record

MAX_AGENTS = 1_000_000
SCALED = 64
"""Most replicas of the simulations that look for a number. Beyond as many, what a replica sees depends on the agents of
each replica alone."""
MAX_SIMULATED = 2048
"""Most replicas of the last simulation."""
LAST_REQUESTS = 5 * MIN_REQUESTS
"""Fewest requests of the last simulation. Its p95 varies by about 1% (one standard deviation) between seeds."""
MAX_THINK_S = 3600.0
RESOLUTION = 0.01
"""To which share of it a number of more than 100 replicas or agents is found."""
STATION_LOAD = 0.5
"""Share of time in which a proxy or a front works, at most. Beyond it, requests wait for it noticeably."""
CORE_LOAD = 0.7
"""Share of time in which a core works, at most."""


@dataclass(frozen=True)
class Requirements:
    """What replicas are for.

    Attributes:
        think_s: mean seconds between an answer and the agent's next request.
        p95_s: the 95th percentile of the seconds of a request, at most.
        max_running: answers that a replica generates concurrently.
        gpus_per_replica: GPUs of a replica.
        seed: random seed.
    """

    think_s: float
    p95_s: float
    max_running: int
    gpus_per_replica: int = 1
    seed: int = 0


class Plan(Record):
    """What a number of agents needs, and what it gets."""

    simulated: Simulated
    gpus: int
    processes: dict[str, int]
    """Processes by part of the service: `models` for the replicas, and `proxy` and `front` if the costs have them."""
    cores: int
    """Processor cores for all of them, without those of models on the processor."""
    network_bytes_per_s: float
    """Requests and answers, as the clients see them."""
    cache_bytes: float | None
    """Memory of the caches of all running requests if every replica is full; None if unknown."""
    loads: dict[str, float]
    """Share of the most that each part can do."""

    @property
    def bottleneck(self) -> str:
        """The part that would be at its limit first if there were more agents."""
        return max(self.loads, key=lambda part: self.loads[part])


class Sizing(Record):
    """The file that `stepspec size --json` writes."""

    costs: Costs
    think_s: float
    p95_s: float
    max_running: int
    gpus_per_replica: int
    seed: int
    plans: list[Plan]
    """One for each number of agents."""
    gpus: int | None = None
    for_gpus: Plan | None = None
    """The most agents that as many GPUs can serve."""


def alone_p95_s(costs: Costs) -> float:
    """Return the 95th percentile of the seconds of a request that runs alone."""
    return nearest_rank(costs.alone.durations_s, 0.95)


def check_wanted(costs: Costs, wanted: Requirements) -> None:
    """Check that enough replicas can meet the p95.

    Raises:
        UsageError: a request takes longer even alone, or a number is out of range.
    """
    if not 0 <= wanted.think_s <= MAX_THINK_S:
        raise UsageError(f"--think must be between 0 and {MAX_THINK_S:,.0f} seconds, got {wanted.think_s:g}.")
    if not 0 < wanted.p95_s < math.inf:
        raise UsageError(f"--p95 must be a number of seconds above 0, got {wanted.p95_s:g}.")
    alone_s = alone_p95_s(costs)
    if wanted.p95_s < alone_s:
        raise UsageError(
            f"A p95 of {wanted.p95_s:g} s cannot be met by more replicas: a request that runs alone has a p95 of "
            f"{alone_s:.6g} s. Give a larger --p95, or use faster models or GPUs."
        )


def plan_agents(costs: Costs, wanted: Requirements, agents: int) -> Plan:
    """Return the smallest number of replicas that meets the p95 for a number of agents.

    The first guess comes from the most requests a second of a replica. Then simulations decide.

    Raises:
        UsageError: a replica for each agent does not meet the p95.
    """
    check_wanted(costs, wanted)

    def meets(replicas: int) -> bool:
        return _simulated(costs, wanted, agents, replicas).p95_s <= wanted.p95_s

    replicas = _smallest(meets, _guess(costs, wanted, agents), agents)
    while (found := _last(costs, wanted, agents, replicas)).p95_s > wanted.p95_s:
        if replicas >= agents:
            raise UsageError(
                f"A p95 of {wanted.p95_s:g} s is not met even with a replica for each agent. Give a larger --p95."
            )
        replicas = min(agents, replicas + max(1, int(RESOLUTION * replicas)))
    return _plan(costs, wanted, found)


def plan_gpus(costs: Costs, wanted: Requirements, gpus: int) -> Plan:
    """Return the most agents, up to `MAX_AGENTS`, for which a number of GPUs meets the p95.

    Raises:
        UsageError: there are too few GPUs for a replica, or the p95 cannot be met.
    """
    check_wanted(costs, wanted)
    replicas = gpus // wanted.gpus_per_replica
    if replicas < 1:
        raise UsageError(f"A replica takes {wanted.gpus_per_replica} GPUs, and there are {gpus}. Give more --gpus.")

    def fails(agents: int) -> bool:
        return _simulated(costs, wanted, agents, replicas).p95_s > wanted.p95_s

    replica = replica_of(costs, wanted.max_running)
    guess = int(replicas * replica.most_per_s * (wanted.think_s + wanted.p95_s))
    agents = max(1, _smallest(fails, max(2, guess), MAX_AGENTS + 1) - 1)
    while (found := _last(costs, wanted, agents, replicas)).p95_s > wanted.p95_s and agents > 1:
        agents -= max(1, int(RESOLUTION * agents))
    if found.p95_s > wanted.p95_s:
        raise UsageError(f"A p95 of {wanted.p95_s:g} s is not met even for one agent. Give a larger --p95.")
    return _plan(costs, wanted, found)


def _guess(costs: Costs, wanted: Requirements, agents: int) -> int:
    replica = replica_of(costs, wanted.max_running)
    requests_per_s = agents / (wanted.think_s + (replica.mean_s + wanted.p95_s) / 2)
    return max(1, min(agents, math.ceil(requests_per_s / replica.most_per_s)))


def _smallest(holds: Callable[[int], bool], guess: int, most: int) -> int:
    """Return the smallest number for which something holds that holds for all larger ones; `most` if for none."""
    low, high = 0, min(guess, most)
    step = max(1, guess // 8)
    while high < most and not holds(high):
        low, high, step = high, min(most, high + step), 2 * step
    while low == 0 and high > step and holds(high - step):
        high, step = high - step, 2 * step
    low = max(low, high - step)
    while high - low > max(1, int(RESOLUTION * high)):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _stations(costs: Costs, wanted: Requirements, agents: int, replicas: int) -> dict[str, Station]:
    """Return what a request passes before a replica, with enough processes for the most requests a second."""
    replica = replica_of(costs, wanted.max_running)
    most_per_s = min(agents / (wanted.think_s + replica.mean_s), replicas * replica.most_per_s)
    spent = {part: costs.passing_s(part) for part in PASSING}
    return {
        part: Station(seconds, max(1, math.ceil(most_per_s * seconds / STATION_LOAD)))
        for part, seconds in spent.items()
        if seconds
    }


def _simulated(
    costs: Costs, wanted: Requirements, agents: int, replicas: int, most: int = SCALED, requests: int | None = None
) -> Simulated:
    """Return what a simulation of at most so many replicas, with their share of the agents, says about all of them."""
    some_replicas = min(replicas, most)
    scale = some_replicas / replicas
    some_agents = max(1, round(scale * agents))
    passed = [*_stations(costs, wanted, some_agents, some_replicas).values()]
    setting = SimulatedService(
        some_agents, wanted.think_s, some_replicas, replica_of(costs, wanted.max_running), passed
    )
    found = simulate(setting, wanted.seed, requests and max(requests, some_agents))
    all_of_them = {"agents": agents, "replicas": replicas, "requests_per_s": found.requests_per_s / scale}
    return found.model_copy(update=all_of_them)


def _last(costs: Costs, wanted: Requirements, agents: int, replicas: int) -> Simulated:
    """Return the figures of a plan, by a larger simulation than those that look for it."""
    return _simulated(costs, wanted, agents, replicas, MAX_SIMULATED, LAST_REQUESTS)


def _plan(costs: Costs, wanted: Requirements, found: Simulated) -> Plan:
    replica, speed = replica_of(costs, wanted.max_running), found.requests_per_s
    passed = _stations(costs, wanted, found.agents, found.replicas)
    loads = {
        "models": speed / (found.replicas * replica.most_per_s),
        "controller": speed * costs.replica_cpu_s / found.replicas,
        **{part: speed * each.seconds / each.processes for part, each in passed.items()},
    }
    cpu_s = costs.replica_cpu_s + sum(each.seconds for each in passed.values())
    return Plan(
        simulated=found,
        gpus=found.replicas * wanted.gpus_per_replica,
        processes={"models": found.replicas, **{part: each.processes for part, each in passed.items()}},
        cores=math.ceil(speed * cpu_s / CORE_LOAD),
        network_bytes_per_s=speed * (costs.busiest.request_bytes + costs.busiest.response_bytes),
        cache_bytes=_cache_bytes(costs, found.replicas * min(wanted.max_running, found.agents)),
        loads=loads,
    )


def _cache_bytes(costs: Costs, requests: int) -> float | None:
    per_token = [each.cache_bytes_per_token for each in costs.memory.values()]
    known: Sequence[float] = [each for each in per_token if each is not None]
    if not known or len(known) < len(per_token):
        return None
    tokens = costs.busiest.prompt_tokens + costs.busiest.committed_tokens + costs.busiest.rejected_tokens
    return requests * tokens * sum(known)
