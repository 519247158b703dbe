"""HTTP connections with limits that uvicorn does not have: of heads, of time, and of their number."""

import asyncio
import heapq
import json
import math
import time
from asyncio.sslproto import SSLProtocol
from contextlib import suppress
from ssl import SSLContext
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from stepspec.serve.bodies import ARRIVAL_S
from stepspec.serve.errors import RefusedError, error_body

MAX_HEAD_BYTES = 64_000
"""Limit of a request line with its headers, and of what is neither body nor head: chunk extensions, trailers."""
PART_BYTES = 8_192
"""Bytes that are parsed before they are counted anew."""
MAX_HEADERS = 100
MAX_PIPELINED = 16
"""Requests of a connection that wait for the response before."""
MAX_CONNECTIONS = 4096

HEAD_S = 10
"""Seconds for a head to arrive, from the opening of the connection or the first byte of a further request."""
BODY_S = ARRIVAL_S + 5
"""Seconds for a body to arrive, if it is not the application that ends the request before."""
IDLE_S = 5.0
"""Seconds for which a connection is kept for a further request."""
STALL_S = 30.0
"""Seconds after which a connection is cut off if its client reads nothing of what is to be sent, or does not close it
too."""


def max_connections() -> int:
    """Return the number of connections that may be open, which leaves a quarter of the descriptors for the models."""
    with suppress(ImportError):
        import resource

        return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4)
    return MAX_CONNECTIONS


class Connection(HttpToolsProtocol):
    """A connection whose client may send and read only within limits of size and time."""

    def __init__(self, *arguments: Any, tls: SSLContext | None = None, **settings: Any) -> None:
        """`tls` encrypts the connection. Other arguments are uvicorn's."""
        super().__init__(*arguments, **settings)
        self._tls = tls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to count, and then TLS, after which this is called again."""
        is_new = cast("object", self.transport) is None
        if is_new:
            self._wire = transport  # below TLS, whose own transport fails after a second `close`
        super().connection_made(transport)
        self.url, self._status, self._part = b"", 400, ""
        self._running: RequestResponseCycle | None = None
        self._num_unparsed = self._num_unsent = 0
        self.idle_since = self.moved = time.monotonic()
        self._deadline = self.idle_since + HEAD_S
        if is_new and len(self.connections) > (most := max_connections()):
            self._make_room(1 + most // 8)
        if is_new and self._tls is not None and not transport.is_closing():
            ended = self.loop.create_future()
            ended.add_done_callback(self._on_handshake)
            protocol = SSLProtocol(self.loop, self, self._tls, ended, server_side=True, ssl_handshake_timeout=HEAD_S)
            transport.set_protocol(protocol)
            protocol.connection_made(transport)

    def _on_handshake(self, ended: asyncio.Future[None]) -> None:
        if ended.exception() is not None or self.scheme == "http":
            self.connections.discard(self)

    def _make_room(self, number: int) -> None:
        """Close connections that have been idle for the longest, or one that waits for its client, or this one."""
        found = cast("set[Connection]", self.connections - {self})
        closed = heapq.nsmallest(number, [each for each in found if each.is_idle], key=lambda each: each.idle_since)
        if not closed:
            late = [each for each in found if each.flow.write_paused or each.answering is None]
            closed = [min(late, key=lambda each: (each.may_generate, each.moved), default=self)]
        for each in closed:
            each.abort()

    def abort(self) -> None:
        """Close the connection without waiting for its client."""
        self._wire.abort()
        self.connections.discard(self)

    @property
    def is_idle(self) -> bool:
        """Whether no request of the connection is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def answering(self) -> RequestResponseCycle | None:
        """The request that arrived in full and is being answered. What the client sends is then a later request."""
        cycle = self._running
        return None if cycle is None or cycle.more_body or cycle.response_complete else cycle

    @property
    def may_generate(self) -> bool:
        """Whether an answer may take long because a model writes it."""
        return self.answering is not None and self.answering.scope["method"] == "POST"

    def connection_lost(self, exc: Exception | None) -> None:
        """End the running request, which is not `cycle` if others wait, and drop those that wait."""
        super().connection_lost(exc)
        self.pipeline.clear()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def check(self, now: float) -> None:
        """Close the connection if its client is late. Call it once a second."""
        unsent, is_closing = self._wire.get_write_buffer_size(), self.transport.is_closing()
        if unsent != self._num_unsent or not (unsent or is_closing):  # it grows until the application has to wait
            self.moved = now
        self._num_unsent = unsent
        if now > self.moved + STALL_S:
            self.abort()
        elif self.flow.read_paused or self.answering is not None:  # it is not the client that is late
            self._deadline = max(self._deadline, now + HEAD_S)
        elif now > self._deadline and not is_closing:  # with TLS, it closes when the client does
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse bytes. The parser collects a head in quadratic time, so it does not get one without end."""
        for start in range(0, len(data), PART_BYTES):
            if self.transport.is_closing():
                return
            part = data[start : start + PART_BYTES]
            self._num_unparsed += len(part)
            self._feed(part)
            if self._num_unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._status = 414 if len(self.url) > MAX_HEAD_BYTES // 2 else 431
                self.send_400_response("")

    def _feed(self, part: bytes) -> None:
        """Parse bytes. A request with an Upgrade header is parsed again without it, or the parser drops its body."""
        try:
            self.parser.feed_data(part)
        except HttpParserError:
            self.send_400_response("The request is not valid HTTP.")
        except HttpParserUpgrade as upgrade:
            line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            head = b"".join(b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade")
            self.parser = HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(line + head + b"\r\n" + part[upgrade.args[0] :])

    def send_400_response(self, msg: str) -> None:
        """Refuse what the client sends, and close the connection."""
        is_alone = self._part == "body" and not self.pipeline and not self.cycle.response_started
        if not (self.is_idle or is_alone):  # nothing may be put into the response to an earlier request
            self.abort()
            return
        what = {
            405: "This is not a proxy. Send no CONNECT.",
            414: f"The URL must have at most {MAX_HEAD_BYTES // 2} bytes.",
            431: f"Head and trailer must have at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers.",
        }.get(self._status, msg)
        body = json.dumps(error_body(RefusedError(None, what))).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[self._status] + head + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """Start the time of a further head."""
        super().on_message_begin()
        self._part = "head"
        if self.cycle is not None:
            self._deadline = time.monotonic() + HEAD_S

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, also of a trailer."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse(431)

    def on_headers_complete(self) -> None:
        """Check the head before the application gets it."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.url) > MAX_HEAD_BYTES // 2:
            self._refuse(414)
        if size > MAX_HEAD_BYTES or len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(431)
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refuse(405)
            return
        super().on_headers_complete()
        waiting = [cycle for cycle, _ in self.pipeline]
        if 0 < len(waiting) < MAX_PIPELINED and sum(len(each.body) for each in waiting) < HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # uvicorn pauses it, and then nobody notices that the client leaves
        self._part, self._num_unparsed = "body", 0
        self._deadline = time.monotonic() + BODY_S

    def _refuse(self, status: int) -> None:
        """Stop parsing. uvicorn then sends its response to what is not HTTP."""
        self._status = status
        raise ValueError(STATUS_LINE[status])

    def on_chunk_header(self) -> None:
        """Count anew with each chunk."""
        self._num_unparsed = 0

    def on_body(self, body: bytes) -> None:
        """Count what is not body."""
        self._num_unparsed = max(0, self._num_unparsed - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the response, or if it is complete, for the next request."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._part, self._num_unparsed = "", 0
        self._deadline = time.monotonic() + IDLE_S if self.cycle.response_complete else math.inf

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that is not read."""
        is_last = not self.pipeline
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `check` closes idle connections
        if is_last:
            self.cycle.body.clear()
            self.idle_since = time.monotonic()
            if self._part != "body":
                self._deadline = self.idle_since + (HEAD_S if self._part else IDLE_S)
