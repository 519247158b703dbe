"""A relay on loopback that delays what it passes on, like a long way to a server.

Each direction takes half of the round trip, and a new connection takes a whole one before its first bytes leave. Chunks
of a stream are shifted, not slowed: each waits for its own time alone. There may be about 500 connections.

The relay runs in a process of its own, because the event loop of a measurement is busy for longer than the delay. Its
timers are late by some tenths of a millisecond, so measure the round trip too.
"""

import asyncio
import selectors
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Annotated
from urllib.parse import SplitResult, urlsplit, urlunsplit

import typer

from stepspec.errors import EngineError, UsageError

BLOCK, MAX_BLOCKS = 1 << 16, 64
"""Bytes of a block, and how many blocks may wait in one direction. Then the sender has to wait."""
HOST = "127.0.0.1"


class Relay:
    """Passes on connections to a server.

    Args:
        host: the server's host.
        port: the server's port.
        round_trip_s: seconds that the way to the server and back takes.
    """

    def __init__(self, host: str, port: int, round_trip_s: float) -> None:
        self._host, self._port, self._round_trip_s = host, port, round_trip_s

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection in both directions, until both have ended."""
        begins = asyncio.get_running_loop().time() + self._round_trip_s
        try:
            upstream, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass_on(reader, back, begins))
                ways.create_task(self._pass_on(upstream, writer, begins))
        except* OSError:
            pass  # one side is gone
        finally:
            writer.close()
            back.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begins: float) -> None:
        """Pass on one direction. An empty block is its end."""
        blocks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_BLOCKS)
        receiving = asyncio.create_task(self._receive(reader, blocks, begins))
        loop, block = asyncio.get_running_loop(), b"?"
        try:
            while block:
                due, block = await blocks.get()
                await asyncio.sleep(due - loop.time())
                if block:
                    writer.write(block)
                    await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
        finally:
            receiving.cancel()

    async def _receive(
        self, reader: asyncio.StreamReader, blocks: "asyncio.Queue[tuple[float, bytes]]", begins: float
    ) -> None:
        loop, block = asyncio.get_running_loop(), b"?"
        while block:
            try:
                block = await reader.read(BLOCK)
            except OSError:
                block = b""
            await blocks.put((max(loop.time(), begins) + self._round_trip_s / 2, block))


def _parts(address: str) -> SplitResult:
    """Return the parts of an address that a relay can be put in front of.

    Raises:
        UsageError: the address is not one of HTTP with a port.
    """
    with suppress(ValueError):  # the port is no number, or too large
        parts = urlsplit(address)
        if parts.scheme == "http" and parts.hostname is not None and parts.port is not None:
            return parts
    raise UsageError(f"{address!r} cannot be put at a distance. Write http://HOST:PORT/v1#MODEL.")


@contextmanager
def far(address: str, round_trip_s: float) -> Generator[str]:
    """Put a server at a distance while the block runs.

    Args:
        address: a server's address, `http://HOST:PORT/v1#MODEL`.
        round_trip_s: seconds that the way to the server and back takes.

    Yields:
        The address of the relay in front of it.

    Raises:
        UsageError: the address is not one of HTTP with a port.
        EngineError: the relay does not start.
    """
    parts = _parts(address)
    command = [sys.executable, "-m", "evals.bench", "delay", str(parts.hostname), str(parts.port), str(round_trip_s)]
    # In a session of its own, so that Ctrl-C does not end it before those who use it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise EngineError(f"The relay in front of {address} did not start.")
            yield urlunsplit(parts._replace(netloc=f"{HOST}:{port}"))
        finally:
            process.terminate()


async def _serve(relay: Relay) -> None:
    server = await asyncio.start_server(relay.serve, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main(
    host: Annotated[str, typer.Argument(help="Host of the server.")],
    port: Annotated[int, typer.Argument(help="Port of the server.")],
    seconds: Annotated[float, typer.Argument(min=0, help="Round trip in seconds.")],
) -> None:
    """Delay a server's answers, until Ctrl-C."""
    # epoll waits in whole milliseconds, which is too coarse for a round trip of one.
    runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector()))
    with runner, suppress(KeyboardInterrupt):
        runner.run(_serve(Relay(host, port, seconds)))
