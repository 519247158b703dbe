"""What is asked of a model: three verbs on token ids. An engine knows token ids and laws, not steps or judges."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from stepspec.errors import EngineError, UsageError


class TokenBuffer:
    """Token ids that only ever grow: a prompt and what has been committed after it.

    Engines are given the whole buffer at every call and copy nothing: they remember how much of *this* buffer they
    have already read, so a call costs its new tokens only.
    """

    __slots__ = ("__weakref__", "_ids")

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = list(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ids: Sequence[int]) -> None:
        """Commits further ids."""
        self._ids.extend(ids)

    def since(self, start: int) -> list[int]:
        """The ids from position `start` on, as a new list."""
        return self._ids[start:]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 is greedy; top_p 1 and top_k 0 leave the law as it is.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 10.0:
            raise UsageError(f"The temperature is {self.temperature}; it must be between 0 (greedy) and 10.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (off) or more.")


@dataclass(frozen=True)
class Stop:
    """When generation ends: after the token that completes a delimiter, after one of `token_ids`, or at the cap."""

    max_tokens: int
    delimiters: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Drafting:
    """Token-level speculation inside a call: exact, so it changes speed and nothing else."""

    drafter: Literal["none", "draft-model"] = "none"
    num_tokens: int = 4


ChunkEnd = Literal["delimiter", "token", "length"]


@dataclass(frozen=True)
class Chunk:
    """Newly generated ids. The last chunk of a call says what ended it and what the whole call cost."""

    ids: tuple[int, ...]
    end: ChunkEnd | None = None
    queue_s: float = 0.0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Probe:
    """Ids that follow the continuation on a branch of their own; the law over `labels` is read at their end."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """What the model thinks of a continuation of n tokens, from one pass, at temperature 1.

    `logprobs`, `choices` and `entropies` have n entries: the log-probability of each token, the model's own most likely
    token in its place, and the entropy of the law there in nats. `next_choice` is the most likely token after the
    continuation. For each probe, `probe_logprobs` holds the log-probabilities of its labels among the whole vocabulary,
    and `probe_choices` the most likely token there, a label or not.
    """

    logprobs: tuple[float, ...]
    choices: tuple[int, ...]
    entropies: tuple[float, ...]
    next_choice: int
    probe_logprobs: tuple[tuple[float, ...], ...] = ()
    probe_choices: tuple[int, ...] = ()
    queue_s: float = 0.0
    passes: int = 1


class Tokenizer(Protocol):
    """What the controller needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written out in it are recognised, none is added."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text in which special tokens written out are text like any other."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens written out."""
        ...

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The chat template's text for messages.

        Raises:
            UsageError: the model has no chat template, or the template refuses the messages.
        """
        ...

    def piece(self, token: int) -> str:
        """Text of a single token."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end the text."""
        ...


class Engine(Protocol):
    """A model behind three verbs. Calls made at the same time share forward passes where the engine can."""

    @property
    def name(self) -> str:
        """What results call the model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_context(self) -> int:
        """Most tokens that a prompt and what follows it may have together."""
        ...

    def generate(
        self, prompt: TokenBuffer, sampling: Sampling, stop: Stop, drafting: Drafting = Drafting()
    ) -> AsyncGenerator[Chunk, None]:
        """Continues the prompt. Closing the iterator frees what the call held.

        Raises:
            ContextError: the prompt leaves no room for a token.
            EngineError: the model failed.
        """
        ...

    async def verify(
        self, prompt: TokenBuffer, continuation: Sequence[int], probes: Sequence[Probe] = ()
    ) -> Verification:
        """Scores `continuation` after `prompt`, and each probe after both, in one pass; probes do not see each other.

        Raises:
            ContextError: prompt, continuation and probes exceed the context.
            EngineError: the model failed.
        """
        ...

    def describe(self) -> dict[str, str | None]:
        """What results say of the model: `name`, `weights` (a hash), `dtype`, `device`."""
        ...

    async def aclose(self) -> None:
        """Ends all calls and frees the model."""
        ...


async def collect(chunks: AsyncGenerator[Chunk, None], so_far: list[int] | None = None) -> Chunk:
    """All chunks of a call as one. `so_far` gets the ids as they come, for a caller who counts those of a call that
    fails midway."""
    ids: list[int] = [] if so_far is None else so_far
    async with aclosing(chunks):
        async for chunk in chunks:
            ids.extend(chunk.ids)
            if chunk.end is not None:
                return replace(chunk, ids=tuple(ids))
    raise EngineError("The engine ended a generation without saying why.")
