"""The file of measured costs: what requests to one replica take, by the number of concurrent requests."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from stepspec.errors import UsageError
from stepspec.evaluation.records import Conditions, EngineRecord, Record

KIND = "costs"
PASSING: Sequence[str] = ("proxy", "front")
"""Processes that every request passes before it reaches a replica, in this order."""
COMMAND = "stepspec costs service --json FILE"
MAX_FAILED = 0.01
"""Share of requests that may fail, at most. Failed requests take other times than answered ones."""
MAX_MISFIT = 2.5
"""By Little's formula, requests a second times their mean duration is the concurrency, up to this factor."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LoadCosts(Record):
    """What requests cost at a number of concurrent requests. Means are over the answered requests."""

    concurrency: int = Field(ge=1)
    requests: int = Field(ge=1)
    failed: int = Field(ge=0)
    requests_per_s: Seconds
    """Answers a second while as many requests run as `concurrency` says."""
    durations_s: Annotated[list[Seconds], Field(min_length=1), AfterValidator(sorted)]
    """Seconds of requests as the client saw them, sorted. An even sample of them if there are many."""
    seconds_per_1000: dict[str, Amount]
    """Seconds per 1,000 committed tokens: on the critical path of a request (`target`, `draft`, `judge`, `controller`)
    and of the models' work, which may overlap (`busy_target`, `busy_draft`, `busy_judge`)."""
    step_acceptance: Amount | None
    """Share of the judged steps that were accepted; None if none was judged."""
    committed_tokens: Amount
    """Of a request, like the next three."""
    rejected_tokens: Amount
    prompt_tokens: Amount
    cached_share: Amount | None
    """Share of the prompt's tokens that were in the prefix cache; None without a prompt."""
    cpu_ms: dict[str, Amount]
    """Processor time of a request in milliseconds, by process: `service`, or `proxy`, `front` and `models` on Ray."""
    request_bytes: Amount
    response_bytes: Amount
    """With their HTTP headers."""

    @property
    def concurrency_found(self) -> float:
        """The mean number of concurrent requests, by Little's formula."""
        return self.requests_per_s * sum(self.durations_s) / len(self.durations_s)


class ModelMemory(Record):
    """Memory of a model. None is what its engine does not report."""

    weights_bytes: Amount | None = None
    cache_bytes_per_token: Amount | None = None


class Costs(Conditions):
    """The file that `stepspec costs service --json` writes."""

    kind: Literal["costs"] = KIND
    version: Literal[1] = 1
    policy: str
    benchmark: str
    temperature: float
    max_running: int = Field(ge=1)
    """Answers that the replica generates concurrently."""
    engines: dict[str, EngineRecord | None]
    memory: dict[str, ModelMemory]
    """By role, target and draft."""
    loads: list[LoadCosts] = Field(min_length=1)

    @property
    def alone(self) -> LoadCosts:
        """The costs of a request that runs alone."""
        return next(each for each in self.loads if each.concurrency == 1)

    @property
    def busiest(self) -> LoadCosts:
        """The costs at the most concurrent requests."""
        return max(self.loads, key=lambda each: each.concurrency)

    @property
    def replica_cpu_s(self) -> float:
        """Processor seconds of a request in the process of its replica, without those of models.

        Models on the processor compute in that process, whose processor time then says nothing about the controller.
        Its own seconds count instead.
        """
        busiest = self.busiest
        if any(each is not None and each.device == "cpu" for each in self.engines.values()):
            return busiest.seconds_per_1000.get("controller", 0.0) * busiest.committed_tokens / 1000
        return sum(spent for part, spent in busiest.cpu_ms.items() if part not in PASSING) / 1000

    def passing_s(self, part: str) -> float:
        """Return the processor seconds of a request in one of `PASSING`; 0 if the costs were measured without it."""
        return self.busiest.cpu_ms.get(part, 0.0) / 1000


def read_costs(file: Path) -> Costs:
    """Read a file of measured costs.

    Raises:
        UsageError: the file cannot be read or is of another kind, has no costs of a request that runs alone, or its
            costs are not those of a service that works.
    """
    try:
        found: Any = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}. Measure costs with: {COMMAND}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not a JSON file. Measure costs with: {COMMAND}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:  # pyright: ignore[reportUnknownMemberType]
        raise UsageError(f"{file} is not a file of costs. Measure costs with: {COMMAND}")
    try:
        costs = Costs.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{file}: {where}: {first['msg']}. Measure costs again with: {COMMAND}") from error
    if all(each.concurrency != 1 for each in costs.loads):
        raise UsageError(f"{file} has no costs at concurrency 1. Measure them with: {COMMAND} --concurrency 1,4,16")
    for each in costs.loads:
        if each.failed > MAX_FAILED * each.requests:
            raise UsageError(
                f"{file}: {each.failed:,} of {each.requests:,} requests failed at concurrency {each.concurrency}, so "
                f"their costs are unknown. Measure again with: {COMMAND}"
            )
        if not 1 / MAX_MISFIT < each.concurrency_found / each.concurrency < MAX_MISFIT:
            raise UsageError(
                f"{file}: the requests a second and the durations at concurrency {each.concurrency} do not belong "
                f"together. Measure again with: {COMMAND}"
            )
    return costs


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
