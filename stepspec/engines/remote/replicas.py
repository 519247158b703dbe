"""Several servers of one model as one engine.

Calls of a request go to one replica, and requests of a conversation, or with a common beginning, to the same one,
because it has their text in its prefix cache. A replica that fails is left out until it answers again, and its calls go
on at another one, from the text that they have written.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import DrafterName, Generate, TokenBuffer, TokenChunk, Verification, Verify
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.engine import RemoteEngine
from stepspec.engines.remote.problems import OverloadedError, RejectedError
from stepspec.errors import EngineError, StepSpecError, UsageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_REST_S, MAX_REST_S = 1.0, 30.0
"""Seconds after which a failed replica is asked whether it works again. They double with every failure."""
BACKOFF_S = 0.25
"""Seconds before all replicas are tried again; they double, too."""
MAX_AHEAD = 8
"""Calls that the replica with a text in its cache may have more than the one with the fewest."""
MAX_KNOWN = 65_536
"""Most conversations and beginnings of texts that are remembered."""
BLOCK, MAX_BLOCKS = 64, 64
"""Beginnings of texts are compared in blocks of so many tokens, up to so many blocks."""


@dataclass(eq=False)
class Replica:
    """One server, with what is known of its health."""

    address: Address
    title: str | None
    engine: RemoteEngine | None = None
    """None until the server has answered for the first time."""
    num_open: int = 0
    """Calls in flight."""
    num_failures: int = 0
    """Failures since it last worked."""
    rests_until: float = 0.0
    """When to ask it again (`time.monotonic`), if it has failed."""
    probe: asyncio.Future[bool] | None = None

    @property
    def works(self) -> bool:
        """Whether it worked when it was last called."""
        return self.engine is not None and not self.num_failures

    def failed(self) -> None:
        """Leave it out for a while."""
        self.num_failures += 1
        self.rests_until = time.monotonic() + min(MAX_REST_S, MIN_REST_S * 2 ** (self.num_failures - 1))

    def load(self) -> None:
        """Detect the features of the server. Blocks.

        Raises:
            ModelError: the server does not answer or does not have the model, or its tokenizer cannot be loaded.
        """
        self.engine = RemoteEngine.at(self.address, self.title)

    @contextmanager
    def call(self) -> Generator[RemoteEngine]:
        """Count a call while the block runs."""
        assert self.engine is not None
        self.num_open += 1
        try:
            yield self.engine
            self.num_failures = 0
        finally:
            self.num_open -= 1


@dataclass
class Affinity:
    """Where conversations and texts were sent, as far as it is remembered."""

    _replicas: OrderedDict[Any, Replica] = field(default_factory=OrderedDict[Any, Replica])

    def find(self, buffer: TokenBuffer) -> Replica | None:
        """Return the replica of a conversation, else the one that has most of the text, or None."""
        if (found := self._replicas.get(buffer.session)) is not None:
            return found
        for key in _blocks(buffer):
            if (known := self._replicas.get(key)) is None:
                break  # a later block cannot be known
            found = known
        return found

    def note(self, buffer: TokenBuffer, replica: Replica) -> None:
        """Remember where a text is."""
        own = [] if buffer.session is None else [buffer.session]
        for key in (*own, *_blocks(buffer)):
            self._replicas[key] = replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > MAX_KNOWN:
            self._replicas.popitem(last=False)


def _blocks(buffer: TokenBuffer) -> Generator[int]:
    """Yield hashes of the blocks of a text, each with its group and the blocks before."""
    key = hash(buffer.group)
    for start in range(0, min(len(buffer), BLOCK * MAX_BLOCKS) - BLOCK + 1, BLOCK):
        key = hash((key, *buffer.since(start, start + BLOCK)))
        yield key


class Replicas:
    """The engine. See `stepspec.engines.protocol.Engine`."""

    def __init__(self, replicas: Sequence[Replica], retries: int) -> None:
        """
        Args:
            replicas: the servers, at least one of which has answered.
            retries: how often all of them are tried again if all fail.

        Raises:
            UsageError: they serve different models.
        """
        self._replicas, self.retries = replicas, retries
        known = [replica.engine for replica in replicas if replica.engine is not None]
        first = self._first = known[0]
        self.name, self.tokenizer = first.name, first.tokenizer
        self.max_context = min(engine.max_context for engine in known)
        self.abilities = reduce(frozenset.intersection, (engine.abilities for engine in known))
        self.drafters: Sequence[DrafterName] = first.drafters
        self.default_sampling = first.default_sampling
        own = {engine.own_speculation for engine in known}
        self.own_speculation = first.own_speculation if len(own) == 1 else None
        for engine in known:
            self._check(engine)
        self.num_moves = 0
        self._placed: WeakKeyDictionary[TokenBuffer, Replica] = WeakKeyDictionary()
        self._affinity = Affinity()

    @classmethod
    def load(cls, spec: str, title: str | None = None) -> "RemoteEngine | Replicas":
        """Detect the features of the servers and load the model's tokenizer.

        Args:
            spec: addresses, separated by spaces. A single one needs no replicas.
            title: the model's name in results; None uses its name on the servers.

        Raises:
            UsageError: an address is invalid, or the servers have different models.
            ModelError: no server answers or has the model, or its tokenizer cannot be loaded.
        """
        addresses = cls.check_options(spec)
        if len(addresses) == 1:
            return RemoteEngine.at(addresses[0], title)
        # A call that fails goes on at another server immediately, and does not try the same one again.
        replicas = [Replica(replace(address, retries=0), title) for address in addresses]
        problem: StepSpecError | None = None
        for replica in replicas:
            try:
                replica.load()
            except UsageError as error:  # ModelError: a server that does not answer
                problem = problem or error
                replica.failed()
                logger.warning("%s is left out until it answers: %s", replica.address.base, error)
        if problem is not None and not any(replica.engine for replica in replicas):
            raise problem
        return cls(replicas, max(address.retries for address in addresses))

    @staticmethod
    def check_options(spec: str) -> Sequence[Address]:
        """Return the addresses, without asking the servers.

        Raises:
            UsageError: one is invalid, or two are the same.
        """
        addresses = [Address.parsed(each) for each in spec.split()]
        if len({address.base for address in addresses}) < len(addresses):
            raise UsageError("Two addresses of a model are the same. Name each server once.")
        return addresses

    def _check(self, engine: RemoteEngine) -> None:
        if (found := engine.server.model) != (expected := self._first.server.model):
            raise UsageError(
                f"{engine.address.base} serves {found!r}, but {self._first.address.base} serves {expected!r}. All "
                "addresses of a model must have the same one."
            )
        if missing := self.abilities - engine.abilities:
            raise UsageError(f"{engine.address.base} cannot do what the other servers can: {', '.join(missing)}.")

    def describe(self) -> Mapping[str, str | None]:
        """See `Engine.describe`."""
        others = [replica.address.base for replica in self._replicas if replica.engine is not self._first]
        described = self._first.describe()
        return {**described, "device": ", ".join([str(described["device"]), *others])}

    def metrics(self) -> EngineMetrics:
        """Return the totals over all calls of all replicas."""
        engines = (replica.engine for replica in self._replicas if replica.engine is not None)
        total = reduce(EngineMetrics.__add__, (engine.metrics() for engine in engines))
        return replace(total, moves=self.num_moves)

    @property
    def states(self) -> Mapping[str, bool]:
        """Whether each server works, by its address."""
        return {replica.address.base: replica.works for replica in self._replicas}

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`."""
        written, length = list[int](), len(call.prompt)
        tries = _Tries(self, call.prompt)
        while True:
            replica = await tries.next()
            try:
                with replica.call() as engine:
                    async with aclosing(engine.generate(_rest(call, written, length, self.tokenizer.piece))) as chunks:
                        async for chunk in chunks:
                            written += chunk.ids
                            yield chunk
                return
            except EngineError as error:
                tries.failed(replica, error)
                if written and not _may_go_on(call):
                    raise

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`."""
        return await self._somewhere(call.prompt, lambda engine: engine.verify(call))

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`."""
        await self._somewhere(TokenBuffer([0]), lambda engine: engine.check_schema(json_schema))

    async def _somewhere(self, buffer: TokenBuffer, work: Callable[[RemoteEngine], Coroutine[Any, Any, T]]) -> T:
        tries = _Tries(self, buffer)
        while True:
            replica = await tries.next()
            try:
                with replica.call() as engine:
                    return await work(engine)
            except EngineError as error:
                tries.failed(replica, error)

    def choose(self, buffer: TokenBuffer, tried: set[Replica]) -> Replica | None:
        """Return the replica for a call: that of the text before, else that which has most of the text in its cache,
        else that with the fewest calls; None if all have been tried.
        """
        self._ask_those_that_rest()
        able = [replica for replica in self._replicas if replica.engine is not None and replica not in tried]
        able = [replica for replica in able if replica.works] or able
        if not able:
            return None
        placed = self._placed.get(buffer)
        if placed not in able:
            least = min(able, key=lambda replica: replica.num_open)
            known = self._affinity.find(buffer)
            if known is None or known not in able or known.num_open > least.num_open + MAX_AHEAD:
                known = least
            placed = self._placed[buffer] = known
            self._affinity.note(buffer, placed)
        return placed

    def _ask_those_that_rest(self) -> None:
        """Ask failed replicas, in the background, whether they work again."""
        for replica in self._replicas:
            if not replica.works and replica.probe is None and time.monotonic() >= replica.rests_until:
                replica.probe = asyncio.ensure_future(self._answers(replica))

    async def _answers(self, replica: Replica) -> bool:
        try:
            if replica.engine is None:
                await asyncio.to_thread(replica.load)
                assert replica.engine is not None
                self._check(replica.engine)
            else:
                await replica.engine.check_health()
        except StepSpecError as error:
            if isinstance(error, UsageError):
                replica.engine = None
            replica.failed()
            return False
        finally:
            replica.probe = None
        replica.num_failures = 0
        logger.warning("%s answers again.", replica.address.base)
        return True

    async def round_trip_s(self) -> float:
        """See `Distant.round_trip_s`. Of several servers, that of the farthest one that works."""
        working = [replica.engine for replica in self._replicas if replica.works and replica.engine is not None]
        return max([await engine.round_trip_s() for engine in working or [self._first]])

    async def forget(self) -> None:
        """See `Engine.forget`."""
        for replica in self._replicas:
            if replica.engine is not None:
                await replica.engine.forget()
        self._affinity = Affinity()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        for replica in self._replicas:
            if replica.probe is not None:
                replica.probe.cancel()
            if replica.engine is not None:
                await replica.engine.aclose()


class _Tries:
    """The replicas that one call has tried."""

    def __init__(self, replicas: Replicas, buffer: TokenBuffer) -> None:
        self._replicas, self._buffer = replicas, buffer
        self._tried: set[Replica] = set()
        self._rounds = 0
        self._problem: EngineError | None = None

    async def next(self) -> Replica:
        """Return the replica to try. Waits before all are tried again.

        Raises:
            EngineError: all have failed as often as they may.
        """
        replica = self._replicas.choose(self._buffer, self._tried)
        if replica is None:
            assert self._problem is not None
            if self._rounds >= self._replicas.retries:
                raise self._problem
            await asyncio.sleep(BACKOFF_S * 2**self._rounds)
            self._rounds += 1
            self._tried.clear()
            replica = self._replicas.choose(self._buffer, self._tried)
            assert replica is not None
        if self._problem is not None:
            logger.warning("%s A call goes on at %s.", self._problem, replica.address.base)
            self._buffer.num_moves += 1
            self._replicas.num_moves += 1
        return replica

    def failed(self, replica: Replica, error: EngineError) -> None:
        """Note that a replica has failed.

        Raises:
            EngineError: the error itself, if another replica would give the same.
        """
        if isinstance(error, RejectedError):
            raise error
        self._problem = error
        self._tried.add(replica)
        if not isinstance(error, OverloadedError):
            replica.failed()


def _may_go_on(call: Generate) -> bool:
    """Whether a call that has written a part of its text can go on as a new call. A server starts to count tokens for
    penalties, and to follow a schema, where a call starts."""
    sampling = call.sampling
    return call.json_schema is None and not sampling.presence_penalty and not sampling.frequency_penalty


def _rest(call: Generate, written: Sequence[int], length: int, piece: Callable[[int], str]) -> Generate:
    """Return the call for what is left of a text. A part of what is written may be in the prompt by now, which had
    `length` ids."""
    if not written:
        return call
    stop = replace(
        call.stop,
        max_tokens=call.stop.max_tokens - len(written),
        before=call.stop.before + "".join(map(piece, written)),
    )
    return replace(call, after=[*call.after, *written][len(call.prompt) - length :], stop=stop)
