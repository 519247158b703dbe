"""Builds responses in the format of OpenAI's Responses API, complete or as events of a stream.

A response has a reasoning item, a message and function calls, in the order in which they are generated. An item ends
when the next one begins. Each committed step is one delta of the reasoning.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import starmap
from typing import Any, ClassVar, Literal

from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.errors import StepSpecError
from stepspec.loop.result import Event, Result
from stepspec.loop.step import Noted, Step, StepCommitted, StepDelta, StepJudged, StepProposed
from stepspec.serve.figures import metrics_of, usage_of
from stepspec.serve.responses_request import ResponsesRequest

Data = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class _OutputItem:
    """An output item while it is generated."""

    type: ClassVar[str]
    prefix: ClassVar[str]
    """Of its id."""
    event: ClassVar[str]
    """Beginning of the names of the events with its text."""

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.status: Status = "in_progress"
        self._index = index
        self._chunks: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._chunks)

    def data(self) -> Data:
        """Return the item as it is now."""
        return {"id": self.id, "type": self.type, "status": self.status}

    def opening(self) -> list[Data]:
        """Return the events with which the item begins."""
        return [self._item_event("added")]

    def delta(self, text: str, **fields: Any) -> Data:
        """Add a chunk of text, and return its event."""
        self._chunks.append(text)
        return self._text_event("delta", delta=text, **fields)

    def closing(self, status: Status) -> list[Data]:
        """End the item, and return the events of its end."""
        self.status = status
        return [self._item_event("done")]

    def _item_event(self, change: str, **fields: Any) -> Data:
        name = f"response.output_item.{change}"
        return {"type": name, "output_index": self._index, "item": self.data(), **fields}

    def _text_event(self, change: str, **fields: Any) -> Data:
        return {"type": f"{self.event}.{change}", **self._position(), **fields}

    def _position(self) -> Data:
        return {"item_id": self.id, "output_index": self._index}


class _PartItem(_OutputItem, ABC):
    """An item whose text is in a content part."""

    def data(self) -> Data:
        return {**super().data(), "content": [self.part()] if self._chunks or self.status != "in_progress" else []}

    @abstractmethod
    def part(self) -> Data:
        """Return the content part."""

    def opening(self) -> list[Data]:
        return [*super().opening(), self._part_event("added")]

    def closing(self, status: Status) -> list[Data]:
        item_events = super().closing(status)
        return [self._text_event("done", text=self.text), self._part_event("done"), *item_events]

    def _part_event(self, change: str) -> Data:
        return {"type": f"response.content_part.{change}", **self._position(), "part": self.part()}

    def _position(self) -> Data:
        return {**super()._position(), "content_index": 0}


class _Reasoning(_PartItem):
    """The committed steps."""

    type, prefix, event = "reasoning", "rs", "response.reasoning_text"

    def data(self) -> Data:
        return {**super().data(), "summary": [], "encrypted_content": None}

    def part(self) -> Data:
        return {"type": "reasoning_text", "text": self.text}


class _MessageItem(_PartItem):
    """The text of the answer."""

    type, prefix, event = "message", "msg", "response.output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[Data] = []

    def data(self) -> Data:
        return {**super().data(), "role": "assistant"}

    def part(self) -> Data:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def _text_event(self, change: str, **fields: Any) -> Data:
        return super()._text_event(change, **fields, logprobs=self.logprobs)


class _CallItem(_OutputItem):
    """A tool call."""

    type, prefix, event = "function_call", "fc", "response.function_call_arguments"

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self._call_id, self._name = call_id, name

    def data(self) -> Data:
        return {**super().data(), "call_id": self._call_id, "name": self._name, "arguments": self.text}

    def closing(self, status: Status) -> list[Data]:
        item_events = super().closing(status)
        return [self._text_event("done", name=self._name, arguments=self.text), *item_events]


class ResponsesAnswer:
    """Builds the response to one request, see `stepspec.serve.streams.AnswerFormat`."""

    named_events = True

    def __init__(self, model: str, policy: str, request: ResponsesRequest, request_id: str, *, thinks: bool) -> None:
        """
        Args:
            model: name of the model.
            policy: name of the policy.
            request: the request. The response repeats its settings.
            request_id: the id in the log.
            thinks: whether the thinking is separate from the answer.
        """
        self._request, self._policy, self._ignored = request, policy, request.ignored
        self._thinks = thinks
        self._with_events = bool(request.stepspec and request.stepspec.events)
        self._with_reasoning = request.text_request.include_reasoning is not False
        self._head = _head(request, model, request_id)
        self._items: list[_OutputItem] = []
        self._num_events = 0

    def begin(self) -> list[Data]:
        """Return the events before the first one of the answer."""
        response = self._response("in_progress")
        return self._numbered([{"type": f"response.{name}", "response": response} for name in STARTS])

    def chunks(self, index: int, event: Event) -> list[Data]:
        """Return the events of the stream for an event of the answer. `end` has those for its end."""
        return self._numbered(self._changes(event))

    def end(self, results: Sequence[Result]) -> list[Data]:
        """Return the events that end the stream. The last one has the complete response."""
        (result,) = results
        return self._numbered(self._ending(result))

    def failed(self, error: StepSpecError) -> list[Data]:
        """Return the event that ends the stream after an error."""
        for item in self._open_items():
            item.status = "incomplete"
        details = {"code": "server_error", "message": str(error)}
        return self._numbered([{"type": "response.failed", "response": self._response("failed", error=details)}])

    def whole(self, results: Sequence[Result]) -> Data:
        """Return the complete response."""
        (result,) = results
        steps = [StepCommitted(step, in_answer=not self._thinks) for step in result.steps]
        for event in (*steps, AnswerDelta(result.answer), *starmap(ToolCalled, enumerate(result.tool_calls))):
            self.chunks(0, event)
        response = self.end(results)[-1]["response"]
        if self._thinks and self._with_reasoning:
            response["stepspec"] = {"steps": [{**_step_data(step), "length": len(step.text)} for step in result.steps]}
        return response

    def _changes(self, event: Event) -> Iterator[Data]:
        if isinstance(event, StepDelta | StepCommitted | StepProposed | StepJudged):
            yield from self._step_changes(event)
        elif isinstance(event, Noted):
            yield {"type": f"stepspec.{event.type}", "stepspec": {"note": event.text}}
        elif isinstance(event, AnswerDelta) and event.text:
            if not any(isinstance(item, _MessageItem) for item in self._open_items()):
                yield from self._begun(_MessageItem(len(self._items)))
            yield self._items[-1].delta(event.text)
        elif isinstance(event, ToolCalled) and event.call.problem is None:
            yield from self._begun(_CallItem(len(self._items), event.call.id, event.call.name))
            yield self._items[-1].delta(event.call.arguments)
            yield from self._items[-1].closing("completed")

    def _step_changes(self, event: StepDelta | StepCommitted | StepProposed | StepJudged) -> Iterator[Data]:
        if not self._with_reasoning:
            return
        if isinstance(event, StepDelta) or (isinstance(event, StepCommitted) and not event.in_answer):
            if not any(isinstance(item, _Reasoning) for item in self._open_items()):
                yield from self._begun(_Reasoning(len(self._items)))
            if isinstance(event, StepDelta):
                yield self._items[-1].delta(event.text)
            else:
                yield self._items[-1].delta(event.rest, stepspec={"step": _step_data(event.step)})
        elif self._with_events:
            data = {"step": event.step.to_dict()} if isinstance(event, StepCommitted) else {"event": asdict(event)}
            yield {"type": f"stepspec.{event.type}", "stepspec": data}

    def _ending(self, result: Result) -> Iterator[Data]:
        status: Status = "incomplete" if result.finish_reason == "length" else "completed"
        if status == "completed" and not any(isinstance(item, _MessageItem | _CallItem) for item in self._items):
            yield from self._begun(_MessageItem(len(self._items)))  # some clients look for a message
        _add_logprobs([item for item in self._items if isinstance(item, _MessageItem)], result)
        for item in self._open_items():
            yield from item.closing(status)
        yield {"type": f"response.{status}", "response": self._ended(result, status)}

    def _ended(self, result: Result, status: Status) -> Data:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, incomplete_details=details, usage=_usage(result))
        response["metrics"] = metrics_of([result], self._policy, self._ignored)
        return response | ({"completed_at": int(time.time())} if status == "completed" else {})

    def _response(self, status: str, **fields: Any) -> Data:
        """Return the response as it is now."""
        return {**self._head, "status": status, "output": [item.data() for item in self._items], **fields}

    def _begun(self, item: _OutputItem) -> Iterator[Data]:
        """End the item before, and begin the next one."""
        for before in self._open_items():
            yield from before.closing("completed")
        self._items.append(item)
        yield from item.opening()

    def _open_items(self) -> list[_OutputItem]:
        """Return the last item if it has not ended."""
        return [item for item in self._items[-1:] if item.status == "in_progress"]

    def _numbered(self, events: Iterable[Data]) -> list[Data]:
        numbered = [{**event, "sequence_number": self._num_events + index} for index, event in enumerate(events)]
        self._num_events += len(numbered)
        return numbered


STARTS = ("created", "in_progress")


def _head(request: ResponsesRequest, model: str, request_id: str) -> Data:
    """Return the fields of a response that are known from the beginning."""
    reasoning, text = request.reasoning, request.text
    return {
        "id": f"resp_{request_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "tools": request.tools or [],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "text": {"format": (text and text.format) or {"type": "text"}, "verbosity": "medium"},
        "metadata": request.metadata or {},
        "user": request.user,
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
    }


def _step_data(step: Step) -> Data:
    """Return a step's data without its text."""
    return {name: value for name, value in step.to_dict().items() if name != "text"}


def _usage(result: Result) -> Data:
    usage = usage_of([result])
    # The client of OpenAI requires the tokens written to the cache. They are not counted here.
    cached = {**usage["prompt_tokens_details"], "cache_write_tokens": 0}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }


def _add_logprobs(messages: Sequence[_MessageItem], result: Result) -> None:
    """Give each message the log-probabilities of its tokens.

    Tokens that only partly belong to a message count. If the tokens do not add up to the text, as with characters of
    several tokens, the message has all tokens after the thinking.
    """
    tokens = (result.logprobs_data() or {"content": []})["content"][result.usage.reasoning_tokens :]
    written, start = "".join(token["token"] for token in tokens), 0
    for message in messages:
        found = written.find(message.text, start)
        if found < 0:
            message.logprobs = tokens
            continue
        start = found + len(message.text)
        message.logprobs = _tokens_between(tokens, found, start)


def _tokens_between(tokens: Sequence[Data], start: int, end: int) -> list[Data]:
    """Return the tokens with characters in a range of their text."""
    found: list[Data] = []
    position = 0
    for token in tokens:
        after = position + len(token["token"])
        if position < end and after > start:
            found.append(token)
        position = after
    return found
