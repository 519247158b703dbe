"""A proxy on loopback between stepspec and a real server. It injects faults of networks and servers."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SLOW_BYTES = 64
TLS_HELLO = b"\x16"


@dataclass
class Call:
    """A request as the proxy received it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body) if self.body else {}


@dataclass(frozen=True)
class Fault:
    """What happens to one call. The default forwards it unchanged."""

    name: str = "none"
    delay_s: float = 0.0
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b'{"error": {"message": "made to fail"}}'
    content_type: str = "application/json"
    cut_after: int | None = None
    """Number of bytes of the response after which the connection closes."""
    reset: bool = False
    """Whether the connection ends with a reset instead of an orderly close."""
    slow: bool = False
    forever: bytes = b""
    """Bytes that follow the body again and again, until the client disconnects."""
    every_s: float = 0.0
    """Pause before each repetition of `forever`, in seconds."""
    hangs: bool = False


NO_FAULT = Fault()


@dataclass
class Proxy:
    """Forward calls to a port of this machine, or answer them itself if the fault has a status."""

    upstream: int | None
    fault: Callable[[Call], Fault] = lambda call: NO_FAULT
    rewrite: Callable[[Call], None] = lambda call: None
    calls: list[Call] = field(default_factory=list[Call])
    met: Counter[str] = field(default_factory=Counter[str])
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first_byte = await reader.readexactly(1)
            if first_byte == TLS_HELLO:  # answer like a server without TLS
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            head = first_byte + await reader.readuntil(b"\r\n\r\n")
            request_line, *lines = head.decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = request_line.split(" ")
            call = Call(method, path, headers, body)
            self.calls.append(call)
            fault = self.fault(call)
            self.met[fault.name] += 1
            await asyncio.sleep(fault.delay_s)
            if fault.hangs:
                await asyncio.sleep(3600)
            if fault.status is not None:
                writer.write(_response(fault))
                await writer.drain()
                while fault.forever:
                    await asyncio.sleep(fault.every_s)
                    writer.write(fault.forever)
                    await writer.drain()
            else:
                self.rewrite(call)
                await self._forward(call, fault, writer)
            if fault.reset:
                writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client or the server disconnected
        finally:
            writer.close()

    async def _forward(self, call: Call, fault: Fault, writer: asyncio.StreamWriter) -> None:
        upstream, back = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            dropped = ("connection", "content-length")
            lines = [f"{name}: {value}" for name, value in call.headers.items() if name not in dropped]
            lines += [f"content-length: {len(call.body)}", "connection: close"]
            back.write(f"{call.method} {call.path} HTTP/1.1\r\n".encode())
            back.write(("\r\n".join(lines) + "\r\n\r\n").encode() + call.body)
            await back.drain()
            remaining = fault.cut_after if fault.cut_after is not None else 1 << 60
            while remaining > 0 and (block := await upstream.read(SLOW_BYTES if fault.slow else 1 << 16)):
                writer.write(block[:remaining])
                await writer.drain()
                remaining -= len(block)
                if fault.slow:
                    await asyncio.sleep(0.002)
        finally:
            back.close()


def _response(fault: Fault) -> bytes:
    lines = [f"HTTP/1.1 {fault.status} Made", f"content-type: {fault.content_type}", "connection: close"]
    lines += [] if fault.forever else [f"content-length: {len(fault.body)}"]
    lines += [*(f"{name}: {value}" for name, value in fault.headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + fault.body


Script = Callable[[Call], Fault]
ServerFixture = Callable[[Script], Proxy]
"""Runs a server that a script plays."""


@contextmanager
def serving(proxy: Proxy) -> Iterator[Proxy]:
    """Run the proxy in a thread, because loading a remote engine blocks the test's own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(proxy.serve, "127.0.0.1", 0), loop)
    server = starting.result()
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:

        def stop() -> None:
            server.close()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(stop)
        thread.join()
        loop.close()
