"""The options of a request, shared by the Python API, LangChain, the service and the command line."""

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from stepspec.base.file_problems import BOUNDS, KINDS
from stepspec.base.keywords import check_known
from stepspec.chat.tools import Tool
from stepspec.engines.protocol import MAX_NUMBER, MAX_TOKEN_ID, Engine, Sampling, check_numbers
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import UsageError

MAX_TOP_LOGPROBS = 20
"""Most tokens that are listed at each place, as in OpenAI's API."""


class RequestOptions(BaseModel):
    """The options of a request. Creating them runs all checks that need no model.

    Raises:
        UsageError: an option is unknown, or a value has the wrong type, is out of range, or contradicts another value.
    """

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    prompt: str = Field(default="bare", title="the name of a prompt")
    """Name of the prompt around the question, see `stepspec.chat.prompts.PROBLEM_PROMPTS`."""
    sampling: Sampling | Mapping[str, Any] | None = Field(
        default=None, title="a stepspec.Sampling, a mapping of its fields, or None"
    )
    """How both models sample tokens: a `Sampling`, or a mapping of the fields that differ from the default sampling of
    the model that answers, see `Engine.default_sampling`. None is that default."""
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_NUMBER)
    """Limit for thinking and answer together; None allows as many as fit the context. Tokens that speculation wastes do
    not count; they have their own limit, see `Ledger.may_waste`."""
    max_thinking_tokens: int | None = Field(default=None, ge=0, le=MAX_NUMBER, title="at least 0 (no thinking)")
    """After this many tokens, the thinking ends and the target answers."""
    max_thinking_s: float | None = Field(default=None, gt=0)
    """After this many seconds, the thinking ends and the target answers. If the model does not separate its thinking,
    the text ends."""
    deadline_s: float | None = Field(default=None, gt=0)
    """After this many seconds, the request ends and returns what exists, with the finish reason "length". Like
    `max_thinking_s`, it counts from the request's acceptance, time in a queue included."""
    enable_thinking: bool | None = Field(default=None, title="True, False or None")
    """False turns the thinking off: by the chat template if it has a switch, else by closing the thinking at its
    beginning. True and None leave it on."""
    reasoning_effort: str | None = Field(default=None, title="a string, such as 'low', or None")
    """How much to think, in the words of the model's chat template, such as "low"; "none" turns the thinking off."""
    chat_template_kwargs: Mapping[str, Any] = Field(default={}, title="a mapping of template variables")
    """Variables of the chat templates of both models."""
    draft_chat_template_kwargs: Mapping[str, Any] = Field(default={}, title="a mapping of template variables")
    """Further variables of the draft's chat template."""
    stop: Sequence[str] = Field(default=(), title="a string or a list of strings")
    """One or more strings that end the answer and are not part of it. They do not apply to the thinking."""
    stop_token_ids: Sequence[int] = Field(default=(), title="token ids, which are 0 or more")
    """The target's token ids that end the answer and are not part of it."""
    json_schema: Mapping[str, Any] | None = Field(default=None, title="a JSON schema, which is a mapping, or None")
    """Constrains the answer to this schema, token by token."""
    tools: Sequence[Tool] = Field(default=(), title="a list of tools")
    """Tools that the target may call, each `{"type": "function", "function": {...}}`. Tool calls are emitted as events
    and never come from the draft."""
    tool_choice: str = Field(default="auto", title="'auto', 'none', 'required' or the name of a tool")
    """"auto", "none", "required", or the name of the tool to call."""
    parallel_tool_calls: bool = Field(default=True, title="True or False")
    """Whether one answer may contain several tool calls."""
    logprobs: bool = Field(default=False, title="True or False")
    """Whether the result has the log-probabilities of all committed tokens under the target. They take further passes
    over the text, at its end. A deadline may leave out the last ones."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS, title=f"between 0 and {MAX_TOP_LOGPROBS}")
    """Number of the most likely tokens to list at each place, at most 20. Requires `logprobs`."""
    session_id: str | None = Field(default=None, title="a string or None")
    """Id of the conversation, the same in all its requests. Routers and pools of servers send requests of one
    conversation to the same replica. It never changes a text."""
    cache_salt: str | None = Field(default=None, title="a string or None")
    """The request reuses cached text only of requests with the same salt, so that nobody without it can measure what
    was asked. Drafters that search past outputs keep to it, too."""
    step_deltas: bool = Field(default=False, title="True or False")
    """Whether `StepDelta` events have the text of a step of the thinking while the target writes it."""
    policy: str | None = Field(default=None, title="the name of a policy or None")
    """Name of a policy, or path of its file, in place of the session's. With a service, one of its names."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(
        cls, given: Mapping[str, Any], validate: ModelWrapValidatorHandler["RequestOptions"]
    ) -> "RequestOptions":
        check_known(given, cls.model_fields)
        try:
            return validate(given)
        except ValidationError as error:
            problem = error.errors()[0]
        kind, name = problem["type"], str(problem["loc"][0])
        field = cls.model_fields[name]
        wanted = (KINDS.get(kind) if field.metadata else None) or field.title  # numbers have bounds, in metadata
        if wanted is None:
            words, bound = BOUNDS[kind]
            wanted = f"{words} {problem.get('ctx', {})[bound]:g}{' seconds' * name.endswith('_s')}"
        raise UsageError(f"{name} must be {wanted}, got {reprlib.repr(given[name])}.")

    @field_validator("max_tokens", "max_thinking_tokens", "max_thinking_s", "deadline_s", "top_logprobs", mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        """Return a number of another library, such as numpy, as one of Python."""
        if isinstance(value, bool) or not isinstance(value, Real):
            return value
        return int(cast("int", value)) if isinstance(value, Integral) else float(value)

    @field_validator("stop", "stop_token_ids", "tools", mode="before")
    @classmethod
    def _several(cls, value: object, info: ValidationInfo) -> tuple[Any, ...]:
        """Return a list as a tuple, because lists could change after the checks."""
        if isinstance(value, str) and info.field_name == "stop":
            return (value,)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise ValueError
        return tuple(cast("Sequence[Any]", value))

    @classmethod
    def of(cls, options: "RequestOptions | None", changes: Mapping[str, Any]) -> "RequestOptions":
        """Return the options with changes, by field.

        Raises:
            UsageError: `options` is not a `RequestOptions`, or a value is invalid, see `RequestOptions`.
        """
        if options is None:
            return cls(**changes)
        if not isinstance(options, cls):
            raise UsageError(f"options must be a stepspec.RequestOptions, got {reprlib.repr(options)}.")
        return cls(**{**dict(options), **changes}) if changes else options

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

    @property
    def separates_answer(self) -> bool:
        """Whether the answer needs a separate call after the thinking, in any form."""
        limits = self.max_thinking_tokens, self.max_thinking_s
        return limits != (None, None) or bool(self.stop_token_ids)

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

    @model_validator(mode="after")
    def _check(self) -> "RequestOptions":
        self.sampled({})
        if self.enable_thinking and self.reasoning_effort == "none":
            raise UsageError("enable_thinking is True, but reasoning_effort is 'none'. Leave out one of them.")
        if self.top_logprobs and not self.logprobs:
            raise UsageError(f"top_logprobs is {self.top_logprobs}, but logprobs is false. Set logprobs to true.")
        if "" in self.stop:
            raise UsageError("A stop string is empty, which would end every answer before it begins. Remove it.")
        for id in self.stop_token_ids:
            if not 0 <= id <= MAX_TOKEN_ID:
                raise UsageError(f"stop_token_ids must be token ids, which are 0 or more, got {id}.")
        for name in ("stop", "stop_token_ids"):
            if self.json_schema is not None and getattr(self, name):
                raise UsageError(
                    f"{name} cannot be used together with json_schema, because it could cut the JSON short. Leave out "
                    "one of the two."
                )
        return self


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
