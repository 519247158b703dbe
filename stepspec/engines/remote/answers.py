"""What servers answer, read into types: only the fields that we use, in the forms in which servers give them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from stepspec.engines.protocol import Tokenizer
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.problems import message_in, nonsense, refused
from stepspec.errors import EngineError

TOKEN_ID = "token_id:"


def _logprob(value: float) -> float:
    if not value <= ROUNDING:  # nor is it one if it is no number
        raise ValueError(f"a log-probability must be at most 0, got {value}")
    return value


ROUNDING = 1e-3
Logprob = Annotated[float, AfterValidator(_logprob)]
"""A natural logarithm; of something impossible -inf. Rounding may bring it above 0."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Milliseconds = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: max(value, 0.0))]
"""Clocks of two processes may differ by less than nothing."""
A = TypeVar("A", bound=BaseModel)


class PromptDetails(BaseModel):
    """Part of `Usage`."""

    cached_tokens: Count | None = None


class Usage(BaseModel):
    """What a call took."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that the server found in its prefix cache; 0 also where it does not say."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Speculation(BaseModel):
    """vLLM's `--per-request-spec-decode-metrics`."""

    num_draft_tokens: Count = 0
    num_accepted_draft_tokens: Count = 0


class CallMetrics(BaseModel):
    """vLLM's figures of one call, if it was started to give them."""

    speculative_decoding: Speculation | None = None
    queue_time_ms: Milliseconds | None = None
    time_to_first_token_ms: Milliseconds | None = None
    """From the first pass on."""
    generation_time_ms: Milliseconds | None = None
    """From the first token to the last."""


class TopLogprob(BaseModel):
    """A likely token, as chat completions list it."""

    id: int | None = None
    token: str = ""
    logprob: Logprob

    @property
    def name(self) -> str:
        """As completions call it that call tokens by their ids."""
        return self.token if self.id is None else f"{TOKEN_ID}{self.id}"


class ContentLogprob(BaseModel):
    """A token's alternatives, as chat completions list them."""

    top_logprobs: list[TopLogprob] | None = None


class Logprobs(BaseModel):
    """Log-probabilities, in one of two forms; llama.cpp gives the one of chat completions."""

    top_logprobs: list[dict[str, Logprob] | None] | None = None
    content: list[ContentLogprob] | None = None


class PromptLogprob(BaseModel):
    """What vLLM says of a token of the prompt, or of one likelier there."""

    logprob: Logprob
    rank: int | None = None


class Choice(BaseModel):
    """A piece of text, or all of it."""

    index: Count = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None

    def top_logprobs(self) -> Mapping[str, float] | None:
        """Log-probabilities at the first token, by the token's name; None if the server gave none."""
        found = self.logprobs or Logprobs()
        if found.top_logprobs:
            return found.top_logprobs[0]
        if found.content and found.content[0].top_logprobs:
            return {each.name: each.logprob for each in found.content[0].top_logprobs}
        return None


class Completion(BaseModel):
    """An answer to `/v1/completions`, or one event of its stream."""

    choices: list[Choice] = Field(default_factory=list[Choice])
    usage: Usage | None = None
    metrics: CallMetrics | None = None

    @classmethod
    def read(cls, address: Address, found: Any) -> "Completion":
        """From decoded JSON.

        Raises:
            EngineError: it is an error, or no completion.
        """
        if isinstance(found, dict) and found.get("error"):
            status = found["error"].get("code") if isinstance(found["error"], dict) else None
            raise refused(address, status if isinstance(status, int) else 500, message_in(found) or "no reason given")
        return validated(cls, address, found, "completion")

    def only_choice(self, address: Address) -> Choice:
        """The one that was asked for.

        Raises:
            EngineError: there is none.
        """
        if len(self.choices) != 1:
            raise nonsense(address, f"{len(self.choices)} choices where one was asked for")
        return self.choices[0]


class ModelCard(BaseModel):
    """What a server says of a model."""

    class Meta(BaseModel):
        """Of llama.cpp."""

        n_ctx: Annotated[int, Field(gt=0)] | None = None

    id: str = Field(min_length=1)
    root: str | None = None
    owned_by: str | None = None
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    meta: Meta | None = None

    @property
    def max_context(self) -> int | None:
        """Tokens; None if the server does not say."""
        return self.max_model_len or (self.meta.n_ctx if self.meta else None)


class ModelList(BaseModel):
    """An answer to `/v1/models`."""

    data: list[ModelCard]


class GenerateMeta(BaseModel):
    """What SGLang's `/generate` says beside its text: of every token its log-probability, id and text."""

    input_token_logprobs: list[tuple[Logprob | None, int, Any]] = []
    input_top_logprobs: list[list[tuple[Logprob | None, int, Any]] | None] = []
    cached_tokens: Count | None = None


class Generated(BaseModel):
    """An answer to SGLang's `/generate`."""

    output_ids: list[int] = Field(min_length=1)
    meta_info: GenerateMeta


def validated(kind: type[A], address: Address, found: Any, what: str) -> A:
    """Decoded JSON as a model.

    Raises:
        EngineError: it is something else.
    """
    try:
        return kind.model_validate(found)
    except (ValidationError, RecursionError) as error:
        first = error.errors(include_input=False)[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else "it is nested too deeply"
        raise nonsense(address, f"something that is no {what} ({why})") from None


def label_logprobs(named: Mapping[str, float], labels: Sequence[int], tokenizer: Tokenizer) -> tuple[float, ...]:
    """Log-probabilities of labels from those that a server shows, by id or by text; -inf for one that it does not."""
    by_text: dict[str, float] = {}
    for name, logprob in named.items():  # the likeliest first
        by_text.setdefault(name.lstrip(" ▁Ġ"), logprob)
    return tuple(
        named.get(f"{TOKEN_ID}{label}", by_text.get(tokenizer.piece(label).strip(), float("-inf"))) for label in labels
    )


def checked_ids(address: Address, ids: Sequence[int], num_ids: int) -> Sequence[int]:
    """The ids, if the vocabulary has them.

    Raises:
        EngineError: it has not; whatever wrote this is not the model that the tokenizer belongs to.
    """
    if any(not 0 <= id < num_ids for id in ids):
        raise EngineError(
            f"{address.base} wrote a token that the tokenizer does not have. Name the model's own: tokenizer=NAME."
        )
    return ids
