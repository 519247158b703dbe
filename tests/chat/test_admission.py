"""Admission: the queue's limits, its order, its places, and its end."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepspec.chat.events import AnswerDelta
from stepspec.loop.result import Event
from stepspec.serve.admission import Admission, Entrance, ServiceLimits, Ticket
from stepspec.serve.errors import BusyError
from stepspec.serve.generation import merged

pytestmark = pytest.mark.anyio


class Requests:
    """Requests that run until they are let go. `order` has their names as they begin."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.order: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._go = asyncio.Semaphore(0)

    async def arrive(self, *names: str, priority: int = 0, num_tokens: int = 1, num_answers: int = 1) -> None:
        """Let requests arrive. The part of a name before its number is the client."""
        for name in names:
            ticket = Ticket(name.rstrip("0123456789"), priority, num_tokens, num_answers)
            self._tasks.append(asyncio.create_task(self._run(name, ticket)))
            await asyncio.sleep(0)

    async def _run(self, name: str, ticket: Ticket) -> None:
        async with self.admission.slot(ticket):
            self.order.append(name)
            await self._go.acquire()

    def cancel(self, number: int) -> None:
        self._tasks[number].cancel()

    async def end(self) -> Sequence[BaseException | None]:
        """Let all requests end, and return their errors."""
        for _ in self._tasks:
            self._go.release()
        found = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert (self.admission.num_running, self.admission.num_queued) == (0, 0)
        return found


async def test_requests_beyond_the_limits_wait_or_are_turned_away() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=2, max_queued=1)))
    await requests.arrive("a1", "a2")
    assert not requests.admission.is_full
    await requests.arrive("a3", "a4")
    assert (requests.admission.num_running, requests.admission.num_queued) == (2, 1)
    assert requests.admission.is_full
    errors = await requests.end()
    assert requests.order == ["a1", "a2", "a3"]
    assert [str(error) for error in errors if error] == ["The queue is full (--max-queued 1). Try again later."]


async def test_tokens_of_the_queue_are_limited_but_one_request_may_always_wait() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=1, max_queued=9, max_queued_tokens=100)))
    await requests.arrive("a1", "a2", num_tokens=150)
    await requests.arrive("a3", num_tokens=1)
    errors = await requests.end()
    assert [getattr(error, "reason", None) for error in errors] == [None, None, "tokens"]
    assert "The queue is full (--max-queued-tokens 100)." in str(errors[2])


async def test_the_lowest_priority_number_goes_first_and_then_the_client_that_was_served_least() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=1, max_queued=9)))
    await requests.arrive("a1")
    await requests.arrive("a2", "a3", "b1", num_tokens=10)
    await requests.arrive("c1", priority=-1)
    await requests.arrive("d1", priority=1)
    requests.admission.generated("a", 5)
    await requests.end()
    assert requests.order == ["a1", "c1", "b1", "a2", "a3", "d1"]


async def test_a_client_that_comes_late_neither_saved_up_nor_has_to_catch_up() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=1, max_queued=9)))
    await requests.arrive("a1", num_tokens=1_000)
    requests.admission.generated("a", 1_000)
    await requests.arrive("a2", "b1", "b2", num_tokens=10)
    await requests.end()
    assert requests.order == ["a1", "a2", "b1", "b2"]


async def test_a_request_that_leaves_the_queue_frees_its_place() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=1, max_queued=2)))
    await requests.arrive("a1", "a2", "a3")
    requests.cancel(1)
    await asyncio.sleep(0)
    assert requests.admission.num_queued == 1
    requests.cancel(0)
    await asyncio.sleep(0.01)
    assert requests.order == ["a1", "a3"]
    await requests.end()


async def test_a_request_that_is_cancelled_as_it_is_admitted_frees_its_place() -> None:
    admission = Admission(ServiceLimits(max_running=1))
    requests = Requests(admission)
    await requests.arrive("a1", "a2")
    requests.cancel(0)
    await asyncio.sleep(0)  # a2 is admitted, and has not run since
    requests.cancel(1)
    await requests.end()


async def test_a_request_of_several_answers_takes_as_many_places_and_alone_as_many_as_it_needs() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=3, max_queued=9)))
    await requests.arrive("a1", "a2", num_answers=2)
    assert requests.order == ["a1"]
    await requests.end()
    await requests.arrive("a3", num_answers=9)
    assert requests.admission.num_running == 9
    await requests.end()


class Entering:
    """Requests that hold places of an entrance until the end. `ends` has how those that are over ended."""

    def __init__(self, max_places: int) -> None:
        self.entrance = Entrance(max_places)
        self.ends: dict[str, type[BaseException]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def arrive(self, *names: str) -> None:
        """Let requests arrive. The part of a name before its number is the client."""
        for name in names:
            self._tasks.append(asyncio.create_task(self._hold(name)))
            for _ in range(5):
                await asyncio.sleep(0)

    async def _hold(self, name: str) -> None:
        try:
            async with self.entrance.place(name.rstrip("0123456789")):
                await asyncio.Event().wait()
        except BaseException as error:
            self.ends[name] = type(error)

    async def end(self) -> None:
        """End all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks)
        assert self.entrance.num_places == 0


async def test_a_full_entrance_goes_to_the_client_with_fewer_places() -> None:
    places = Entering(4)
    await places.arrive("a1", "a2", "a3", "a4", "a5")
    assert places.ends == {"a5": BusyError}
    assert places.entrance.is_full("a")
    assert not places.entrance.is_full("b")
    await places.arrive("b1", "b2", "b3")
    assert places.ends == dict.fromkeys(("a5", "a1", "a2", "b3"), BusyError)
    await places.arrive("c1", "d1")
    assert places.ends == dict.fromkeys(("a5", "a1", "a2", "b3", "a3", "b1"), BusyError)
    assert places.entrance.num_places == 4
    await places.end()


@given(st.lists(st.sampled_from("abcd"), max_size=25), st.integers(1, 7))
async def test_a_client_is_turned_away_only_with_its_share_of_the_places(clients: list[str], max_places: int) -> None:
    places, names = Entering(max_places), [f"{client}{number}" for number, client in enumerate(clients)]
    for number, name in enumerate(names):
        await places.arrive(name)
        held = Counter(each[0] for each in names[: number + 1] if each not in places.ends)
        assert held.total() == places.entrance.num_places <= max_places
        assert name not in places.ends or held[name[0]] >= max(held.values()) - 1
    await places.end()


async def test_a_request_waits_for_a_bounded_time() -> None:
    requests = Requests(Admission(ServiceLimits(max_running=1, max_wait_s=0.02)))
    await requests.arrive("a1", "a2")
    await asyncio.sleep(0.1)
    errors = await requests.end()
    assert [getattr(error, "reason", None) for error in errors] == [None, "wait"]
    assert "--max-wait 0.02 s" in str(errors[1])


async def test_draining_turns_new_requests_away_and_ends_running_ones_in_time() -> None:
    admission = Admission(ServiceLimits(max_running=1))
    requests = Requests(admission)
    await requests.arrive("a1", "a2")
    admission.drain(0.05)
    await requests.arrive("a3")
    await asyncio.sleep(0.02)
    assert requests.order == ["a1"]
    await asyncio.sleep(0.1)
    errors = await requests.end()
    assert all(isinstance(error, BusyError) and error.reason == "draining" for error in errors)


async def test_answers_beyond_the_limit_wait_for_others_of_their_request() -> None:
    num_running = most_running = 0

    async def answer(index: int) -> AsyncGenerator[tuple[int, Event], None]:
        nonlocal num_running, most_running
        num_running += 1
        most_running = max(most_running, num_running)
        await asyncio.sleep(0.01)
        yield index, AnswerDelta("a")
        num_running -= 1

    indexes = [index async for index, _ in merged([answer(index) for index in range(7)], 3)]
    assert sorted(indexes) == [*range(7)]
    assert most_running == 3


async def test_a_client_whose_request_has_left_the_queue_leaves_no_count() -> None:
    admission = Admission(ServiceLimits())
    admission.generated("gone", 0)
    assert not admission._served, "its count would be the lowest one, at which others begin"
