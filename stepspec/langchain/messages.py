"""LangChain's messages and ours: turns of a conversation one way, events and results the other.

A message's content is the answer as a string, as other chat models have it. The reasoning stands in
`additional_kwargs["reasoning_content"]`, and beside it, in `"reasoning_steps"`, how it parts into steps; of both,
`content_blocks` makes one standard reasoning block for each step.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.exceptions import ModelInvalidRequestError
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.block_translators import register_translator
from langchain_core.messages.tool import tool_call_chunk

from stepspec.chat.calls import Nesting
from stepspec.chat.events import AnswerDelta, ToolCall, ToolCallDelta, ToolCalled
from stepspec.loop.step import Event, Result, Step, StepCommitted

PROVIDER = "stepspec"
TEXT_INDEX = 0
"""Index of the block with the answer. Steps are numbered from 1 on and tool calls after them, so that the chunks of a
stream merge in any order."""


def turns_of(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's form, with what earlier answers were thought through.

    Raises:
        ModelInvalidRequestError: a message is of a kind that has no such form.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        try:
            turn: Any = convert_to_openai_messages(
                _plain(message), text_format="block", pass_through_unknown_blocks=False
            )
        except ValueError as error:
            raise ModelInvalidRequestError(f"The models take text alone: {error}") from error
        if isinstance(message, AIMessage) and (thought := _reasoning_of(message)):
            turn["reasoning_content"] = thought
        turns.append(turn)
    return turns


def _plain(message: BaseMessage) -> BaseMessage:
    """The message without blocks that say what its other fields say too."""
    if not isinstance(message, AIMessage) or isinstance(message.content, str):
        return message
    kept = [block for block in message.content if isinstance(block, str) or block.get("type") == "text"]
    return message.model_copy(update={"content": kept})


def _reasoning_of(message: AIMessage) -> str:
    kept = message.additional_kwargs.get("reasoning_content")
    if kept is None and isinstance(message.content, list):
        blocks = [block for block in message.content if isinstance(block, dict)]
        kept = "".join(str(block.get("reasoning", "")) for block in blocks if block.get("type") == "reasoning")
    return str(kept or "")


def chunk_of(event: Event, *, thinks: bool) -> AIMessageChunk | None:
    """What of an event is shown."""
    about = {"model_provider": PROVIDER}
    if isinstance(event, StepCommitted) and thinks:
        return AIMessageChunk(content="", additional_kwargs=_thought([event.step]), response_metadata=about)
    if isinstance(event, AnswerDelta):
        return AIMessageChunk(content=event.text, response_metadata=about)
    if isinstance(event, ToolCallDelta):
        piece = tool_call_chunk(name=event.name, args=event.arguments, id=event.id, index=CALL_INDEX + event.index)
    elif isinstance(event, ToolCalled) and event.call.problem is not None:
        piece = tool_call_chunk(args=_spoiling(event.call.arguments), index=CALL_INDEX + event.index)
    else:
        return None
    return AIMessageChunk(content="", tool_call_chunks=[piece], response_metadata=about)


def _spoiling(arguments: str) -> str:
    """What is put behind the arguments of a call that cannot be made, as LangChain would complete them and make it."""
    nesting = Nesting()
    nesting.read(arguments)
    within = ("\\" if nesting.escaped else "") + ('"' if nesting.in_string else "")
    return within + ("}" if nesting.opened[-1:] == ["["] else "]")


CALL_INDEX = 1_000_000
"""Index of the first call's block, behind any number of steps."""


def last_chunk(result: Result, model: str, policy: str) -> AIMessageChunk:
    """What is known when all is said."""
    return AIMessageChunk(
        content="",
        usage_metadata=_usage(result),
        response_metadata=_metadata(result, model, policy),
        chunk_position="last",
    )


def message_of(result: Result, model: str, policy: str) -> AIMessage:
    """The whole of it at once."""
    good = [call for call in result.tool_calls if call.problem is None]
    return AIMessage(
        content=result.answer,
        additional_kwargs=_thought(result.steps) if result.thinks and result.steps else {},
        tool_calls=[{"name": call.name, "args": json.loads(call.arguments), "id": call.id} for call in good],
        invalid_tool_calls=[_invalid(call) for call in result.tool_calls if call.problem is not None],
        usage_metadata=_usage(result),
        response_metadata=_metadata(result, model, policy),
    )


def _invalid(call: ToolCall) -> Any:
    return {
        "type": "invalid_tool_call",
        "name": call.name,
        "args": call.arguments,
        "id": call.id,
        "error": call.problem,
    }


def _thought(steps: Sequence[Step]) -> dict[str, Any]:
    return {
        "reasoning_content": "".join(step.text for step in steps),
        "reasoning_steps": [_described(step) for step in steps],
    }


def _described(step: Step) -> dict[str, Any]:
    """What is told of a step besides its text."""
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


def _usage(result: Result) -> UsageMetadata:
    usage = result.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
        output_token_details=OutputTokenDetails(reasoning=usage.reasoning_tokens),
    )


def _metadata(result: Result, model: str, policy: str) -> dict[str, Any]:
    usage = result.usage
    return {
        "model_name": model,
        "model_provider": PROVIDER,
        "finish_reason": result.finish_reason,
        "stepspec": {
            "policy": policy,
            "draft_tokens": usage.draft_tokens,
            "target_tokens": usage.target_tokens,
            "estimated_speedup": result.estimated_speedup,
            "steps": result.counts.steps,
            "steps_judged": result.counts.steps_judged,
            "steps_accepted": result.counts.steps_accepted,
            "wall_s": result.times.wall,
            "limit": result.limit,
            "note": result.note,
        },
    }


def _blocks(message: AIMessage) -> list[Any]:
    """Standard content blocks of a message or of a chunk of one."""
    if not isinstance(message.content, str):
        raise NotImplementedError("these blocks are standard already")
    blocks: list[Any] = []
    text, start = message.additional_kwargs.get("reasoning_content", ""), 0
    for step in message.additional_kwargs.get("reasoning_steps", ()):
        end = start + step["length"]
        about = {"index": step["index"], "extras": step["extras"]}
        blocks.append({"type": "reasoning", "reasoning": text[start:end], **about})
        start = end
    if message.content:
        blocks.append({"type": "text", "text": message.content, "index": TEXT_INDEX})
    if isinstance(message, AIMessageChunk) and message.chunk_position != "last":
        return [*blocks, *(_call_piece(chunk) for chunk in message.tool_call_chunks)]
    return [*blocks, *message.tool_calls, *message.invalid_tool_calls]


def _call_piece(chunk: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_call_chunk", **{name: chunk.get(name) for name in ("id", "name", "args", "index")}}


register_translator(PROVIDER, _blocks, _blocks)
