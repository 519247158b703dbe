"""Runs evaluations on a Ray cluster: actors that each hold the models run blocks of jobs, and the rows are stored here.

All blocks of a round go to one worker, so that the policies are timed on the same machine. The blocks of a worker that
dies go to another one.
"""

# pyright: reportUnknownMemberType=false
# Ray's functions are typed in part only.

import asyncio
import logging
import math
import os
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar, cast

from stepspec.api.models import Pair
from stepspec.base.extras import from_extra
from stepspec.engines.protocol import side_by_side
from stepspec.errors import EngineError, StepSpecError, UsageError, reason_of
from stepspec.evaluation.machine import commit, hardware, versions
from stepspec.evaluation.records import Block, Failure, Node, ResultRow, Summary, Trace
from stepspec.evaluation.run.evaluation import run_unfinished
from stepspec.evaluation.run.executor import Evaluation, Gradings, called
from stepspec.evaluation.run.problems import EvalProblem
from stepspec.evaluation.run.results import OnRow, Results
from stepspec.evaluation.run.runner import Runner
from stepspec.evaluation.run.schedule import JobBlock, Round

with from_extra("ray", "An evaluation on a Ray cluster"):
    import ray
    from ray.exceptions import (
        ActorUnschedulableError,
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayError,
        RayTaskError,
        WorkerCrashedError,
    )

LOST = (RayActorError, NodeDiedError, ObjectLostError, OutOfMemoryError, WorkerCrashedError)
"""Errors of calls to a worker that died."""
MAX_DEATHS = 5
"""A block during which so many workers died, or a worker that dies so often before it has done anything, ends a run."""
START_S = 600.0
"""Seconds to wait for a place for a worker."""
CLOSE_S = 10.0
REACH_S = 5.0
"""Seconds for a connection to a cluster."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2, which Ray's servers use, sends first, with empty settings. They answer with theirs."""
FRAME_BYTES, SETTINGS = 9, 4
"""Length of a frame's head, whose fourth byte is the frame's type."""

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
    hint = "Give the HOST:PORT that 'ray start' shows, auto on a machine of the cluster, or local to start one here."
    try:
        if _is_reached(cluster.address):
            hint = "If it asks for a token, have that in ~/.ray/auth_token, and set RAY_AUTH_MODE=token."
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, OverflowError, ValueError, RuntimeError, RayError) as error:
        raise UsageError(f"Cannot use a Ray cluster at {cluster.address!r}: {reason_of(error)}. {hint}") from error
    try:
        nodes = cast("list[dict[str, Any]]", ray.nodes())
        yield _completed(cluster, [each["Resources"] for each in nodes if each["Alive"]])
    finally:
        ray.shutdown()


def _is_reached(address: str) -> bool:
    """Return whether an address names a port, at which a server of HTTP/2 answers. Ray itself tries for minutes.

    Raises:
        OSError: no such server answers.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return False
    with socket.create_connection((host.strip("[]"), int(port)), REACH_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return True
        connection.settimeout(REACH_S)
        connection.sendall(PREFACE)
        answer = b""
        with suppress(TimeoutError):
            while len(answer) < FRAME_BYTES and (more := connection.recv(FRAME_BYTES - len(answer))):
                answer += more
    if len(answer) < FRAME_BYTES or answer[3] != SETTINGS:
        raise OSError("what listens there is not Ray")
    return True


def _completed(cluster: Cluster, nodes: Sequence[Mapping[str, float]]) -> Cluster:
    """Return the cluster with all numbers, by the resources of its machines."""
    gpus = cluster.gpus
    if gpus is None:
        gpus = float(any(each.get("GPU") for each in nodes))
    cpus = cluster.cpus
    if cpus is None:
        cpus = 1.0 if gpus else min((each["CPU"] for each in nodes if each.get("CPU")), default=1.0)
    room = sum(int(min(each.get("CPU", 0) / cpus, each.get("GPU", 0) / gpus if gpus else math.inf)) for each in nodes)
    if not room:
        there = ", ".join(f"{each.get('CPU', 0):g} and {each.get('GPU', 0):g}" for each in nodes)
        raise UsageError(
            f"A worker takes {cpus:g} CPUs and {gpus:g} GPUs, and no machine of the cluster has them (CPUs and GPUs: "
            f"{there}). Change --worker-cpus and --worker-gpus."
        )
    return replace(cluster, workers=cluster.workers or room, cpus=cpus, gpus=gpus)


class NoRoomError(EngineError):
    """The cluster has no room for a worker."""


@dataclass(frozen=True)
class About:
    """Where a worker runs, and with what. Workers of a run must not differ in `models` and `versions`."""

    node: Node
    models: Mapping[str, str]
    versions: Mapping[str, str]


Call = tuple[str, tuple[Any, ...]]
"""The name and the arguments of a call to a `Receiver`."""


class Recorder:
    """A `Receiver` that keeps what it gets, for another one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def answered(self, policy: str) -> None:
        self.calls.append(("answered", (policy,)))

    def add(self, row: ResultRow, trace: Trace | None) -> None:
        self.calls.append(("add", (row, trace)))

    def refuse(self, failure: Failure) -> None:
        self.calls.append(("refuse", (failure,)))

    def fail(self, failure: Failure) -> None:
        self.calls.append(("fail", (failure,)))

    def add_block(self, block: Block) -> None:
        self.calls.append(("add_block", (block,)))

    def say(self, words: str) -> None: ...


class Worker:
    """The models, in an actor."""

    _pair: Pair
    _runner: Runner

    def __init__(self) -> None:
        self._gradings = Gradings()

    async def ready(self) -> None:
        """Return when the actor runs."""

    async def load(self, load: Callable[[], Pair]) -> About:
        """Load the models."""
        self._pair = load()
        node = Node(name=cast(str, ray.util.get_node_ip_address()), hardware=hardware())
        return About(node, self._pair.models, {**versions(), "commit": commit() or "unknown"})

    async def call(self, function: Callable[[Pair], Any]) -> Any:
        """Call a function with the models."""
        return await called(function, self._pair)

    async def begin(self, task: Evaluation, blocks: Sequence[JobBlock]) -> None:
        """Prepare for a run, of which some blocks under each policy are given."""
        traces = task.keeping.traces or task.keeping.record
        systems, gauges = task.systems(self._pair), task.gauges_of(self._pair)
        self._runner = Runner(task.run, systems, self._gradings.by(task.grader), task.ask, traces, gauges)
        await self._runner.warm_up(blocks, Recorder())

    async def run(self, block: JobBlock) -> list[Call]:
        """Run a block, and return what became of its jobs."""
        recorder = Recorder()
        await self._runner.run_block(block, recorder)
        return recorder.calls

    async def close(self) -> None:
        """Free the models."""
        self._gradings.close()
        await self._pair.aclose()


@dataclass
class Place:
    """A place for a worker. If its worker dies, another one starts, perhaps on another machine."""

    start: Callable[[], Awaitable[tuple[Any, About]]]
    handle: Any = None
    about: About | None = None
    num_calls: int = 0
    num_deaths: int = 0
    """Since its last work."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def worker(self) -> Any:
        """Return the worker, and start one if there is none.

        Raises:
            EngineError: workers die again and again.
        """
        async with self.starting:
            while self.handle is None:
                try:
                    self.handle, self.about = await self.start()
                except LOST as error:
                    self.lose(error)
            return self.handle

    def lose(self, error: Exception) -> None:
        """Note that the worker has died.

        Raises:
            EngineError: workers die again and again.
        """
        self.kill()
        self.num_deaths += 1
        if self.num_deaths >= MAX_DEATHS:
            raise EngineError(
                f"{MAX_DEATHS} workers died one after the other before they had done anything. The last error: "
                f"{reason_of(error)}. Their log is on the machine of the worker, in /tmp/ray/session_latest/logs."
            ) from error

    def kill(self) -> None:
        """End the worker without waiting for what it does."""
        if self.handle is not None:
            with suppress(*LOST):
                ray.kill(self.handle)
        self.handle = None


@dataclass
class _Queue:
    """Rounds that wait for a worker, and those that run."""

    waiting: deque[Round]
    num_places: int
    """Number of workers that may run them."""
    largest: Sequence[JobBlock] = ()
    """The largest block of each policy, by which workers warm up."""
    num_running: int = 0
    deaths: Counter[tuple[str, str, int]] = field(default_factory=Counter[tuple[str, str, int]])
    """By the key of a block's first job, how many workers died during the block."""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def is_finished(self) -> bool:
        """Whether all rounds are finished."""
        return not self.waiting and not self.num_running

    async def unless_finished(self, work: Awaitable[T]) -> T | None:
        """Return the result of some work; None if all rounds are finished before it, which then is cancelled."""

        async def finished() -> None:
            async with self.changed:
                await self.changed.wait_for(lambda: self.is_finished)

        tasks = asyncio.ensure_future(work), asyncio.ensure_future(finished())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)

    async def take(self) -> Round | None:
        """Return the next round. Wait as long as one of another worker may come back; None if all are finished."""
        async with self.changed:
            await self.changed.wait_for(lambda: bool(self.waiting) or self.is_finished)
            if not self.waiting:
                return None
            self.num_running += 1
            return self.waiting.popleft()

    async def finish(self) -> None:
        """Note that a round is finished."""
        async with self.changed:
            self.num_running -= 1
            self.changed.notify_all()

    async def give_back(self, blocks: Sequence[JobBlock]) -> None:
        """Return blocks of a round whose worker died during the first of them.

        Raises:
            EngineError: workers die again and again during this block.
        """
        first = blocks[0][0]
        self.deaths[first.key] += 1
        if self.deaths[first.key] >= MAX_DEATHS:
            raise EngineError(
                f"{MAX_DEATHS} workers died during the problem {first.problem.id!r} under {first.policy} or one beside "
                "it. The machine may lack memory for it."
            )
        async with self.changed:
            self.waiting.appendleft(blocks)
            self.num_running -= 1
            self.changed.notify_all()


class OnRay:
    """An `Executor` on a connected cluster. Functions and problems that it gets must be picklable.

    Args:
        cluster: the cluster, with all numbers.
        load: loads the models in a worker.
        notify: called with a sentence for the user.
    """

    def __init__(
        self, cluster: Cluster, load: Callable[[], Pair], notify: Callable[[str], None] = lambda sentence: None
    ) -> None:
        self._cluster, self._load, self._notify = cluster, load, notify
        self._is_shared = False
        self._places = [Place(self._start) for _ in range(cluster.workers or 1)]
        self._first: About | None = None

    @property
    def num_workers(self) -> int:
        """See `Executor.num_workers`."""
        return len(self._places)

    async def __aenter__(self) -> "OnRay":
        await self._places[0].worker()
        return self

    async def __aexit__(self, *error: Any) -> None:
        closing = [_result(place.handle.close.remote()) for place in self._places if place.handle is not None]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), CLOSE_S)
        for place in self._places:
            place.kill()

    async def _start(self) -> tuple[Any, About]:
        """Start a worker where there is room, and load the models.

        Raises:
            UsageError: the models cannot be loaded, or the worker's models or versions are not those of the first one.
            NoRoomError: there is no room.
        """
        cluster = self._cluster
        actor: Any = ray.remote(Worker)
        options = {"num_cpus": cluster.cpus, "num_gpus": cluster.gpus, "scheduling_strategy": "SPREAD"}
        handle: Any = actor.options(max_restarts=0, **options).remote()
        try:
            await asyncio.wait_for(_result(handle.ready.remote()), START_S)
            about: About = await _result(handle.load.remote(self._load))
            self._first = self._first or about
            _check_same(self._first, about)
        except (TimeoutError, ActorUnschedulableError):
            ray.kill(handle)
            raise NoRoomError(
                f"The cluster had no room for a worker for {START_S / 60:.0f} minutes. It takes {cluster.cpus:g} CPUs "
                f"and {cluster.gpus:g} GPUs."
            ) from None
        except BaseException:
            ray.kill(handle)
            raise
        if not self._is_shared and self._num_at(about.node.name):
            self._is_shared = True
            self._notify(
                f"Several workers share {about.node.name} and slow each other, so times are longer than alone."
            )
        return handle, about

    def _num_at(self, node: str) -> int:
        """Return the number of workers on a machine."""
        running = (each.about for each in self._places if each.handle is not None)
        return sum(about is not None and about.node.name == node for about in running)

    async def call(self, function: Callable[[Pair], T | Awaitable[T]]) -> T:
        """See `Executor.call`. The least busy worker is called, another one if it dies."""
        place = min(self._places, key=lambda each: each.num_calls)
        place.num_calls += 1
        try:
            while True:
                worker = await place.worker()
                try:
                    found = await _result(worker.call.remote(function))
                except LOST as error:
                    self._lose(place, worker, error)
                else:
                    place.num_deaths = 0
                    return found
        finally:
            place.num_calls -= 1

    async def evaluate(
        self,
        task: Evaluation,
        problems: Sequence[EvalProblem],
        *,
        on_row: OnRow | None = None,
        only: Collection[str] | None = None,
    ) -> Summary:
        """See `Executor.evaluate`. Every worker runs as many requests concurrently as the run says."""

        async def run_rounds(rounds: Sequence[Round], make_results: Callable[[], Results]) -> None:
            largest = {block[0].policy: block for block in sorted(chain.from_iterable(rounds), key=len)}
            places = sorted(self._places, key=lambda each: each.handle is None)[: len(rounds)]
            queue = _Queue(deque(rounds), len(places), [*largest.values()])
            await side_by_side(*(self._serve(place, task, queue, make_results()) for place in places))

        return await run_unfinished(task.run, problems, task.keeping, run_rounds, on_row=on_row, only=only)

    async def _serve(self, place: Place, task: Evaluation, queue: _Queue, results: Results) -> None:
        """Run rounds by the workers of a place until all are finished."""
        begun: Any = None
        while True:
            try:
                worker = await queue.unless_finished(place.worker())
            except NoRoomError:
                queue.num_places -= 1
                if queue.num_places:
                    return  # the others do what is left
                raise
            blocks = await queue.take()
            if worker is None or blocks is None:
                return
            left = deque(blocks)
            try:
                if worker is not begun:
                    results.say("warm-up")
                    await _result(worker.begin.remote(task, queue.largest))
                    begun = worker
                while left:
                    results.say(left[0][0].policy)
                    for name, arguments in await _result(worker.run.remote(left[0])):
                        getattr(results, name)(*self._placed(arguments, place))
                    left.popleft()
                    place.num_deaths = 0
            except LOST as error:
                await queue.give_back(left)
                self._lose(place, worker, error)
            else:
                await queue.finish()

    def _lose(self, place: Place, worker: Any, error: Exception) -> None:
        """Note that a worker has died, unless another caller has noted it."""
        if worker is place.handle and place.about is not None:
            self._notify(f"A worker on {place.about.node.name} died. Another one does its work.")
            place.lose(error)

    def _placed(self, arguments: tuple[Any, ...], place: Place) -> Iterator[Any]:
        """Yield the arguments of a call, rows and blocks with the machine on which they ran."""
        assert place.about is not None, "the worker has said where it is"
        node = place.about.node.model_copy(update={"num_workers": self._num_at(place.about.node.name)})
        yield from (each.on(node) if isinstance(each, ResultRow | Block) else each for each in arguments)


def _check_same(first: About, other: About) -> None:
    """Check that the workers of two machines give the same rows.

    Raises:
        UsageError: they differ.
    """
    for what, mine, theirs in (
        ("models", first.models, other.models),
        ("versions", first.versions, other.versions),
    ):
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if different:
            shown = ", ".join(f"{name} {mine.get(name)} and {theirs.get(name)}" for name in different)
            raise UsageError(
                f"The {what} on {first.node.name} and {other.node.name} differ ({shown}). Rows of both would not be "
                "comparable: install the same on all machines."
            )


async def _result(reference: Any) -> Any:
    """Return what a call to a worker returned.

    Raises:
        StepSpecError: the error of the call.
    """
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, StepSpecError):
            raise error.cause from None
        raise EngineError(f"A worker failed: {reason_of(cast(Exception, error.cause))}.") from error
