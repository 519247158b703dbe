"""A word-level tokenizer and an engine that plays a script, for tests with results worked out by hand.

The tokens are tags, blank lines, digits, words with the space before them, and single characters. A character outside
ASCII has one token per byte. `One two.\\n\\n` has four tokens.
"""

import asyncio
import copy
import itertools
import math
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import jinja2
from jinja2.meta import find_undeclared_variables

from stepspec.base.files import package_folder
from stepspec.chat.events import AnswerDelta
from stepspec.engines.hugging_face import CallParser, HuggingFaceTokenizer, load_tokenizer
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    CALL_DRAFTERS,
    EVERYTHING,
    Ability,
    DrafterName,
    Drafting,
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verification,
    Verify,
)
from stepspec.engines.stops import StopMatcher
from stepspec.engines.thinking import find_tags
from stepspec.errors import ContextError, StepSpecError, UsageError
from stepspec.loop.controller import run
from stepspec.loop.ledger import Ledger
from stepspec.loop.policy import Policy
from stepspec.loop.request import Request
from stepspec.loop.result import Done, Event, Result
from stepspec.loop.step import StepCommitted, StepDelta

PLAIN_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
THINKING_TEMPLATE = PLAIN_TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")

SPECIAL = r"</?think>|<\|\w+\|>"
TOKENS = r"\n\n|\d| ?[A-Za-z]+|."


class WordTokenizer:
    """Assigns ids to tokens in order of first use. `num_decoded` counts all ids that were decoded."""

    def __init__(
        self,
        template: str = THINKING_TEMPLATE,
        *,
        tags: bool = True,
        special: str = SPECIAL,
        ends: Sequence[str] = ("<|end|>",),
        longer: str = "",
    ) -> None:
        """`special` matches the special tokens, and `ends` end a text. Without `tags`, think tags are not special.
        `longer` matches further tokens, which are looked for first."""
        self.num_decoded = 0
        self._tags = tags
        self._special = special
        self._tokens = re.compile("|".join(filter(None, (special, longer, TOKENS))), re.DOTALL)
        self._ids: dict[bytes, int] = {}
        self._pieces: list[bytes] = []
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)
        found = find_undeclared_variables(environment.parse(template))
        self.template_variables = frozenset(found - {"messages", "tools", "add_generation_prompt", "raise_exception"})
        self.end_ids = frozenset(id for end in ends for id in self.encode(end))
        self.thinking = find_tags(self, template) if tags else None

    @property
    def num_ids(self) -> int | None:
        return None

    def encode(self, text: str) -> list[int]:
        tokens: list[bytes] = []
        for match in self._tokens.findall(text):
            is_tag = re.fullmatch(self._special, match) is not None
            is_one_token = (match.isascii() or is_tag) and (self._tags or "think" not in match)
            tokens += [match.encode()] if is_one_token else [bytes([byte]) for byte in match.encode()]
        return [self._id(token) for token in tokens]

    def encode_text(self, text: str) -> list[int]:
        parts = re.split(f"({self._special})", text)
        chunks = [chunk for index, part in enumerate(parts) for chunk in (part if index % 2 else [part])]
        return [id for chunk in chunks for id in self.encode(chunk)]

    def special_spans(self, text: str) -> list[tuple[int, int]]:
        found = (match.span() for match in re.finditer(self._special, text))
        return [(start, end) for start, end in found if len(self.encode(text[start:end])) == 1]

    def special_edges(self, text: str) -> tuple[bool, bool]:
        return re.match(r"[\w|]*>", text) is not None, re.search(r"<[\w/|]*$", text) is not None

    max_token_bytes: int | None = None
    start_ids: Sequence[int] = ()

    def _id(self, token: bytes) -> int:
        if token not in self._ids:
            self._ids[token] = len(self._pieces)
            self._pieces.append(token)
        return self._ids[token]

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return b"".join(self._pieces[id] for id in ids).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        return self._pieces[token].decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        return re.fullmatch(self._special, self.piece(token)) is not None

    def same_vocabulary(self, other: "WordTokenizer") -> bool:
        return self is other

    response_template = None

    def response_parser(self, template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> CallParser:
        return CallParser(dict(template), prefix="", tools=[dict(tool) for tool in tools])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = {},
    ) -> str:
        given = {"add_generation_prompt": add_generation_prompt, "tools": list(tools) or None, **arguments}
        try:
            return self._template.render(messages=messages, **given)
        except (jinja2.TemplateError, TypeError) as error:
            raise UsageError(f"The model's chat template refuses these messages: {error}.") from error


def with_template(template: str) -> HuggingFaceTokenizer:
    """Return the embedded target's tokenizer with another chat template, as a model that does not think."""
    own = copy.deepcopy(load_tokenizer(str(package_folder() / "mini" / "weights" / "target")).own)
    own.chat_template = template
    return HuggingFaceTokenizer(own, frozenset([own.eos_token_id]), "none")


class LetterTokenizer(WordTokenizer):
    """Has one token for every character outside of tags."""

    def encode(self, text: str) -> list[int]:
        parts = re.split(f"({self._special})", text)
        tokens = [token for index, part in enumerate(parts) for token in ([part] if index % 2 else part)]
        return [self._id(token.encode()) for token in tokens if token]


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def check_deltas(events: Iterable[Event]) -> int:
    """Check that what was shown of a step is the beginning of its text. Return the number of `StepDelta` events."""
    num_deltas, num_steps, shown = 0, 0, ""
    for event in events:
        if isinstance(event, StepDelta):
            assert event.text
            assert event.index == num_steps
            num_deltas, shown = num_deltas + 1, shown + event.text
        elif isinstance(event, StepCommitted):
            assert event.step.text[: event.num_shown] == shown
            assert shown + event.rest == event.step.text
            num_steps, shown = num_steps + 1, ""
    return num_deltas


@dataclass(frozen=True)
class Reply:
    """What one `generate` call writes until a stop ends it. After the text, the call hangs or raises `fails`."""

    text: str = ""
    fails: StepSpecError | None = None
    hangs: bool = False
    delay_s: float = 0.0
    """Time to wait before the first chunk."""
    gap_s: float | None = None
    """Time to wait before each further chunk; None if they come together."""
    queue_s: float = 0.0
    chunk_size: int = 1_000_000
    token_drafted: int = 0
    token_accepted: int = 0
    relaxed: Collection[int] = ()
    """Positions of relaxed tokens."""
    logprobs: Mapping[int, float] | None = None
    """Log-probs by position, for a call that asks for them; -0.1 elsewhere. Entropies are twice as high, negated."""


@dataclass(frozen=True)
class Opinion:
    """The outcome of one `verify` call: `text` is what the model itself would write at the step's positions.

    A token of the step that equals the model's own choice has the log-prob -0.1, any other token -9. `logprobs`
    overrides both by position. At the end of a probe, `rating` is the argmax token and `digits` the distribution over
    digits, by default all on `rating`.
    """

    text: str = ""
    rating: str = "9"
    digits: Mapping[int, float] | None = None
    logprobs: Mapping[int, float] | None = None
    fails: StepSpecError | None = None
    hangs: bool = False
    delay_s: float = 0.0
    queue_s: float = 0.0


@dataclass(frozen=True)
class Call:
    """The arguments of one call to the engine."""

    verb: str
    prompt: str
    continuation: str = ""
    stop: Stop | None = None
    sampling: Sampling | None = None
    drafting: Drafting | None = None
    probes: tuple[str, ...] = ()
    json_schema: str | None = None
    logprobs: bool = False


class ScriptedEngine:
    """Plays its replies and opinions one after the other, and records the calls."""

    drafters: Sequence[DrafterName] = CALL_DRAFTERS
    own_speculation: str | None = "none"
    default_sampling: Mapping[str, float] = {}

    def __init__(
        self,
        tokenizer: WordTokenizer,
        replies: Iterable[Reply | str] = (),
        opinions: Iterable[Opinion | str] = (),
        *,
        name: str = "scripted",
        max_context: int = 100_000,
        abilities: frozenset[Ability] = EVERYTHING,
    ) -> None:
        self.name = name
        self.abilities = abilities
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.calls: list[Call] = []
        self.num_open = 0
        self.hanging = asyncio.Event()
        self.closed = False
        self.num_forgotten = 0
        self._replies = iter(replies)
        self._opinions = iter(opinions)
        self._seen: WeakKeyDictionary[TokenBuffer, list[int]] = WeakKeyDictionary()

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        prompt, stop = call.prompt, call.stop
        self._check_room(len(prompt) + len(call.after) + 1)
        text = self._read(prompt) + self.tokenizer.decode(call.after)
        options = {"stop": stop, "sampling": call.sampling, "drafting": call.drafting}
        options |= {
            "json_schema": call.json_schema,
            "logprobs": call.logprobs,
        }
        self.calls.append(Call("generate", text, **options))
        reply = self._reply_to(self.calls[-1])
        reply = Reply(reply) if isinstance(reply, str) else reply
        room = min(stop.max_tokens, self.max_context - len(prompt) - len(call.after))
        watch = StopMatcher(replace(stop, max_tokens=room), self.tokenizer.piece, self.tokenizer.end_ids)
        self.num_open += 1
        try:
            await asyncio.sleep(reply.delay_s)
            ids: list[int] = []
            logprobs: list[float] = []
            num_passes = 0

            def chunk() -> TokenChunk:
                start = num_passes - len(ids)
                relaxed = tuple(place - start for place in reply.relaxed if start <= place < num_passes)
                costs = {"queue_s": reply.queue_s, "passes": num_passes}
                if not call.logprobs:
                    return TokenChunk(tuple(ids), relaxed=relaxed, **costs)
                entropies = tuple(-2 * each for each in logprobs)
                return TokenChunk(tuple(ids), logprobs=tuple(logprobs), entropies=entropies, relaxed=relaxed, **costs)

            for num_passes, id in enumerate(self.tokenizer.encode(reply.text), 1):
                ids.append(id)
                logprobs.append((reply.logprobs or {}).get(num_passes - 1, -0.1))
                end = watch.feed(id)
                if end is not None:
                    yield replace(chunk(), end=end, drafted=reply.token_drafted, accepted=reply.token_accepted)
                    return
                if len(ids) == reply.chunk_size:
                    yield chunk()
                    ids, logprobs = [], []
                    if reply.gap_s is not None:
                        await asyncio.sleep(reply.gap_s)
            if ids:
                yield chunk()
            if reply.hangs:
                await self._hang()
            assert reply.fails is not None, f"no stop matched in {reply.text!r}, generated after {text!r}"
            raise reply.fails
        finally:
            self.num_open -= 1

    def _reply_to(self, call: Call) -> Reply | str:
        reply = next(self._replies, None)
        assert reply is not None, f"the script of {self.name} has no reply to {call.prompt!r}"
        return reply

    def _opinion_on(self, call: Call) -> Opinion | str:
        opinion = next(self._opinions, None)
        assert opinion is not None, f"the script of {self.name} has no opinion on {call.continuation!r}"
        return opinion

    async def check_schema(self, json_schema: str) -> None:
        """Accept every schema: the script decides what is generated."""

    async def verify(self, call: Verify) -> Verification:
        prompt, continuation, probes = call.prompt, call.continuation, call.probes
        self._check_room(len(prompt) + len(continuation) + sum(len(probe.ids) for probe in probes))
        text, decode = self._read(prompt), self.tokenizer.decode
        self.calls.append(
            Call("verify", text, decode(continuation), probes=tuple(decode(probe.ids) for probe in probes))
        )
        opinion = self._opinion_on(self.calls[-1])
        opinion = Opinion(opinion) if isinstance(opinion, str) else opinion
        self.num_open += 1
        try:
            await asyncio.sleep(opinion.delay_s)
            if opinion.hangs:
                await self._hang()
            if opinion.fails is not None:
                raise opinion.fails
        finally:
            self.num_open -= 1
        return self._supported(self._verification(opinion, continuation, probes))

    def _supported(self, verification: Verification) -> Verification:
        """Return the verification without the fields that this engine does not support."""
        return replace(
            verification,
            logprobs=verification.logprobs if "scores" in self.abilities else None,
            choices=verification.choices if "choices" in self.abilities else None,
            probe_logprobs=verification.probe_logprobs if "label logprobs" in self.abilities else (),
        )

    def _verification(self, opinion: Opinion, continuation: Sequence[int], probes: Sequence[Probe]) -> Verification:
        anything = self.tokenizer.encode("?" * (len(continuation) + 1))
        own = [*self.tokenizer.encode(opinion.text), *anything][: len(continuation) + 1]
        logprobs = [-0.1 if id == choice else -9.0 for id, choice in zip(continuation, own, strict=False)]
        for position, logprob in (opinion.logprobs or {}).items():
            logprobs[position] = logprob
        distribution = opinion.digits or ({int(opinion.rating): 1.0} if opinion.rating.isdigit() else {})
        digits = tuple(math.log(distribution[digit]) if distribution.get(digit) else -math.inf for digit in range(10))
        rated = self.tokenizer.encode(opinion.rating)[0]
        return Verification(
            logprobs=tuple(logprobs),
            choices=tuple(own[:-1]),
            next_choice=own[-1],
            probe_logprobs=tuple(digits[: len(probe.labels)] for probe in probes),
            probe_choices=(rated,) * len(probes),
            queue_s=opinion.queue_s,
        )

    def describe(self) -> dict[str, str | None]:
        return {"name": self.name, "weights": None, "dtype": None, "device": None}

    def metrics(self) -> EngineMetrics:
        return EngineMetrics()

    async def forget(self) -> None:
        self.num_forgotten += 1

    async def aclose(self) -> None:
        self.closed = True

    def drafted_by(self, draft: "ScriptedEngine") -> "ScriptedEngine":
        return self

    async def _hang(self) -> None:
        self.hanging.set()
        await asyncio.Event().wait()

    def _check_room(self, wanted: int) -> None:
        if wanted > self.max_context:
            raise ContextError(f"{wanted} tokens do not fit the context of {self.max_context}.")

    def _read(self, prompt: TokenBuffer) -> str:
        """Return the prompt's text, and check that the prompt has only grown. `num_decoded` stays the same."""
        ids, seen = prompt.since(0), self._seen.get(prompt, [])
        assert ids[: len(seen)] == seen
        self._seen[prompt] = ids
        num_decoded = self.tokenizer.num_decoded
        text = self.tokenizer.decode(ids)
        self.tokenizer.num_decoded = num_decoded
        return text


class FarEngine(ScriptedEngine):
    """A scripted engine on a server, as far away as the delays of its script."""

    async def round_trip_s(self) -> float:
        return 0.02


PROMPT = "<|user|>How many?<|end|><|assistant|><think>"


@dataclass(frozen=True)
class Play:
    """The record of one request: its events, its result and both engines."""

    events: list[Event]
    result: Result
    target: ScriptedEngine
    draft: ScriptedEngine

    @property
    def steps(self) -> list[tuple[str, str, int, int, str]]:
        """Origin, text, number of tokens, number of tokens from the draft, and end of each step."""
        return [(step.origin, step.text, step.num_tokens, step.num_from_draft, step.end) for step in self.result.steps]

    @property
    def counted(self) -> dict[str, int]:
        """The counts that are not 0."""
        return {name: count for name, count in vars(self.result.counts).items() if count}


@dataclass
class Stage:
    """Two engines with one tokenizer, and a request for them to play."""

    policy: Policy
    draft_replies: Iterable[Reply | str] = ()
    opinions: Iterable[Opinion | str] = ()
    target_replies: Iterable[Reply | str] = ()
    max_tokens: int = 1000
    temperature: float = 0.0
    target_context: int = 100_000
    draft_context: int = 100_000
    tags: bool = True
    draft_kind: type[ScriptedEngine] = ScriptedEngine

    def __post_init__(self) -> None:
        self.tokenizer = WordTokenizer(tags=self.tags)
        self.draft = self.draft_kind(self.tokenizer, self.draft_replies, name="draft", max_context=self.draft_context)
        self.target = ScriptedEngine(
            self.tokenizer,
            self.target_replies,
            self.opinions,
            name="target",
            max_context=self.target_context,
        )
        self.request = Request(
            policy=self.policy,
            target=self.target,
            draft=self.draft,
            panel=self.policy.panel(self.tokenizer),
            tags=self.tokenizer.thinking,
            sampling=Sampling(temperature=self.temperature, seed=7),
            ledger=Ledger(self.max_tokens),
            prompt=self.tokenizer.encode(PROMPT),
        )

    def events(self) -> AsyncGenerator[Event, None]:
        """Run the request and yield its events."""
        return run(self.request)

    async def play(self) -> Play:
        """Run the whole request, and check everything that holds for every request."""
        events = [event async for event in self.events()]
        done = events[-1]
        assert isinstance(done, Done)
        assert not any(isinstance(event, Done) for event in events[:-1])
        result = done.result
        self._check(events, result)
        return Play(events, result, self.target, self.draft)

    def _check(self, events: Sequence[Event], result: Result) -> None:
        counts = result.counts
        counts.check(self.max_tokens)
        longest, rate = self.policy.waste
        assert counts.wasted <= rate * (counts.committed + 2 * longest)
        assert tuple(event.step for event in events if isinstance(event, StepCommitted)) == result.steps
        assert [step.index for step in result.steps] == list(range(counts.steps))
        assert result.reasoning == "".join(step.text for step in result.steps)
        assert result.answer == "".join(event.text for event in events if isinstance(event, AnswerDelta))
        if not self.tags:
            assert result.answer == result.reasoning
        assert self.target.num_open == self.draft.num_open == 0
        assert (
            min(
                vars(result.times)[part]
                for part in ("queue", "engine_wait", "draft", "judge", "target", "controller", "other")
            )
            >= 0
        )


def shape(events: Iterable[Event]) -> list[str]:
    """Return the types of the events, with consecutive repeats collapsed."""
    return [kind for kind, _ in itertools.groupby(event.type for event in events)]
