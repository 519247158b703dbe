"""What the OpenAPI document says of requests and responses beyond the routes themselves."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from stepspec.serve.requests import ChatRequest
from stepspec.serve.schemas import Chunk, Completion, ErrorBody

REFS = "#/components/schemas/"

# With a response for every other status FastAPI adds none of its own, whose form errors here do not have.
RESPONSES: dict[int | str, dict[str, Any]] = {"default": {"model": ErrorBody, "description": "The service failed."}}

MODEL_RESPONSES: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "There is no such model."},
    **RESPONSES,
}

CHAT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Completion,
        "description": "The answer. With `stream` it comes as server-sent events, each a chunk in JSON, the last one "
        "`[DONE]`; an event may also be an error.",
        "content": {"text/event-stream": {"schema": {"$ref": f"{REFS}Chunk"}}},
    },
    400: {"model": ErrorBody, "description": "The request cannot be honored; `param` names the field."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    **MODEL_RESPONSES,
}

CHAT_BODY: dict[str, Any] = {
    "required": True,
    "content": {"application/json": {"schema": {"$ref": f"{REFS}ChatRequest"}}},
}


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Makes the document of an app: FastAPI's, with the two models that no route has for its own."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        schemas = document["components"]["schemas"]
        for model in (ChatRequest, Chunk):
            schema = model.model_json_schema(ref_template=f"{REFS}{{model}}")
            schemas |= {**schema.pop("$defs", {}), model.__name__: schema}
        return document

    return openapi
