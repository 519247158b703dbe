"""Requests and responses in the OpenAPI document that FastAPI cannot derive from the routes."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from stepspec.serve.requests import ChatRequest
from stepspec.serve.schemas import Chunk, Completion, ErrorBody

REFS = "#/components/schemas/"

# A default response keeps FastAPI from adding its own validation error, which has a different format.
RESPONSES: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "The service failed."}}

MODEL_RESPONSES: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "There is no such model."},
    **RESPONSES,
}

CHAT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Completion,
        "description": "The answer. With `stream`, server-sent events: each is a chunk in JSON, and the last is "
        "`[DONE]`. An event may also be an error.",
        "content": {"text/event-stream": {"schema": {"$ref": f"{REFS}Chunk"}}},
    },
    400: {"model": ErrorBody, "description": "The request is invalid or not supported; `param` names the field."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    **MODEL_RESPONSES,
}

CHAT_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": f"{REFS}ChatRequest"}}},
}


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Return a function that builds the app's OpenAPI document, with the two models that no route declares."""
    build = app.openapi

    def openapi() -> dict[str, Any]:
        document = build()
        schemas = document["components"]["schemas"]
        for model in (ChatRequest, Chunk):
            schema = model.model_json_schema(ref_template=f"{REFS}{{model}}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
        return document

    return openapi
