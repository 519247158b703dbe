"""What servers answer, read into types: only the fields that we use, in the forms in which servers give them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from stepspec.engine import Tokenizer
from stepspec.errors import EngineError
from stepspec.remote.address import Address
from stepspec.remote.problems import nonsense, refused

TOKEN_ID = "token_id:"


class PromptDetails(BaseModel):
    """Part of `Usage`."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """What a call took."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached(self) -> int:
        """Prompt tokens that the server found in its prefix cache; 0 also where it does not say."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class Speculation(BaseModel):
    """vLLM's `--per-request-spec-decode-metrics`."""

    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


class CallMetrics(BaseModel):
    """vLLM's figures of one call, if it was started to give them."""

    speculative_decoding: Speculation | None = None
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    """From the first pass on."""
    generation_time_ms: float | None = None
    """From the first token to the last."""


class Choice(BaseModel):
    """A piece of text, or all of it."""

    index: int = 0
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: dict[str, Any] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None

    def top_logprobs(self) -> Mapping[str, float] | None:
        """Log-probabilities at the first token, by the token's name; None if the server gave none."""
        found = self.logprobs or {}
        if tops := found.get("top_logprobs"):
            return tops[0]
        content: Any = found.get("content")  # llama.cpp gives the form of chat completions
        if content and content[0].get("top_logprobs"):
            return {_name_of(each): each["logprob"] for each in content[0]["top_logprobs"]}
        return None


def _name_of(entry: Mapping[str, Any]) -> str:
    return f"{TOKEN_ID}{entry['id']}" if "id" in entry else entry["token"]


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
            raise refused(address, status if isinstance(status, int) else 500, json.dumps(found).encode())
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise nonsense(address, f"something that is no completion ({where}: {first['msg']})") from None

    def only_choice(self, address: Address) -> Choice:
        """The one that was asked for.

        Raises:
            EngineError: there is none.
        """
        if len(self.choices) != 1:
            raise nonsense(address, f"{len(self.choices)} choices where one was asked for")
        return self.choices[0]


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
