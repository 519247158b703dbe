"""Checks the options of a request, for models in this process and for a service alike."""

import reprlib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, cast

from stepspec.engines.protocol import HIGHEST_ID, Sampling, check_numbers
from stepspec.errors import UsageError

KINDS: Mapping[str, tuple[Any, str]] = {
    "prompt": (str, "the name of a prompt"),
    "sampling": (Sampling, "a stepspec.Sampling"),
    "stop": (Sequence, "a string or a list of strings"),
    "stop_token_ids": (Sequence, "a list of token ids"),
    "json_schema": ((Mapping, NoneType), "a JSON schema, which is a mapping, or None"),
    "tools": (Sequence, "a list of tools"),
    "tool_choice": (str, "'auto', 'none', 'required' or the name of a tool"),
    "parallel_tool_calls": (bool, "True or False"),
}
"""By option its type, and the same in words."""


def check_options(options: Mapping[str, object]) -> None:
    """Checks the types and ranges of options that are given, as far as no model is needed for it.

    Raises:
        UsageError: a value has another type, is out of its range, or contradicts another one.
    """
    for name, (kind, words) in KINDS.items():
        if name in options and not _is(kind, options[name], text=name == "stop"):
            raise UsageError(f"{name} must be {words}, got {reprlib.repr(options[name])}.")
    _check_limits(options)
    _check_stops(options)


def check_patience(timeout: object, **retries: object) -> None:
    """Checks how long and how often a call is tried; None is not set.

    Args:
        timeout: seconds.
        retries: a number of further tries, under the name that the caller knows it by.

    Raises:
        UsageError: a value is not a number or out of its range.
    """
    check_numbers(timeout=timeout, **retries)
    if timeout is not None and cast("float", timeout) <= 0:
        raise UsageError(f"timeout must be above 0 seconds, got {timeout}.")
    for name, number in retries.items():
        if number is not None and cast("int", number) < 0:
            raise UsageError(f"{name} must be at least 0, got {number}.")


def _is(kind: Any, value: object, *, text: bool) -> bool:
    """Whether a value is of a type; text is a sequence only where that is said."""
    return isinstance(value, kind) and (kind is not Sequence or text or not isinstance(value, str | bytes))


def _check_limits(options: Mapping[str, object]) -> None:
    limits = {name: options.get(name) for name in ("max_tokens", "max_thinking_tokens", "deadline_s")}
    check_numbers(**limits)
    max_tokens, max_thinking_tokens, deadline_s = cast("tuple[float | None, ...]", tuple(limits.values()))
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens must be at least 1, got {max_tokens}.")
    if max_thinking_tokens is not None and max_thinking_tokens < 0:
        raise UsageError(f"max_thinking_tokens is {max_thinking_tokens}; it must be 0 (no thinking) or more.")
    if deadline_s is not None and deadline_s <= 0:
        raise UsageError(f"deadline_s is {deadline_s}; it must be above 0.")


def _check_stops(options: Mapping[str, object]) -> None:
    stop = cast("Sequence[object]", options.get("stop", ()))
    for each in [stop] if isinstance(stop, str) else stop:
        if not isinstance(each, str):
            raise UsageError(f"stop must be a string or a list of strings, got {reprlib.repr(each)} in it.")
        if not each:
            raise UsageError("A stop string is empty; it would end every answer before it begins.")
    stop_token_ids = cast("Sequence[object]", options.get("stop_token_ids", ()))
    for each in stop_token_ids:
        if type(each) is not int or not 0 <= each <= HIGHEST_ID:
            raise UsageError(f"stop_token_ids must be token ids, which are 0 or more, got {reprlib.repr(each)}.")
    for name in ("stop", "stop_token_ids"):
        if options.get("json_schema") is not None and options.get(name):
            raise UsageError(
                f"{name} cannot be used together with json_schema: it would end the answer in the middle of its form. "
                "Leave out one of the two."
            )
