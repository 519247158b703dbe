"""The messages of Anthropic's Messages API, as turns of a chat."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from stepspec.errors import unknown_name
from stepspec.serve.errors import RefusedError
from stepspec.serve.translated import joined_turns, paragraphs, shown, string_of

ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code puts in front of its system prompt. It is another one for each request, so
nothing behind it could be reused."""

ROLES = ("user", "assistant", "system")


def chat_turns(system: str | Sequence[Any] | None, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the turns of a chat.

    Raises:
        RefusedError: a message is invalid or not supported.
    """
    turns = [turn for index, message in enumerate(messages) for turn in _turns(f"messages.{index}", message)]
    if text := system_text("system", system or ""):
        turns.insert(0, {"role": "system", "content": text})
    merged: list[dict[str, Any]] = []
    for role, group in groupby(turns, key=lambda turn: turn["role"]):
        alike = [*group]
        merged += alike if role == "tool" else [joined_turns(role, alike)]
    return merged


def system_text(where: str, content: Any) -> str:
    """Return the text of a system prompt, without the first line of a block if that names the client.

    Raises:
        RefusedError: it is invalid.
    """
    texts = _texts(where, content)
    return paragraphs(text.partition("\n")[2].lstrip("\n") if text.startswith(ATTRIBUTION) else text for text in texts)


def _turns(where: str, message: Any) -> Iterator[dict[str, Any]]:
    """Yield the turns of a message: one for each result of a tool, and one for each block of anything else."""
    if not isinstance(message, dict):
        raise RefusedError(where, f"{where} must be an object with role and content.")
    role, content = string_of(where, message, "role"), message.get("content")
    if role not in ROLES:
        raise RefusedError(f"{where}.role", unknown_name("role", role, ROLES))
    where = f"{where}.content"
    if role == "system":
        yield {"role": role, "content": system_text(where, content)}
    elif isinstance(content, str):
        yield {"role": role, "content": content}
    elif role == "user":
        blocks = sorted(_blocks(where, content), key=lambda each: each[1].get("type") != "tool_result")
        for place, block in blocks:  # results first, next to their calls
            yield _of_user(place, block)
    else:
        blocks = [*_blocks(where, content)]
        steps = [string_of(place, block, "thinking") for place, block in blocks if block.get("type") == "thinking"]
        yield {"role": role, "reasoning_content": "".join(steps)}
        for place, block in blocks:
            if block.get("type") not in ("thinking", "redacted_thinking"):  # only Anthropic can read the second
                yield _of_assistant(place, block)


def _of_user(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") != "tool_result":
        return {"role": "user", "content": _text(where, block)}
    given = block.get("content")
    content = "" if given is None else paragraphs(_texts(f"{where}.content", given))
    if block.get("is_error") and not content:
        content = "The tool failed."
    return {"role": "tool", "tool_call_id": string_of(where, block, "tool_use_id"), "content": content}


def _of_assistant(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") != "tool_use":
        return {"role": "assistant", "content": _text(where, block)}
    given = block.get("input")
    if not isinstance(given, dict):
        raise RefusedError(f"{where}.input", f"{where}.input must be an object.")
    function = {"name": string_of(where, block, "name"), "arguments": json.dumps(given, ensure_ascii=False)}
    call = {"id": string_of(where, block, "id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _texts(where: str, content: Any) -> list[str]:
    """Return the texts of a content, which is a string or a list of text blocks."""
    return [content] if isinstance(content, str) else [_text(*each) for each in _blocks(where, content)]


def _blocks(where: str, content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each block with its place."""
    if not isinstance(content, list):
        raise RefusedError(where, f"{where} must be a string or a list of blocks.")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise RefusedError(f"{where}.{index}", f"{where}.{index} must be an object with a type.")
        yield f"{where}.{index}", block


def _text(where: str, block: Mapping[str, Any]) -> str:
    if block.get("type") != "text":
        raise RefusedError(f"{where}.type", f"Blocks of type {shown(block.get('type'))} are not supported here.")
    return string_of(where, block, "text")
