"""Requests and responses in the OpenAPI document that FastAPI cannot derive from the routes."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from stepspec.serve.completions import CompletionRequest
from stepspec.serve.messages_request import CountRequest, MessagesRequest
from stepspec.serve.requests import ChatRequest
from stepspec.serve.responses_request import ResponsesRequest
from stepspec.serve.schemas import (
    Chunk,
    Completion,
    ErrorBody,
    MessageEvent,
    MessageObject,
    MessagesErrorBody,
    ResponseEvent,
    ResponseObject,
    TextCompletion,
    TextCompletionChunk,
    TokenCount,
    Tokens,
)
from stepspec.serve.tokenize import TokenizeRequest

REFS = "#/components/schemas/"

Responses = dict[int | str, dict[str, Any]]


def _refusals(**descriptions: str) -> Responses:
    """Return responses with errors. Names are statuses after an underscore."""
    return {int(name[1:]): {"model": ErrorBody, "description": text} for name, text in descriptions.items()}


# A default response keeps FastAPI from adding its own validation error, which has a different format.
RESPONSES: Responses = {"default": {"model": ErrorBody, "description": "The service failed."}}
KEYED_RESPONSES: Responses = {
    **_refusals(_401="The API key is missing or unknown.", _403="The service does not answer to the host."),
    **RESPONSES,
}
MODEL_RESPONSES: Responses = {**_refusals(_404="There is no such model."), **KEYED_RESPONSES}
TOKENIZE_RESPONSES: Responses = {
    200: {"model": Tokens, "description": "The tokens."},
    **MODEL_RESPONSES,
    **_refusals(
        _400="The request is invalid or not supported; `param` names the field.",
        _408="The body did not arrive in time.",
        _413="The body is too large.",
        _429="The client has used up a limit of its key. `Retry-After` says when to try again.",
        _503="The queue is full, or the service shuts down. `Retry-After` says when to try again.",
    ),
}

DONE = "The last one is `[DONE]`. A chunk may also be an error."


def _text_responses(model: type[BaseModel], chunk: type[BaseModel], name: str, end: str = DONE) -> Responses:
    success = {
        "model": model,
        "description": f"The {name}. With `stream`, server-sent events, each with a chunk in JSON. {end}",
        "content": {"text/event-stream": {"schema": {"$ref": f"{REFS}{chunk.__name__}"}}},
    }
    return {**TOKENIZE_RESPONSES, 200: success}


CHAT_RESPONSES = _text_responses(Completion, Chunk, "answer")
RESPONSES_RESPONSES = _text_responses(ResponseObject, ResponseEvent, "response", "Each event has the name of its type.")


def _of_messages(responses: Responses) -> Responses:
    """Return responses with errors in Anthropic's format."""
    return {
        status: each if status == 200 else {**each, "model": MessagesErrorBody} for status, each in responses.items()
    }


MESSAGES_RESPONSES = _of_messages(
    _text_responses(MessageObject, MessageEvent, "message", "Each event has the name of its type.")
)
COUNT_RESPONSES = _of_messages(
    {**TOKENIZE_RESPONSES, 200: {"model": TokenCount, "description": "The number of tokens."}}
)
COMPLETION_RESPONSES = _text_responses(TextCompletion, TextCompletionChunk, "text")

REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountRequest,
    TokenizeRequest,
)
BODIES: Mapping[str, dict[str, Any]] = {
    model.__name__: {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"{REFS}{model.__name__}"}}},
        }
    }
    for model in REQUESTS
}
"""By model of the request, what its route adds to the document."""


KEYED = ("/v1/", "/tokenize")
"""Beginnings of paths that need a key, if the service has keys."""


def documented(app: FastAPI, *, needs_key: bool) -> Callable[[], dict[str, Any]]:
    """Return a function that builds the app's OpenAPI document, with the models that no route declares."""
    build = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        document = build()
        schemas = document["components"]["schemas"]
        for model in (*REQUESTS, Chunk, TextCompletionChunk, ResponseEvent, MessageEvent):
            schema = model.model_json_schema(ref_template=f"{REFS}{{model}}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
        if needs_key:
            document["components"]["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
            for path, route in document["paths"].items():
                if path.startswith(KEYED):
                    for method in route.values():
                        method["security"] = [{"key": []}, {"header": []}]
        return document

    return openapi
