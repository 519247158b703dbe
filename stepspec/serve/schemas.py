"""Response models for the OpenAPI document. `answers.py` builds the responses; tests validate them against these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Exact(BaseModel):
    """An object without further fields."""

    model_config = ConfigDict(extra="forbid")


class Problem(Exact):
    """Details of an error."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = Field(description="The field that caused the error.")
    code: str | None = Field(
        description="Such as `context_length_exceeded`, `model_not_found`, `invalid_api_key` or `service_overloaded`."
    )


class ErrorBody(Exact):
    """An error in OpenAI's format."""

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
    """The served models, each under every policy that it supports."""

    object: Literal["list"]
    data: list[ModelCard]


class CalledFunction(Exact):
    """The function of a tool call, with its arguments in JSON."""

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


class OneLogprob(Exact):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class CommittedLogprob(OneLogprob):
    """A committed token, and the most likely ones at its place."""

    top_logprobs: list[OneLogprob]


class Logprobs(Exact):
    """All committed tokens, those of the thinking too."""

    content: list[CommittedLogprob]
    refusal: None


class DescribedStep(Exact):
    """A step of the reasoning. Its text is the next `length` characters of the reasoning."""

    index: int
    origin: str
    num_tokens: int
    num_from_draft: int
    end: str
    scores: dict[str, float | None]
    length: int


class Steps(Exact):
    """The steps of the reasoning."""

    steps: list[DescribedStep]


class Choice(Exact):
    """An answer."""

    index: int
    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: Logprobs | None
    stepspec: Steps | None = Field(default=None, description="Set if the response includes the thinking.")


class CachedTokens(Exact):
    """Details of the prompt tokens."""

    cached_tokens: int


class ReasoningTokens(Exact):
    """Details of the completion tokens."""

    reasoning_tokens: int


class TokenUsage(Exact):
    """Token usage of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class TokenLevel(Exact):
    """Metrics of token-level speculation. Null is what the target's engine does not report."""

    mean_acceptance_length: float | None
    acceptance_histogram: list[int] | None = Field(description="Rounds by their number of accepted tokens.")
    num_spec_steps: int | None = Field(description="Rounds with drafted tokens.")
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float | None


class StepLevel(BaseModel):
    """Metrics of step-level speculation. Further fields are possible."""

    policy: str
    counts: dict[str, int]
    times: dict[str, float | None] = Field(description="Seconds. `engine_wait` is until the engines began.")
    thinks: bool
    limit: str | None = Field(description="The limit that ended the text or its thinking.")
    stop_string: str | None = Field(description="The string of `stop` that ended the answer.")
    not_proposed: str | None = Field(description="Why the draft proposed no step, or no further one.")
    token_level_exact: bool
    note: str | None = Field(description="What to know about the answer, such as a question unlike the training data.")
    uncovered: list[str] = Field(description="What the policy's calibration does not cover in the request.")


class Metrics(Exact):
    """Speculation metrics, which are null for several answers, and the request's ignored fields."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None = Field(description="Time in the service's queue.")
    mean_itl_ms: float | None = Field(description="Mean time of a token after the first output.")
    tokens_per_second: float | None
    speculative_decoding: TokenLevel | None
    stepspec: StepLevel | None
    ignored_fields: list[str]


class Completion(Exact):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage
    metrics: Metrics


class DeltaCall(Call):
    """A tool call, which is sent when it is complete."""

    index: int


class Delta(Exact):
    """The part of the answer in a chunk."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning: str = ""
    reasoning_content: str = ""
    tool_calls: list[DeltaCall] = []


class ChunkChoice(Exact):
    """The choice with the delta. A chunk has at most one choice."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: Logprobs | None


class Chunk(Exact):
    """A chunk of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice] = Field(description="Empty in the chunk with `usage`.")
    usage: TokenUsage | None = None
    metrics: Metrics | None = None
    stepspec: dict[str, Any] | None = Field(
        default=None, description="The step that has ended, an invalid tool call, or an event."
    )


class TextLogprobs(Exact):
    """Log-probabilities in the format of completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Where each token begins in the text of all tokens.")


class TextChoice(Exact):
    """A text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class TextCompletion(Exact):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage
    metrics: Metrics


class TextChunkChoice(Exact):
    """The next part of a text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class TextCompletionChunk(Exact):
    """A chunk of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice] = Field(description="Empty in the chunk with `usage`.")
    usage: TokenUsage | None = None
    metrics: Metrics | None = None


class Tokens(Exact):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Version(Exact):
    """The version of stepspec."""

    version: str


class Load(Exact):
    """The load of the service."""

    server_load: int = Field(description="Requests that run or wait.")


class ResponseObject(BaseModel):
    """A response in the format of OpenAI's Responses API, which has further fields."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    output: list[dict[str, Any]] = Field(description="Reasoning, messages and function calls.")
    usage: dict[str, Any] | None
    store: Literal[False]
    metrics: Metrics | None = None


class ResponseEvent(BaseModel):
    """An event of a streamed response. The further fields depend on its type."""

    type: str
    sequence_number: int


class MessagesErrorBody(Exact):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: dict[str, str] = Field(description="`type` and `message`.")
    request_id: str | None


class MessageObject(BaseModel):
    """A message in the format of Anthropic's Messages API, which has further fields."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Thinking, text and `tool_use` blocks.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: dict[str, int]
    metrics: Metrics | None = None


class MessageEvent(BaseModel):
    """An event of a streamed message. The further fields depend on its type."""

    type: str


class TokenCount(Exact):
    """The length of a prompt."""

    input_tokens: int
