"""A small HTTP client for measuring: it notes when the parts of an answer arrive, and keeps connections open.

It knows as much of HTTP/1.1 as uvicorn sends. A general client would take more time from the service beside it.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

TIMEOUT_S = 60.0
"""Seconds after which an exchange is given up."""
IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. uvicorn closes it after 5 s, and a request that is sent at
that moment is lost."""
CHAT = "/v1/chat/completions"
CLOSE = "Connection: close"
"""Header of a request after which its connection is closed."""
DONE = b"data: [DONE]"


class Address(NamedTuple):
    """Where the service listens."""

    host: str
    port: int


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are those of `time.perf_counter`."""

    due: float
    """When the request was to be sent."""
    sent: float | None = None
    """When it began, before a connection was opened."""
    status_at: float | None = None
    """When the status line arrived."""
    content_at: float | None = None
    """When the first text of a stream arrived."""
    ended: float | None = None
    """When the answer was complete, or failed."""
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)
    chunks: list[float] = field(default_factory=list[float])
    """When each chunk of the body arrived."""
    failure: str | None = None
    """Why there is no complete answer."""

    @property
    def seconds(self) -> float:
        """Seconds from the time at which the request was to be sent to the end."""
        assert self.ended is not None
        return self.ended - self.due

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of server-sent events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def answered(self) -> bool:
        """Whether the answer is complete."""
        if self.failure is not None or self.status != 200:
            return False
        if self.is_stream:
            return DONE in self.body[-64:]
        return bool(self.json().get("choices"))

    @property
    def refused(self) -> bool:
        """Whether the request got an error in OpenAI's format, which in a stream is the last event."""
        if self.failure is not None or self.status is None:
            return False
        if self.is_stream:
            events = bytes(self.body).strip().split(b"\n\n")
            return is_error(decoded(events[-1].removeprefix(b"data: ")))
        return self.status >= 400 and is_error(self.json())

    def json(self) -> dict[str, Any]:
        """Return the body; empty if it is not a JSON object."""
        return decoded(bytes(self.body))


def decoded(text: bytes) -> dict[str, Any]:
    """Return a JSON object; empty if the text is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def is_error(body: Mapping[str, Any]) -> bool:
    """Return whether a body is an error in OpenAI's format."""
    error = body.get("error")
    return isinstance(error, dict) and {"message", "type", "param", "code"} <= error.keys()


def http_request(path: str, body: bytes | None = None, headers: Sequence[str] = ()) -> bytes:
    """Return the bytes of a request: POST with a JSON body, or GET without one."""
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost", *headers]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def chat_request(question: str, *, headers: Sequence[str] = (), **fields: Any) -> bytes:
    """Return the bytes of a request for a chat completion."""
    body = {"messages": [{"role": "user", "content": question}], **fields}
    return http_request(CHAT, json.dumps(body).encode(), headers)


class Connection:
    """A connection to the service, for one exchange after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.used = time.perf_counter()
        """When the last answer was complete."""

    @classmethod
    async def open(cls, address: Address) -> "Connection":
        """Connect."""
        return cls(*await asyncio.open_connection(*address))

    async def exchange(self, request: bytes, found: Exchange) -> None:
        """Send a request and read the whole answer.

        Raises:
            OSError, EOFError, ValueError: the connection broke, or the answer is not HTTP.
        """
        self.writer.write(request)
        await self.read(found)

    async def read(self, found: Exchange) -> None:
        """Read the whole answer to a request that was sent. Raises what `exchange` raises."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found.status_at = time.perf_counter()
        found.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        found.status = int(head[0].split(" ", 2)[1])
        async for chunk in self._body(found.headers):
            now = time.perf_counter()
            found.chunks.append(now)
            found.body += chunk
            if found.content_at is None and found.is_stream and _has_text(chunk):
                found.content_at = now

    async def _body(self, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        if headers.get("transfer-encoding") != "chunked":
            yield await self.reader.readexactly(int(headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readline()
        await self.reader.readline()

    def close(self) -> None:
        """Close the connection without waiting for what was sent."""
        self.writer.transport.abort()


def _has_text(chunk: bytes) -> bool:
    """Return whether events have text. The service sends whole events in a chunk."""
    for event in chunk.split(b"\n\n"):
        for choice in decoded(event.removeprefix(b"data: ")).get("choices", ()):
            delta = choice.get("delta", {})
            if delta.get("content") or delta.get("reasoning"):
                return True
    return False


class Client:
    """Sends requests to a service over connections that stay open."""

    def __init__(self, address: Address, timeout_s: float = TIMEOUT_S) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._idle: list[Connection] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the sockets close in the next turn of the loop

    async def send(self, request: bytes, due: float | None = None) -> Exchange:
        """Send a request and return the exchange, failed or not. `due`: when it was to be sent, by default now."""
        now = time.perf_counter()
        found = Exchange(now if due is None else due, sent=now)
        connection = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = self._reused() or await Connection.open(self.address)
                await connection.exchange(request, found)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:  # a timeout is an OSError
            found.failure = type(error).__name__
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        found.ended = time.perf_counter()
        if connection is not None:
            self._release(connection, found, request)
        return found

    def _reused(self) -> Connection | None:
        """Return the idle connection that was used last, if it can still be used."""
        while self._idle:
            connection = self._idle.pop()
            if time.perf_counter() - connection.used < IDLE_S:
                return connection
            connection.close()
        return None

    def _release(self, connection: Connection, found: Exchange, request: bytes) -> None:
        closes = CLOSE.encode() in request or found.headers.get("connection", "").lower() == "close"
        if found.failure is None and not closes:
            connection.used = time.perf_counter()
            self._idle.append(connection)
        else:
            connection.close()

    async def get(self, path: str) -> str:
        """Return the body of a page, over a connection of its own.

        Raises:
            OSError: the service does not answer.
        """
        found = await self.send(http_request(path, headers=[CLOSE]))
        if found.failure is not None or found.status != 200:
            raise ConnectionError(f"GET {path} failed: {found.failure or found.status}.")
        return found.body.decode()
