"""The options of a request: one class for the Python API, LangChain, the service and the commands."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypedDict, cast

from stepspec.chat.tools import Tool
from stepspec.engines.protocol import HIGHEST_ID, Sampling, check_numbers
from stepspec.errors import UsageError


class Options(TypedDict, total=False):
    """The fields of `RequestOptions` as keyword arguments."""

    prompt: str
    sampling: Sampling
    max_tokens: int | None
    max_thinking_tokens: int | None
    deadline_s: float | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    json_schema: Mapping[str, Any] | None
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool


def _option(default: Any, kind: Any, words: str) -> Any:
    """A field with its type for a check at run time, and the same in words."""
    return field(default=default, metadata={"kind": kind, "words": words})


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a request. They are checked here as far as no model is needed for it.

    Attributes:
        prompt: the wording around a problem's text, a name in `stepspec.chat.prompts.PROBLEM_PROMPTS`.
        sampling: how both models sample tokens.
        max_tokens: limit for thinking and answer together; None allows as many as fit the context. Tokens that
            speculation wastes do not count; they have their own limit, see `Ledger.may_waste`.
        max_thinking_tokens: after these tokens the thinking is ended, and the target answers.
        deadline_s: the same after these seconds. If the model does not separate its thinking, the text ends.
        stop: a string, or several, that end the answer and are not part of it. They do not apply to the thinking.
        stop_token_ids: tokens of the target that end the answer and are not part of it.
        json_schema: constrains the answer to this schema, token by token.
        tools: tools that the target may call, each `{"type": "function", "function": {...}}`. Tool calls are
            emitted as events and never come from the draft.
        tool_choice: "auto", "none", "required", or the name of the tool to call.
        parallel_tool_calls: whether one answer may contain several tool calls.

    Raises:
        UsageError: a value has another type, is out of its range, or contradicts another one.
    """

    prompt: str = _option("bare", str, "the name of a prompt")
    sampling: Sampling = _option(Sampling(), Sampling, "a stepspec.Sampling")
    max_tokens: int | None = None
    max_thinking_tokens: int | None = None
    deadline_s: float | None = None
    stop: Sequence[str] = _option((), Sequence, "a string or a list of strings")
    stop_token_ids: Sequence[int] = _option((), Sequence, "a list of token ids")
    json_schema: Mapping[str, Any] | None = _option(
        None, (Mapping, NoneType), "a JSON schema, which is a mapping, or None"
    )
    tools: Sequence[Tool] = _option((), Sequence, "a list of tools")
    tool_choice: str = _option("auto", str, "'auto', 'none', 'required' or the name of a tool")
    parallel_tool_calls: bool = _option(True, bool, "True or False")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for each in fields(self):
            value, kind = getattr(self, each.name), each.metadata.get("kind")
            if kind is not None and not _is(kind, value):
                raise UsageError(f"{each.name} must be {each.metadata['words']}, got {reprlib.repr(value)}.")
        self._check_limits()
        self._check_stops()

    @classmethod
    def of(cls, options: "RequestOptions | None", changes: Options) -> "RequestOptions":
        """Options with some of them changed.

        Raises:
            UsageError: see `RequestOptions`; or `options` is of another type.
        """
        if options is None:
            return cls(**changes)
        if not isinstance(options, cls):
            raise UsageError(f"options must be a stepspec.RequestOptions, got {reprlib.repr(options)}.")
        return replace(options, **changes) if changes else options

    def _check_limits(self) -> None:
        check_numbers(
            max_tokens=self.max_tokens, max_thinking_tokens=self.max_thinking_tokens, deadline_s=self.deadline_s
        )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.max_thinking_tokens is not None and self.max_thinking_tokens < 0:
            raise UsageError(f"max_thinking_tokens is {self.max_thinking_tokens}; it must be 0 (no thinking) or more.")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise UsageError(f"deadline_s is {self.deadline_s}; it must be above 0.")

    def _check_stops(self) -> None:
        for text in cast("Sequence[object]", self.stop):
            if not isinstance(text, str):
                raise UsageError(f"stop must be a string or a list of strings, got {reprlib.repr(text)} in it.")
            if not text:
                raise UsageError("A stop string is empty; it would end every answer before it begins.")
        for id in cast("Sequence[object]", self.stop_token_ids):
            if type(id) is not int or not 0 <= id <= HIGHEST_ID:
                raise UsageError(f"stop_token_ids must be token ids, which are 0 or more, got {reprlib.repr(id)}.")
        for name in ("stop", "stop_token_ids"):
            if self.json_schema is not None and getattr(self, name):
                raise UsageError(
                    f"{name} cannot be used together with json_schema: it would end the answer in the middle of its "
                    "form. Leave out one of the two."
                )


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


def _is(kind: Any, value: object) -> bool:
    """Whether a value is of a type; text is not a sequence of anything."""
    return isinstance(value, kind) and (kind is not Sequence or not isinstance(value, str | bytes))
