"""Converts LangChain messages to turns of a conversation, and events and results to LangChain messages.

A message's content is the answer as a string, as in other chat models. `additional_kwargs["reasoning_content"]` holds
the reasoning, and `additional_kwargs["reasoning_steps"]` its division into steps. From the two, `content_blocks` makes
one standard reasoning block for each step.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.tool import tool_call_chunk

from stepspec.chat.events import AnswerDelta, ToolCall, ToolCalled
from stepspec.loop.result import Event, Result
from stepspec.loop.step import Step, StepCommitted

PROVIDER = "stepspec"
TEXT_INDEX = 0
"""Index of the answer's block. Steps start at 1 and tool calls at `CALL_INDEX`, so that the chunks of a stream merge
in any order."""


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


def chunk_of(event: Event) -> AIMessageChunk | None:
    """Return the message chunk of an event; None if the event has none."""
    metadata = {"model_provider": PROVIDER}
    if isinstance(event, StepCommitted) and not event.in_answer:
        return AIMessageChunk(content="", additional_kwargs=_reasoning([event.step]), response_metadata=metadata)
    if isinstance(event, AnswerDelta):
        return AIMessageChunk(content=event.text, response_metadata=metadata)
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


def message_of(result: Result, model: str | None) -> AIMessage:
    """Return the entire answer as one message."""
    valid = [call for call in result.tool_calls if call.problem is None]
    return AIMessage(
        content=result.answer,
        additional_kwargs=_reasoning(result.steps) if result.thinks and result.steps else {},
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
    return {
        "index": step.index + 1,
        "length": len(step.text),
        "extras": {
            "step": step.index,
            "origin": step.origin,
            "scores": dict(step.scores),
            "tokens": step.num_tokens,
            "tokens_from_draft": step.num_from_draft,
        },
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
        end = start + step["length"]
        step_data = {"index": step["index"], "extras": step["extras"]}
        blocks.append({"type": "reasoning", "reasoning": text[start:end], **step_data})
        start = end
    if message.content:
        blocks.append({"type": "text", "text": message.content, "index": TEXT_INDEX})
    if isinstance(message, AIMessageChunk) and message.chunk_position != "last":
        return [*blocks, *(_call_chunk(chunk) for chunk in message.tool_call_chunks)]
    return [*blocks, *message.tool_calls, *message.invalid_tool_calls]


def _call_chunk(chunk: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_call_chunk", **{name: chunk.get(name) for name in ("id", "name", "args", "index")}}


register_translator(PROVIDER, _blocks, _blocks)
