"""The relay that puts a server at a distance: how exact its delay is, and what it leaves as it was."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from evals.bench.delay import far
from stepspec.errors import UsageError

pytestmark = pytest.mark.anyio
GAP_S, CHUNKS = 0.01, 6
TRIES = 5
"""A busy machine may stop a test for seconds. What the relay itself does to a time shows in every try."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Server:
    """Answers every request, `/stream` in chunks with pauses."""

    port: int = 0
    num_connections: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether a client has left."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if b"/stream" not in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                for _ in range(CHUNKS):
                    writer.write(b"2\r\nok\r\n")
                    await asyncio.sleep(GAP_S)
                writer.write(b"0\r\n\r\n")
        self.left.set()
        writer.close()


@asynccontextmanager
async def serving() -> AsyncGenerator[Server]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


async def seconds(client: httpx.AsyncClient, url: str) -> float:
    since = time.perf_counter()
    assert (await client.get(url)).text == "ok"
    return time.perf_counter() - since


@pytest.mark.parametrize("round_trip_s", [0.0, 0.001, 0.005, 0.02])
async def test_a_request_takes_the_round_trip_longer_and_the_connection_stays(round_trip_s: float) -> None:
    async with serving() as server, httpx.AsyncClient() as client:
        with far(server.url, round_trip_s) as relay:
            first = await seconds(client, relay)
            own = min([await seconds(client, server.url) for _ in range(30)])
            most, delayed = own + 1.1 * round_trip_s + 1e-3, math.inf
            for _ in range(200):  # on a busy machine only some requests wait for nothing else
                delayed = min(delayed, await seconds(client, relay))
                if delayed <= most:
                    break
            assert server.num_connections == 2
    assert own + round_trip_s - 3e-4 <= delayed <= most
    assert first >= 2 * round_trip_s, "a new connection takes a round trip of its own"


async def test_requests_do_not_wait_for_each_other() -> None:
    async with serving() as server, httpx.AsyncClient() as client:
        with far(server.url, 0.1) as relay:
            for _ in range(TRIES):
                since = time.perf_counter()
                await asyncio.gather(*(seconds(client, relay) for _ in range(20)))
                if (took := time.perf_counter() - since) < 1.0:
                    break
    assert took < 1.0


async def test_a_stream_is_shifted_and_not_slowed() -> None:
    async with serving() as server, httpx.AsyncClient() as client:
        with far(server.url, 0.05) as relay:
            await seconds(client, relay)  # opens the connection
            for _ in range(TRIES):
                since, came = time.perf_counter(), list[float]()
                async with client.stream("GET", f"{relay}/stream") as response:
                    async for _ in response.aiter_raw():
                        came.append(time.perf_counter() - since)
                assert len(came) == CHUNKS
                assert came[0] >= 0.05
                if came[-1] - came[0] < 4 * 0.05:
                    break
    assert came[-1] - came[0] < 4 * 0.05, "chunks that wait for each other would take five times the delay"


async def test_a_client_that_leaves_is_gone_at_the_server_too() -> None:
    async with serving() as server:
        with far(server.url, 0.01) as relay:
            async with httpx.AsyncClient() as client:
                await seconds(client, relay)
            await asyncio.wait_for(server.left.wait(), 10)


@pytest.mark.parametrize("address", ["https://host/v1", "http://host/v1", "http://host:99999/v1", "http://host:abc/v1"])
async def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="cannot be put at a distance"), far(address, 0.01):
        pass


async def test_a_server_that_does_not_read_makes_the_client_wait() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(10)
        writer.close()

    block, most = bytes(1 << 20), 100
    async with await asyncio.start_server(wait, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with far(f"http://127.0.0.1:{port}/v1", 0.0) as relay:
            _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(relay).port)
            sent = 0
            with contextlib.suppress(TimeoutError):
                while sent < most:
                    writer.write(block)
                    await asyncio.wait_for(writer.drain(), 1)
                    sent += 1
            writer.transport.abort()
    assert sent < most
