"""The input items of OpenAI's Responses API, as turns of a chat.

Consecutive reasoning, messages and function calls of the assistant are one turn, as chat templates expect.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from stepspec.errors import unknown_name
from stepspec.serve.errors import RefusedError
from stepspec.serve.translated import joined_turns, paragraphs, shown, string_of


def chat_turns(instructions: str | None, given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return the turns of a chat.

    Consecutive items of the assistant are one turn. So are the instructions and the system messages at the beginning,
    because many chat templates take only one.

    Raises:
        RefusedError: an item is invalid or not supported.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    turns = [{"role": "system", "content": instructions}] if instructions else []
    turns += [_turn(f"input.{index}", item) for index, item in enumerate(items)]
    merged: list[dict[str, Any]] = []
    for role, group in groupby(turns, key=lambda turn: turn["role"]):
        if role == "assistant" or (role == "system" and not merged):
            merged.append(joined_turns(role, [*group]))
        else:
            merged += group
    return merged


def _turn(where: str, item: Any) -> dict[str, Any]:
    """Return the turn that an item is, or a part of the assistant's turn."""
    if not isinstance(item, dict):
        raise RefusedError(where, f"{where} must be an object with type and content.")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        return {"role": _role(where, item), "content": _text(f"{where}.content", item.get("content"))}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _reasoning(where, item)}
    if kind == "function_call":
        function = {name: string_of(where, item, name) for name in ("name", "arguments")}
        call = {"id": string_of(where, item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        content = _text(f"{where}.output", item.get("output"))
        return {"role": "tool", "tool_call_id": string_of(where, item, "call_id"), "content": content}
    if kind == "item_reference":
        raise RefusedError(f"{where}.type", "The service stores no items. Send the item instead of its reference.")
    raise RefusedError(
        f"{where}.type",
        f"Items of type {shown(kind)} are not supported. Send messages, reasoning, function calls and their outputs.",
    )


def _role(where: str, item: Mapping[str, Any]) -> str:
    role = string_of(where, item, "role")
    roles = ("user", "assistant", "system", "developer")
    if role not in roles:
        raise RefusedError(f"{where}.role", unknown_name("role", role, roles))
    return "system" if role == "developer" else role


def _reasoning(where: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item, or else its summary."""
    text = _text(f"{where}.content", item.get("content") or "")
    if text:
        return text
    summary = item.get("summary") or []
    if not isinstance(summary, list):
        raise RefusedError(f"{where}.summary", f"{where}.summary must be a list of parts.")
    text = paragraphs(_part_text(f"{where}.summary.{index}", part) for index, part in enumerate(summary))
    if not text and item.get("encrypted_content"):
        raise RefusedError(f"{where}.encrypted_content", "The reasoning is encrypted. Leave this item out.")
    return text


def _text(where: str, content: Any) -> str:
    """Return the text of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RefusedError(where, f"{where} must be a string or a list of parts.")
    return "".join(_part_text(f"{where}.{index}", part) for index, part in enumerate(content))


PARTS: Mapping[str, str] = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
"""Types of parts, and the field that has their text."""


def _part_text(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise RefusedError(where, f"{where} must be an object with type and text.")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in PARTS:
        raise RefusedError(f"{where}.type", f"Parts of type {shown(kind)} are not supported. Send input_text.")
    return string_of(where, part, PARTS[kind])
