"""The service as an ASGI application: its routes, and how errors become responses."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from stepspec import __version__
from stepspec.api.models import Pair
from stepspec.errors import StepSpecError, UsageError
from stepspec.serve.answers import ChatAnswer
from stepspec.serve.completions import CompletionAnswer, CompletionRequest
from stepspec.serve.document import (
    BODIES,
    CHAT_RESPONSES,
    COMPLETION_RESPONSES,
    COUNT_RESPONSES,
    KEYED_RESPONSES,
    MESSAGES_RESPONSES,
    MODEL_RESPONSES,
    RESPONSES_RESPONSES,
    TOKENIZE_RESPONSES,
    documented,
)
from stepspec.serve.errors import error_response, public_error
from stepspec.serve.hosts import HostCheck
from stepspec.serve.log import RequestLog, entry_of
from stepspec.serve.messages_answer import MessagesAnswer
from stepspec.serve.messages_request import MessagesRequest
from stepspec.serve.page import add_page
from stepspec.serve.requests import ChatRequest
from stepspec.serve.responses_answer import ResponsesAnswer
from stepspec.serve.responses_request import ResponsesRequest
from stepspec.serve.schemas import Load, ModelCard, ModelList, Version
from stepspec.serve.service import Service
from stepspec.serve.settings import Settings
from stepspec.serve.streams import CLIENT_LEFT, respond


def create_app(
    pairs: Pair | Mapping[str, Pair], policy: str = "two-level", settings: Settings | None = None
) -> FastAPI:
    """Return the service as an ASGI application. It closes the models on shutdown.

    Args:
        pairs: the models to serve, by name. The first one is the default. A single pair has its target's name.
        policy: name of the policy for requests that name none.
        settings: limits, keys and logging.

    Raises:
        UsageError: a pair does not support the policy.
    """
    named = {pairs.target.name: pairs} if isinstance(pairs, Pair) else pairs
    service = Service(named, policy, settings or Settings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.aclose()

    # Its documentation pages load nothing from another network.
    app = FastAPIOffline(title="stepspec", version=__version__, lifespan=lifespan)
    app.state.service = service
    if service.settings.hosts:
        app.add_middleware(HostCheck, hosts=service.settings.hosts)
    app.add_middleware(RequestLog, count=service.monitor.responded)
    if service.settings.cors_origins:  # added last, so that all responses have its headers
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    _add_texts(app, service)
    _add_models(app, service)
    _add_state(app, service)
    add_page(app)
    app.add_exception_handler(StepSpecError, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http)
    app.openapi = documented(app, needs_key=service.settings.keys.are_needed)
    return app


def _add_texts(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions", response_model=None, openapi_extra=BODIES["ChatRequest"], responses=CHAT_RESPONSES
    )
    async def chat(request: Request) -> Response:
        """Generates the answer to a conversation."""
        asked, run = await service.received(request, ChatRequest)
        answer = ChatAnswer(
            run.model.name, run.policy, asked, run.log.request_id, thinks=run.prompts[0].thinking is not None
        )
        return await respond(request, run.events(), answer, stream=bool(asked.stream))

    @app.post(
        "/v1/completions",
        response_model=None,
        openapi_extra=BODIES["CompletionRequest"],
        responses=COMPLETION_RESPONSES,
    )
    async def complete(request: Request) -> Response:
        """Generates the text that follows a prompt, without a chat template."""
        asked, run = await service.received(request, CompletionRequest)
        thinking = [prompt.thinking for prompt in run.prompts for _ in range(asked.num_answers)]
        answer = CompletionAnswer(run.model.name, run.policy, asked, run.log.request_id, thinking)
        return await respond(request, run.events(), answer, stream=bool(asked.stream))

    @app.post(
        "/v1/responses",
        response_model=None,
        openapi_extra=BODIES["ResponsesRequest"],
        responses=RESPONSES_RESPONSES,
    )
    async def respond_to(request: Request) -> Response:
        """Generates the response to input items. Nothing is stored."""
        asked, run = await service.received(request, ResponsesRequest)
        answer = ResponsesAnswer(
            run.model.name, run.policy, asked, run.log.request_id, thinks=run.prompts[0].thinking is not None
        )
        return await respond(request, run.events(), answer, stream=bool(asked.stream))

    @app.post(
        "/v1/messages", response_model=None, openapi_extra=BODIES["MessagesRequest"], responses=MESSAGES_RESPONSES
    )
    async def message(request: Request) -> Response:
        """Generates the answer to a conversation, in the format of Anthropic's API."""
        asked, run = await service.received(request, MessagesRequest)
        (prompt,) = run.prompts
        thinks = prompt.thinking is not None
        answer = MessagesAnswer(
            run.model.name, run.policy, asked, run.log.request_id, len(prompt.prompt), thinks=thinks
        )
        return await respond(request, run.events(), answer, stream=bool(asked.stream))

    @app.post(
        "/v1/messages/count_tokens",
        response_model=None,
        openapi_extra=BODIES["CountRequest"],
        responses=COUNT_RESPONSES,
    )
    async def count(request: Request) -> Response:
        """Returns the number of tokens of a conversation, in the format of Anthropic's API."""
        return JSONResponse(await service.counted(request))

    @app.post("/tokenize", response_model=None, openapi_extra=BODIES["TokenizeRequest"], responses=TOKENIZE_RESPONSES)
    async def tokenize(request: Request) -> Response:
        """Returns the tokens of a prompt or of a conversation."""
        return JSONResponse(await service.tokenized(request))


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=ModelList, responses=KEYED_RESPONSES)
    async def models(request: Request) -> dict[str, Any]:
        """Lists the served models, each under every policy that it supports."""
        service.client(request)
        return {"object": "list", "data": service.models.cards()}

    @app.get("/v1/models/{name:path}", response_model=ModelCard, responses=MODEL_RESPONSES)
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Describes a served model."""
        service.client(request)
        found, policy = service.models.find(name)
        return found.card(policy)


def _add_state(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response, summary="Returns 200 while the service runs.")
    async def health() -> Response:
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get(
        "/ready",
        response_class=Response,
        summary="Returns 200 while the service takes requests, else 503.",
        responses={503: {"description": "The queue is full, or the service shuts down."}},
    )
    async def ready() -> Response:
        return Response(status_code=200 if service.is_ready else 503)

    @app.get("/metrics", response_class=Response, summary="Returns metrics in Prometheus' text format.")
    async def metrics() -> Response:
        return Response(service.monitor.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", response_model=Version)
    async def version() -> dict[str, str]:
        """Returns the version of stepspec."""
        return {"version": __version__}

    @app.get("/load", response_model=Load)
    async def load() -> dict[str, int]:
        """Returns the number of requests that run or wait."""
        return {"server_load": service.admission.num_running + service.admission.num_queued}


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StepSpecError)
    entry = entry_of(request.scope)
    public = public_error(error, entry.request_id)
    entry.failed(public)
    return error_response(request.url.path, public, entry.request_id)


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem, request_id = UsageError(str(error.detail)), entry_of(request.scope).request_id
    return error_response(request.url.path, problem, request_id, error.status_code, error.headers or {})
