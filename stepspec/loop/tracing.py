"""OpenTelemetry spans of a request. They follow the GenAI semantic conventions, which are still in development.

All span and attribute names are in this module. It needs only `opentelemetry-api`. If that is not installed, or no
tracer records, a request has no spans and no overhead.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any

from stepspec.chat.events import AnswerDelta, ToolCallDelta
from stepspec.errors import StepSpecError
from stepspec.loop.options import RequestOptions
from stepspec.loop.step import Done, Event, Result, StepCommitted, StepJudged, StepProposed

PROVIDER = "stepspec"
OPERATION = "chat"
DRAFT_SPAN, VERIFY_SPAN, REGENERATE_SPAN, STEP_SPAN = (
    "stepspec.draft",
    "stepspec.verify",
    "stepspec.regenerate",
    "stepspec.step",
)
"""Children of a request's span: the phases of a step. `STEP_SPAN` is a step that one model wrote without a judge."""


@dataclass(frozen=True)
class Asked:
    """What a request's span records at its start."""

    target: str
    policy: str
    options: RequestOptions

    @property
    def name(self) -> str:
        """The span's name."""
        return f"{OPERATION} {self.target}"

    def attributes(self) -> Mapping[str, Any]:
        """Return the request's span attributes."""
        options = self.options
        sampling = options.sampling
        return {
            "gen_ai.operation.name": OPERATION,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self.target,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed,
            "stepspec.policy": self.policy,
            **({"gen_ai.request.max_tokens": options.max_tokens} if options.max_tokens is not None else {}),
            **({"gen_ai.request.stop_sequences": tuple(options.stop)} if options.stop else {}),
        }


def answer_attributes(result: Result, target: str) -> Mapping[str, Any]:
    """Return the response's span attributes."""
    usage = result.usage
    return {
        "gen_ai.response.model": target,
        "gen_ai.response.finish_reasons": (result.finish_reason,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "stepspec.usage.draft_tokens": usage.draft_tokens,
        "stepspec.usage.target_tokens": usage.target_tokens,
        "stepspec.usage.wasted_tokens": usage.wasted_tokens,
        **({"stepspec.limit": result.limit} if result.limit else {}),
    }


async def traced(events: AsyncGenerator[Event, None], asked: Asked) -> AsyncGenerator[Event, None]:
    """Pass on the events of a request. Record a span for the request and a child span for each phase of a step."""
    api = _api()
    span = api.get_tracer("stepspec").start_span(asked.name, attributes=asked.attributes()) if api else None
    if api is None or span is None or not span.is_recording():
        async with aclosing(events):
            async for event in events:
                yield event
        return
    steps = _Steps(api, span)
    try:
        async with aclosing(events):
            async for event in events:
                steps.note(event)
                if isinstance(event, Done):
                    span.set_attributes(answer_attributes(event.result, asked.target))
                yield event
                steps.resumed()
    except StepSpecError as error:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(api.StatusCode.ERROR, str(error))
        raise
    finally:
        span.end()


class _Steps:
    """Turns the time between events into child spans."""

    def __init__(self, api: Any, span: Any) -> None:
        self._api = api
        self._span = span
        self._began = self._since = time.time_ns()
        self._proposed = False
        self._judged: StepJudged | None = None
        self._seen = False

    def resumed(self) -> None:
        """Restart the clock when the caller asks for the next event. The caller's own time is not part of a span."""
        self._since = time.time_ns()

    def note(self, event: Event) -> None:
        """Record the span that ends with an event."""
        if isinstance(event, StepProposed):
            self._proposed = True
            self._child(DRAFT_SPAN, event.index, {"stepspec.step.draft_tokens": event.num_tokens})
        elif isinstance(event, StepJudged):
            self._judged = event
            scores = {f"stepspec.step.score.{name}": score for name, score in event.scores.items() if score is not None}
            self._child(VERIFY_SPAN, event.index, {"stepspec.step.accepted": event.accepted, **scores})
        elif isinstance(event, StepCommitted):
            self._committed(event)
        if isinstance(event, StepCommitted | AnswerDelta | ToolCallDelta) and not self._seen:
            self._seen = True
            seconds = (time.time_ns() - self._began) / 1e9
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def _committed(self, event: StepCommitted) -> None:
        step, judged = event.step, self._judged
        attributes = {
            "stepspec.step.source": step.origin,
            "stepspec.step.draft_tokens": step.num_from_draft,
            "stepspec.step.target_tokens": step.num_tokens - step.num_from_draft,
        }
        if not self._proposed:
            self._child(STEP_SPAN, step.index, attributes)
        elif judged is not None and not judged.accepted:
            self._child(REGENERATE_SPAN, step.index, attributes)
        self._proposed, self._judged = False, None

    def _child(self, name: str, index: int, attributes: Mapping[str, Any]) -> None:
        context = self._api.set_span_in_context(self._span)
        tracer = self._api.get_tracer("stepspec")
        about = {"stepspec.step.index": index, **attributes}
        tracer.start_span(name, context, attributes=about, start_time=self._since).end()
        self._since = time.time_ns()


@cache
def _api() -> Any:
    """Return OpenTelemetry's tracing API; None if it is not installed."""
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return None
    return trace
