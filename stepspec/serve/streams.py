"""Responses: complete, or streamed as server-sent events. A client that disconnects cancels its request."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from anyio import CancelScope
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from stepspec.errors import StepSpecError
from stepspec.loop.result import Done, Event, Result
from stepspec.serve.errors import public_error
from stepspec.serve.generation import IndexedEvents
from stepspec.serve.log import LogEntry, entry_of

KEEPALIVE_S = 10.0
"""Seconds without an event after which a keep-alive comment is sent, since a step may take longer than a client's
timeout."""

FIRST_S = 0.1
"""Seconds to wait for the first event before a stream starts. Until then an error can still set the HTTP status."""

MAX_EVENTS = 16
"""Events that wait to be sent. If there are more, the generation waits."""

DONE = format_sse_event(data_str="[DONE]")
CLIENT_LEFT = 499
"""Status that the log shows for a request whose client disconnected."""


class AnswerFormat(Protocol):
    """Builds the response in one format."""

    named_events: bool
    """Whether the events of a stream are named by their type, as in the Responses API, and no `[DONE]` ends it."""

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before the first event."""
        ...

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the chunks of an event of the answer with this number."""
        ...

    def end(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        """Return the chunks after the last event."""
        ...

    def failed(self, error: StepSpecError) -> list[dict[str, Any]]:
        """Return the chunks for an error in the middle of a stream."""
        ...

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the complete response."""
        ...


async def respond(request: Request, events: IndexedEvents, answer: AnswerFormat, *, stream: bool) -> Response:
    """Return the response.

    Raises:
        StepSpecError: the request failed before the response began.
    """
    if not stream:
        return await _while_connected(request, _whole(events, answer))
    queue = _EventQueue(events)
    try:
        await queue.wait_for_first()
    except BaseException:
        await queue.end()
        raise
    return _Stream(queue, answer, entry_of(request.scope))


async def _whole(events: IndexedEvents, answer: AnswerFormat) -> Response:
    results: dict[int, Result] = {}
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Done):
                results[index] = event.result
    return JSONResponse(answer.whole([results[index] for index in sorted(results)]))


async def _while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response. If the client disconnects, cancel the work, which frees both engines."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else Response(status_code=CLIENT_LEFT)
    finally:
        for each in (task, disconnect):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventQueue:
    """The events of a request, read by a background task. Closing it cancels the request at any point.

    Until a client has taken what was sent, the request keeps its place in the service.
    """

    def __init__(self, events: IndexedEvents) -> None:
        self._queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue(MAX_EVENTS)
        self._first: tuple[int, Event] | Exception | None = None
        self._task = asyncio.ensure_future(self._pump(events))

    async def _pump(self, events: IndexedEvents) -> None:
        try:
            async with aclosing(events):
                async for each in events:
                    await self._queue.put(each)
                    if isinstance(each[1], Done):
                        await self._queue.join()
            await self._queue.put(None)
        except Exception as error:
            await self._queue.put(error)

    async def wait_for_first(self) -> None:
        """Wait up to `FIRST_S` seconds for the first event, so that early errors can set the HTTP status.

        Raises:
            StepSpecError: the request was rejected or failed in that time.
        """
        with suppress(TimeoutError):
            self._first = await asyncio.wait_for(self._queue.get(), FIRST_S)
        if isinstance(self._first, Exception):
            raise self._first

    async def next(self) -> tuple[int, Event] | Exception | None:
        """Return the next event or the error of the request; None at the end.

        Raises:
            TimeoutError: there was none for `KEEPALIVE_S` seconds.
        """
        if (first := self._first) is not None:
            self._first = None
            return first
        return await asyncio.wait_for(self._queue.get(), KEEPALIVE_S)

    def sent(self) -> None:
        """Count an event as sent. What it became is in the buffer of the connection, which takes no more when full."""
        self._queue.task_done()

    async def end(self) -> None:
        """Cancel the request and wait until its engines are free, even if this task is cancelled."""
        self._task.cancel()
        with CancelScope(shield=True):
            await asyncio.wait({self._task})


class _Stream(EventSourceResponse):
    """A streamed answer. A client that disconnects cancels the request."""

    def __init__(self, queue: _EventQueue, answer: AnswerFormat, entry: LogEntry) -> None:
        super().__init__(_lines(queue, answer, entry))
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._queue.end()


async def _lines(queue: _EventQueue, answer: AnswerFormat, entry: LogEntry) -> AsyncGenerator[bytes, None]:
    results: dict[int, Result] = {}
    yield _encoded(answer, answer.begin())
    while True:
        try:
            found = await queue.next()
        except TimeoutError:
            yield KEEPALIVE_COMMENT
            continue
        if found is None:
            ordered = [results[index] for index in sorted(results)]
            yield _encoded(answer, answer.end(ordered)) + (b"" if answer.named_events else DONE)
            return
        if isinstance(found, Exception):  # the HTTP status is already sent
            public = public_error(found, entry.request_id)
            entry.failed(public)
            yield _encoded(answer, answer.failed(public))
            return
        index, event = found
        if isinstance(event, Done):
            results[index] = event.result
        if chunks := answer.chunks(index, event):
            yield _encoded(answer, chunks)
        queue.sent()


def _encoded(answer: AnswerFormat, chunks: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(
        format_sse_event(
            data_str=json.dumps(chunk, ensure_ascii=False), event=chunk["type"] if answer.named_events else None
        )
        for chunk in chunks
    )
