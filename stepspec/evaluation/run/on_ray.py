"""Runs evaluations on a Ray cluster: actors that each hold the models run blocks of jobs, and the rows are stored here.

All blocks of a round go to one worker, so that the policies are timed on the same machine. Ray starts a worker that
died again, and repeats the call during which it died.
"""

# pyright: reportUnknownMemberType=false
# Ray's functions are typed in part only.

import asyncio
import logging
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar, cast

from stepspec.api.models import Pair
from stepspec.base.extras import from_extra
from stepspec.engines.protocol import side_by_side
from stepspec.errors import EngineError, StepSpecError, UsageError, reason_of
from stepspec.evaluation.machine import commit, hardware, versions
from stepspec.evaluation.records import Node, Summary
from stepspec.evaluation.run.evaluation import run_unfinished
from stepspec.evaluation.run.executor import Evaluation, Gradings, called
from stepspec.evaluation.run.problems import EvalProblem
from stepspec.evaluation.run.results import OnRow, Results
from stepspec.evaluation.run.runner import Runner
from stepspec.evaluation.run.schedule import JobBlock, Round

with from_extra("ray", "An evaluation on a Ray cluster"):
    import grpc
    import ray
    from ray.exceptions import RayError, RayTaskError

MAX_RETRIES = 4
"""A call during which a worker dies more often than this ends a run."""
ROOM_S = 120.0
"""Seconds in which the cluster must have room for a worker, at the start and after its death."""
REACH_S = 5.0
"""Seconds for a connection to a cluster."""

T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and what a worker takes of it.

    Attributes:
        address: `auto` for the cluster that this machine is part of, `HOST:PORT`, `ray://HOST:PORT`, or `local`.
        workers: number of workers; None for as many as fit.
        cpus: processors of a worker; None for 1 beside a GPU, else all of a machine.
        gpus: GPUs of a worker; None for 1 if the cluster has any.
    """

    address: str
    workers: int | None = None
    cpus: float | None = None
    gpus: float | None = None


@contextmanager
def connected(cluster: Cluster) -> Generator[Cluster]:
    """Connect to a cluster, and yield it with the numbers that were None.

    Raises:
        UsageError: there is no such cluster, or none of its machines is large enough.
    """
    try:
        _check_reached(cluster.address)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, OverflowError, ValueError, RuntimeError, RayError) as error:
        raise UsageError(
            f"Cannot use a Ray cluster at {cluster.address!r}: {reason_of(error)}. Give the HOST:PORT that 'ray start' "
            "shows, auto on a machine of the cluster, or local to start one here. If the cluster asks for a token, "
            "have that in ~/.ray/auth_token, and set RAY_AUTH_MODE=token."
        ) from error
    try:
        yield _completed(cluster, [each["Resources"] for each in cast("list[Any]", ray.nodes()) if each["Alive"]])
    finally:
        ray.shutdown()


def _check_reached(address: str) -> None:
    """Check that a server of gRPC, which Ray's are, answers at an address with a port. Ray itself tries for minutes.

    Raises:
        OSError: no such server answers.
    """
    host_port = address.removeprefix("ray://")
    if ":" not in host_port or os.environ.get("RAY_USE_TLS", "0") == "1":
        return
    with grpc.insecure_channel(host_port, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(REACH_S)
        except grpc.FutureTimeoutError:
            raise OSError("no Ray answers there") from None


def _completed(cluster: Cluster, nodes: Sequence[Mapping[str, float]]) -> Cluster:
    """Return the cluster with all numbers, by the resources of its machines."""
    gpus = float(any(each.get("GPU") for each in nodes)) if cluster.gpus is None else cluster.gpus
    cpus = cluster.cpus or (1.0 if gpus else min((each["CPU"] for each in nodes if each.get("CPU")), default=1.0))
    room = sum(int(min(each.get("CPU", 0) / cpus, each.get("GPU", 0) / gpus if gpus else math.inf)) for each in nodes)
    if not room:
        raise UsageError(f"No machine has {cpus:g} CPUs and {gpus:g} GPUs. Change --worker-cpus and --worker-gpus.")
    return replace(cluster, workers=cluster.workers or room, cpus=cpus, gpus=gpus)


class NoRoomError(EngineError):
    """The cluster has no room for a worker."""


@dataclass(frozen=True)
class About:
    """Where a worker runs, and with which models and packages, by name. Those must be the same for all of a run."""

    node: Node
    versions: Mapping[str, str]


class Recorder:
    """A `Receiver` that keeps the calls that it gets, their names and arguments, for another one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, arguments))

    def say(self, words: str) -> None: ...


class EvalModels:
    """The models, in an actor. They load with the first call, which may be a repeated one on another machine.

    Args:
        load: loads the models.
    """

    _runner: Runner

    def __init__(self, load: Callable[[], Pair]) -> None:
        self._load, self._gradings = load, Gradings()
        self._begun: Any = None

    @cached_property
    def _pair(self) -> Pair:
        return self._load()

    @cached_property
    def _about(self) -> About:
        found = {**self._pair.models, **versions(), "commit": commit() or "unknown"}
        return About(Node(name=cast(str, ray.util.get_node_ip_address()), hardware=hardware()), found)

    @ray.method(concurrency_group="health")
    async def ready(self) -> None:
        """Return when the actor runs, even while other calls block it."""

    async def call(self, function: Callable[[Pair], Any]) -> tuple[About, Any]:
        """Call a function with the models. Return its result, and about which worker."""
        return self._about, await called(function, self._pair)

    async def run(self, prepared: Sequence[Any], block: JobBlock) -> tuple[About, Any]:
        """Run a block, and return what became of its jobs.

        Args:
            prepared: the reference of the run and its largest blocks; in a list, which Ray passes as it is.
            block: jobs of the run.
        """
        recorder: Any = Recorder()
        if self._begun != prepared[0]:
            task, largest = cast("tuple[Evaluation, Sequence[JobBlock]]", await prepared[0])
            self._runner = task.runner(self._pair, self._gradings)
            await self._runner.warm_up(largest, recorder)
            self._begun = prepared[0]
        await self._runner.run_block(block, recorder)
        return self._about, recorder.calls


@dataclass
class Worker:
    """An actor with `EvalModels`, and where it was at its last answer."""

    actor: Any
    about: About | None = None
    num_calls: int = 0


class OnRay:
    """An `Executor` on a connected cluster. Functions and problems that it gets must be picklable.

    Args:
        cluster: the cluster, with all numbers.
        load: loads the models in a worker.
    """

    def __init__(self, cluster: Cluster, load: Callable[[], Pair]) -> None:
        self._cluster, self._load = cluster, load
        self._workers: list[Worker] = []
        self._first: About | None = None

    @property
    def num_workers(self) -> int:
        """See `Executor.num_workers`."""
        return len(self._workers)

    async def __aenter__(self) -> "OnRay":
        cluster, limits = self._cluster, {"max_restarts": -1, "max_task_retries": MAX_RETRIES}
        actor = cast(Any, ray).remote(concurrency_groups={"health": 1}, **limits)(EvalModels)
        actor = actor.options(num_cpus=cluster.cpus, num_gpus=cluster.gpus, scheduling_strategy="SPREAD")
        started = [Worker(actor.remote(self._load)) for _ in range(cluster.workers or 1)]
        found = await asyncio.gather(*map(self._check_room, started), return_exceptions=True)
        self._workers = [each for each, error in zip(started, found, strict=True) if error is None]
        if not self._workers:
            raise cast(BaseException, found[0])
        return self

    async def __aexit__(self, *error: Any) -> None:
        for each in self._workers:
            ray.kill(each.actor)

    async def _check_room(self, worker: Worker) -> None:
        """Check that a worker runs, or does within some time.

        Raises:
            NoRoomError: the cluster has no room for it.
        """
        try:
            await asyncio.wait_for(_result(worker.actor.ready.remote()), ROOM_S)
        except TimeoutError:
            raise NoRoomError(
                "The cluster has no room for a worker. Try again later, or reduce --worker-cpus."
            ) from None

    async def _ask(self, worker: Worker, method: str, *arguments: Any) -> tuple[About, Any]:
        """Return the result of a call to a worker, and about it.

        Raises:
            StepSpecError: the error of the call.
            UsageError: the worker's models or versions are not those of the first one.
            NoRoomError: the worker died, and there is no room for it any more.
        """
        call = asyncio.ensure_future(_result(getattr(worker.actor, method).remote(*arguments)))
        worker.num_calls += 1
        try:
            while not (await asyncio.wait([call], timeout=ROOM_S))[0]:
                await self._check_room(worker)
            about, found = await call
        finally:
            worker.num_calls -= 1
            call.cancel()
        self._first = first = self._first or about
        _check_same(first, about)
        worker.about = about
        return about, found

    async def call(self, function: Callable[[Pair], T | Awaitable[T]]) -> T:
        """See `Executor.call`."""
        least_busy = min(self._workers, key=lambda each: each.num_calls)
        return (await self._ask(least_busy, "call", function))[1]

    async def evaluate(self, task: Evaluation, problems: Sequence[EvalProblem], on_row: OnRow | None = None) -> Summary:
        """See `Executor.evaluate`. Every worker runs as many requests concurrently as the run says."""

        async def run_rounds(rounds: Sequence[Round], make_results: Callable[[], Results]) -> None:
            largest = {block[0].policy: block for block in sorted(chain.from_iterable(rounds), key=len)}
            prepared, waiting = ray.put((task, [*largest.values()])), deque(rounds)
            while waiting:  # again if a worker is lost after the others have finished
                workers = self._workers[: len(waiting)]
                await side_by_side(*(self._serve(each, prepared, waiting, make_results()) for each in workers))

        return await run_unfinished(task.run, problems, task.keeping, run_rounds, on_row=on_row, only=task.only)

    async def _serve(self, worker: Worker, prepared: Any, waiting: deque[Round], results: Results) -> None:
        """Run rounds by a worker until none waits. If the worker is lost, what is left of its round waits again."""
        while waiting and worker in self._workers:
            blocks = deque(waiting.popleft())
            try:
                while blocks:
                    results.say(blocks[0][0].policy)
                    about, calls = await self._ask(worker, "run", [prepared], blocks[0])
                    results.node = self._node_of(about)
                    for name, arguments in calls:
                        getattr(results, name)(*arguments)
                    blocks.popleft()
            except NoRoomError:
                if self._workers == [worker]:
                    raise
                self._workers.remove(worker)
                ray.kill(worker.actor)
                waiting.append(blocks)

    def _node_of(self, about: About) -> Node:
        """Return where a worker runs, with the number of workers there."""
        names = [each.about.node.name for each in self._workers if each.about is not None]
        return about.node.model_copy(update={"num_workers": names.count(about.node.name)})


def _check_same(first: About, other: About) -> None:
    """Check that the workers of two machines give the same rows.

    Raises:
        UsageError: they differ.
    """
    here, there = first.versions, other.versions
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if names:
        shown = ", ".join(f"{name} {here.get(name)} and {there.get(name)}" for name in names)
        raise UsageError(f"Install the same models and packages on {first.node.name} and {other.node.name}: {shown}.")


async def _result(reference: Any) -> Any:
    """Return what a call to an actor returned.

    Raises:
        StepSpecError: the error of the call.
    """
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, StepSpecError):
            raise error.cause from None
        raise EngineError(f"A worker failed: {reason_of(cast(Exception, error.cause))}.") from error
    except RayError as error:
        raise EngineError(
            f"A worker died, at most {MAX_RETRIES + 1} times during the same work: {reason_of(error)}. Its machine may "
            "lack memory. Its log is there, in /tmp/ray/session_latest/logs."
        ) from error
