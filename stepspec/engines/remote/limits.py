"""Limits on the responses of a server: bytes, JSON values, nesting and seconds.

Requests ask for no compression, and compressed responses are rejected, so the counted bytes are the bytes in memory.
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
"""Maximum size of one event with the comments before it. Short lines use many times their size in memory."""
MAX_VALUES = 4_000_000
"""Maximum number of brackets and commas in a JSON text. `[[],[],` uses 20 times its size in memory."""


class BoundedTransport(httpx.AsyncBaseTransport):
    """Wraps a transport with limits on the time to the response and on its size, and rejects compression.

    Raises:
        EngineError: a response exceeds a limit; raised by the request, or while the response is read.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport, address: Address) -> None:
        self._inner = inner
        self._address = address

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, see `httpx.AsyncBaseTransport`."""
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
            raise nonsense(self._address, f"content-encoding {encoding[:40]!r}, although none was requested")
        assert isinstance(response.stream, httpx.AsyncByteStream)
        events = "text/event-stream" in response.headers.get("content-type", "")
        response.stream = _BoundedStream(response.stream, self._address, events=events)
        return response

    async def aclose(self) -> None:
        """Close the connections."""
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
    """Counts the bytes of the last, incomplete event of a stream. A blank line ends an event."""

    def __init__(self) -> None:
        self._length = 0
        self._end = b""

    def length_with(self, block: bytes) -> int:
        """Add a block and return the number of bytes since the last blank line."""
        if self._end == b"\r" and block.startswith(b"\n"):  # a line ending split across two blocks
            block = block[1:]
        lines = self._end + block
        self._end = lines[-1:]
        lines = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blank = lines.rfind(b"\n\n")
        self._length = self._length + len(block) if blank < 0 else len(lines) - blank - 2
        return self._length


class TokenDeadline:
    """Deadline for the next token of a stream. Time that the reader spends between waits does not count."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._first = True
        self._left = address.first_token_s

    def token_came(self) -> None:
        """Restart the deadline for the next token."""
        self._first, self._left = False, self._address.timeout

    async def wait(self, work: Awaitable[T]) -> T:
        """Wait for something until the deadline.

        Raises:
            EngineError: the deadline passed.
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
    """Read the body of a response.

    Raises:
        EngineError: the body is too large, or too slow.
    """
    try:
        async with asyncio.timeout(address.timeout):
            return await response.aread()
    except TimeoutError:
        raise too_slow(address, address.timeout, first=False) from None


def read_json(address: Address, response: httpx.Response, text: bytes) -> Any:
    """Parse the JSON of a response, or of one event of it.

    Raises:
        EngineError: the text is not JSON, has too many values, or is nested too deeply.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise nonsense(address, f"JSON of more than {MAX_VALUES:,} values")
    try:
        return json.loads(text)
    except RecursionError:
        raise nonsense(address, "JSON that is nested too deeply") from None
    except ValueError:
        raise not_json(address, response.headers.get("content-type", ""), text) from None
