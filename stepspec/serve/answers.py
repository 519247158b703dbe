"""Builds chat completions and chunks in the format of OpenAI's API, with metrics in vLLM's format."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stepspec.chat.events import AnswerDelta, ToolCall, ToolCallDelta, ToolCalled
from stepspec.loop.step import Event, Result, Step, StepCommitted


class Answering:
    """Builds the response to one request. Each committed step is sent as `reasoning` and as `reasoning_content`."""

    def __init__(
        self, model: str, policy: str, *, thinks: bool, include_reasoning: bool, ignored: Sequence[str] = ()
    ) -> None:
        """`ignored` lists the request's unknown fields."""
        self._ignored = list(ignored)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._policy = policy
        self._thinks = thinks and include_reasoning

    def first(self) -> dict[str, Any]:
        """Return the first chunk, which has the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """Return the chunk of an event; None for events that are not sent."""
        if isinstance(event, StepCommitted) and self._thinks:
            step = event.step
            return self._chunk(_reasoning(step.text), extension={"step": _step_data(step)})
        if isinstance(event, AnswerDelta):
            return self._chunk({"content": event.text})
        if isinstance(event, ToolCallDelta):
            return self._chunk({"tool_calls": [_call_delta(event)]})
        if isinstance(event, ToolCalled):
            return self._chunk({}, extension={"call": {"index": event.index, "problem": event.call.problem}})
        return None

    def last(self, result: Result, *, with_metrics: bool) -> dict[str, Any]:
        """Return the chunk with the finish reason. It has the metrics if no usage chunk follows."""
        chunk = self._chunk({}, finish_reason=result.finish_reason, logprobs=result.logprobs_data())
        return {**chunk, "metrics": self._metrics(result)} if with_metrics else chunk

    def usage(self, result: Result) -> dict[str, Any]:
        """Return the chunk with usage and metrics."""
        empty = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return {**empty, "usage": usage(result), "metrics": self._metrics(result)}

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the complete, non-streamed response."""
        message: dict[str, Any] = {"role": "assistant", "content": result.answer}
        extension: dict[str, Any] = {}
        if self._thinks:
            message |= _reasoning(result.reasoning)
            steps = [{**_step_data(step), "length": len(step.text)} for step in result.steps]
            extension = {"stepspec": {"steps": steps}}
        if result.tool_calls:
            message["tool_calls"] = [_call(call) for call in result.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": result.finish_reason,
            "logprobs": result.logprobs_data(),
        }
        costs = {"usage": usage(result), "metrics": self._metrics(result)}
        return {**self._head, "object": "chat.completion", "choices": [choice], **costs, **extension}

    def _metrics(self, result: Result) -> dict[str, Any]:
        return {**metrics(result, self._policy), "ignored_fields": self._ignored}

    def _chunk(
        self,
        delta: Mapping[str, Any],
        finish_reason: str | None = None,
        extension: Mapping[str, Any] | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        own_fields = {"stepspec": extension} if extension else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **own_fields}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}


def _step_data(step: Step) -> dict[str, Any]:
    """Return a step's data without its text."""
    return {name: value for name, value in step.to_dict().items() if name != "text"}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """Return the chunk of a tool call. Only the first chunk names the tool."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, **_call(ToolCall(delta.id, delta.name or "", delta.arguments))}


def usage(result: Result) -> dict[str, Any]:
    """Return token usage in OpenAI's format."""
    counts = result.usage
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


def metrics(result: Result, policy: str) -> dict[str, Any]:
    """Return speculation metrics: for tokens in vLLM's format, for steps in stepspec's own."""
    counts, times = result.counts, result.times
    firsts = [first for first in (times.first_step, times.first_answer) if first is not None]
    return {
        "time_to_first_token_ms": min(firsts) * 1000 if firsts else None,
        "generation_time_ms": (times.wall - times.queue) * 1000,
        "queue_time_ms": times.queue * 1000,
        "tokens_per_second": counts.committed / times.wall if times.wall else None,
        "speculative_decoding": {
            "num_draft_tokens": counts.token_drafted,
            "num_accepted_draft_tokens": counts.token_accepted,
            "draft_acceptance_rate": counts.token_accepted / counts.token_drafted if counts.token_drafted else None,
        },
        "stepspec": {
            "policy": policy,
            "counts": asdict(counts),
            "wasted_tokens": counts.wasted,
            "times": {part: seconds for part, seconds in asdict(times).items() if part != "reached"},
            "thinks": result.thinks,
            "limit": result.limit,
            "estimated_speedup": result.estimated_speedup,
            "token_level_exact": result.token_level_exact,
            "note": result.note,
        },
    }
