"""What clients do to a service, wrong or hostile: each kind of visit, and how it must end."""

import asyncio
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from evals.bench.service.client import CHAT, Address, Client, Connection, Exchange, chat_request, http_request

Outcome = Literal["answered", "refused", "left", "wrong"]
"""With a complete answer, with an error in OpenAI's format, by the client, or in any other way."""
QUESTION = "How many apples are there?"
MAX_BODY_BYTES = 100_000
"""Limit of the service for a body."""
READ_BYTES, READ_S = 512, 0.005
"""What a slow reader reads, and how long it then waits."""
SLOW_ANSWERS = 8
"""Answers that a slow reader asks for, so that there is something to read."""
END_S = 30.0
"""Seconds after which an end that did not come is wrong."""
MALFORMED = (b"", b"{", b'{"messages": [', b"[]", b"null", b'"text"', b"{'messages': []}", b'{"messages": []} {}')
HOSTILE: tuple[bytes, ...] = (
    b"[" * 50_000,
    b'{"messages": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}",
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": ' + b"9" * 6_000 + b"}",
    b'{"messages": [{"role": "user", "content": "a"}], "n": 1000000000}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\\u0000"}]}',
    b'{"messages": {"0": {"role": "user", "content": "a"}}}',
    b'{"messages": [{"role": "root", "content": "a"}]}',
    b'{"messages": [], "messages": [{"role": "user", "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "model": "' + b"a" * 10_000 + b'"}',
    b'{"messages": [{"role": "user", "content": "a"}], "stop": ["", "", "", ""]}',
    b'{"messages": [{"role": "user", "content": "a"}], "__proto__": {"a": 1}, "policy": "../../etc/passwd"}',
)
NO_HTTP = (
    b"\r\n\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    b"POST / HTTP/9.9\r\nHost: a\r\n\r\n",
)


@dataclass(frozen=True)
class Visitor:
    """A client for one visit.

    Attributes:
        address: where the service listens.
        request_s: seconds that a request takes.
        rng: random numbers of this visit.
    """

    address: Address
    request_s: float
    rng: random.Random

    async def send(self, request: bytes) -> Outcome:
        """Send a request, and read the answer to its end."""
        async with Client(self.address, END_S) as client:
            return outcome_of(await client.send(request))

    async def pause(self, longest_s: float) -> None:
        """Wait for a random time."""
        await asyncio.sleep(self.rng.uniform(0, longest_s))


def outcome_of(found: Exchange) -> Outcome:
    """Return how a request ended. The service may be too busy, but no input may break it."""
    if found.answered:
        return "answered"
    return "refused" if found.refused and (found.status == 503 or (found.status or 500) < 500) else "wrong"


async def ask(visitor: Visitor) -> Outcome:
    """A normal request, streamed or not."""
    return await visitor.send(chat_request(QUESTION, stream=visitor.rng.random() < 0.5))


async def disconnect(visitor: Visitor) -> Outcome:
    """A client that leaves at a random time, sometimes before it has sent the whole request."""
    request = chat_request(QUESTION, stream=visitor.rng.random() < 0.5)
    if visitor.rng.random() < 0.2:
        request = request[: visitor.rng.randrange(len(request))]
    connection = await Connection.open(visitor.address)
    try:
        connection.writer.write(request)
        await visitor.pause(1.2 * visitor.request_s)
        if visitor.rng.random() < 0.5:  # a polite end; the service may still write
            with suppress(OSError):  # it has closed the connection first
                connection.writer.write_eof()
            await visitor.pause(0.1)
    finally:
        connection.close()
    return "left"


async def half_body(visitor: Visitor) -> Outcome:
    """A client that announces a body, sends half of it, and leaves."""
    request = chat_request(QUESTION)
    connection = await Connection.open(visitor.address)
    try:
        connection.writer.write(request[: (request.index(b"\r\n\r\n") + len(request)) // 2])
        await visitor.pause(visitor.request_s)
    finally:
        connection.close()
    return "left"


async def read_slowly(visitor: Visitor) -> Outcome:
    """A client that reads a stream slowly, through a small buffer."""
    found = Exchange(time.perf_counter())
    connection = await _with_small_buffer(visitor.address)
    try:
        async with asyncio.timeout(END_S):
            connection.writer.write(chat_request(QUESTION, stream=True, n=SLOW_ANSWERS))
            slow = Connection(asyncio.StreamReader(), connection.writer)
            reading = asyncio.create_task(slow.read(found))
            while (data := await connection.reader.read(READ_BYTES)) and not reading.done():
                slow.reader.feed_data(data)
                await asyncio.sleep(READ_S)
                if found.body.endswith(b"[DONE]\n\n"):
                    break
            slow.reader.feed_eof()
            await asyncio.gather(reading, return_exceptions=True)  # the rest of the last chunk may be missing
    except OSError:  # or a timeout
        return "wrong"
    finally:
        connection.close()
    return outcome_of(found)


async def _with_small_buffer(address: Address) -> Connection:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel takes its smallest size
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, tuple(address))
    return Connection(*await asyncio.open_connection(sock=made, limit=READ_BYTES))


async def oversized(visitor: Visitor) -> Outcome:
    """A body above the limit."""
    return await visitor.send(chat_request("a" * 2 * MAX_BODY_BYTES))


async def malformed(visitor: Visitor) -> Outcome:
    """A body that is not a JSON object."""
    return await visitor.send(http_request(CHAT, visitor.rng.choice(MALFORMED)))


async def hostile(visitor: Visitor) -> Outcome:
    """JSON that breaks careless parsers."""
    return await visitor.send(http_request(CHAT, visitor.rng.choice(HOSTILE)))


async def no_utf8(visitor: Visitor) -> Outcome:
    """A body that is not valid UTF-8."""
    body = bytearray(json.dumps({"messages": [{"role": "user", "content": QUESTION}]}).encode())
    body[visitor.rng.randrange(len(body))] = visitor.rng.randrange(0x80, 0x100)
    return await visitor.send(http_request(CHAT, bytes(body)))


async def no_http(visitor: Visitor) -> Outcome:
    """Bytes that are not HTTP. The server below the service answers with status 400, or closes the connection."""
    connection = await Connection.open(visitor.address)
    try:
        async with asyncio.timeout(END_S):
            connection.writer.write(visitor.rng.choice(NO_HTTP))
            connection.writer.write_eof()
            answer = await connection.reader.read()
    except TimeoutError:
        return "wrong"
    except OSError:
        return "left"
    finally:
        connection.close()
    return "left" if not answer or b" 400 " in answer[:20] else "wrong"


VISITS: Mapping[str, Callable[[Visitor], Awaitable[Outcome]]] = {
    "normal": ask,
    "disconnect": disconnect,
    "slow reader": read_slowly,
    "half a body": half_body,
    "oversized": oversized,
    "malformed": malformed,
    "hostile JSON": hostile,
    "invalid UTF-8": no_utf8,
    "no HTTP": no_http,
}
EXPECTED: Mapping[str, tuple[Outcome, ...]] = {
    "normal": ("answered",),
    "disconnect": ("left",),
    "slow reader": ("answered",),
    "half a body": ("left",),
    "oversized": ("refused",),
    "malformed": ("refused",),
    "hostile JSON": ("answered", "refused"),
    "invalid UTF-8": ("refused",),
    "no HTTP": ("left",),
}
"""How each kind of visit may end."""
