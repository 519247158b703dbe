"""What responses look like, for the OpenAPI document. They are made by `answers.py` and held to this by tests."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Exact(BaseModel):
    """An object without further fields."""

    model_config = ConfigDict(extra="forbid")


class Problem(Exact):
    """What is wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = Field(description="The field that is to blame.")
    code: str | None = Field(description="`context_length_exceeded`, `model_not_found` or `request_too_large`.")


class ErrorBody(Exact):
    """An error in OpenAI's form."""

    error: Problem


class ModelCard(Exact):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    draft: str | None
    policy: str


class ModelList(Exact):
    """The served models, of which there is one."""

    object: Literal["list"]
    data: list[ModelCard]


class CalledFunction(Exact):
    """A function that is called, with its arguments in JSON."""

    name: str
    arguments: str


class Call(Exact):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Exact):
    """The answer."""

    role: Literal["assistant"]
    content: str
    reasoning: str = ""
    reasoning_content: str = Field(default="", description="The same as `reasoning`.")
    tool_calls: list[Call] = []


class Choice(Exact):
    """The only one."""

    index: Literal[0]
    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: None


class CachedTokens(Exact):
    """Part of the prompt."""

    cached_tokens: int


class ReasoningTokens(Exact):
    """Part of the completion."""

    reasoning_tokens: int


class TokenUsage(Exact):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TokenLevel(Exact):
    """Token-level speculation."""

    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None


class StepLevel(BaseModel):
    """Step-level speculation. There may be further fields."""

    policy: str
    counts: dict[str, int]
    times: dict[str, float | None] = Field(description="Seconds.")
    thinks: bool
    limit: str | None = Field(description="What cut the text or its thinking short.")
    estimated_speedup: float | None
    token_level_exact: bool
    note: str | None = Field(description="Says so where the question is unlike what the models have learned.")


class Metrics(Exact):
    """What speculation did, and which fields of the request were ignored."""

    time_to_first_token_ms: float | None
    generation_time_ms: float
    queue_time_ms: float
    tokens_per_second: float | None
    speculative_decoding: TokenLevel
    stepspec: StepLevel
    ignored_fields: list[str]


class DescribedStep(Exact):
    """A step of the reasoning; its text is the next `length` characters of it."""

    index: int
    origin: str
    num_tokens: int
    num_from_draft: int
    end: str
    scores: dict[str, float | None]
    length: int


class Steps(Exact):
    """How the reasoning parts into steps."""

    steps: list[DescribedStep]


class Completion(Exact):
    """An answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage
    metrics: Metrics
    stepspec: Steps | None = Field(default=None, description="Where the response has the thinking.")


class DeltaFunction(Exact):
    """A chunk of a call's arguments."""

    name: str = ""
    arguments: str


class DeltaCall(Exact):
    """A chunk of a tool call. The first one names the tool."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: DeltaFunction


class Delta(Exact):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[DeltaCall] = []


class ChunkChoice(Exact):
    """The only one."""

    index: Literal[0]
    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: None


class Chunk(Exact):
    """A chunk of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice] = Field(description="Empty in the chunk with `usage`.")
    usage: TokenUsage | None = None
    metrics: Metrics | None = None
    stepspec: dict[str, Any] | None = Field(default=None, description="The step, or the tool call, that has ended.")
