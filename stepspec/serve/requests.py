"""What a client may ask, in OpenAI's words and vLLM's, and what of it the Python API is told."""

import logging
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stepspec.engine import Sampling
from stepspec.errors import UsageError
from stepspec.session import Options
from stepspec.tools import chosen, schema_of

logger = logging.getLogger(__name__)

MAX_STOPS = 16


class RefusedError(UsageError):
    """A field that is known and cannot be honoured. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(BaseModel):
    """Of a stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of `/v1/chat/completions`. Fields that nobody knows are ignored, and a line in the log says so."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    model: str | None = None
    policy: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    thinking_token_budget: int | None = None
    deadline_s: float | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_reasoning: bool = True
    # Known to clients, and of no consequence here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    # Known to clients, and only to be had at their defaults.
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    reasoning_effort: str | None = Field(default=None, description="only `none`")

    def options(self, *, thinks: bool) -> Options:
        """What the Python API is told.

        Raises:
            RefusedError: a field cannot be honoured.
            UsageError: a value is out of its range.
        """
        self._check()
        if self.model_extra:
            logger.warning("Ignored unknown fields of a request: %s.", ", ".join(sorted(self.model_extra)))
        sampled = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: value for name in sampled if (value := getattr(self, name)) is not None}
        seed = secrets.randbits(31) if self.seed is None else self.seed
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        no_thinking = self.reasoning_effort == "none" and thinks
        thinking = 0 if no_thinking else self.thinking_token_budget
        with _of("response_format"):
            schema = schema_of(self.response_format)
        with _of("tool_choice"):
            choice = chosen(self.tool_choice)
        return Options(
            sampling=Sampling(**given, seed=seed),
            max_tokens=most,
            max_thinking_tokens=thinking,
            deadline_s=self.deadline_s,
            stop=stops,
            json_schema=schema,
            tools=self.tools or [],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
        )

    def _check(self) -> None:
        nothing = {"n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0, "frequency_penalty": 0}
        for name, usual in nothing.items():
            if getattr(self, name) not in (None, usual):
                raise RefusedError(name, f"{name} cannot be had here; leave it out.")
        if self.logit_bias:
            raise RefusedError("logit_bias", "logit_bias cannot be had here; leave it out.")
        if self.reasoning_effort not in (None, "none"):
            raise RefusedError(
                "reasoning_effort", "Of reasoning_effort there is only 'none'; set thinking_token_budget."
            )
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise RefusedError("stop", f"There are {len(self.stop)} stop strings; at most {MAX_STOPS} are taken.")


@contextmanager
def _of(param: str) -> Generator[None]:
    """Says of which field it is that something is wrong with."""
    try:
        yield
    except UsageError as error:
        raise RefusedError(param, str(error)) from error


def field_of(location: Sequence[Any]) -> str:
    """A field's name, from where a body was found wrong."""
    return ".".join(str(part) for part in location if part != "body") or "body"
