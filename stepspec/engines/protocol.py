"""The engine interface. An engine works on token ids and distributions and does not know steps or judges."""

import asyncio
import hashlib
import math
import reprlib
from array import array
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args, runtime_checkable

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import ContextError, EngineError, UnknownIdError, UsageError

MAX_TOKEN_ID = (1 << 31) - 1
MAX_NUMBER = (1 << 63) - 1
GRAMMAR_OPTIONS = "x-guidance"
"""Key at the top of a JSON schema with options of the grammar that the torch engine makes of it."""


class TokenBuffer:
    """Append-only token ids: a prompt and the ids committed after it.

    Every call passes the whole buffer to the engine without a copy. The engine remembers how much of *this* buffer it
    has read, so a call processes only the new ids.
    """

    __slots__ = ("__weakref__", "_ids", "group", "highest", "num_moves", "num_prompt", "session")

    def __init__(self, ids: Sequence[int], session: str | None = None, group: str | None = None) -> None:
        """Create a buffer.

        Args:
            ids: the prompt.
            session: id of the conversation that the text belongs to, within its group. Engines use it to find the
                replica of a model that has the text in its cache; it never changes a text.
            group: what the text may be shared with. Engines reuse and learn from a text only for buffers of the same
                group, because what is reused can be measured.

        Raises:
            UsageError: one of the ids is not a token id.
        """
        self.group = group
        self.session = session if session is None or group is None else hash_of(group, session)
        self.num_moves = 0
        """Calls that went on at another replica of a model, because the one before had failed."""
        self._ids = array("i")  # not a list: the garbage collector would visit all ids of all requests
        self.highest = 0
        """The highest id. Engines compare it with their vocabulary size instead of checking every id."""
        self.append(ids)
        self.num_prompt = len(self)
        """Number of ids in the prompt. The output follows."""

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, ids: Sequence[int]) -> None:
        """Append ids.

        Raises:
            UsageError: one of them is not a token id; the buffer is unchanged.
        """
        try:
            new = array("i", ids)
        except (TypeError, OverflowError):
            given: Sequence[Any] = ids
            wrong = next(id for id in given if not isinstance(id, int) or abs(id) > MAX_TOKEN_ID)
            raise _invalid_id(wrong) from None
        if new:
            if (lowest := min(new)) < 0:
                raise _invalid_id(lowest)
            self._ids.extend(new)
            self.highest = max(self.highest, max(new))

    def since(self, start: int, end: int | None = None) -> list[int]:
        """Return the ids from position `start` up to, but not including, `end` as a new list.

        A call should pass the length of its prompt at its start as `end`, because the buffer may grow during the call.
        """
        return self._ids[start:end].tolist()


def hash_of(*parts: str | None) -> str | None:
    """Return a hash of strings, such as a group and a salt, from which they cannot be read; None if all are None."""
    return None if parts.count(None) == len(parts) else hashlib.sha256(repr(parts).encode()).hexdigest()


def group_of(client: str | None, salt: str | None) -> str | None:
    """Return the group of a client's requests with a salt; None for requests with neither."""
    owner, group = hash_of(client), hash_of(client, salt)
    return group if owner is None else f"{owner}/{group}"


def owner_of(group: str | None) -> str | None:
    """Return the client's part of a group, see `group_of`; None if there is none."""
    owner, slash, _ = (group or "").partition("/")
    return owner if slash else None


WHOLE = ("top_k", "seed", "retries", "max_retries")
"""Settings that must be integers."""


def check_numbers(**settings: Any) -> None:
    """Check that settings are finite numbers, and integers if they are in `WHOLE`. None means not set.

    Raises:
        UsageError: a setting is not.
    """
    for name, value in settings.items():
        kind = Integral if name in WHOLE else Real
        if value is None:
            continue
        if isinstance(value, Integral) and abs(cast("int", value)) > MAX_NUMBER:
            raise UsageError(f"{name} must be between -{MAX_NUMBER} and {MAX_NUMBER}.")
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(cast("float", value)):
            if name in WHOLE:
                raise UsageError(f"{name} must be a whole number, got {value!r}.")
            raise UsageError(f"{name} must be a finite number, got {value!r}.")


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; the other defaults do not change the distribution.

    They apply in this order: the repetition penalty over prompt and output, the frequency and the presence penalty over
    the output, `logit_bias`, the mask of `allowed` tokens, then temperature, top-k, top-p and min-p.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output has, as in OpenAI's API."""
    frequency_penalty: float = 0.0
    """Subtracted as many times as the output has the token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value to add to its logit."""
    allowed: frozenset[int] | None = None
    """The only token ids that may be generated; None allows all."""
    seed: int = 0

    def __post_init__(self) -> None:
        bias: Any = self.logit_bias
        try:
            pairs = tuple((int(id), float(amount)) for id, amount in (bias.items() if hasattr(bias, "items") else bias))
        except (TypeError, ValueError):
            raise UsageError(f"logit_bias must map token ids to numbers, got {reprlib.repr(bias)}.") from None
        object.__setattr__(self, "logit_bias", pairs)
        if self.allowed is not None:
            object.__setattr__(self, "allowed", frozenset(self.allowed))
        check_numbers(**{name: getattr(self, name) for name in SAMPLING_NUMBERS})
        if not 0.0 <= self.temperature <= 10.0:
            raise UsageError(f"temperature must be between 0 (greedy) and 10, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top_p must be above 0 and at most 1, got {self.top_p}.")
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or more, got {self.top_k}.")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"min_p must be between 0 (off) and 1, got {self.min_p}.")
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise UsageError(f"repetition_penalty must be above 0 and at most 10, got {self.repetition_penalty}.")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise UsageError(f"{name} must be between -2 and 2, got {getattr(self, name)}.")
        if not all(abs(amount) <= 100.0 for _, amount in self.logit_bias):
            raise UsageError("A logit_bias must be between -100 and 100.")
        if self.allowed is not None and not self.allowed:
            raise UsageError("allowed must have at least one token id, or be None.")

    @property
    def depends_on_text(self) -> bool:
        """Whether logits change with the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def is_edited(self) -> bool:
        """Whether penalties, bias or a mask change logits."""
        return self.depends_on_text or bool(self.logit_bias) or self.allowed is not None

    @cached_property
    def named_ids(self) -> tuple[int, ...]:
        """The token ids in `logit_bias`, and the lowest and highest one in `allowed`."""
        bounds = (min(self.allowed), max(self.allowed)) if self.allowed else ()
        return (*(id for id, _ in self.logit_bias), *bounds)

    def reseeded(self, offset: int) -> "Sampling":
        """Return the same parameters with another seed. After the highest seed, the lowest one follows."""
        seed = (self.seed + offset + MAX_NUMBER) % (2 * MAX_NUMBER + 1) - MAX_NUMBER
        return replace(self, seed=seed)

    def seed_at(self, position: int) -> int:
        """Return a random seed for a call at a position of a text.

        It is for engines that seed a new random generator in every call. The same seed would give every step of a text
        the same random numbers.
        """
        digest = hashlib.blake2b(f"{self.seed} {position}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1  # 31 bits, which every server accepts


SAMPLING_NUMBERS = tuple(each.name for each in fields(Sampling) if isinstance(each.default, int | float))
"""Names of the numeric fields of `Sampling`: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`.

Every interface supports them.
"""


@dataclass(frozen=True)
class Stop:
    """When generation ends: after a token that completes a delimiter, after one of `token_ids`, or at `max_tokens`.

    Raises:
        UsageError: `max_tokens` is below 1, or a delimiter is empty.
    """

    max_tokens: int
    delimiters: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    before: str = ""
    """Text before the generated one, with which it may complete a delimiter. Servers that look for delimiters
    themselves do not know it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if "" in self.delimiters:
            raise UsageError("A delimiter must not be empty, because every token would complete it.")


CALL_DRAFTERS: Mapping[str, str] = {
    "draft-model": "draft_model.DraftModel",
    "prompt-lookup": "lookup.PromptLookup",
    "suffix": "suffix.Suffix",
}
"""Drafters that a call can select, if the engine supports them: the class in `torch_engine.drafters`."""

if TYPE_CHECKING:
    DrafterName = DrafterChoice = str
else:
    DrafterName = Literal["none", "engine", *CALL_DRAFTERS]
    """The drafter: none, the built-in speculation that the engine was started with, or a drafter of stepspec."""
    DrafterChoice = Literal[DrafterName, "auto"]

MAX_DRAFTED = 64
"""Maximum number of tokens drafted per round."""


AcceptanceRule = Literal["exact", "ratio", "typical", "fly"]
RULE_SETTINGS: Mapping[AcceptanceRule, tuple[str, ...]] = {
    "exact": (),
    "ratio": ("threshold",),
    "typical": ("threshold",),
    "fly": ("window", "entropy"),
}
"""What each acceptance rule needs; all but `exact` also have `exact_digits`."""


@dataclass(frozen=True)
class Acceptance:
    """Which drafted tokens stand. `exact` keeps the target's distribution; the other rules keep further tokens.

    A token that only another rule keeps is *relaxed*. The rules compare probabilities under the target at temperature
    1, after penalties, bias and mask. Above temperature 0, top-k, top-p and min-p must leave the token, too. Special
    tokens and ids that end a text are never relaxed, nor is a token where the most likely one is such a token.

    - `ratio`: the token is at least `threshold` times as likely as the most likely one.
    - `typical` (arXiv:2401.10774, section 2.3.1): its probability is at least
      min(threshold, sqrt(threshold) * exp(-entropy)), with the entropy of the whole distribution.
    - `fly` (arXiv:2511.22972, as in vLLM 0.33): -sum(p log p) over the three most likely tokens is at least `entropy`,
      in nats, and the exact rule accepts the next `window` tokens of the same draft.

    Raises:
        UsageError: a setting is missing, out of range, or without effect under the rule.
    """

    rule: AcceptanceRule = "exact"
    threshold: float | None = None
    window: int | None = None
    entropy: float | None = None
    exact_digits: bool = False
    """Whether tokens whose text has a digit are never relaxed either."""

    def __post_init__(self) -> None:
        needed = RULE_SETTINGS[self.rule]
        for name in ("threshold", "window", "entropy"):
            if (getattr(self, name) is None) == (name in needed):
                raise UsageError(f"Acceptance {self.rule!r} {'needs' if name in needed else 'does not use'} {name}.")
        if self.exact_digits and self.is_exact:
            raise UsageError("Acceptance 'exact' does not use exact_digits, because it relaxes no token.")
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise UsageError(f"threshold must be above 0 and at most 1, got {self.threshold}.")
        if self.window is not None and not 1 <= self.window < MAX_DRAFTED:
            raise UsageError(f"window must be between 1 and {MAX_DRAFTED - 1}, got {self.window}.")
        if self.entropy is not None and not 0 <= self.entropy < math.inf:
            raise UsageError(f"entropy must be at least 0, got {self.entropy}.")

    @property
    def is_exact(self) -> bool:
        """Whether no token is relaxed."""
        return self.rule == "exact"


@dataclass(frozen=True)
class Drafting:
    """Token-level speculation in a call. Under the acceptance rule `exact` it changes only the speed.

    Exact means that texts have the target's distribution. Above temperature 0, the text of a seed depends on the number
    of drafted tokens. It is reproducible with a fixed number, but not with a number chosen online.

    Raises:
        UsageError: a value is out of range.
    """

    drafter: DrafterName = "none"
    num_tokens: int | None = None
    """Tokens drafted per round; None chooses the number online from measured acceptance and costs."""
    acceptance: Acceptance = Acceptance()
    """Which drafted tokens stand. Other rules than `exact` need a drafter and the ability `relaxed acceptance`."""

    def __post_init__(self) -> None:
        if self.num_tokens is not None and not 0 <= self.num_tokens <= MAX_DRAFTED:
            raise UsageError(f"num_tokens must be between 0 and {MAX_DRAFTED}, got {self.num_tokens}.")
        if not self.acceptance.is_exact and self.drafter == "none":
            raise UsageError(f"Acceptance {self.acceptance.rule!r} needs a drafter, got 'none'.")
        window = self.acceptance.window
        if window is not None and self.num_tokens is not None and self.num_tokens <= window:
            raise UsageError(f"A window of {window} needs more than {window} drafted tokens, got {self.num_tokens}.")


@dataclass(frozen=True)
class Generate:
    """A call that generates a continuation of a prompt."""

    prompt: TokenBuffer
    """The ids to continue. Ids that are appended after the call starts are not read."""
    sampling: Sampling
    stop: Stop
    drafting: Drafting = Drafting()
    """Token-level speculation."""
    json_schema: str | None = None
    """A JSON schema as text. It constrains the generated text, which may start with white space. Requires the ability
    `json schema`."""
    logprobs: bool = False
    """Whether to return the log-probabilities of the generated ids, and entropies if the engine has them. Requires the
    ability `logprobs`."""
    after: Sequence[int] = ()
    """Ids after the prompt that are not part of it yet, such as steps that are not judged. The continuation follows
    them."""


ChunkEnd = Literal["delimiter", "token", "length"]


@dataclass(frozen=True)
class TokenChunk:
    """Newly generated ids. The last chunk of a call has `end` and the costs of the whole call. Other chunks have the
    costs so far, as far as the engine knows them then."""

    ids: tuple[int, ...]
    end: ChunkEnd | None = None
    queue_s: float = 0.0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    """Ids of the prompt, and of those after it, that the engine found in its prefix cache."""
    metrics: EngineMetrics | None = None
    """Detailed metrics of the call; None if the engine does not report them."""
    logprobs: tuple[float, ...] | None = None
    """The log-probability of each id, at temperature 1 and without penalty, bias or mask; nan for an end token that a
    server leaves out. None if the call did not ask for them."""
    entropies: tuple[float, ...] | None = None
    """The entropy, in nats, of the model's distribution at each id, at temperature 1 and without penalty, bias or mask;
    None without the ability `entropies`."""
    relaxed: tuple[int, ...] | None = None
    """Positions in `ids` of relaxed tokens, which the exact rule with the same random numbers would have rejected; see
    `Acceptance`; also of those that may be, where the engine cannot tell. None if it relaxes no token."""

    @property
    def written(self) -> tuple[int, ...]:
        """The ids of a finished call without the token that ended it."""
        return self.ids[:-1] if self.end == "token" else self.ids


@dataclass(frozen=True)
class Probe:
    """Ids on a branch of their own. The log-probs of `labels` are read after them."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    place: int | None = None
    """Number of the continuation's tokens that the branch follows; None for all of them."""

    def after(self, continuation: Sequence[int]) -> list[int]:
        """Return the ids of the branch, with the part of the continuation that it follows."""
        return [*continuation[: self.place], *self.ids]


@dataclass(frozen=True)
class Verification:
    """The scores of a continuation of n tokens, at temperature 1.

    `logprobs` and `choices` have n entries: the log-probability of each token, and the target's own choice at its
    position. `next_choice` is its choice after the continuation. Choices are argmax tokens unless the call says how to
    sample them.

    For each probe, `probe_logprobs` has the log-probabilities of its labels over the whole vocabulary; -inf for a label
    that a server does not return. `probe_choices` has the argmax token after the probe, which need not be a label.

    Values that the engine does not support, or that were not requested, are None; `probe_logprobs` is then empty.
    """

    logprobs: tuple[float, ...] | None
    choices: tuple[int, ...] | None
    next_choice: int
    probe_logprobs: tuple[tuple[float, ...], ...] = ()
    probe_choices: tuple[int, ...] = ()
    queue_s: float = 0.0
    passes: int = 1
    cached: int = 0
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The most likely tokens at each place of the continuation with their log-probabilities, if the call wants some."""


@dataclass(frozen=True)
class Verify:
    """A call that scores a continuation of a prompt."""

    prompt: TokenBuffer
    """The ids before the continuation. Ids that are appended after the call starts are not read."""
    continuation: Sequence[int]
    """The n ids to score."""
    probes: Sequence[Probe] = ()
    """Branches that leave the continuation, most at its end."""
    scores: bool = True
    """Whether to return the n values of `Verification.logprobs` and `choices`. False may save work on a server."""
    sampling: Sampling | None = None
    """How the target chooses tokens. If given, the choices are the tokens that `generate` would write at these places,
    with its random numbers; else the argmax tokens. Requires the ability `samples`, and no penalty."""
    top: int = 0
    """Number of the most likely tokens to return at each place of the continuation. Requires `scores`."""


Ability = Literal[
    "scores",
    "cached scores",
    "choices",
    "samples",
    "label logprobs",
    "logprobs",
    "entropies",
    "json schema",
    "penalties",
    "relaxed acceptance",
    "forget",
]
"""Optional features of an engine.

`scores`, `choices`, `label logprobs`: `verify` returns the log-probs of a continuation, the argmax tokens, and the
log-probs of labels. `cached scores`: for scores and choices it reads only what is not in its prefix cache. `samples`:
it can sample the choices. `logprobs`: `generate` returns those of what it writes; `entropies`: and entropies.
`json schema`: `generate` supports a schema. `penalties`: the presence and the frequency penalty also count the
output before the call. `relaxed acceptance`: `generate` supports all acceptance rules. `forget`: `forget` clears all
caches, and groups are kept apart.
"""

EVERYTHING: frozenset[Ability] = frozenset(get_args(Ability))


class Tokenizer(Protocol):
    """The tokenizer interface of the controller."""

    def encode(self, text: str) -> list[int]:
        """Encode a text. Special tokens in it are recognized; none are added."""
        ...

    def encode_text(self, text: str) -> list[int]:
        """Encode a text. Special tokens in it are treated as plain text."""
        ...

    def special_spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Return where a text writes special tokens: start and end of each, in order."""
        ...

    def special_edges(self, text: str) -> tuple[bool, bool]:
        """Return whether a special token could begin before the text and end in it, and begin in it and end after."""
        ...

    @property
    def num_ids(self) -> int | None:
        """An exclusive upper bound of the token ids; None if unknown."""
        ...

    @property
    def max_token_bytes(self) -> int | None:
        """Maximum size of the text of one token, in UTF-8 bytes; None if unknown."""
        ...

    @property
    def thinking(self) -> ThinkingTags | None:
        """How the model marks its thinking; None if it does not."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, including special tokens."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that a request may set, such as `enable_thinking`."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = {},
    ) -> str:
        """Render messages with the chat template, and tools if the template supports them.

        Args:
            messages: the turns.
            add_generation_prompt: whether the text ends where the model's turn begins.
            tools: tools that the model may call.
            arguments: further variables of the template, such as `enable_thinking`.

        Raises:
            UsageError: the model has no chat template, or the template rejects the messages.
        """
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The transformers response template that parses the model's tool calls, if there is one."""
        ...

    def response_parser(self, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Any:
        """Create a streaming parser (see `stepspec.engines.hugging_face.CallParser`)."""
        ...

    def piece(self, token: int) -> str:
        """Return the text of a single token."""
        ...

    def is_special(self, token: int) -> bool:
        """Return whether a token is a control token instead of text, such as the end of a turn or of the thinking."""
        ...

    def same_vocabulary(self, other: Any) -> bool:
        """Return whether another tokenizer gives every token the same id."""
        ...

    @property
    def start_ids(self) -> Sequence[int]:
        """Ids that begin every text of the model, such as a beginning-of-sequence token; often none."""
        ...

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a text."""
        ...


class Engine(Protocol):
    """The engine interface: one model. Concurrent calls share forward passes if the engine supports it."""

    @property
    def name(self) -> str:
        """Name of the model in results."""
        ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a prompt and its continuation together."""
        ...

    @property
    def abilities(self) -> frozenset[Ability]:
        """The optional features that the engine supports."""
        ...

    @property
    def drafters(self) -> Sequence[DrafterName]:
        """Supported drafters other than `none`. Only `engine` if a call cannot select a drafter."""
        ...

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """The sampling that the model's files recommend, by names of `Sampling`; empty if there is none."""
        ...

    @property
    def own_speculation(self) -> str | None:
        """The engine's built-in speculation, which calls cannot change.

        "none", a description such as "ngram, 3 tokens", or None if unknown.
        """
        ...

    def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """Generate a continuation of a prompt. Closing the iterator frees the resources of the call.

        Raises:
            ContextError: the prompt fills the context.
            UsageError: the schema is invalid or not supported, or an id is not in the model's vocabulary.
            EngineError: the model failed.
        """
        ...

    async def check_schema(self, json_schema: str) -> None:
        """Check that the engine supports a schema, before a text is generated. Requires the ability `json schema`.

        Raises:
            UsageError: the schema is invalid or not supported.
            EngineError: the model failed.
        """
        ...

    async def verify(self, call: Verify) -> Verification:
        """Score a continuation of a prompt, and each probe after it or a part of it. Probes do not see each other.

        Raises:
            ContextError: prompt, continuation and probes exceed the context.
            UsageError: an id is not in the model's vocabulary.
            EngineError: the model failed.
        """
        ...

    def describe(self) -> Mapping[str, str | int | None]:
        """Describe the model for results: `name`, `weights` (a hash), `dtype`, `device`, `threads` (on a CPU)."""
        ...

    def metrics(self) -> EngineMetrics:
        """Return the totals over all calls so far."""
        ...

    async def forget(self) -> None:
        """Clear all state of earlier requests: cached prefixes, past outputs, learned acceptance.

        Weights and measurements of the machine stay. An engine without the ability `forget` clears what it can.

        Raises:
            EngineError: the engine was closed.
        """
        ...

    async def aclose(self) -> None:
        """Cancel all calls and free the model."""
        ...


@runtime_checkable
class Distant(Protocol):
    """An engine whose model runs elsewhere, so that its calls take nothing from the engines of this process."""

    async def round_trip_s(self) -> float:
        """Return the seconds that its smallest request takes: the way there and back, and hardly any work.

        Raises:
            EngineError: the server does not answer.
        """
        ...


def most_likely(logprobs: Mapping[int, float], count: int) -> tuple[tuple[int, float], ...]:
    """Return the most likely tokens with their log-probabilities, the most likely one first."""
    return tuple(sorted(logprobs.items(), key=lambda item: -item[1])[:count])


def read_prompt_logprobs(
    rows: Sequence[Mapping[int, Any]], ids: Sequence[int], top: int
) -> tuple[tuple[float, ...], tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Return the log-probabilities of ids, the argmax tokens and the `top` most likely ones, from vLLM's
    `prompt_logprobs`: for each place a log-probability and a rank by id.

    Raises:
        KeyError, ValueError: the rows are not those of the ids.
    """
    own = tuple(row[id].logprob for row, id in zip(rows, ids, strict=True))
    choices = tuple({entry.rank: id for id, entry in row.items()}[1] for row in rows)
    listed = ({id: entry.logprob for id, entry in row.items()} for row in rows)
    return own, choices, tuple(most_likely(each, top) for each in listed)


def check_room(engine: Engine, prompt_length: int, wanted: int) -> None:
    """Check that `wanted` tokens fit into the engine's context after a prompt of `prompt_length` tokens.

    Raises:
        UsageError: the prompt is empty.
        ContextError: they do not fit.
    """
    if prompt_length == 0:
        raise UsageError("The prompt is empty; a model needs at least one token to continue.")
    if prompt_length + wanted > engine.max_context:
        raise ContextError(
            f"The prompt has {prompt_length} tokens and {wanted} more are wanted, but {engine.name} has a context "
            f"of {engine.max_context}. Shorten the prompt or choose a model with a longer context."
        )


def _invalid_id(found: object) -> UsageError:
    return UsageError(f"Token ids must be whole numbers from 0 to {MAX_TOKEN_ID}, got {found!r}.")


def check_acceptance(engine: Engine, acceptance: Acceptance) -> None:
    """Check that an engine that drafts tokens by itself supports an acceptance rule.

    Raises:
        UsageError: it does not.
    """
    if not acceptance.is_exact and "relaxed acceptance" not in engine.abilities:
        raise UsageError(
            f"{engine.name} accepts drafted tokens by its own rule, not by {acceptance.rule!r}. Leave out acceptance, "
            "or serve it with the torch engine, or with vLLM, its own speculation and stepspec's plugin."
        )


def may_be_relaxed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the ids that a rule can relax, for engines that cannot tell which are."""
    return tuple(place for place, id in enumerate(ids) if not tokenizer.is_special(id))


def check_ids(name: str, vocab_size: int, prompt: TokenBuffer, *further: Sequence[int]) -> None:
    """Check that the ids of a call are in the vocabulary of the model called `name`.

    Only the highest id of the prompt and the `further` ids are checked.

    Raises:
        UnknownIdError: an id is not.
    """
    for ids in ((prompt.highest,), *further):
        if ids:
            check_range(ids, vocab_size, name)


def check_range(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Check that ids are in the vocabulary of the model called `name`. There must be at least one id.

    Raises:
        UnknownIdError: an id is not.
    """
    for id in (min(ids), max(ids)):
        if not 0 <= id < vocab_size:
            raise UnknownIdError(
                f"Token id {id} is not in the vocabulary of {name}, whose ids are 0 to {vocab_size - 1}."
            )


async def side_by_side(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently and return their results. If one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first failure is enough
    return [task.result() for task in tasks]


async def collect(chunks: AsyncGenerator[TokenChunk, None], so_far: list[int] | None = None) -> TokenChunk:
    """Merge all chunks of a call into one.

    Args:
        chunks: the chunks of the call.
        so_far: a list that receives the ids as they arrive, so that the caller can count those of a failed call.

    Raises:
        EngineError: the call ended without a last chunk.
    """
    async with aclosing(merged(chunks, MAX_NUMBER, so_far)) as blocks:
        async for chunk in blocks:
            return chunk
    raise EngineError("The engine ended a generation without a reason.")


async def merged(
    chunks: AsyncGenerator[TokenChunk, None], size: int, ids: list[int] | None = None
) -> AsyncGenerator[TokenChunk, None]:
    """Merge the chunks of a call into chunks of at least `size` ids each; the last one may have fewer. `ids` receives
    those of an unfinished one as they arrive."""
    ids = [] if ids is None else ids
    logprobs, entropies, relaxed = list[float](), list[float](), list[int]()
    async with aclosing(chunks):
        async for chunk in chunks:
            relaxed.extend(len(ids) + place for place in chunk.relaxed or ())
            ids.extend(chunk.ids)
            logprobs.extend(chunk.logprobs or ())
            entropies.extend(chunk.entropies or ())
            if chunk.end is not None or len(ids) >= size:
                yield replace(
                    chunk,
                    ids=tuple(ids),
                    logprobs=None if chunk.logprobs is None else tuple(logprobs),
                    entropies=None if chunk.entropies is None else tuple(entropies),
                    relaxed=None if chunk.relaxed is None else tuple(relaxed),
                )
                if chunk.end is not None:
                    return
                for each in (ids, logprobs, entropies, relaxed):
                    each.clear()
