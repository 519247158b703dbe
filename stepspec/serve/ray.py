"""The service on a Ray cluster: replicas that each hold models, behind a front that keeps the format of errors.

    serve run stepspec.serve.ray:app                        # the embedded pair
    serve run stepspec.serve.ray:app policy=token max_replicas=4
    serve deploy ray.yaml

A client talks to the front, which has no models. It sends a request to the replica of its `X-Session-ID`, else to
the less busy one of two. A request whose replica dies before it answers is sent to another one.
"""

import asyncio
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi.sse import format_sse_event
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepspec.api.models import Pair, check_models
from stepspec.base.extras import from_extra
from stepspec.base.strict_json import MAX_BODY_BYTES
from stepspec.engines.protocol import hash_of
from stepspec.errors import StepSpecError, UsageError
from stepspec.loop.policy import load_policy
from stepspec.serve.admission import RETRY_S, Entrance, ServiceLimits
from stepspec.serve.app import create_app
from stepspec.serve.bodies import arrived
from stepspec.serve.errors import MESSAGES_ROUTES, BusyError, LostError, error_body, error_response, messages_error
from stepspec.serve.hosts import LOCAL, HostCheck, answered_hosts
from stepspec.serve.keys import ENVIRONMENT, Keys, authorization_of
from stepspec.serve.log import header
from stepspec.serve.merged_metrics import merged_metrics
from stepspec.serve.pairs import load_pairs, wanted_pairs
from stepspec.serve.service import Service
from stepspec.serve.settings import Settings

with from_extra("ray", "stepspec.serve.ray"):
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig
    from ray.serve.exceptions import BackPressureError, RayServeException
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

logger = logging.getLogger("ray.serve")

EXCHANGE_S = 1.0
"""Seconds between two reports of a replica."""
FORGOTTEN_S = 10.0
"""Seconds after which a replica that reports no more is gone."""
RETRIES = 2
"""How often a request is sent to another replica after one has died."""
REQUEST_ID = b"x-request-id"
"""Header of a response that Ray adds itself."""
PASSED = ("type", "http_version", "method", "path", "raw_path", "query_string", "headers", "scheme", "client", "server")
"""Keys of an ASGI scope that a replica gets."""


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Listed = Annotated[list[str], BeforeValidator(_as_list)]
"""Several values, or one, as `serve run` gives it."""


class Arguments(BaseModel):
    """The arguments of the application, with the names of the options of `stepspec serve`."""

    model_config = ConfigDict(extra="forbid")

    pair: Listed = Field(default_factory=list)
    """Pairs by name, or `NAME=MODELS`."""
    target: str | None = None
    draft: str | None = None
    judges: dict[str, str] = Field(default_factory=dict)
    """Spec strings of judge models by name."""
    policy: str = "two-level"
    api_keys: Path | None = None
    """File of API keys, on every node. It is read again when it changes."""
    insecure: bool = False
    """Whether clients on other machines are answered without API keys."""
    allowed_host: Listed = Field(default_factory=list)
    """Further host names in addresses of the service."""
    max_running: int = Field(default=128, ge=1)
    """Answers that one replica generates concurrently."""
    max_queued: int = Field(default=128, ge=0)
    """Requests that wait at one replica, and at the front while all replicas are full."""
    max_wait: float | None = Field(default=None, gt=0)
    drain: float = Field(default=30.0, ge=0)
    """Seconds for the requests of a replica to end before it is removed."""
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    requests_per_replica: float = Field(default=16.0, gt=0)
    """Requests, running and waiting, to which the number of replicas is adjusted."""
    upscale_delay: float = Field(default=30.0, ge=0)
    """Seconds of more requests before a replica is added."""
    downscale_delay: float = Field(default=300.0, ge=0)
    """Seconds of fewer requests before one is removed."""
    cpus: float = Field(default=1.0, ge=0)
    """Processors of a replica."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of a replica; 0 for models on servers."""
    fronts: int = Field(default=1, ge=1)
    """Processes that take requests."""


class SessionRouter(ConsistentHashRouter):
    """Chooses the replica of a session by consistent hashing, else the less busy one of two."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """See `ray.serve.request_router.RequestRouter`."""
        if pending_request is None or pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


@serve.deployment(name="board", ray_actor_options={"num_cpus": 0}, logging_config={"enable_access_log": False})
class Board:
    """What the replicas report about themselves: their metrics, and what their clients have used."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, bytes, Mapping[tuple[str, str], int]]] = {}

    async def exchange(
        self, replica: str, metrics: bytes, used: Mapping[tuple[str, str], int]
    ) -> Mapping[tuple[str, str], int]:
        """Take the report of a replica, and return what clients have used at the others."""
        now = time.monotonic()
        self._reports[replica] = now, metrics, used
        for name in [name for name, (at, _, _) in self._reports.items() if now - at > FORGOTTEN_S]:
            del self._reports[name]
        total: Counter[tuple[str, str]] = Counter()
        for name, (_, _, counts) in self._reports.items():
            if name != replica:
                total.update(counts)
        return dict(total)

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas in Prometheus' text format."""
        return merged_metrics({name: text for name, (_, text, _) in self._reports.items()})


@serve.deployment(name="models")
class Models:
    """A replica: models in one process, with the queue and the limits of `stepspec serve`."""

    def __init__(self, arguments: Arguments, load: Callable[[], Mapping[str, Pair]], board: Any) -> None:
        self._board = board
        self._name = serve.get_replica_context().replica_id.unique_id
        limits = ServiceLimits(arguments.max_running, arguments.max_queued, max_wait_s=arguments.max_wait)
        settings = Settings(limits=limits, keys=Keys(arguments.api_keys, os.environ), drain_s=arguments.drain)
        made = create_app(load(), arguments.policy, settings)
        self._app: ASGIApp = made
        self._service: Service = made.state.service
        self._exchange: asyncio.Task[None] | None = None

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the response to a request, all that there are at a time."""
        if self._exchange is None:
            self._exchange = asyncio.create_task(self._report())
        incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            if not incoming:
                await asyncio.Event().wait()  # a client that leaves cancels this call
            return incoming.pop()

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            is_open = True
            while is_open:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                is_open = found[-1] is not None
                yield [message for message in found if message is not None]
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _report(self) -> None:
        """Exchange reports with the board, and read the keys again when their file changes."""
        service = self._service
        while True:
            with suppress(RayError, RayServeException):  # the board is back by itself
                service.rates.elsewhere = await self._board.exchange.remote(
                    self._name, service.monitor.text(), service.rates.counts()
                )
            service.settings.keys.refresh()
            await asyncio.sleep(EXCHANGE_S)

    async def __del__(self) -> None:
        if self._exchange is not None:
            self._exchange.cancel()
        await self._service.aclose()


@serve.deployment(name="front", ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Front:
    """Takes requests, and sends each one to a replica."""

    def __init__(self, arguments: Arguments, models: Any, board: Any) -> None:
        self._models, self._board = models, board
        self._keys = Keys(arguments.api_keys, os.environ)
        self._entrance = Entrance(arguments.max_running + arguments.max_queued)
        is_open = self._keys.are_needed or arguments.insecure
        if not is_open and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
            raise UsageError(
                "With RAY_SERVE_ENABLE_HA_PROXY=1, every request seems to come from this machine. Set api_keys or the "
                f"environment variable {ENVIRONMENT}, or allow all clients with insecure=true."
            )
        hosts = answered_hosts(LOCAL, arguments.allowed_host, is_open=is_open)
        self._guard = Middleware(HostCheck, hosts=hosts, is_local=not is_open)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        routes = [Route("/metrics", self._metrics), Mount("/", app=self._forward)]
        return Starlette(routes=routes, middleware=[self._guard])

    async def _metrics(self, _: Request) -> Response:
        return Response(await self._board.metrics.remote(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request, which is read only for a client with a key.

        Raises:
            StepSpecError: the request is turned away.
        """
        if request.method != "POST":  # only these have a body, and they all need a key
            return b""
        self._keys.refresh()
        client = self._keys.client(authorization_of(request.headers.get))
        async with self._entrance.place(client.name):
            return await arrived(request, MAX_BODY_BYTES)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(Request(scope, receive))
        except ClientDisconnect:
            return
        except StepSpecError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        asked = {name: scope[name] for name in PASSED if name in scope}
        session = header(scope, b"x-session-id")
        if session is not None:  # sessions of different keys have nothing in common
            session = hash_of(authorization_of(lambda name: header(scope, name.encode())), session)
        for retries_left in reversed(range(1 + RETRIES)):
            begun = ended = is_stream = False
            stream = self._models.options(stream=True, session_id=session or "").respond.remote(asked, body)
            try:
                async for messages in stream:
                    for message in messages:
                        if message["type"] == "http.response.start":
                            begun, is_stream = True, _is_stream(message)
                            message["headers"] = [each for each in message["headers"] if each[0] != REQUEST_ID]
                        elif message["type"] == "http.response.body":
                            ended = not message.get("more_body", False)
                        await send(message)
                return
            except BackPressureError:
                error = BusyError("Too many requests wait. Try again later.", RETRY_S, "requests")
                await error_response(scope["path"], error)(scope, receive, send)
                return
            except (RayError, RayServeException) as error:
                logger.warning("A replica failed during a request: %s", type(error).__name__)
                if begun:
                    if is_stream and not ended:
                        await send({"type": "http.response.body", "body": _last_event(scope["path"], LostError())})
                    return
                if not retries_left:
                    await error_response(scope["path"], LostError())(scope, receive, send)
                    return
            finally:
                stream.cancel()


def _is_stream(start: Message) -> bool:
    """Whether a response is a stream of events."""
    return any(name == b"content-type" and b"text/event-stream" in value for name, value in start["headers"])


def _last_event(path: str, error: StepSpecError) -> bytes:
    """Return the last event of a stream that fails, in the format of its route."""
    if path.startswith(MESSAGES_ROUTES):
        return format_sse_event(data_str=json.dumps(messages_error(error)), event="error")
    found = error_body(error)
    if path.endswith("/responses"):
        return format_sse_event(data_str=json.dumps({"type": "error", **found["error"]}), event="error")
    return format_sse_event(data_str=json.dumps(found))


def app(arguments: Arguments) -> serve.Application:
    """Return the application, for `serve run stepspec.serve.ray:app NAME=VALUE ...`.

    Raises:
        UsageError: an argument is invalid. No model is loaded yet.
    """
    policy = load_policy(arguments.policy)[0]
    wanted = wanted_pairs(arguments.pair, arguments.target, arguments.draft)
    for models in wanted.values():
        check_models(**models.arguments(policy, arguments.judges))
    return application(arguments, partial(load_pairs, wanted, policy, arguments.judges))


def application(arguments: Arguments, load: Callable[[], Mapping[str, Pair]]) -> serve.Application:
    """Return the application for pairs of your own. `load` returns them by name; it runs in each replica."""
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=max(arguments.min_replicas, arguments.max_replicas),
        target_ongoing_requests=arguments.requests_per_replica,
        upscale_delay_s=arguments.upscale_delay,
        downscale_delay_s=arguments.downscale_delay,
    )
    board = Board.bind()
    models = Models.options(
        autoscaling_config=scaling,
        max_ongoing_requests=arguments.max_running + arguments.max_queued,
        max_queued_requests=arguments.max_queued,
        graceful_shutdown_timeout_s=arguments.drain,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        request_router_config=RequestRouterConfig(request_router_class=SessionRouter),  # pyright: ignore[reportArgumentType]
    ).bind(arguments, load, board)
    return Front.options(num_replicas=arguments.fronts, max_ongoing_requests=100_000).bind(arguments, models, board)
