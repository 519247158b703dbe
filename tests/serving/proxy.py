"""A proxy on loopback, between stepspec and a real server, that does to calls what networks and servers do."""

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
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body) if self.body else {}


@dataclass(frozen=True)
class Fault:
    """What happens to one call; with nothing set it goes through as it is."""

    name: str = "none"
    delay_s: float = 0.0
    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b'{"error": {"message": "made to fail"}}'
    content_type: str = "application/json"
    cut_after: int | None = None
    """Bytes of the answer after which the connection ends."""
    reset: bool = False
    """It ends by a reset, and not in an orderly way."""
    slow: bool = False
    forever: bytes = b""
    """Follows the body again and again, until the other side has gone."""
    every_s: float = 0.0
    """Pause before each time."""
    hangs: bool = False


NO_FAULT = Fault()


@dataclass
class Proxy:
    """Passes calls on to a port of this machine, or answers them itself where the fault says so."""

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
            begin = await reader.readexactly(1)
            if begin == TLS_HELLO:  # as a server without TLS does
                writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            head = begin + await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
            }
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            method, path, _ = first.split(" ")
            call = Call(method, path, headers, body)
            self.calls.append(call)
            fault = self.fault(call)
            self.met[fault.name] += 1
            await asyncio.sleep(fault.delay_s)
            if fault.hangs:
                await asyncio.sleep(3600)
            if fault.status is not None:
                writer.write(_answer(fault))
                await writer.drain()
                while fault.forever:
                    await asyncio.sleep(fault.every_s)
                    writer.write(fault.forever)
                    await writer.drain()
            else:
                self.rewrite(call)
                await self._pass_on(call, fault, writer)
            if fault.reset:
                writer.transport.abort()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side has gone
        finally:
            writer.close()

    async def _pass_on(self, call: Call, fault: Fault, writer: asyncio.StreamWriter) -> None:
        upstream, back = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            kept = {name: value for name, value in call.headers.items() if name not in ("connection", "content-length")}
            lines = [f"{name}: {value}" for name, value in kept.items()]
            lines += [f"content-length: {len(call.body)}", "connection: close"]
            back.write(f"{call.method} {call.path} HTTP/1.1\r\n".encode())
            back.write(("\r\n".join(lines) + "\r\n\r\n").encode() + call.body)
            await back.drain()
            left = fault.cut_after if fault.cut_after is not None else 1 << 60
            while left > 0 and (block := await upstream.read(SLOW_BYTES if fault.slow else 1 << 16)):
                writer.write(block[:left])
                await writer.drain()
                left -= len(block)
                if fault.slow:
                    await asyncio.sleep(0.002)
        finally:
            back.close()


def _answer(fault: Fault) -> bytes:
    lines = [f"HTTP/1.1 {fault.status} Made", f"content-type: {fault.content_type}", "connection: close"]
    lines += [] if fault.forever else [f"content-length: {len(fault.body)}"]
    lines += [*(f"{name}: {value}" for name, value in fault.headers)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + fault.body


@contextmanager
def serving(proxy: Proxy) -> Iterator[Proxy]:
    """The proxy at work, in a thread, as loading a remote engine blocks the test's own loop."""
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
