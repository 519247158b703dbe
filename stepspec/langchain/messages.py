"""Converts LangChain messages to turns of a conversation, and events and results to LangChain messages.

A message's content is the answer as a string, as in other chat models. `additional_kwargs["reasoning_content"]` holds
the reasoning, and `additional_kwargs["reasoning_steps"]` its division into steps. From the two, `content_blocks` makes
one standard reasoning block for each step. If the model does not separate its thinking, the steps are the answer:
`additional_kwargs["answer_steps"]` divides it, and `content_blocks` has a text block for each step.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.tool import tool_call_chunk

from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.loop.result import Event, Result
from stepspec.loop.step import Step, StepCommitted, StepDelta

PROVIDER = "stepspec"
TEXT_INDEX = 0
"""Index of the answer's first block. Steps of the thinking start at 1 and tool calls at `CALL_INDEX`, so that the
chunks of a stream merge in any order."""


def turns_of(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format, including the reasoning of earlier answers.

    Raises:
        ModelInvalidRequestError: a message has content other than text.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        try:
            turn: Any = convert_to_openai_messages(
                _plain(message), text_format="block", pass_through_unknown_blocks=False
            )
        except ValueError as error:
            raise ModelInvalidRequestError(f"Only text content is supported: {error}") from error
        if isinstance(message, AIMessage) and (reasoning := _reasoning_of(message)):
            turn["reasoning_content"] = reasoning
        turns.append(turn)
    return turns


def _plain(message: BaseMessage) -> BaseMessage:
    """Return the message with only its text blocks, since other fields hold the same data as the other blocks."""
    if not isinstance(message, AIMessage) or isinstance(message.content, str):
        return message
    text_blocks = [block for block in message.content if isinstance(block, str) or block.get("type") == "text"]
    return message.model_copy(update={"content": text_blocks})


def _reasoning_of(message: AIMessage) -> str:
    given = (message.additional_kwargs.get(name) for name in ("reasoning_content", "reasoning"))
    if text := next((each for each in given if each and isinstance(each, str)), None):
        return text
    if isinstance(message.content, str):
        return ""
    blocks = [block for block in message.content if isinstance(block, dict)]
    return "".join(str(block.get("reasoning", "")) for block in blocks if block.get("type") == "reasoning")


class AnswerSteps:
    """Divides an answer into steps, by its events, if the model does not separate its thinking.

    Each entry has the `index` of a block, `lengths` of text that follows in it, and the step's `extras` once that is
    committed. The first block has the rest of the text. What follows a tool call is one block.
    """

    def __init__(self) -> None:
        self._ends: list[int] = []
        """Where the committed steps end in the answer."""
        self._position = 0
        self._lengths: dict[int, int] = {}
        self._extras: dict[int, dict[str, Any]] = {}
        self._after_call: int | None = None
        """Index of the block after the first tool call."""

    def of(self, event: Event) -> list[dict[str, Any]]:
        """Return the entries of an event."""
        if isinstance(event, AnswerDelta):
            return [*self._parts(len(event.text))]
        index = len(self._ends)
        if isinstance(event, ToolCalled):  # no event says how much of a step it is
            self._after_call = self._after_call or index + 1
        elif isinstance(event, StepCommitted) and event.in_answer and index != self._after_call:
            self._ends.append(sum(self._ends[-1:]) + len(event.step.text))
            self._extras[index] = {"extras": _extras(event.step)}
            if index in self._lengths:
                return [{"index": index, "lengths": [], **self._extras[index]}]
        return []

    @property
    def whole(self) -> list[dict[str, Any]]:
        """The entries of the answer so far. Steps without visible text have none."""
        return [
            {"index": index, "lengths": [length] if index else [], **self._extras.get(index, {})}
            for index, length in self._lengths.items()
            if self._ends
        ]

    def _parts(self, length: int) -> Iterator[dict[str, Any]]:
        while length:
            index = self._after_call or bisect_right(self._ends, self._position)
            taken = min(length, self._ends[index] - self._position) if index < len(self._ends) else length
            extras = {} if index in self._lengths else self._extras.get(index, {})
            self._lengths[index] = self._lengths.get(index, 0) + taken
            if index or extras:
                yield {"index": index, "lengths": [taken] if index else [], **extras}
            self._position += taken
            length -= taken


def chunk_of(event: Event, answer_steps: AnswerSteps) -> AIMessageChunk | None:
    """Return the message chunk of an event; None if the event has none."""
    metadata = {"model_provider": PROVIDER}
    entries = answer_steps.of(event)
    own: dict[str, Any] = {"answer_steps": entries} if entries else {}
    if isinstance(event, StepDelta):
        own = {"reasoning_content": event.text, "reasoning_steps": [{"index": event.index + 1}]}
        return AIMessageChunk(content="", additional_kwargs=own, response_metadata=metadata)
    if isinstance(event, StepCommitted) and not event.in_answer:
        own = {**_reasoning([event.step]), "reasoning_content": event.rest}
        return AIMessageChunk(content="", additional_kwargs=own, response_metadata=metadata)
    if isinstance(event, AnswerDelta) or entries:
        text = event.text if isinstance(event, AnswerDelta) else ""
        return AIMessageChunk(content=text, additional_kwargs=own, response_metadata=metadata)
    if not isinstance(event, ToolCalled):
        return None
    call = event.call
    # LangChain completes partial JSON and takes it for valid, so what it must not parse begins with a closing bracket.
    arguments = call.arguments if call.problem is None else f"]{call.arguments}"
    call_chunk = tool_call_chunk(name=call.name, args=arguments, id=call.id, index=CALL_INDEX + event.index)
    return AIMessageChunk(content="", tool_call_chunks=[call_chunk], response_metadata=metadata)


CALL_INDEX = 1_000_000
"""Index of the first tool call's block, larger than any step's index."""


def last_chunk(result: Result, model: str | None) -> AIMessageChunk:
    """Return the last chunk of a stream, with usage and metadata."""
    return AIMessageChunk(
        content="",
        usage_metadata=_usage(result),
        response_metadata=_metadata(result, model),
        chunk_position="last",
    )


def message_of(result: Result, model: str | None, answer_steps: AnswerSteps) -> AIMessage:
    """Return the entire answer as one message. `answer_steps` has seen all events."""
    valid = [call for call in result.tool_calls if call.problem is None]
    divided: dict[str, Any] = {"answer_steps": entries} if (entries := answer_steps.whole) else {}
    return AIMessage(
        content=result.answer,
        additional_kwargs=_reasoning(result.steps) if result.thinks and result.steps else divided,
        tool_calls=[{"name": call.name, "args": json.loads(call.arguments), "id": call.id} for call in valid],
        invalid_tool_calls=[_invalid(call) for call in result.tool_calls if call.problem is not None],
        usage_metadata=_usage(result),
        response_metadata=_metadata(result, model),
    )


def _invalid(call: ToolCall) -> Any:
    return {
        "type": "invalid_tool_call",
        "name": call.name,
        "args": call.arguments,
        "id": call.id,
        "error": call.problem,
    }


def _reasoning(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "reasoning_content": "".join(step.text for step in steps),
        "reasoning_steps": [_step_data(step) for step in steps],
    }


def _step_data(step: Step) -> dict[str, Any]:
    """Return a step's data without its text."""
    return {"index": step.index + 1, "length": len(step.text), "extras": _extras(step)}


def _extras(step: Step) -> dict[str, Any]:
    return {
        "step": step.index,
        "origin": step.origin,
        "scores": dict(step.scores),
        "tokens": step.num_tokens,
        "tokens_from_draft": step.num_from_draft,
    }


def _logprobs(result: Result) -> dict[str, Any]:
    """Return the log-probabilities where LangChain's other chat models have them."""
    data = result.logprobs_data()
    return {} if data is None else {"logprobs": data}


def _usage(result: Result) -> UsageMetadata:
    usage = result.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def _metadata(result: Result, model: str | None) -> dict[str, Any]:
    usage = result.usage
    return {
        "model_name": model or result.model,
        "model_provider": PROVIDER,
        "finish_reason": result.finish_reason,
        **_logprobs(result),
        "stepspec": {
            "policy": result.policy,
            "draft_tokens": usage.draft_tokens,
            "target_tokens": usage.target_tokens,
            "steps": result.counts.steps,
            "steps_proposed": result.counts.steps_proposed,
            "not_proposed": result.not_proposed,
            "steps_judged": result.counts.steps_judged,
            "steps_accepted": result.counts.steps_accepted,
            "wall_s": result.times.wall,
            "first_token_s": result.times.first_token,
            "limit": result.limit,
            "note": result.note,
            "uncovered": list(result.uncovered),
        },
    }


def _blocks(message: AIMessage) -> list[Any]:
    """Return the standard content blocks of a message or a message chunk."""
    if not isinstance(message.content, str):
        raise NotImplementedError("these blocks already are standard blocks")
    blocks: list[Any] = []
    text, start = message.additional_kwargs.get("reasoning_content", ""), 0
    for step in message.additional_kwargs.get("reasoning_steps", ()):
        end = start + step.get("length", len(text))  # the length and the extras come when the step is committed
        step_data = {name: step[name] for name in ("index", "extras") if name in step}
        blocks.append({"type": "reasoning", "reasoning": text[start:end], **step_data})
        start = end
    blocks += _text_blocks(message.content, message.additional_kwargs.get("answer_steps", ()))
    if isinstance(message, AIMessageChunk) and message.chunk_position != "last":
        return [*blocks, *(_call_chunk(chunk) for chunk in message.tool_call_chunks)]
    return [*blocks, *message.tool_calls, *message.invalid_tool_calls]


def _text_blocks(text: str, steps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    entries = {step["index"]: step for step in steps}
    start = len(text) - sum(sum(entry["lengths"]) for entry in entries.values())
    if start or TEXT_INDEX in entries:
        extras = entries.pop(TEXT_INDEX, {}).get("extras")
        yield {"type": "text", "text": text[:start], "index": TEXT_INDEX, **({"extras": extras} if extras else {})}
    for index, entry in entries.items():
        end = start + sum(entry["lengths"])
        extras = {"extras": entry["extras"]} if "extras" in entry else {}
        yield {"type": "text", "text": text[start:end], "index": index, **extras}
        start = end


def _call_chunk(chunk: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_call_chunk", **{name: chunk.get(name) for name in ("id", "name", "args", "index")}}


register_translator(PROVIDER, _blocks, _blocks)
