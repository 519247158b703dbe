"""Writes a completion, whole or as chunks, in the form of OpenAI's API with vLLM's metrics."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stepspec.chat.events import AnswerDelta, ToolCall, ToolCallDelta, ToolCalled
from stepspec.loop.step import Event, Result, Step, StepCommitted


class Answering:
    """One answer. Reasoning goes out under both names by which clients know it, step by step once committed."""

    def __init__(
        self, model: str, policy: str, *, thinks: bool, include_reasoning: bool, ignored: Sequence[str] = ()
    ) -> None:
        """`ignored` are the fields of the request that are not known."""
        self._ignored = list(ignored)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._policy = policy
        self._thinks = thinks and include_reasoning

    def first(self) -> dict[str, Any]:
        """The chunk that says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, event: Event) -> dict[str, Any] | None:
        """The chunk of an event; None for an event that clients do not get."""
        if isinstance(event, StepCommitted) and self._thinks:
            step = event.step
            return self._chunk(_reasoning(step.text), about={"step": _described(step)})
        if isinstance(event, AnswerDelta):
            return self._chunk({"content": event.text})
        if isinstance(event, ToolCallDelta):
            return self._chunk({"tool_calls": [_call_delta(event)]})
        if isinstance(event, ToolCalled):
            return self._chunk({}, about={"call": {"index": event.index, "problem": event.call.problem}})
        return None

    def last(self, result: Result, *, with_metrics: bool) -> dict[str, Any]:
        """The chunk that says why it ended; and what it took, where no chunk for that comes behind it."""
        chunk = self._chunk({}, finish_reason=result.finish_reason)
        return {**chunk, "metrics": self._metrics(result)} if with_metrics else chunk

    def usage(self, result: Result) -> dict[str, Any]:
        """The chunk with what it took."""
        empty = {**self._head, "object": "chat.completion.chunk", "choices": []}
        return {**empty, "usage": usage(result), "metrics": self._metrics(result)}

    def whole(self, result: Result) -> dict[str, Any]:
        """The completion at once."""
        message: dict[str, Any] = {"role": "assistant", "content": result.answer}
        about: dict[str, Any] = {}
        if self._thinks:
            message |= _reasoning(result.reasoning)
            about = {"stepspec": {"steps": [{**_described(step), "length": len(step.text)} for step in result.steps]}}
        if result.tool_calls:
            message["tool_calls"] = [_call(call) for call in result.tool_calls]
        choice = {"index": 0, "message": message, "finish_reason": result.finish_reason, "logprobs": None}
        costs = {"usage": usage(result), "metrics": self._metrics(result)}
        return {**self._head, "object": "chat.completion", "choices": [choice], **costs, **about}

    def _metrics(self, result: Result) -> dict[str, Any]:
        return {**metrics(result, self._policy), "ignored_fields": self._ignored}

    def _chunk(
        self, delta: Mapping[str, Any], finish_reason: str | None = None, about: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        extension = {"stepspec": about} if about else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **extension}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}


def _described(step: Step) -> dict[str, Any]:
    """A step without its text."""
    return {name: value for name, value in step.to_dict().items() if name != "text"}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    """A chunk of a tool call. Only the first one names the tool."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    return {"index": delta.index, **_call(ToolCall(delta.id, delta.name or "", delta.arguments))}


def usage(result: Result) -> dict[str, Any]:
    """Tokens in OpenAI's form."""
    found = result.usage
    return {
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens,
        "total_tokens": found.prompt_tokens + found.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": found.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": found.reasoning_tokens},
    }


def metrics(result: Result, policy: str) -> dict[str, Any]:
    """What speculation did: on tokens in vLLM's form, on steps in ours."""
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
            "times": asdict(times),
            "thinks": result.thinks,
            "limit": result.limit,
            "estimated_speedup": result.estimated_speedup,
            "token_level_exact": result.token_level_exact,
            "note": result.note,
        },
    }
