"""HTTP client of one server: pooled connections, limited retries, event streams and traffic counts."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from httpx_retries import Retry, RetryTransport
from httpx_sse import EventSource, SSEError

from stepspec.engines.remote.address import Address
from stepspec.engines.remote.limits import BoundedTransport, TokenDeadline, read_json, read_whole
from stepspec.engines.remote.problems import not_json, refused, unreachable
from stepspec.errors import StepSpecError

RETRIED_STATUSES = (408, 409, 429, *range(500, 600))
RETRIED_ERRORS = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ReadError,
    httpx.WriteError,
    httpx.RemoteProtocolError,
)
MAX_WAIT_S = 30.0
"""Maximum wait for one retry, even if `Retry-After` is longer. All retries of a call may take twice that."""
CONNECT_S = 10.0
MAX_CONNECTIONS = 512
DONE = "[DONE]"


@dataclass
class Traffic:
    """Counts of requests and body bytes."""

    requests: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass
class Wire:
    """HTTP client of one server for any number of event loops. Each loop has its own connection pool."""

    address: Address
    traffic: Traffic = field(default_factory=Traffic)
    refusal: Callable[[Address, int, bytes], StepSpecError] = refused
    """Converts a response with an error status to an exception."""
    _clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = field(
        default_factory=WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
    )

    async def ask(self, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[Any, httpx.Headers]:
        """Send a request. Return the decoded JSON of the response and its headers.

        Raises:
            EngineError: the request failed; the message has the server and what to do.
            ContextError: the prompt is too long for the server.
        """
        async with self._sent(url, body, headers) as response:
            text = await read_whole(self.address, response)
            self.traffic.bytes_received += len(text)
            return read_json(self.address, response, text), response.headers

    async def check(self, url: str) -> None:
        """Check that a server answers.

        Raises:
            EngineError: it does not, or says that it cannot work.
        """
        try:
            response = await self._client().get(url, headers=self.address.headers(), timeout=CONNECT_S)
        except httpx.HTTPError as error:
            raise unreachable(self.address, error) from error
        if response.is_server_error:
            raise self.refusal(self.address, response.status_code, response.content)

    @asynccontextmanager
    async def stream(
        self, url: str, body: bytes, headers: Mapping[str, str], deadline: TokenDeadline | None = None
    ) -> AsyncGenerator[tuple[AsyncGenerator[Any, None], httpx.Headers], None]:
        """Stream the decoded events of a response, with its headers. Leaving the context cancels the request.

        If the caller passes a deadline, it must report each token to it. Otherwise every event counts as a token.

        Raises:
            EngineError, ContextError: see `ask`; also during the stream.
        """
        async with self._sent(url, body, headers) as response:
            if "text/event-stream" not in response.headers.get("content-type", ""):
                text = await read_whole(self.address, response)
                raise not_json(self.address, response.headers.get("content-type", ""), text)
            events = self._events(response, deadline)
            try:
                yield events, response.headers
            finally:
                await events.aclose()

    async def _events(self, response: httpx.Response, own_deadline: TokenDeadline | None) -> AsyncGenerator[Any, None]:
        deadline = own_deadline or TokenDeadline(self.address)
        response.encoding = "utf-8"  # ignore the server's charset, since Python's codecs include decompressors
        try:
            async with aclosing(EventSource(response).aiter_sse()) as events:
                while (event := await deadline.wait(anext(events, None))) is not None and event.data != DONE:
                    self.traffic.bytes_received += len(event.data)
                    yield read_json(self.address, response, event.data.encode())
                    if own_deadline is None:
                        deadline.token_came()
        except SSEError as error:
            raise unreachable(self.address, error) from error

    @asynccontextmanager
    async def _sent(self, url: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[httpx.Response, None]:
        """Send a request and yield its successful response, before its body is read."""
        self.traffic.requests += 1
        self.traffic.bytes_sent += len(body)
        client = self._client()
        headers = {**self.address.headers(), "Content-Type": "application/json", **headers}
        try:
            async with client.stream("POST", url, content=body, headers=headers) as response:
                if not response.is_success:
                    text = await read_whole(self.address, response)
                    raise self.refusal(self.address, response.status_code, text)
                yield response
        except httpx.HTTPError as error:
            raise unreachable(self.address, error) from error

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS)
            connections = httpx.AsyncHTTPTransport(verify=self.address.uses_tls, http2=True, limits=limits)
            retry = Retry(
                self.address.retries,
                allowed_methods=["POST"],
                status_forcelist=RETRIED_STATUSES,
                retry_on_exceptions=RETRIED_ERRORS,
                backoff_factor=0.25,
                max_backoff_wait=MAX_WAIT_S,
                total_timeout=2 * MAX_WAIT_S,
            )
            self._clients[loop] = httpx.AsyncClient(
                transport=RetryTransport(BoundedTransport(connections, self.address), retry),
                timeout=httpx.Timeout(None, connect=min(CONNECT_S, self.address.timeout)),
            )
        return self._clients[loop]

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        if client := self._clients.pop(asyncio.get_running_loop(), None):
            await client.aclose()
