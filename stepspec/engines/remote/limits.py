"""Bounds on what a server can make us read, keep and wait for: bytes, values, nesting, and seconds.

Responses are asked for without compression and refused with it, so that what is counted is what is kept.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import httpx

from stepspec.engines.remote.address import Address
from stepspec.engines.remote.problems import nonsense, not_json, too_slow

T = TypeVar("T")

MAX_EVENT_BYTES = 1 << 20
"""Of one event of a stream, comments before it included; short lines take many times their size in memory."""
MAX_VALUES = 4_000_000
"""Of one JSON text, by its brackets and commas: `[[],[],` takes 20 times its size in memory."""


class BoundedTransport(httpx.AsyncBaseTransport):
    """Another transport, with responses that begin in time, are not compressed and have a largest size.

    Raises:
        EngineError: (from a request, or while its response is read) the server does not keep to that.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, address: Address) -> None:
        self._inner = inner
        self._address = address

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request; see `httpx.AsyncBaseTransport`."""
        request.headers["Accept-Encoding"] = "identity"
        seconds = self._address.first_token_s
        try:
            async with asyncio.timeout(seconds):
                response = await self._inner.handle_async_request(request)
        except TimeoutError:
            raise too_slow(self._address, seconds, first=True) from None
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            await response.aclose()
            raise nonsense(self._address, f"content-encoding {encoding[:40]!r}, although it was asked for none")
        assert isinstance(response.stream, httpx.AsyncByteStream)
        events = "text/event-stream" in response.headers.get("content-type", "")
        response.stream = _BoundedStream(response.stream, self._address, events=events)
        return response

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._inner.aclose()


class _BoundedStream(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, address: Address, *, events: bool) -> None:
        self._inner = inner
        self._address = address
        self._event = _OpenEvent() if events else None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for block in self._inner:
            num_bytes += len(block)
            if num_bytes > self._address.max_response_bytes:
                raise nonsense(
                    self._address,
                    f"more than {self._address.max_response_mb:g} MB (max_response_mb=N in its address allows more)",
                )
            if self._event is not None and self._event.length_with(block) > MAX_EVENT_BYTES:
                raise nonsense(self._address, f"an event of more than {MAX_EVENT_BYTES >> 20} MB")
            yield block

    async def aclose(self) -> None:
        await self._inner.aclose()


class _OpenEvent:
    """How long the event at the end of a stream is so far; an event ends with a blank line."""

    def __init__(self) -> None:
        self._length = 0
        self._end = b""

    def length_with(self, block: bytes) -> int:
        """Bytes since the last blank line, after a further block."""
        if self._end == b"\r" and block.startswith(b"\n"):  # one line end in two blocks
            block = block[1:]
        lines = self._end + block
        self._end = lines[-1:]
        lines = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blank = lines.rfind(b"\n\n")
        self._length = self._length + len(block) if blank < 0 else len(lines) - blank - 2
        return self._length


class TokenDeadline:
    """Seconds that a stream may still take to its next token. What the reader takes itself is not counted."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._first = True
        self._left = address.first_token_s

    def token_came(self) -> None:
        """Begins the wait for the next token."""
        self._first, self._left = False, self._address.timeout

    async def wait(self, work: Awaitable[T]) -> T:
        """Waits for something, but no longer than a token may take.

        Raises:
            EngineError: it takes longer.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with asyncio.timeout(self._left):
                return await work
        except TimeoutError:
            seconds = self._address.first_token_s if self._first else self._address.timeout
            raise too_slow(self._address, seconds, first=self._first) from None
        finally:
            self._left -= clock() - started


async def read_whole(address: Address, response: httpx.Response) -> bytes:
    """The body of a response.

    Raises:
        EngineError: it is too large, or does not come in time.
    """
    try:
        async with asyncio.timeout(address.timeout):
            return await response.aread()
    except TimeoutError:
        raise too_slow(address, address.timeout, first=False) from None


def read_json(address: Address, response: httpx.Response, text: bytes) -> Any:
    """What a response, or one event of it, says.

    Raises:
        EngineError: it is not JSON, or nobody could need so much of it.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise nonsense(address, f"JSON of more than {MAX_VALUES:,} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise nonsense(address, "JSON that is nested too deeply") from None
    except ValueError:
        raise not_json(address, response.headers.get("content-type", ""), text) from None
