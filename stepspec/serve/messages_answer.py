"""Builds messages in the format of Anthropic's Messages API, complete or as events of a stream.

A message has a thinking block for each committed step, then text and `tool_use` blocks in the order in which they are
generated. A block ends when the next one begins.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import starmap
from typing import Any

from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.errors import StepSpecError
from stepspec.loop.result import Event, Result
from stepspec.loop.step import StepCommitted, StepDelta, StepJudged, StepProposed
from stepspec.serve.errors import messages_error
from stepspec.serve.figures import metrics_of
from stepspec.serve.messages_request import MessagesRequest

Data = dict[str, Any]

SIGNATURE = "stepspec"
"""Signature of every thinking block. Clients do not send back a block without one; the service does not check it."""


class MessagesAnswer:
    """Builds the message that answers one request, see `stepspec.serve.streams.AnswerFormat`."""

    named_events = True

    def __init__(
        self,
        model: str,
        policy: str,
        request: MessagesRequest,
        request_id: str,
        num_prompt_tokens: int,
        *,
        thinks: bool,
    ) -> None:
        """
        Args:
            model: name of the model.
            policy: name of the policy.
            request: the request.
            request_id: the id in the log.
            num_prompt_tokens: tokens of the prompt.
            thinks: whether the thinking is separate from the answer.
        """
        self._request, self._policy, self._thinks = request, policy, thinks
        self._num_prompt_tokens = num_prompt_tokens
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._blocks: list[Data] = []
        self._is_open = False

    def begin(self) -> list[Data]:
        """Return the event before the first block."""
        usage = _usage(self._num_prompt_tokens, 0, 0)
        return [{"type": "message_start", "message": self._message(stop_reason=None, stop_sequence=None, usage=usage)}]

    def chunks(self, index: int, event: Event) -> list[Data]:
        """Return the events of the stream for an event of the answer. `end` has those for its end."""
        return list(self._changes(event))

    def end(self, results: Sequence[Result]) -> list[Data]:
        """Return the events that end the stream."""
        (result,) = results
        ending = self._ending(result)
        usage, metrics = ending.pop("usage"), ending.pop("metrics")
        delta = {"type": "message_delta", "delta": ending, "usage": usage, "metrics": metrics}
        return [*self._closing(), delta, {"type": "message_stop"}]

    def failed(self, error: StepSpecError) -> list[Data]:
        """Return the event that ends the stream after an error."""
        return [messages_error(error)]

    def whole(self, results: Sequence[Result]) -> Data:
        """Return the complete message."""
        (result,) = results
        steps = [StepCommitted(step, in_answer=not self._thinks) for step in result.steps]
        for event in (*steps, AnswerDelta(result.answer), *starmap(ToolCalled, enumerate(result.tool_calls))):
            self.chunks(0, event)
        return self._message(**self._ending(result))

    def _changes(self, event: Event) -> Iterator[Data]:
        if isinstance(event, StepDelta | StepCommitted | StepProposed | StepJudged):
            yield from self._step_changes(event)
        elif isinstance(event, AnswerDelta) and event.text:
            if not self._is_open:
                yield from self._begun({"type": "text", "text": ""})
            yield self._delta("text", event.text)
        elif isinstance(event, ToolCalled) and event.call.problem is None:
            call = event.call
            yield from self._begun({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._block_event("delta", delta={"type": "input_json_delta", "partial_json": call.arguments})
            self._blocks[-1]["input"] = json.loads(call.arguments)
            yield from self._closing()

    def _step_changes(self, event: StepDelta | StepCommitted | StepProposed | StepJudged) -> Iterator[Data]:
        chat = self._request.text_request
        if chat.include_reasoning is False:
            return
        if isinstance(event, StepDelta) or (isinstance(event, StepCommitted) and not event.in_answer):
            if not (self._is_open and self._blocks[-1]["type"] == "thinking"):
                yield from self._begun({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta("thinking", event.text if isinstance(event, StepDelta) else event.rest)
            if isinstance(event, StepCommitted):
                yield self._delta("signature", SIGNATURE)
                yield from self._closing()
        elif chat.speculation.events:
            data = {"step": event.step.to_dict()} if isinstance(event, StepCommitted) else {"event": asdict(event)}
            yield {"type": f"stepspec.{event.type}", "stepspec": data}

    def _ending(self, result: Result) -> Data:
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        # A stop string may end the text in the middle of a call.
        is_whole = result.finish_reason == "stop" or (result.finish_reason == "length" and result.limit is None)
        stopped = is_whole and result.stop_string is not None
        return {
            "stop_reason": "stop_sequence" if stopped else reasons[result.finish_reason],
            "stop_sequence": result.stop_string if stopped else None,
            "usage": _usage(result.num_prompt_tokens, result.usage.cached_tokens, result.counts.committed),
            "metrics": metrics_of([result], self._policy, self._request.ignored),
        }

    def _message(self, **fields: Any) -> Data:
        return {**self._head, "content": self._blocks, **fields}

    def _begun(self, block: Data) -> Iterator[Data]:
        """End the block before, and begin another one."""
        yield from self._closing()
        self._blocks.append(block)
        self._is_open = True
        yield self._block_event("start", content_block=dict(block))

    def _delta(self, name: str, text: str) -> Data:
        """Add text to the block, and return its event."""
        self._blocks[-1][name] += text
        return self._block_event("delta", delta={"type": f"{name}_delta", name: text})

    def _closing(self) -> Iterator[Data]:
        if self._is_open:
            self._is_open = False
            yield self._block_event("stop")

    def _block_event(self, change: str, **fields: Any) -> Data:
        return {"type": f"content_block_{change}", "index": len(self._blocks) - 1, **fields}


def _usage(prompt: int, cached: int, written: int) -> Data:
    """Return the tokens in Anthropic's format, in which cached tokens are not input tokens."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
    }
