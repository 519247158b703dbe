"""RemoteStepSpec: a client of a stepspec service with the API of `StepSpec`.

    spec = RemoteStepSpec("http://localhost:8000/v1")
    result = await spec.generate("How many?")

It yields the events of `StepSpec.stream`.
"""

import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any

from stepspec.api.session import check_open, one_conversation
from stepspec.base.extras import from_extra
from stepspec.base.keywords import known_options
from stepspec.base.workers import off_the_loop
from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.chat.prompts import Message
from stepspec.engines.protocol import SAMPLING_NUMBERS, Sampling, side_by_side
from stepspec.errors import ContextError, EngineError, ModelError, StepSpecError, UsageError
from stepspec.loop.counts import Counts, Times
from stepspec.loop.limits import cut_off, end_of
from stepspec.loop.options import RequestOptions, check_patience
from stepspec.loop.result import Done, Event, Result, TokenLogprob
from stepspec.loop.step import Noted, Step, StepCommitted, StepDelta, StepJudged, StepProposed

with from_extra("remote", "stepspec.client"):
    from stepspec.engines.remote.address import Address
    from stepspec.engines.remote.client import Wire
    from stepspec.engines.remote.problems import nonsense, refused


GRACE_S = 5.0
"""Seconds after a request's deadline in which the service's response has to arrive."""


class RemoteStepSpec:
    """A client of one service. Any number of event loops can use it."""

    @known_options
    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        policy: str | None = None,
        *,
        api_key: str | None = None,
        retries: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Create the client. It connects at the first request.

        Args:
            base_url: address of the service, with the options of `stepspec.engines.remote.address.Address`.
            model: name of a model of the service; None uses the model that it serves.
            policy: name of a policy of the service; None uses the service's default.
            api_key: the API key; None reads it from the environment.
            retries: number of retries after a failed connection; None uses the value in the address.
            timeout: seconds without data after which a call fails; None uses the value in the address.

        Raises:
            UsageError: the address is invalid, or a number is out of range.
        """
        check_patience(timeout, retries=retries)
        address = Address.parsed(base_url)
        address = address if retries is None else replace(address, retries=retries)
        self._address = address if timeout is None else replace(address, timeout=timeout)
        self._wire = Wire(self._address, refusal=_refusal)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model, self._policy = model, policy
        self._closed = False

    async def __aenter__(self) -> "RemoteStepSpec":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the session, and the connections of the running event loop."""
        self._closed = True
        await self._wire.aclose()

    @known_options
    async def stream(
        self, question: str | Sequence[Message], options: RequestOptions | None = None, **changes: Any
    ) -> AsyncGenerator[Event, None]:
        """Answer a question and yield its events. Arguments are those of `StepSpec.stream`.

        Raises:
            UsageError, ContextError: the service rejects the request.
            ModelError: the service does not have the model.
            EngineError: the service cannot be reached or failed.
        """
        requested = RequestOptions.of(options, changes)
        check_open(closed=self._closed)
        body = await off_the_loop(
            (question, requested.tools, requested.json_schema), lambda: self._body(question, requested)
        )
        reader, caller_s = _Reader(self._address, deltas=requested.step_deltas), 0.0
        end = end_of(requested.deadline_s, -GRACE_S)
        event: Event | None = None
        async with aclosing(self._chunks(body)) as chunks:
            while True:
                chunk = None
                async with cut_off(None if end is None else end + caller_s) as limit:
                    chunk = await anext(chunks, None)
                if chunk is None:
                    break
                for event in reader.read(chunk):
                    since = time.monotonic()
                    yield event
                    caller_s += time.monotonic() - since  # in which nothing is read
        if limit.expired() and not (reader.ended and isinstance(event, Done)):
            raise EngineError(f"{self._address.base} did not end the request within {GRACE_S:g} s of its deadline.")
        if reader.ended is None:
            raise EngineError(f"{self._address.base} ended the response before it was complete. See the server's log.")
        if not isinstance(event, Done):
            raise EngineError(f"{self._address.base} sent no metrics. Check that it is a service of stepspec.")

    async def _chunks(self, body: bytes) -> AsyncGenerator[Any, None]:
        url = f"{self._address.base}/chat/completions"
        async with self._wire.stream(url, body, self._headers) as (chunks, _), aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    def _body(self, question: str | Sequence[Message], options: RequestOptions) -> bytes:
        messages = one_conversation(question, options.prompt)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        limits = {"max_thinking_s": options.max_thinking_s, "deadline_s": options.deadline_s}
        speculation = {"policy": options.policy or self._policy, **limits, "events": True}
        fields = {
            "messages": list(messages),
            "model": self._model,
            "stepspec": speculation,
            **_fields(options),
            **stream,
        }
        try:
            return json.dumps(fields, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError):
            raise UsageError(
                "A setting, a tool or the JSON schema holds a value that is not valid JSON, such as NaN."
            ) from None

    @known_options
    async def batch(
        self,
        questions: Sequence[str | Sequence[Message]],
        options: RequestOptions | None = None,
        **changes: Any,
    ) -> list[Result]:
        """Answer questions concurrently. Arguments and errors are those of `stream`.

        Results are in the order of the questions. The first failure cancels the other questions.
        """
        return await side_by_side(*(self.generate(each, options, **changes) for each in questions))

    @known_options
    async def generate(
        self, question: str | Sequence[Message], options: RequestOptions | None = None, **changes: Any
    ) -> Result:
        """Answer a question and return the result. Arguments and errors are those of `stream`."""
        async with aclosing(self.stream(question, options, **changes)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event.result
        raise AssertionError("a request ends with Done or an error")


RENAMED: Mapping[str, str] = {"max_tokens": "max_completion_tokens", "max_thinking_tokens": "thinking_token_budget"}
"""Fields of the service for options that have another name there."""
CONVERTED = frozenset(
    {"prompt", "sampling", "max_thinking_s", "deadline_s", "json_schema", "policy", "step_deltas"}
    | {"tools", "tool_choice", "parallel_tool_calls"}
)
"""Options that are not a single field of the service."""


def _fields(options: RequestOptions) -> dict[str, Any]:
    """Return the options as fields of a request to the service.

    Raises:
        UsageError: the service does not support one of them.
    """
    sampling = options.sampling
    own = vars(sampling) if isinstance(sampling, Sampling) else {"seed": 0, **(sampling or {})}
    given: dict[str, Any] = own
    if given.get("allowed") is not None:
        raise UsageError("allowed contains token ids, which a remote service does not accept. Leave it out.")
    fields: dict[str, Any] = {name: given[name] for name in SAMPLING_NUMBERS if name in given}
    if given.get("logit_bias"):
        fields["logit_bias"] = {str(id): amount for id, amount in given["logit_bias"]}
    if options.tools:
        choice = options.tool_choice
        named = choice not in ("auto", "none", "required")
        fields["tools"] = list(options.tools)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice}} if named else choice
        fields["parallel_tool_calls"] = options.parallel_tool_calls
    if options.json_schema is not None:
        schema = {"name": "answer", "schema": dict(options.json_schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    for name, field in RequestOptions.model_fields.items():
        value = getattr(options, name)
        if name not in CONVERTED and value != field.default:
            fields[RENAMED.get(name, name)] = value
    return fields


STEP_EVENTS: Mapping[str, Callable[..., Event]] = {"step.proposed": StepProposed, "step.judged": StepJudged}


class _Reader:
    """Converts the chunks of a stream to events and collects them into the result."""

    def __init__(self, address: Address, *, deltas: bool) -> None:
        """`deltas`: whether the events include `StepDelta`."""
        self.ended: str | None = None
        self._deltas, self._open = deltas, ""
        self._address = address
        self._steps: list[Step] = []
        self._answer: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: tuple[TokenLogprob, ...] | None = None

    def read(self, chunk: Any) -> list[Event]:
        """Return the events of a chunk."""
        try:
            return self._read(chunk)
        except (KeyError, TypeError, IndexError, AttributeError):
            raise nonsense(self._address, "a chunk of unknown format; it may run another version of stepspec") from None

    def _read(self, chunk: Mapping[str, Any]) -> list[Event]:
        if "error" in chunk:
            raise _to_error(chunk["error"])
        if not chunk["choices"]:
            return [Done(self._result(chunk["model"], chunk["usage"], chunk["metrics"]["stepspec"]))]
        choice, about = chunk["choices"][0], chunk.get("stepspec", {})
        if "note" in about:
            return [Noted(about["note"])]
        if "event" in about:
            event = dict(about["event"])
            return [STEP_EVENTS[event.pop("type")](**event)]
        self.ended = choice["finish_reason"] or self.ended
        if choice.get("logprobs"):
            self._logprobs = tuple(map(_logprob_of, choice["logprobs"]["content"]))
        delta, events = choice["delta"], list[Event]()
        if "step" in about:
            in_answer = "text" in about["step"]
            text = about["step"]["text"] if in_answer else self._open + delta["reasoning"]
            step = Step(**{**about["step"], "text": text})
            self._steps.append(step)
            events.append(StepCommitted(step, in_answer, len(self._open) if self._deltas else 0))
            self._open = ""
        elif delta.get("reasoning"):
            self._open += delta["reasoning"]
            events += [StepDelta(len(self._steps), delta["reasoning"])] if self._deltas else []
        if delta.get("content"):
            self._answer.append(delta["content"])
            events.append(AnswerDelta(delta["content"]))
        for each in delta.get("tool_calls", ()):
            self._calls.append(ToolCall(each["id"], each["function"]["name"], each["function"]["arguments"]))
            events.append(ToolCalled(len(self._calls) - 1, self._calls[-1]))
        if "call" in about:
            self._calls.append(ToolCall(**about["call"]))
            events.append(ToolCalled(len(self._calls) - 1, self._calls[-1]))
        return events

    def _result(self, model: str, usage: Mapping[str, Any], statistics: Mapping[str, Any]) -> Result:
        answer = "".join(self._answer)
        return Result(
            reasoning="".join(step.text for step in self._steps) if statistics["thinks"] else answer,
            answer=answer,
            steps=tuple(self._steps),
            counts=Counts(**statistics["counts"]),
            times=Times(**statistics["times"]),
            finish_reason=self.ended or "stop",  # type: ignore[arg-type]
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            tool_calls=tuple(self._calls),
            thinks=statistics["thinks"],
            limit=statistics["limit"],
            stop_string=statistics.get("stop_string"),
            not_proposed=statistics.get("not_proposed"),
            model=model,
            policy=statistics["policy"],
            token_level_exact=statistics["token_level_exact"],
            note=statistics["note"],
            uncovered=tuple(statistics.get("uncovered", ())),
            logprobs=self._logprobs,
        )


def _logprob_of(token: Mapping[str, Any]) -> TokenLogprob:
    top = tuple((each["token"], each["logprob"]) for each in token["top_logprobs"])
    return TokenLogprob(token["token"], token["logprob"], top)


def _refusal(address: Address, status: int, body: bytes) -> StepSpecError:
    """Convert a response with an error status to the exception that the service raised."""
    if status not in (400, 404, 413, 422):
        return refused(address, status, body)
    try:
        return _to_error(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return refused(address, status, body)


def _to_error(error: Mapping[str, Any]) -> StepSpecError:
    """Convert the `error` object of a response to an exception."""
    message, code = str(error["message"]), error.get("code")
    if code == "context_length_exceeded":
        return ContextError(message)
    if code == "model_not_found":
        return ModelError(message)
    return UsageError(message) if error.get("type") == "invalid_request_error" else EngineError(message)
