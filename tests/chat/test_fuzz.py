"""Random requests from the OpenAPI document: no failure of the service, no status or format that it does not have."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service import serving

from stepspec import load_pair

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize")
VALID: dict[str, Any] = {"model": None, "stepspec": None, "stream": False}
"""Values with which more of the random requests are answered, and quickly."""


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    torch.set_num_threads(1)
    with serving({"embedded": load_pair()}) as address:
        yield schemathesis.openapi.from_url(f"{address.removesuffix('/v1')}/openapi.json")


def fuzz(document: Any, route: str, max_examples: int) -> Counter[int]:
    """Send random requests, and return how many had each status."""
    seen: Counter[int] = Counter()
    operation = document[route]["POST"]
    for mode in GenerationMode:

        @settings(max_examples=max_examples, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            if case.meta.generation.mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
                tried = [name for name in case.body if name != "tools"][:4]
                case.body = {name: case.body[name] for name in ("prompt", *tried) if name in case.body} | VALID
                case.body["max_output_tokens" if route == "/v1/responses" else "max_tokens"] = 3
                if route == "/v1/chat/completions":
                    case.body["messages"] = [{"role": "user", "content": str(case.body.get("messages"))[:50]}]
                if route == "/v1/responses":
                    case.body["input"] = str(case.body.get("input"))[:50]
            answer = case.call(timeout=60)
            seen[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        run()
    return seen


@pytest.mark.parametrize("route", ROUTES)
def test_random_requests_get_documented_answers(document: Any, route: str) -> None:
    seen = fuzz(document, route, 15)
    assert seen[400]


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_many_random_requests_get_documented_answers(document: Any, route: str) -> None:
    seen = fuzz(document, route, 1_000)
    assert seen[200]
    assert seen[400]
