"""The options of a request, shared by the Python API, LangChain, the service and the command line."""

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
    """Return a dataclass field with its type for the run-time check, and that type in words for errors."""
    return field(default=default, metadata={"kind": kind, "words": words})


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a request. Creating them runs all checks that need no model.

    Attributes:
        prompt: name of the prompt around the question, see `stepspec.chat.prompts.PROBLEM_PROMPTS`.
        sampling: how both models sample tokens.
        max_tokens: limit for thinking and answer together; None allows as many as fit the context. Tokens that
            speculation wastes do not count; they have their own limit, see `Ledger.may_waste`.
        max_thinking_tokens: after this many tokens, the thinking ends and the target answers.
        deadline_s: after this many seconds, the thinking ends and the target answers. If the model does not separate
            its thinking, the text ends.
        stop: one or more strings that end the answer and are not part of it. They do not apply to the thinking.
        stop_token_ids: the target's token ids that end the answer and are not part of it.
        json_schema: constrains the answer to this schema, token by token.
        tools: tools that the target may call, each `{"type": "function", "function": {...}}`. Tool calls are
            emitted as events and never come from the draft.
        tool_choice: "auto", "none", "required", or the name of the tool to call.
        parallel_tool_calls: whether one answer may contain several tool calls.

    Raises:
        UsageError: a value has the wrong type, is out of range, or contradicts another value.
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
        for name in ("stop", "stop_token_ids", "tools"):  # lists could change after the checks
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(cls, options: "RequestOptions | None", changes: Options) -> "RequestOptions":
        """Return the options with the given changes.

        Raises:
            UsageError: `options` is not a `RequestOptions`, or a value is invalid, see `RequestOptions`.
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
            raise UsageError(f"max_thinking_tokens must be at least 0 (no thinking), got {self.max_thinking_tokens}.")
        if self.deadline_s is not None and self.deadline_s <= 0:
            raise UsageError(f"deadline_s must be above 0 seconds, got {self.deadline_s}.")

    def _check_stops(self) -> None:
        for text in cast("Sequence[object]", self.stop):
            if not isinstance(text, str):
                raise UsageError(f"stop must be a string or a list of strings, got {reprlib.repr(text)} in it.")
            if not text:
                raise UsageError("A stop string is empty, which would end every answer before it begins. Remove it.")
        for id in cast("Sequence[object]", self.stop_token_ids):
            if type(id) is not int or not 0 <= id <= HIGHEST_ID:
                raise UsageError(f"stop_token_ids must be token ids, which are 0 or more, got {reprlib.repr(id)}.")
        for name in ("stop", "stop_token_ids"):
            if self.json_schema is not None and getattr(self, name):
                raise UsageError(
                    f"{name} cannot be used together with json_schema, because it could cut the JSON short. Leave out "
                    "one of the two."
                )


def check_patience(timeout: object, **retries: object) -> None:
    """Check a timeout and a number of retries. None means not set.

    Args:
        timeout: in seconds.
        retries: the number of retries, as one keyword argument with the name to use in errors.

    Raises:
        UsageError: a value is not a number or is out of range.
    """
    check_numbers(timeout=timeout, **retries)
    if timeout is not None and cast("float", timeout) <= 0:
        raise UsageError(f"timeout must be above 0 seconds, got {timeout}.")
    for name, number in retries.items():
        if number is not None and cast("int", number) < 0:
            raise UsageError(f"{name} must be at least 0, got {number}.")


def _is(kind: Any, value: object) -> bool:
    """Whether a value has a type. Strings and bytes do not count as sequences."""
    return isinstance(value, kind) and (kind is not Sequence or not isinstance(value, str | bytes))
