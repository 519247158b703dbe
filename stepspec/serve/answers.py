"""Builds chat completions and chunks in the format of OpenAI's API, with metrics in vLLM's format."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.errors import StepSpecError
from stepspec.loop.result import Done, Event, Result
from stepspec.loop.step import Noted, Step, StepCommitted, StepDelta, StepJudged, StepProposed
from stepspec.serve.errors import error_body
from stepspec.serve.figures import metrics_of, usage_of
from stepspec.serve.requests import ChatRequest


class ChatAnswer:
    """Builds the response to a chat request. The thinking is `reasoning` and `reasoning_content`."""

    named_events = False

    def __init__(self, model: str, policy: str, request: ChatRequest, request_id: str, *, thinks: bool) -> None:
        """`thinks`: whether the thinking is separate from the answer."""
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": model}
        self._request, self._policy, self._thinks = request, policy, thinks
        self._num_calls: Counter[int] = Counter()
        """Calls that each answer has sent."""
        self._shows_thinking = thinks and request.include_reasoning is not False

    def begin(self) -> list[dict[str, Any]]:
        """Return the chunks before the first event, which have the role."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._request.num_answers)]

    def chunks(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the chunks of an event."""
        if isinstance(event, Noted):
            return [self._chunk(index, {}, {"note": event.text})]
        if isinstance(event, AnswerDelta):
            return [self._chunk(index, {"content": event.text})]
        if isinstance(event, ToolCalled):
            if event.call.problem is not None:
                return [self._chunk(index, {}, {"call": asdict(event.call)})]
            call = {"index": self._num_calls[index], **_call(event.call)}
            self._num_calls[index] += 1
            return [self._chunk(index, {"tool_calls": [call]})]
        if isinstance(event, Done):
            return [self._last(index, event.result)]
        return self._step_chunks(index, event)

    def _step_chunks(
        self, index: int, event: StepDelta | StepCommitted | StepProposed | StepJudged
    ) -> list[dict[str, Any]]:
        with_events = self._request.speculation.events
        if self._request.include_reasoning is False:
            return []
        if isinstance(event, StepDelta):
            return [self._chunk(index, _reasoning(event.text))]
        if isinstance(event, StepCommitted) and not event.in_answer:
            return [self._chunk(index, _reasoning(event.rest), {"step": _step_data(event.step)})]
        if not with_events:
            return []
        data = {"step": event.step.to_dict()} if isinstance(event, StepCommitted) else {"event": asdict(event)}
        return [self._chunk(index, {}, data)]

    def _last(self, index: int, result: Result) -> dict[str, Any]:
        """Return the chunk with the finish reason. It has the metrics if no chunk follows that has them."""
        chunk = self._chunk(index, {}, reason=result.finish_reason, logprobs=result.logprobs_data())
        if self._request.includes_usage and self._request.num_answers == 1:
            return chunk
        return {**chunk, "metrics": metrics_of([result], self._policy, self._request.ignored)}

    def end(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        """Return the chunks after the last event."""
        if not self._request.includes_usage:
            return []
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], **self._costs(results)}]

    def failed(self, error: StepSpecError) -> list[dict[str, Any]]:
        """Return the chunks for an error in the middle of a stream."""
        return [error_body(error)]

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the complete, non-streamed response."""
        choices = [self._choice(index, result) for index, result in enumerate(results)]
        return {**self._head, "object": "chat.completion", "choices": choices, **self._costs(results)}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.answer}
        if self._shows_thinking:
            message |= _reasoning(result.reasoning)
        if calls := [_call(call) for call in result.tool_calls if call.problem is None]:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "finish_reason": result.finish_reason,
            "logprobs": result.logprobs_data(),
        }
        if self._shows_thinking:
            steps = [{**_step_data(step), "length": len(step.text)} for step in result.steps]
            choice["stepspec"] = {"steps": steps}
        return choice

    def _costs(self, results: Sequence[Result]) -> dict[str, Any]:
        metrics = metrics_of(results, self._policy, self._request.ignored)
        return {"usage": usage_of(results, self._request.num_answers), "metrics": metrics}

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        extension: Mapping[str, Any] | None = None,
        reason: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        own_fields = {"stepspec": extension} if extension else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **own_fields}


def _reasoning(text: str) -> dict[str, str]:
    return {"reasoning": text, "reasoning_content": text}


def _step_data(step: Step) -> dict[str, Any]:
    """Return a step's data without its text."""
    return {name: value for name, value in step.to_dict().items() if name != "text"}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
