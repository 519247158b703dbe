"""The options of a request, shared by the Python API, LangChain, the service and the command line."""

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypedDict, cast

from stepspec.base.keywords import check_known
from stepspec.chat.tools import Tool
from stepspec.engines.protocol import HIGHEST_ID, Engine, Sampling, check_numbers
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import UsageError

MOST_TOP_LOGPROBS = 20
"""Most tokens that are listed at each place, as in OpenAI's API."""


class Options(TypedDict, total=False):
    """The fields of `RequestOptions` as keyword arguments."""

    prompt: str
    sampling: Sampling | Mapping[str, Any] | None
    max_tokens: int | None
    max_thinking_tokens: int | None
    max_thinking_s: float | None
    deadline_s: float | None
    enable_thinking: bool | None
    reasoning_effort: str | None
    chat_template_kwargs: Mapping[str, Any]
    draft_chat_template_kwargs: Mapping[str, Any]
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    json_schema: Mapping[str, Any] | None
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool
    logprobs: bool
    top_logprobs: int
    session_id: str | None
    cache_salt: str | None
    policy: str | None


def _option(default: Any, kind: Any, words: str) -> Any:
    """Return a dataclass field with its type for the run-time check, and that type in words for errors."""
    return field(default=default, metadata={"kind": kind, "words": words})


def _variables() -> Any:
    """Return a dataclass field for variables of a chat template."""
    metadata = {"kind": Mapping, "words": "a mapping of template variables"}
    return field(default_factory=dict[str, Any], metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The options of a request. Creating them runs all checks that need no model.

    Attributes:
        prompt: name of the prompt around the question, see `stepspec.chat.prompts.PROBLEM_PROMPTS`.
        sampling: how both models sample tokens: a `Sampling`, or a mapping of the fields that differ from the default
            sampling of the model that answers, see `Engine.default_sampling`. None is that default.
        max_tokens: limit for thinking and answer together; None allows as many as fit the context. Tokens that
            speculation wastes do not count; they have their own limit, see `Ledger.may_waste`.
        max_thinking_tokens: after this many tokens, the thinking ends and the target answers.
        max_thinking_s: after this many seconds, the thinking ends and the target answers. If the model does not
            separate its thinking, the text ends.
        deadline_s: after this many seconds, the request ends and returns what exists, with the finish reason
            "length". Like `max_thinking_s`, it counts from the request's acceptance, time in a queue included.
        enable_thinking: False turns the thinking off: by the chat template if it has a switch, else by closing the
            thinking at its beginning. True and None leave it on.
        reasoning_effort: how much to think, in the words of the model's chat template, such as "low"; "none" turns the
            thinking off.
        chat_template_kwargs: variables of the chat templates of both models.
        draft_chat_template_kwargs: further variables of the draft's chat template.
        stop: one or more strings that end the answer and are not part of it. They do not apply to the thinking.
        stop_token_ids: the target's token ids that end the answer and are not part of it.
        json_schema: constrains the answer to this schema, token by token.
        tools: tools that the target may call, each `{"type": "function", "function": {...}}`. Tool calls are
            emitted as events and never come from the draft.
        tool_choice: "auto", "none", "required", or the name of the tool to call.
        parallel_tool_calls: whether one answer may contain several tool calls.
        logprobs: whether the result has the log-probabilities of all committed tokens under the target. They take
            further passes over the text, at its end. A deadline may leave out the last ones.
        top_logprobs: number of the most likely tokens to list at each place, at most 20. Requires `logprobs`.
        session_id: id of the conversation, the same in all its requests. Routers and pools of servers send requests of
            one conversation to the same replica. It never changes a text.
        cache_salt: the request reuses cached text only of requests with the same salt, so that nobody without it can
            measure what was asked. Drafters that search past outputs keep to it, too.
        policy: name of a policy, or path of its file, in place of the session's. With a service, one of its names.

    Raises:
        UsageError: a value has the wrong type, is out of range, or contradicts another value.
    """

    prompt: str = _option("bare", str, "the name of a prompt")
    sampling: Sampling | Mapping[str, Any] | None = _option(
        None, (Sampling, Mapping, NoneType), "a stepspec.Sampling, a mapping of its fields, or None"
    )
    max_tokens: int | None = None
    max_thinking_tokens: int | None = None
    max_thinking_s: float | None = None
    deadline_s: float | None = None
    enable_thinking: bool | None = _option(None, (bool, NoneType), "True, False or None")
    reasoning_effort: str | None = _option(None, (str, NoneType), "a string, such as 'low', or None")
    chat_template_kwargs: Mapping[str, Any] = _variables()
    draft_chat_template_kwargs: Mapping[str, Any] = _variables()
    stop: Sequence[str] = _option((), Sequence, "a string or a list of strings")
    stop_token_ids: Sequence[int] = _option((), Sequence, "a list of token ids")
    json_schema: Mapping[str, Any] | None = _option(
        None, (Mapping, NoneType), "a JSON schema, which is a mapping, or None"
    )
    tools: Sequence[Tool] = _option((), Sequence, "a list of tools")
    tool_choice: str = _option("auto", str, "'auto', 'none', 'required' or the name of a tool")
    parallel_tool_calls: bool = _option(True, bool, "True or False")
    logprobs: bool = _option(False, bool, "True or False")
    top_logprobs: int = 0
    session_id: str | None = _option(None, (str, NoneType), "a string or None")
    cache_salt: str | None = _option(None, (str, NoneType), "a string or None")
    policy: str | None = _option(None, (str, NoneType), "the name of a policy or None")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for each in fields(self):
            value, kind = getattr(self, each.name), each.metadata.get("kind")
            if kind is not None and not _is(kind, value):
                raise UsageError(f"{each.name} must be {each.metadata['words']}, got {reprlib.repr(value)}.")
        self.sampled({})
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

    def sampled(self, default: Mapping[str, Any]) -> Sampling:
        """Return the request's sampling, given the default one of a model.

        Raises:
            UsageError: a field is unknown or out of range.
        """
        if isinstance(self.sampling, Sampling):
            return self.sampling
        given = self.sampling or {}
        check_known(given, (each.name for each in fields(Sampling)), "field of a Sampling")
        return Sampling(**{**default, **given})

    @property
    def without_thinking(self) -> bool:
        """Whether the thinking is turned off."""
        return self.enable_thinking is False or self.reasoning_effort == "none"

    def template_variables(self, model: Engine, *, is_draft: bool = False) -> Mapping[str, Any]:
        """Return the variables of a model's chat template.

        The draft gets only those variables of the request that its template has.

        Raises:
            UsageError: the template does not have a variable that is meant for it.
        """
        known, tags = model.tokenizer.template_variables, model.tokenizer.thinking
        given = dict(self.chat_template_kwargs)
        if self.reasoning_effort not in (None, "none"):
            effort = None if tags is None else tags.effort
            if effort is None and not is_draft:
                raise UsageError(
                    f"reasoning_effort is {self.reasoning_effort!r}, but the chat template of {model.name} has no "
                    "variable for it. Set max_thinking_tokens to limit the thinking, or enable_thinking to false."
                )
            given |= {} if effort is None else {effort: self.reasoning_effort}
        if is_draft:
            given = {name: value for name, value in given.items() if name in known}
            given |= self.draft_chat_template_kwargs
        for name in given:
            if name not in known:
                option = "draft_chat_template_kwargs" if is_draft else "chat_template_kwargs"
                problem = f"the chat template of {model.name} has no variable {name!r}"
                raise UsageError(f"{option}: {problem}. {_listed(known)}")
        off: Mapping[str, Any] = tags.format.off if self.without_thinking and tags is not None else {}
        for name, value in off.items():
            if given.get(name, value) != value:
                raise UsageError(f"The thinking is turned off, but chat_template_kwargs sets {name}. Leave one out.")
        return {**off, **given}

    def turns_thinking_off(self, variables: Mapping[str, Any], tags: ThinkingTags | None) -> bool:
        """Whether the request turns the thinking off, by its options or by `variables` of the chat template."""
        off: Mapping[str, Any] = {} if tags is None else tags.format.off
        return self.without_thinking or any(variables.get(name) == value for name, value in off.items())

    def _check_limits(self) -> None:
        if self.enable_thinking and self.reasoning_effort == "none":
            raise UsageError("enable_thinking is True, but reasoning_effort is 'none'. Leave out one of them.")
        check_numbers(
            max_tokens=self.max_tokens,
            max_thinking_tokens=self.max_thinking_tokens,
            max_thinking_s=self.max_thinking_s,
            deadline_s=self.deadline_s,
            top_logprobs=self.top_logprobs,
        )
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise UsageError(f"top_logprobs must be between 0 and {MOST_TOP_LOGPROBS}, got {self.top_logprobs}.")
        if self.top_logprobs and not self.logprobs:
            raise UsageError(f"top_logprobs is {self.top_logprobs}, but logprobs is false. Set logprobs to true.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.max_thinking_tokens is not None and self.max_thinking_tokens < 0:
            raise UsageError(f"max_thinking_tokens must be at least 0 (no thinking), got {self.max_thinking_tokens}.")
        for name, seconds in {"max_thinking_s": self.max_thinking_s, "deadline_s": self.deadline_s}.items():
            if seconds is not None and seconds <= 0:
                raise UsageError(f"{name} must be above 0 seconds, got {seconds}.")

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


def _listed(names: Collection[str]) -> str:
    if not names:
        return "It has none that a request may set."
    return f"Those that a request may set are {', '.join(sorted(names))}."


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
