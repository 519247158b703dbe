"""Models of server responses, with only the fields that stepspec uses, in all formats that servers use."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from stepspec.engines.protocol import Tokenizer
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.problems import message_in, nonsense, refused
from stepspec.errors import EngineError

TOKEN_ID = "token_id:"


def _logprob(value: float) -> float:
    if not value <= ROUNDING:  # also true for NaN
        raise ValueError(f"a log-probability must be at most 0, got {value}")
    return value


ROUNDING = 1e-3
Logprob = Annotated[float, AfterValidator(_logprob)]
"""A natural logarithm; -inf for probability 0. Rounding may make it slightly larger than 0."""
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Milliseconds = Annotated[float, Field(allow_inf_nan=False), AfterValidator(lambda value: max(value, 0.0))]
"""Differences between the clocks of two processes may be negative; they become 0."""
A = TypeVar("A", bound=BaseModel)


class PromptDetails(BaseModel):
    """Details of the prompt tokens in `ServerUsage`."""

    cached_tokens: Count | None = None


class ServerUsage(BaseModel):
    """Token counts of a call."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that the server found in its prefix cache; 0 if it does not report them."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class SpecDecodeMetrics(BaseModel):
    """Counts from vLLM's `--per-request-spec-decode-metrics`."""

    num_draft_tokens: Count = 0
    num_accepted_draft_tokens: Count = 0


class CallMetrics(BaseModel):
    """vLLM's metrics of one call, if the server reports them."""

    speculative_decoding: SpecDecodeMetrics | None = None
    queue_time_ms: Milliseconds | None = None


class TopLogprob(BaseModel):
    """One of the most likely tokens, in the format of chat completions."""

    id: int | None = None
    token: str = ""
    logprob: Logprob

    @property
    def name(self) -> str:
        """The name of the token in completions: `token_id:ID` if its id is known, else its text."""
        return self.token if self.id is None else f"{TOKEN_ID}{self.id}"


class ContentLogprob(BaseModel):
    """The most likely tokens at one position, in the format of chat completions."""

    top_logprobs: list[TopLogprob] | None = None


class ServerLogprobs(BaseModel):
    """Log-probabilities in the format of completions, or of chat completions as from llama.cpp."""

    token_logprobs: list[Logprob | None] | None = None
    top_logprobs: list[dict[str, Logprob] | None] | None = None
    content: list[ContentLogprob] | None = None


class PromptLogprob(BaseModel):
    """vLLM's log-probability of a prompt token, or of a more likely token at its position."""

    logprob: Logprob
    rank: int | None = None


class ServerChoice(BaseModel):
    """A chunk of text, or the whole text."""

    index: Count = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: ServerLogprobs | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None

    def top_logprobs(self) -> Mapping[str, float] | None:
        """Return the top log-probabilities at the first token by token name; None if there are none."""
        found = self.logprobs or ServerLogprobs()
        if found.top_logprobs:
            return found.top_logprobs[0]
        if found.content and found.content[0].top_logprobs:
            return {each.name: each.logprob for each in found.content[0].top_logprobs}
        return None

    def has_rival(self, address: Address, place: int, id: int) -> bool:
        """Return whether another token is at least as likely as the one at a place, among the top tokens named by id.

        Raises:
            EngineError: the answer of the server at `address` has no top tokens there.
        """
        top = (self.logprobs and self.logprobs.top_logprobs) or ()
        named = dict((top[place] if place < len(top) else None) or {})
        own = named.pop(f"{TOKEN_ID}{id}", None)
        if own is None:
            raise nonsense(address, "no log-probabilities of the top tokens")
        return any(each >= own for each in named.values())


class ServerCompletion(BaseModel):
    """A response of `/v1/completions`, or one event of its stream."""

    choices: list[ServerChoice] = Field(default_factory=list[ServerChoice])
    usage: ServerUsage | None = None
    metrics: CallMetrics | None = None

    @classmethod
    def read(cls, address: Address, found: Any) -> "ServerCompletion":
        """Create a completion from decoded JSON.

        Raises:
            EngineError: the JSON is an error, or not a completion.
        """
        if isinstance(found, dict) and found.get("error"):
            status = found["error"].get("code") if isinstance(found["error"], dict) else None
            raise refused(address, status if isinstance(status, int) else 500, message_in(found) or "no reason given")
        return validated(cls, address, found, "completion")

    def only_choice(self, address: Address) -> ServerChoice:
        """Return the only choice.

        Raises:
            EngineError: there is not exactly one.
        """
        if len(self.choices) != 1:
            raise nonsense(address, f"{len(self.choices)} choices instead of 1")
        return self.choices[0]


class ServerKind(NamedTuple):
    """What is known of a server by its name. Everything else is found by test requests.

    Attributes:
        title: the server's name in reports.
        version_path: path of its version.
        takes_salt: whether calls with a new `cache_salt` do not match earlier prefixes.
        may_take_salt: whether to send salts, which some versions ignore.
    """

    title: str = "a server"
    version_path: str = "version"
    takes_salt: bool = False
    may_take_salt: bool = False


SERVERS: Mapping[str | None, ServerKind] = {
    "vllm": ServerKind("vLLM", takes_salt=True, may_take_salt=True),
    "sglang": ServerKind("SGLang", may_take_salt=True),  # later versions keep calls apart by them
    "llamacpp": ServerKind("llama.cpp", version_path="props"),
    "tensorrt_llm": ServerKind("TensorRT-LLM"),
}
"""Servers by what they write as the owner of their models."""


class ServerModel(BaseModel):
    """A server's description of a model."""

    class Meta(BaseModel):
        """Metadata from llama.cpp."""

        n_ctx: Annotated[int, Field(gt=0)] | None = None

    id: str = Field(min_length=1)
    root: str | None = None
    owned_by: str | None = None
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    meta: Meta | None = None

    @property
    def max_context(self) -> int | None:
        """Context length in tokens; None if the server does not report it."""
        return self.max_model_len or (self.meta.n_ctx if self.meta else None)

    @property
    def server(self) -> ServerKind:
        """What is known of its server."""
        return SERVERS.get(self.owned_by, ServerKind())


class ServerModels(BaseModel):
    """A response of `/v1/models`."""

    data: list[ServerModel]


def validated(kind: type[A], address: Address, found: Any, what: str) -> A:
    """Validate decoded JSON as a model; `what` names it in the error message.

    Raises:
        EngineError: the JSON does not match the model.
    """
    try:
        return kind.model_validate(found)
    except (ValidationError, RecursionError) as error:
        first = error.errors(include_input=False)[0] if isinstance(error, ValidationError) else None
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else "it is nested too deeply"
        raise nonsense(address, f"an invalid {what} ({why})") from None


def label_logprobs(named: Mapping[str, float], labels: Sequence[int], tokenizer: Tokenizer) -> tuple[float, ...]:
    """Return the log-probabilities of labels from top tokens named by id or text; -inf for missing labels."""
    by_text: dict[str, float] = {}
    for name, logprob in named.items():  # the most likely first
        by_text.setdefault(name.lstrip(" ▁Ġ"), logprob)
    return tuple(
        named.get(f"{TOKEN_ID}{label}", by_text.get(tokenizer.piece(label).strip(), float("-inf"))) for label in labels
    )


def checked_ids(address: Address, ids: Sequence[int], num_ids: int) -> Sequence[int]:
    """Return the ids if all are in the vocabulary.

    Raises:
        EngineError: an id is not, so the tokenizer does not belong to the model.
    """
    if any(not 0 <= id < num_ids for id in ids):
        raise EngineError(
            f"{address.base} returned a token that the tokenizer does not have. Set the model's own: tokenizer=NAME. "
            "vLLM's CPU build 0.32 does this where it drafts tokens and samples: use temperature 0, or install "
            "stepspec there, whose plugin repairs it."
        )
    return ids
