"""The spans of a request, as a collector receives them."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from following import following_pair
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted import Opinion, Reply, ScriptedEngine, WordTokenizer

from stepspec import Pair, StepSpec
from stepspec.errors import EngineError, TargetError
from stepspec.loop.tracing import caller
from stepspec.serve import create_app

pytestmark = pytest.mark.anyio

EXPORTER = InMemorySpanExporter()
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
HEADERS = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def _provider() -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


def of(name: str, spans: Sequence[ReadableSpan]) -> list[dict[str, Any]]:
    """Return the attributes of the spans with that name, in order."""
    return [dict(span.attributes or {}) for span in spans if span.name == name]


async def test_a_request_has_a_span_and_its_steps_are_children(spans: InMemorySpanExporter) -> None:
    result = await StepSpec(policy="two-level", pair=following_pair()).generate("How many?", max_tokens=100)
    found = spans.get_finished_spans()
    (request,) = [span for span in found if span.parent is None]
    assert request.name == "chat target"
    attributes = dict(request.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "stepspec"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "target"
    assert attributes["gen_ai.request.max_tokens"] == 100
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.usage.input_tokens"] == result.num_prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"] == result.usage.completion_tokens
    assert attributes["gen_ai.usage.reasoning.output_tokens"] == result.usage.reasoning_tokens
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes["stepspec.policy"] == "two-level"
    children = [span for span in found if span.parent is not None]
    assert all(span.parent.span_id == request.context.span_id for span in children if span.parent)
    assert [each["stepspec.step.index"] for each in of("stepspec.draft", found)][:2] == [0, 1]
    assert [each["stepspec.step.accepted"] for each in of("stepspec.verify", found)][:2] == [True, True]
    judged = of("stepspec.verify", found)[0]
    assert any(name.startswith("stepspec.step.score.") for name in judged)


async def test_a_rejected_step_is_regenerated_in_a_span(spans: InMemorySpanExporter) -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, ["Two.\n\n", "So 9.<|end|>"], [Opinion(rating="0"), "</think>"], name="target")
    draft = ScriptedEngine(tokenizer, ["One.\n\n", "</think>"], name="draft")
    await StepSpec(policy="specreason", pair=Pair(target, draft)).generate("How many?")
    (again,) = of("stepspec.regenerate", spans.get_finished_spans())
    assert again["stepspec.step.source"] == "target"
    assert [each["stepspec.step.drafted_tokens"] for each in of("stepspec.draft", spans.get_finished_spans())] == [3, 1]
    assert (again["stepspec.step.draft_tokens"], again["stepspec.step.target_tokens"]) == (0, 3)


async def test_steps_that_are_written_at_the_same_time_have_spans_that_overlap(spans: InMemorySpanExporter) -> None:
    pair = following_pair(delay_s=0.05)
    pair.draft.delay_s = 0.01  # type: ignore[union-attr]
    result = await StepSpec(policy="lookahead", pair=pair).generate("How many?")
    assert [step.origin for step in result.steps] == ["draft", "draft"]
    found = spans.get_finished_spans()
    own = [span for span in found if span.name == "stepspec.step"]
    assert [dict(span.attributes or {})["stepspec.step.index"] for span in own][:2] == [0, 1]
    first, second = ((span.start_time or 0, span.end_time or 0) for span in own[:2])
    assert second[0] < first[1] <= second[1]
    assert len(of("stepspec.draft", found)) >= 2
    assert [each["stepspec.step.accepted"] for each in of("stepspec.verify", found)][:2] == [True, True]


async def test_an_error_is_recorded_in_the_span(spans: InMemorySpanExporter) -> None:
    tokenizer = WordTokenizer()
    target = ScriptedEngine(tokenizer, [Reply(fails=EngineError("It broke."))], name="target")
    with pytest.raises(TargetError):
        await StepSpec(policy="target", pair=Pair(target, None)).generate("How many?")
    (request,) = spans.get_finished_spans()
    assert dict(request.attributes or {})["error.type"] == "TargetError"
    assert not request.status.is_ok


async def test_closing_the_stream_ends_the_span(spans: InMemorySpanExporter) -> None:
    events = StepSpec(policy="two-level", pair=following_pair()).stream("How many?")
    await anext(events)
    await events.aclose()
    assert [span.name for span in spans.get_finished_spans() if span.parent is None] == ["chat target"]


async def test_without_opentelemetry_the_events_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepspec.loop import tracing

    with_spans = [event.type async for event in StepSpec(pair=following_pair()).stream("How many?")]
    monkeypatch.setattr(tracing, "_api", lambda: None)
    assert [event.type async for event in StepSpec(pair=following_pair()).stream("How many?")] == with_spans


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_to_the_service_is_a_child_of_the_clients_span(
    spans: InMemorySpanExporter, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stepspec")
    transport = httpx.ASGITransport(create_app(following_pair()))
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        body = {"messages": [{"role": "user", "content": "How many?"}], "stream": stream}
        assert (await client.post("/v1/chat/completions", json=body, headers=HEADERS)).status_code == 200
        await client.post("/v1/chat/completions", json=body)
    found = spans.get_finished_spans()
    first, second = (span for span in found if span.name == "chat target")
    assert f"{first.context.trace_id:032x}" == TRACE_ID
    assert second.context.trace_id != first.context.trace_id
    by_id = {span.context.span_id: span for span in found}
    servers = {span.context.span_id for span in found if span.name == "POST /v1/chat/completions"}
    assert len(servers) in (0, 2), "FastAPI has spans of its own from 0.165 on"
    for span in (first, second) if servers else ():
        while span.parent is not None and span.parent.span_id in by_id:
            span = by_id[span.parent.span_id]
        assert span.context.span_id in servers
    logged = [vars(each)["trace_id"] for each in caplog.records if hasattr(each, "trace_id")]
    assert logged == [f"{span.context.trace_id:032x}" for span in (first, second)]


def test_the_span_of_a_client_is_the_parent_only_without_a_span_of_the_server() -> None:
    with caller({}) as found:
        assert found is None
    with caller(HEADERS) as found:
        assert found == TRACE_ID
        assert f"{trace.get_current_span().get_span_context().trace_id:032x}" == TRACE_ID
    with trace.get_tracer("server").start_as_current_span("POST") as span, caller(HEADERS) as found:
        assert trace.get_current_span() is span
        assert found == f"{span.get_span_context().trace_id:032x}"
