"""The routes: `/v1/chat/completions`, `/v1/models` and `/health`."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from anyio import CancelScope
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from stepspec import __version__
from stepspec.api.loading import Pair
from stepspec.api.session import StepSpec
from stepspec.base.files import list_data_files
from stepspec.base.strict_json import MAX_BODY_BYTES
from stepspec.errors import ContextError, EngineError, StepSpecError, UsageError, unknown_name
from stepspec.loop.step import Done, Event, Result
from stepspec.serve.answers import Answering
from stepspec.serve.bodies import TooLargeError, read_chat
from stepspec.serve.choices import unquoted
from stepspec.serve.document import CHAT_BODY, CHAT_RESPONSES, MODEL_RESPONSES, RESPONSES, documented
from stepspec.serve.log import RequestLog, note_chat, noted
from stepspec.serve.requests import ChatRequest, RefusedError
from stepspec.serve.schemas import ModelCard, ModelList

logger = logging.getLogger(__name__)

KEEPALIVE_S = 10.0
"""Seconds without an event after which a keep-alive comment is sent, since a step may take longer than a client's
timeout."""

FIRST_S = 1.0
"""Seconds to wait for the first event before a stream starts. Until then an error can still set the HTTP status."""

DONE = format_sse_event(data_str="[DONE]")
CLIENT_LEFT = 499
"""Status that the log shows for a request whose client disconnected."""


class Service:
    """A pair of models, with a session for each requested policy."""

    def __init__(self, pair: Pair, policy: str) -> None:
        """Raises:
        UsageError: these models cannot serve the policy.
        """
        self.pair = pair
        self.policy = policy
        self._sessions = {policy: StepSpec(policy=policy, pair=pair)}
        self._started = int(time.time())

    @property
    def model(self) -> str:
        """The served model's name."""
        return self.pair.target.name

    def session(self, request: ChatRequest) -> tuple[str, StepSpec]:
        """Return the policy's name and the session for a request. Policy names are never used as paths.

        Raises:
            NoSuchModelError: the request names another model.
            RefusedError: there is no such policy, or these models cannot serve it.
        """
        if request.model not in (None, self.model):
            raise NoSuchModelError(str(request.model), self.model)
        name = request.policy or self.policy
        if name not in self._sessions:
            if name not in list_data_files("policies"):
                raise RefusedError("policy", unknown_name("policy", name, list_data_files("policies")))
            try:
                self._sessions[name] = StepSpec(policy=name, pair=self.pair)
            except UsageError as error:
                raise RefusedError("policy", str(error)) from error
        return name, self._sessions[name]

    def card(self) -> dict[str, Any]:
        """Return the model card of the served model."""
        return {
            "id": self.model,
            "object": "model",
            "created": self._started,
            "owned_by": "stepspec",
            "max_model_len": self.pair.target.max_context,
            "draft": self.pair.draft.name if self.pair.draft else None,
            "policy": self.policy,
        }


class NoSuchModelError(RefusedError):
    """The request names a model that is not served."""

    def __init__(self, name: str, known: str) -> None:
        super().__init__("model", unknown_name("model", name, [known]))


def create_app(pair: Pair, policy: str = "stepspec", *, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """Return the service as an ASGI application. It closes the pair on shutdown.

    Args:
        pair: the models to serve.
        policy: name of the policy for requests that name none.
        max_body_bytes: limit of a request body. A larger body returns 413 and is not read further.

    Raises:
        UsageError: these models cannot serve the policy.
    """
    service = Service(pair, policy)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await pair.aclose()

    app = FastAPI(title="stepspec", version=__version__, lifespan=lifespan)
    app.add_middleware(RequestLog)
    _add_models(app, service)

    @app.get("/health", response_class=Response, responses=RESPONSES, summary="Returns 200 while the service runs.")
    async def health() -> Response:
        return Response()

    @app.post(
        "/v1/chat/completions", response_model=None, openapi_extra={"requestBody": CHAT_BODY}, responses=CHAT_RESPONSES
    )
    async def chat(request: Request) -> Response:
        """Generates the answer to a conversation."""
        chat_request = await read_chat(request, max_body_bytes)
        with chat_request.in_its_words():
            return await _answer(service, chat_request, request)

    app.add_exception_handler(StepSpecError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_internal_error)
    app.openapi = documented(app)
    return app


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=ModelList, responses=RESPONSES)
    async def models() -> dict[str, Any]:
        """Lists the served model."""
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=MODEL_RESPONSES)
    async def model(name: str) -> dict[str, Any]:
        """Describes the served model."""
        if name != service.model:
            raise NoSuchModelError(name, service.model)
        return service.card()


async def _answer(service: Service, chat_request: ChatRequest, request: Request) -> Response:
    name, session = service.session(chat_request)
    note_chat(request.scope, name, chat_request.ignored)
    options = chat_request.options()
    answering = Answering(
        service.model,
        name,
        thinks=session.thinks,
        include_reasoning=chat_request.include_reasoning is not False,
        ignored=chat_request.ignored,
    )
    events = noted(session.stream(chat_request.messages, options), request.scope)
    events = unquoted(events) if chat_request.form.choices else events
    if not chat_request.stream:
        return await _while_connected(request, _completion(events, answering))
    usage = bool(chat_request.stream_options and chat_request.stream_options.include_usage)
    queue = _EventQueue(events)
    try:
        await queue.wait_for_first()
    except BaseException:
        await queue.end()
        raise
    return _Stream(queue, answering, usage=usage)


async def _completion(events: AsyncGenerator[Event, None], answering: Answering) -> Response:
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Done):
                return JSONResponse(answering.whole(event.result))
    raise AssertionError("a request ends with Done or an error")


async def _while_connected(request: Request, work: Any) -> Response:
    """Return the response. If the client disconnects, cancel the work, which frees both engines."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else Response(status_code=CLIENT_LEFT)
    finally:
        for each in (task, disconnect):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventQueue:
    """The events of a request, read by a background task. Closing it cancels the request at any point."""

    def __init__(self, events: AsyncGenerator[Event, None]) -> None:
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._first: Event | Exception | None = None
        self._task = asyncio.ensure_future(self._pump(events))

    async def _pump(self, events: AsyncGenerator[Event, None]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self._queue.put_nowait(event)
        except Exception as error:
            self._queue.put_nowait(error)

    async def wait_for_first(self) -> None:
        """Wait up to `FIRST_S` seconds for the first event, so that early errors can set the HTTP status.

        Raises:
            StepSpecError: the request was rejected or failed in that time.
        """
        with suppress(TimeoutError):
            self._first = await asyncio.wait_for(self._queue.get(), FIRST_S)
        if isinstance(self._first, Exception):
            raise self._first

    async def next(self) -> Event | Exception | None:
        """Return the next event or the error of the request; None after `KEEPALIVE_S` seconds without one."""
        if (first := self._first) is not None:
            self._first = None
            return first
        try:
            return await asyncio.wait_for(self._queue.get(), KEEPALIVE_S)
        except TimeoutError:
            return None

    async def end(self) -> None:
        """Cancel the request and wait until its engines are free, even if this task is cancelled."""
        self._task.cancel()
        with CancelScope(shield=True):
            await asyncio.wait({self._task})


class _Stream(EventSourceResponse):
    """A streamed answer. A client that disconnects cancels the request."""

    def __init__(self, queue: _EventQueue, answering: Answering, *, usage: bool) -> None:
        super().__init__(_lines(queue, answering, usage=usage))
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._queue.end()


async def _lines(queue: _EventQueue, answering: Answering, *, usage: bool) -> AsyncGenerator[bytes, None]:
    yield _line(answering.first())
    while True:
        event = await queue.next()
        if event is None:
            yield KEEPALIVE_COMMENT
        elif isinstance(event, Exception):  # the HTTP status is already sent
            yield _line(error_body(_public_error(event)))
            return
        elif isinstance(event, Done):
            for chunk in _last_chunks(event.result, answering, usage=usage):
                yield _line(chunk)
            yield DONE
            return
        elif (chunk := answering.chunk(event)) is not None:
            yield _line(chunk)


def _public_error(error: Exception) -> StepSpecError:
    """Return the error for the client. The details of an internal error only go to the log."""
    if isinstance(error, StepSpecError):
        return error
    logger.error("A request failed with an internal error.", exc_info=error)
    return EngineError(f"The service failed: {type(error).__name__}. See the service's log.")


def _last_chunks(result: Result, answering: Answering, *, usage: bool) -> list[dict[str, Any]]:
    last = answering.last(result, with_metrics=not usage)
    return [last, answering.usage(result)] if usage else [last]


def _line(chunk: Mapping[str, Any]) -> bytes:
    return format_sse_event(data_str=json.dumps(chunk, ensure_ascii=False))


def error_body(error: StepSpecError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    param = error.param if isinstance(error, RefusedError) else None
    code = None
    if isinstance(error, ContextError):
        param, code = "messages", "context_length_exceeded"
    elif isinstance(error, TooLargeError):
        code = "request_too_large"
    elif isinstance(error, NoSuchModelError):
        code = "model_not_found"
    kind = "server_error" if isinstance(error, EngineError) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def _status(error: StepSpecError) -> int:
    if isinstance(error, NoSuchModelError):
        return 404
    if isinstance(error, TooLargeError):
        return 413
    return 400 if isinstance(error, UsageError) else 500


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, StepSpecError)
    return JSONResponse(error_body(error), _status(error))


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(UsageError(str(error.detail))), error.status_code, error.headers)


async def _on_internal_error(_: Request, error: Exception) -> Response:
    return JSONResponse(error_body(_public_error(error)), 500)
