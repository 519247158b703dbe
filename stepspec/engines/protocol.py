"""The engine interface: three methods on token ids. An engine knows token ids and distributions, no steps or judges."""

import asyncio
import hashlib
import math
from array import array
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, Protocol, cast, get_args

from stepspec.engines.metrics import Metrics
from stepspec.errors import ContextError, EngineError, UnknownIdError, UsageError

THINK_OPEN, THINK_END = "<think>", "</think>"
"""The tags around thinking, which tokenizers keep in texts."""

HIGHEST_ID = (1 << 31) - 1


class TokenBuffer:
    """Token ids that only ever grow: a prompt and what has been committed after it.

    Engines are given the whole buffer at every call and copy nothing: they remember how much of *this* buffer they
    have already read, so a call costs its new tokens only.
    """

    __slots__ = ("__weakref__", "_ids", "highest")

    def __init__(self, ids: Sequence[int]) -> None:
        """
        Raises:
            UsageError: one of the ids is none.
        """
        self._ids = array("i")  # no list: Python's garbage collector would walk through all the ids of all requests
        self.highest = 0
        """The highest id, by which engines see that all are in their vocabulary without looking at each."""
        self.append(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ids: Sequence[int]) -> None:
        """Commits further ids.

        Raises:
            UsageError: one of them is none; then none is committed.
        """
        try:
            new = array("i", ids)
        except (TypeError, OverflowError):
            given: Sequence[Any] = ids
            wrong = next(id for id in given if not isinstance(id, int) or abs(id) > HIGHEST_ID)
            raise _no_id(wrong) from None
        if new:
            if (lowest := min(new)) < 0:
                raise _no_id(lowest)
            self._ids.extend(new)
            self.highest = max(self.highest, max(new))

    def since(self, start: int, end: int | None = None) -> list[int]:
        """The ids from position `start` on, up to `end`, as a new list.

        A call passes the length that its prompt had when it was made: the buffer may have grown since.
        """
        return self._ids[start:end].tolist()


WHOLE = ("max_tokens", "max_thinking_tokens", "top_k", "seed", "retries", "max_retries")
"""Settings that are whole numbers."""


def check_numbers(**settings: Any) -> None:
    """Checks that settings are finite numbers, and whole ones where they count; None is one that is not set.

    Raises:
        UsageError: one is not.
    """
    for name, value in settings.items():
        kind = Integral if name in WHOLE else Real
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(cast("float", value)):
            if name in WHOLE:
                raise UsageError(f"{name} must be a whole number, got {value!r}.")
            raise UsageError(f"{name} must be a finite number, got {value!r}.")


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. Temperature 0 is greedy; the other defaults leave the distribution as it is.

    What changes logits comes first (the repetition penalty over prompt and output, then the bias and the mask of
    allowed tokens), then temperature, top-k, top-p and min-p.

    Raises:
        UsageError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with what is added to their logits."""
    allowed: frozenset[int] | None = None
    """The only token ids that may be written; None allows all."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(**{name: getattr(self, name) for name in SAMPLING_NUMBERS})
        if not 0.0 <= self.temperature <= 10.0:
            raise UsageError(f"The temperature is {self.temperature}; it must be between 0 (greedy) and 10.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}; it must be 0 (off) or more.")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"min_p is {self.min_p}; it must be between 0 (off) and 1.")
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise UsageError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0 and at most 10.")
        if not all(abs(amount) <= 100.0 for _, amount in self.logit_bias):
            raise UsageError("A logit_bias must be between -100 and 100.")
        if self.allowed is not None and not self.allowed:
            raise UsageError("No token is allowed; allowed must name at least one, or be None.")

    @cached_property
    def named_ids(self) -> tuple[int, ...]:
        """The token ids that `logit_bias` and `allowed` name; of those allowed the lowest and the highest."""
        bounds = (min(self.allowed), max(self.allowed)) if self.allowed else ()
        return (*(id for id, _ in self.logit_bias), *bounds)

    def seed_at(self, position: int) -> int:
        """A seed for a call at that position of a text, for engines whose random numbers begin anew with every call:
        with one seed for all steps of a text, they would be drawn alike."""
        digest = hashlib.blake2b(f"{self.seed} {position}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1  # 31 bits, which every server takes


SAMPLING_NUMBERS = tuple(each.name for each in fields(Sampling) if isinstance(each.default, int | float))
"""Names of the fields of `Sampling` that name no token: `temperature`, `top_p`, `top_k`, `min_p`,
`repetition_penalty` and `seed`. Every interface takes these."""


@dataclass(frozen=True)
class Stop:
    """When generation ends: after the token that completes a delimiter, after one of `token_ids`, or at the cap.

    Raises:
        UsageError: the cap is below 1, or a delimiter is empty.
    """

    max_tokens: int
    delimiters: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if "" in self.delimiters:
            raise UsageError("A delimiter must not be empty; every token would complete it.")


DrafterName = Literal["none", "engine", "draft-model", "prompt-lookup", "suffix", "early-exit", "medusa"]
"""What drafts tokens: nothing; whatever the engine uses by itself, as it was started; or one of ours."""

CALL_DRAFTERS: tuple[DrafterName, ...] = tuple(name for name in get_args(DrafterName) if name not in ("none", "engine"))
"""What a call can ask of an engine that it can steer."""

MAX_DRAFTED = 64
"""Most tokens that can be drafted a round."""


@dataclass(frozen=True)
class Drafting:
    """Token-level speculation inside a call: without a tolerance exact, so that it changes speed and nothing else.

    Exact means that the distribution of texts is the target's. Above temperature 0 the text of a seed depends on how
    many tokens are drafted: a fixed number repeats it, a number that is chosen online does not.

    Raises:
        UsageError: a value is out of its range.
    """

    drafter: DrafterName = "none"
    num_tokens: int | None = None
    """Tokens drafted a round; None chooses online, by measured acceptance and costs."""
    tolerance: float = 0.0
    """Typical acceptance (arXiv:2401.10774, section 2.3.1), not exact: a drafted token is kept also if its probability
    at temperature 1 is at least min(tolerance, sqrt(tolerance) * exp(-entropy)). 0 is off."""
    archive: str = ""
    """Of a drafter that remembers past outputs: the collection that it looks in and adds to. A named one is kept when
    the engine forgets."""

    def __post_init__(self) -> None:
        if self.num_tokens is not None and not 0 <= self.num_tokens <= MAX_DRAFTED:
            raise UsageError(
                f"{self.num_tokens} tokens cannot be drafted a round; it must be between 0 and {MAX_DRAFTED}."
            )
        if not 0.0 <= self.tolerance <= 1.0:
            raise UsageError(f"The tolerance is {self.tolerance}; it must be between 0 (exact) and 1.")


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
    cached: int = 0
    """Ids of the prompt that the engine did not have to read again."""
    metrics: Metrics | None = None
    """The same and more, by kind; None where an engine does not say."""


@dataclass(frozen=True)
class Probe:
    """Ids that follow the continuation on a branch of their own; the log-probs of `labels` are read at their end."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Verification:
    """What the model thinks of a continuation of n tokens, from one pass, at temperature 1.

    `logprobs` and `choices` have n entries: the log-probability of each token, and the model's own most likely token in
    its place. `next_choice` is the most likely token after the continuation. For each probe, `probe_logprobs` holds the
    log-probabilities of its labels among the whole vocabulary (of a label that a server does not show, -inf), and
    `probe_choices` the most likely token there, a label or not. What an engine cannot give, or was not asked for, is
    None; `probe_logprobs` is then empty.
    """

    logprobs: tuple[float, ...] | None
    choices: tuple[int, ...] | None
    next_choice: int
    probe_logprobs: tuple[tuple[float, ...], ...] = ()
    probe_choices: tuple[int, ...] = ()
    queue_s: float = 0.0
    passes: int = 1
    cached: int = 0


Ability = Literal["scores", "choices", "label logprobs", "json schema", "forget"]
"""What not every engine can do. `verify` gives log-probabilities of a continuation, the model's own choices beside its
tokens, log-probabilities of a probe's labels; `generate` keeps to a schema; `forget` clears all caches."""

EVERYTHING: frozenset[Ability] = frozenset(get_args(Ability))


class Tokenizer(Protocol):
    """What the controller needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens written out in it are recognised, none is added."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text in which special tokens written out are text like any other."""
        ...

    def writes_special(self, text: str) -> bool:
        """Whether special tokens are written out in a text."""
        ...

    @property
    def num_ids(self) -> int | None:
        """The number of token ids, all of which are below it; None where that is not known."""
        ...

    @property
    def max_token_bytes(self) -> int | None:
        """Most bytes of text, in UTF-8, that one token stands for; None where that is not known."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens written out."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The chat template's text for messages, and for tools if it knows of such.

        Raises:
            UsageError: the model has no chat template, or the template refuses the messages.
        """
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """Parser of the model's tool calls, if its chat template has one for transformers."""
        ...

    def response_parser(self, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Transformers' streaming parser of responses (`transformers.utils.chat_parsing.ResponseParser`)."""
        ...

    def piece(self, token: int) -> str:
        """Text of a single token."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark and no text, such as the end of a turn or of the thinking."""
        ...

    def same_vocabulary(self, other: Any) -> bool:
        """Whether another tokenizer gives every token the same id."""
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

    @property
    def abilities(self) -> frozenset[Ability]:
        """What `verify` can give besides the next token and the choices at probes."""
        ...

    @property
    def drafters(self) -> Sequence[DrafterName]:
        """What can draft tokens in a call, besides `none`; `engine` alone for an engine that a call cannot steer."""
        ...

    @property
    def own_speculation(self) -> str | None:
        """How the engine drafts tokens by itself, whatever a call asks for: "none", a description such as "ngram, 3
        tokens", or None where that is unknown."""
        ...

    def generate(
        self,
        prompt: TokenBuffer,
        sampling: Sampling,
        stop: Stop,
        drafting: Drafting = Drafting(),
        hint: Sequence[int] = (),
        json_schema: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Continues the prompt. Closing the iterator frees what the call held.

        `hint` are ids that may well follow the prompt, a rejected step for one: a free draft for drafters that look
        things up. With a `json_schema`, a JSON text, nothing is written that cannot be or become what it describes;
        white space may stand in front of it. An engine without that ability is not asked for it.

        Raises:
            ContextError: the prompt leaves no room for a token.
            UsageError: the schema is none, or none that can be kept to; or an id is not in the model's vocabulary.
            EngineError: the model failed.
        """
        ...

    async def check_schema(self, json_schema: str) -> None:
        """Whether texts can be held to a schema, before any is written. An engine without that ability is not asked.

        Raises:
            UsageError: they cannot.
            EngineError: the model failed.
        """
        ...

    async def verify(
        self, prompt: TokenBuffer, continuation: Sequence[int], probes: Sequence[Probe] = (), *, scores: bool = True
    ) -> Verification:
        """Scores `continuation` after `prompt`, and each probe after both; probes do not see each other.

        Without `scores` nobody asks for what a continuation of n tokens gives n of, which may save a server work.

        Raises:
            ContextError: prompt, continuation and probes exceed the context.
            UsageError: an id is not in the model's vocabulary.
            EngineError: the model failed.
        """
        ...

    def describe(self) -> dict[str, str | None]:
        """What results say of the model: `name`, `weights` (a hash), `dtype`, `device`."""
        ...

    def metrics(self) -> Metrics:
        """What the engine has done so far."""
        ...

    async def forget(self) -> None:
        """Drops whatever a new request would not have: cached prefixes, past outputs, learned acceptance. Weights, and
        what was measured of the machine, stay. An engine without the ability `forget` drops what it can.

        Raises:
            EngineError: the engine was closed.
        """
        ...

    async def aclose(self) -> None:
        """Ends all calls and frees the model."""
        ...


def check_room(engine: Engine, prompt_length: int, wanted: int) -> None:
    """Whether so many tokens fit behind a prompt of that length.

    Raises:
        UsageError: the prompt is empty.
        ContextError: they do not.
    """
    if prompt_length == 0:
        raise UsageError("The prompt is empty; a model needs at least one token to continue.")
    if prompt_length + wanted > engine.max_context:
        raise ContextError(
            f"The prompt has {prompt_length} tokens and {wanted} more are wanted, but {engine.name} has a context "
            f"of {engine.max_context}. Shorten the prompt or choose a model with a longer context."
        )


def _no_id(found: object) -> UsageError:
    return UsageError(f"Token ids must be whole numbers from 0 to {HIGHEST_ID}, got {found!r}.")


def check_ids(name: str, vocab_size: int, prompt: TokenBuffer, *further: Sequence[int]) -> None:
    """Whether the ids of a call are in the vocabulary of the model called `name`.

    Looks at each of the `further` ids and at no more than the highest one of the prompt.

    Raises:
        UnknownIdError: one is not.
    """
    for ids in ((prompt.highest,), *further):
        if ids:
            check_range(ids, vocab_size, name)


def check_range(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Checks that ids, of which there is at least one, are in the vocabulary of the model called `name`.

    Raises:
        UnknownIdError: one is not.
    """
    for id in (min(ids), max(ids)):
        if not 0 <= id < vocab_size:
            raise UnknownIdError(
                f"Token id {id} is not in the vocabulary of {name}, whose ids are 0 to {vocab_size - 1}."
            )


async def side_by_side(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """What several calls come to that run at the same time; if one fails the others are given up."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # one tells what is wrong
    return [task.result() for task in tasks]


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
