"""OpenTelemetry spans of a request. They follow the GenAI semantic conventions, which are still in development.

All span and attribute names are in this module. It needs only `opentelemetry-api`. If that is not installed, or no
tracer records, a request has no spans and no overhead.
"""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.engines.protocol import Sampling
from stepspec.errors import StepSpecError
from stepspec.loop.options import RequestOptions
from stepspec.loop.result import Done, Event, Result
from stepspec.loop.step import Step, StepCommitted, StepDelta, Verdict

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
class RequestAttributes:
    """What a request's span records at its start."""

    target: str
    policy: str
    options: RequestOptions
    sampling: Sampling

    @property
    def name(self) -> str:
        """The span's name."""
        return f"{OPERATION} {self.target}"

    def attributes(self) -> Mapping[str, Any]:
        """Return the request's span attributes."""
        options, sampling = self.options, self.sampling
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


class Spans:
    """The spans of one request: its own, and a child for each phase of a step. Phases may overlap.

    Args:
        asked: what the request's span records at its start; None records nothing.
    """

    def __init__(self, asked: RequestAttributes | None = None) -> None:
        self._asked = asked
        self._api = None if asked is None else _api()
        self._span: Any = None
        self._began = 0
        self._seen = False

    @contextmanager
    def request(self) -> Generator[None]:
        """Record the request's span around a block, and an error that ends it."""
        if self._api is None or self._asked is None:
            yield
            return
        api, asked = self._api, self._asked
        self._began = time.time_ns()
        span = api.get_tracer("stepspec").start_span(asked.name, attributes=asked.attributes())
        self._span = span if span.is_recording() else None
        try:
            yield
        except StepSpecError as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(api.StatusCode.ERROR, str(error))
            raise
        finally:
            span.end()
            self._span = None

    def event(self, event: Event) -> None:
        """Record what an event says about the whole request."""
        if self._span is None or self._asked is None:
            return
        if isinstance(event, Done):
            self._span.set_attributes(answer_attributes(event.result, self._asked.target))
        elif isinstance(event, StepDelta | StepCommitted | AnswerDelta | ToolCalled) and not self._seen:
            self._seen = True
            seconds = (time.time_ns() - self._began) / 1e9
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def drafted(self, since: int, index: int, num_tokens: int) -> None:
        """Record a proposal. `since`: when the phase began, in nanoseconds (`time.time_ns`)."""
        self._child(DRAFT_SPAN, since, index, {"stepspec.step.drafted_tokens": num_tokens})

    def judged(self, since: int, index: int, verdict: Verdict) -> None:
        """Record a verdict."""
        scores = {f"stepspec.step.score.{name}": score for name, score in verdict.scores.items() if score is not None}
        self._child(VERIFY_SPAN, since, index, {"stepspec.step.accepted": verdict.accepted, **scores})

    def generated(self, since: int, step: Step, *, proposed: bool) -> None:
        """Record a step that was written, at least in part, after a proposal failed, or without one."""
        attributes = {
            "stepspec.step.source": step.origin,
            "stepspec.step.draft_tokens": step.num_from_draft,
            "stepspec.step.target_tokens": step.num_tokens - step.num_from_draft,
        }
        self._child(REGENERATE_SPAN if proposed else STEP_SPAN, since, step.index, attributes)

    def generated_ahead(self, since: int, index: int, num_tokens: int) -> None:
        """Record a step that the target has written ahead, which may not be committed."""
        attributes = {"stepspec.step.source": "target", "stepspec.step.target_tokens": num_tokens}
        self._child(STEP_SPAN, since, index, attributes)

    def _child(self, name: str, since: int, index: int, attributes: Mapping[str, Any]) -> None:
        if self._span is None or self._api is None:
            return
        context = self._api.set_span_in_context(self._span)
        tracer = self._api.get_tracer("stepspec")
        about = {"stepspec.step.index": index, **attributes}
        tracer.start_span(name, context, attributes=about, start_time=since).end()


@contextmanager
def caller(headers: Mapping[str, str]) -> Generator[str | None]:
    """Make the current span, or else the one in the headers of an HTTP request, the parent of all spans in a block.

    Args:
        headers: in lower case, such as `traceparent`.

    Yields:
        the id of the trace; None if there is none.
    """
    if (api := _api()) is None:
        yield None
        return
    from opentelemetry import context, propagate

    has_span = api.get_current_span().get_span_context().is_valid
    token = context.attach(propagate.extract({} if has_span else headers, context.get_current()))
    parent = api.get_current_span().get_span_context()
    try:
        yield api.format_trace_id(parent.trace_id) if parent.is_valid else None
    finally:
        context.detach(token)


@cache
def _api() -> Any:
    """Return OpenTelemetry's tracing API; None if it is not installed."""
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        return None
    return trace
