"""Admission: how many requests run, which of the waiting ones is next, and which are turned away.

A request is turned away as soon as it arrives if the queue is full, so that its client can try elsewhere. The next
request is the one with the lowest priority number, then that of the client that was served least. What a client was
served is counted in tokens, as in arXiv:2401.00588: a client that begins to wait starts at the lowest count of those
who wait, so that it can neither save up nor be made to catch up.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stepspec.serve.errors import BusyError
from stepspec.serve.keys import ANONYMOUS

RETRY_S = 1.0
"""Seconds after which a client that was turned away may try again."""

OUTPUT_WEIGHT = 2
"""What an output token counts in tokens of a prompt."""


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the service. None means no limit."""

    max_running: int = 128
    """Answers that are generated concurrently."""
    max_queued: int = 128
    """Requests that wait."""
    max_queued_tokens: int | None = None
    """Prompt tokens of the waiting requests. A single request may have more if none waits."""
    max_wait_s: float | None = None
    """Seconds that a request may wait."""


@dataclass(eq=False)
class Ticket:
    """A request that waits or runs."""

    client: str
    priority: int
    num_tokens: int
    num_answers: int
    model: str = ""
    admitted: asyncio.Future[None] = field(default_factory=asyncio.Future[None])


@asynccontextmanager
async def _until(message: str, reason: str) -> AsyncGenerator[asyncio.Timeout]:
    """Yield the end of a block. If it is rescheduled and passes, the block ends with a BusyError."""
    try:
        async with asyncio.timeout(None) as end:
            yield end
    except TimeoutError:
        if end.expired():
            raise BusyError(message, RETRY_S, reason) from None
        raise


class Entrance:
    """A bounded number of places for requests that are being read and encoded, which clients share equally.

    If all are taken, a client with fewer places than another gets the one that the other has held for the longest.
    """

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._clients: dict[asyncio.Timeout, str] = {}
        """The client of each place, by the end of its time, in the order of arrival."""

    @property
    def num_places(self) -> int:
        """Number of places that are taken."""
        return len(self._clients)

    def is_full(self, client: str) -> bool:
        """Whether a client would get no place."""
        return self.num_places >= self._max_places and self._displaced(client) is None

    def _displaced(self, client: str) -> asyncio.Timeout | None:
        """Return the place of another client that a client may have; None if there is none."""
        held = Counter(self._clients.values())
        largest = max(held, key=held.__getitem__)
        if held[largest] <= held[client] + 1:
            return None
        return next(end for end, name in self._clients.items() if name == largest)

    @asynccontextmanager
    async def place(self, client: str) -> AsyncGenerator[None]:
        """Hold a place while the block reads and encodes a request.

        Raises:
            BusyError: all places are taken, or another client with fewer of them needs this one.
        """
        message = (
            f"The service is reading as many requests as --max-running and --max-queued allow together "
            f"({self._max_places}). Try again later."
        )
        if self.num_places >= self._max_places:
            if (displaced := self._displaced(client)) is None:
                raise BusyError(message, RETRY_S, "entering")
            del self._clients[displaced]
            displaced.reschedule(asyncio.get_running_loop().time())
        async with _until(message, "entering") as end:
            self._clients[end] = client
            try:
                yield
            finally:
                self._clients.pop(end, None)


class Admission:
    """Lets a bounded number of requests run, and keeps the others in a queue."""

    def __init__(self, limits: ServiceLimits) -> None:
        self.limits = limits
        self.num_running = 0
        """Answers that are being generated."""
        self.entrance = Entrance(limits.max_running + limits.max_queued)
        self._running: Counter[str] = Counter()
        self.is_draining = False
        """Whether no further request is taken."""
        self._ends: set[asyncio.Timeout] = set()
        self._waiting: dict[int, Ticket] = {}
        self._numbers = itertools.count()
        self._served: Counter[str] = Counter()
        """Weighted tokens by client, of clients with a request in the service."""
        self._present: Counter[str] = Counter()

    @property
    def num_queued(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a request is in the service."""
        return bool(self.entrance.num_places or self.num_running or self._waiting)

    def num_running_of(self, model: str) -> int:
        """Return the number of answers of a model that are being generated."""
        return self._running[model]

    def num_queued_of(self, model: str) -> int:
        """Return the number of waiting requests to a model."""
        return sum(ticket.model == model for ticket in self._waiting.values())

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the waiting requests."""
        return sum(ticket.num_tokens for ticket in self._waiting.values())

    @property
    def is_full(self) -> bool:
        """Whether a further request, of one token and a new client, would be turned away."""
        try:
            self.check(1)
        except BusyError:
            return True
        return self.entrance.is_full(ANONYMOUS)

    def _has_to_wait(self, num_answers: int) -> bool:
        is_too_much = self.num_running + num_answers > self.limits.max_running
        return bool(self._waiting) or (self.num_running > 0 and is_too_much)

    @property
    def _queue_is_full(self) -> bool:
        return self.num_queued >= self.limits.max_queued

    def check(self, num_tokens: int = 0, num_answers: int = 1) -> None:
        """Check that a request may run or wait.

        Raises:
            BusyError: the service ends, or the queue is full.
        """
        if self.is_draining:
            raise BusyError("The service is shutting down. Try another one.", RETRY_S, "draining")
        if not self._has_to_wait(num_answers):
            return
        if self._queue_is_full:
            message = f"The queue is full (--max-queued {self.limits.max_queued}). Try again later."
            raise BusyError(message, RETRY_S, "requests")
        most = self.limits.max_queued_tokens
        if most is not None and self._waiting and self.num_queued_tokens + num_tokens > most:
            message = f"The queue is full (--max-queued-tokens {most}). Try again later."
            raise BusyError(message, RETRY_S, "tokens")

    @asynccontextmanager
    async def slot(self, ticket: Ticket) -> AsyncGenerator[None, None]:
        """Wait until the request may run, and hold its place while the block runs.

        Raises:
            BusyError: the service ends, the queue is full, or the request has waited too long.
        """
        self.check(ticket.num_tokens, ticket.num_answers)
        self._enter(ticket)
        try:
            async with _until("The service has shut down. Try another one.", "draining") as end:
                self._ends.add(end)
                try:
                    await self._admitted(ticket)
                    try:
                        self._served[ticket.client] += ticket.num_tokens
                        yield
                    finally:
                        self._free(ticket)
                        self._admit()
                finally:
                    self._ends.discard(end)
        finally:
            self._leave(ticket)

    def drain(self, seconds: float) -> None:
        """Take no further request, and end those that still run after some seconds. Call it in the event loop."""
        self.is_draining = True
        asyncio.get_running_loop().call_later(seconds, self._end_all)

    def _end_all(self) -> None:
        now = asyncio.get_running_loop().time()
        for end in self._ends:
            end.reschedule(now)

    def generated(self, client: str, num_tokens: int) -> None:
        """Count tokens that were generated for a client."""
        if client in self._served:  # a request whose deadline has passed in the queue has left
            self._served[client] += OUTPUT_WEIGHT * num_tokens

    def _enter(self, ticket: Ticket) -> None:
        if not self._present[ticket.client] and self._served:
            self._served[ticket.client] = max(self._served[ticket.client], min(self._served.values()))
        self._present[ticket.client] += 1
        self._served.setdefault(ticket.client, 0)

    def _leave(self, ticket: Ticket) -> None:
        self._present[ticket.client] -= 1
        if not self._present[ticket.client]:
            del self._present[ticket.client], self._served[ticket.client]

    async def _admitted(self, ticket: Ticket) -> None:
        number = next(self._numbers)
        self._waiting[number] = ticket
        self._admit()
        try:
            async with asyncio.timeout(self.limits.max_wait_s):
                await ticket.admitted
        except BaseException as error:
            if ticket.admitted.done() and not ticket.admitted.cancelled():  # admitted in the same moment
                self._free(ticket)
            self._waiting.pop(number, None)
            self._admit()
            if isinstance(error, TimeoutError):
                message = f"The request has waited for --max-wait {self.limits.max_wait_s:g} s. Try again later."
                raise BusyError(message, RETRY_S, "wait") from None
            raise

    def _admit(self) -> None:
        """Let waiting requests run as long as there is room. One with more answers than may run runs alone."""
        while self._waiting:
            number = min(self._waiting, key=self._order)
            ticket = self._waiting[number]
            if ticket.admitted.cancelled():  # its task has not run since
                del self._waiting[number]
                continue
            if self.num_running and self.num_running + ticket.num_answers > self.limits.max_running:
                return
            del self._waiting[number]
            self.num_running += ticket.num_answers
            self._running[ticket.model] += ticket.num_answers
            ticket.admitted.set_result(None)

    def _free(self, ticket: Ticket) -> None:
        self.num_running -= ticket.num_answers
        self._running[ticket.model] -= ticket.num_answers

    def _order(self, number: int) -> tuple[int, int, int]:
        ticket = self._waiting[number]
        return ticket.priority, self._served[ticket.client], number
