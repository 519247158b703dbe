"""The remote engine: a model behind an OpenAI-compatible server, asked through `/v1/completions`.

Where the server takes and gives token ids, ids go over the wire, and what is committed is never encoded again. Where it
knows text alone, text goes, and what comes back is encoded once, piece by piece, and cut where a step ends. Nothing is
found out while a request runs: what the server can do is asked when the engine is loaded.
"""

import json
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from stepspec.engines.draft_vocabulary import load_draft_vocabulary, within
from stepspec.engines.hugging_face import HuggingFaceTokenizer, context_of, load_tokenizer, weights_hash
from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import (
    Ability,
    Chunk,
    DrafterName,
    Drafting,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Verification,
    check_ids,
    check_room,
    side_by_side,
)
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import Choice, Completion, Generated, Usage, checked_ids, label_logprobs, validated
from stepspec.engines.remote.client import Wire
from stepspec.engines.remote.conversation import Conversation
from stepspec.engines.remote.limits import TokenDeadline
from stepspec.engines.remote.problems import RejectedError, nonsense
from stepspec.engines.remote.server import Server, generate_fields, one_token_fields, schema_fields
from stepspec.engines.stops import StopWatch
from stepspec.errors import EngineError, ModelError, UsageError

UNKNOWN_CONTEXT = 1 << 20
"""Tokens, where nobody says how long a text may be: the server will refuse what is too long."""

SCHEMAS_KNOWN = 64
USUAL = Sampling()
FURTHER = ("top_k", "min_p", "repetition_penalty")
"""Of a sampling what OpenAI's own API does not have."""

MAX_TAG = 64
"""Characters of the longest tag that is waited for in text."""

ENDED = {"stop", "length"}
"""Known reasons for which a server ends a text."""


class RemoteEngine:
    """One model on one server. Calls share its batches as it sees fit."""

    drafters: tuple[DrafterName, ...] = ("engine",)

    def __init__(
        self, address: Address, server: Server, tokenizer: HuggingFaceTokenizer, title: str | None = None
    ) -> None:
        self.name = title or server.model
        self.tokenizer = tokenizer
        self.max_context = address.context or server.max_context or context_of(server.folder) or UNKNOWN_CONTEXT
        scores: list[Ability] = ["scores", "choices"] if server.scores else []
        labels: list[Ability] = ["label logprobs"] if server.num_logprobs else []
        schemas: list[Ability] = ["json schema"] if server.schema_field else []
        forgets: list[Ability] = ["forget"] if server.takes_salt else []
        self.abilities: frozenset[Ability] = frozenset([*scores, *labels, *schemas, *forgets])
        self.own_speculation = server.speculation
        self.address = address
        self._server = server
        self._wire = Wire(address)
        self._metrics = Metrics()
        # Servers that take no such field draw from the whole vocabulary.
        vocabulary = load_draft_vocabulary(server.folder, tokenizer.num_ids) if server.extended else None
        self._vocabulary = None if vocabulary is None else frozenset(vocabulary)
        self._cache_salt: str | None = None
        self._conversations: WeakKeyDictionary[TokenBuffer, Conversation] = WeakKeyDictionary()
        self._kept_schemas: deque[str] = deque(maxlen=SCHEMAS_KNOWN)
        """Those that the server took, the last ones."""

    @classmethod
    def load(cls, spec: str, title: str | None = None) -> "RemoteEngine":
        """Asks the server at an address (see `Address`) what it can do, and loads the model's tokenizer.

        Raises:
            UsageError: the address is none.
            ModelError: the server does not answer, does not have the model, or nobody knows its tokenizer.
        """
        address = Address.parsed(spec)
        server = Server.found(address)
        name = address.tokenizer or server.folder
        try:
            tokenizer = load_tokenizer(name)
        except ModelError as error:
            raise ModelError(f"{error} Name one that is here in the address, http://...?tokenizer=NAME.") from error
        return cls(address, server, tokenizer, title)

    def describe(self) -> dict[str, str | None]:
        """What results say of the model."""
        where = f"{self._server.kind} at {self.address.base}"
        return {"name": self.name, "weights": weights_hash(self._server.folder), "dtype": None, "device": where}

    def metrics(self) -> Metrics:
        """What was asked of the server so far, all calls together."""
        return replace(self._metrics.copied(), **vars(self._wire.traffic))

    async def generate(
        self,
        prompt: TokenBuffer,
        sampling: Sampling,
        stop: Stop,
        drafting: Drafting = Drafting(),
        hint: Sequence[int] = (),
        json_schema: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. Tokens are drafted as the server was started to do; a hint has no way to it."""
        check_room(self, len(prompt), 1)
        check_ids(self.name, self.tokenizer.num_ids, prompt, sampling.named_ids)
        stop = replace(stop, max_tokens=min(stop.max_tokens, self.max_context - len(prompt)))
        watch = StopWatch(stop, self.tokenizer.piece, self.tokenizer.end_ids)
        conversation = self._conversation(prompt)
        fields = self._fields(within(sampling, self._vocabulary), stop, len(prompt))
        if json_schema is not None and self._server.schema_field:
            fields |= schema_fields(self._server.schema_field, json_schema)
        body = conversation.body(prompt, fields)
        pieces = _Pieces(self.address, self._server, self.tokenizer)
        deadline = TokenDeadline(self.address)
        total, usage, finish, unfinished = Chunk((), "length"), Usage(), None, True
        whole = self._in_one_piece(stop)
        async with aclosing(self._answers(conversation, body, None if whole else deadline)) as answers:
            async for answer in answers:
                usage = answer.usage or usage
                if answer.metrics is not None:
                    total = _with_metrics(total, answer)
                if not answer.choices:
                    continue
                choice = answer.only_choice(self.address)
                finish = choice.finish_reason or finish
                ids = pieces.of(choice)
                if ids and unfinished:
                    deadline.token_came()
                end, count = _fed(watch, ids)
                total = replace(total, passes=total.passes + bool(ids))
                self._metrics.generated += count
                if end is not None:
                    unfinished = False
                    total = replace(total, ids=tuple(ids[:count]), end=end)
                    if not finish:  # it would write on: leaving tells it to stop
                        break
                elif ids and unfinished:
                    yield Chunk(tuple(ids))
        if unfinished:
            total = replace(total, ids=self._last_ids(finish), end="token" if finish == "stop" else "length")
        if whole:
            total = replace(total, passes=max(usage.completion_tokens - total.accepted, 0))
        self._note(prompt, usage)
        yield replace(total, cached=usage.cached)

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`. The server is asked for one token under it, once for each of the last schemas."""
        if not self._server.schema_field or json_schema in self._kept_schemas:
            return
        fields: dict[str, Any] = {"model": self._server.model, "prompt": "1", "max_tokens": 1}
        try:
            fields |= schema_fields(self._server.schema_field, json_schema)
            await self._wire.ask(f"{self.address.base}/completions", json.dumps(fields).encode(), {})
        except (RejectedError, ValueError) as error:
            raise UsageError(f"The JSON schema cannot be kept to: {error}") from error
        self._kept_schemas.append(json_schema)

    async def _answers(
        self, conversation: Conversation, body: bytes, deadline: TokenDeadline | None
    ) -> AsyncGenerator[Completion, None]:
        """What the server writes, as it comes; without a deadline for tokens in one piece."""
        if deadline is None:
            yield await self._answer(conversation, body)
            return
        url = f"{self.address.base}/completions"
        async with self._wire.stream(url, body, conversation.headers, deadline) as (events, headers):
            conversation.replay(headers)
            async for found in events:
                yield Completion.read(self.address, found)

    async def _answer(self, conversation: Conversation, body: bytes) -> Completion:
        """All that the server writes."""
        started = time.perf_counter()
        found, headers = await self._wire.ask(f"{self.address.base}/completions", body, conversation.headers)
        conversation.replay(headers)
        answer = Completion.read(self.address, found)
        if (told := answer.metrics) is not None and told.time_to_first_token_ms is not None:
            compute_ms = told.time_to_first_token_ms + (told.generation_time_ms or 0.0)
            whole = time.perf_counter() - started
            self._metrics.note_call((told.queue_time_ms or 0.0) / 1000, compute_ms / 1000, whole)
        return answer

    def _in_one_piece(self, stop: Stop) -> bool:
        """Whether a text is not streamed: a step, of which nobody sees a part, if the server itself knows its end."""
        return bool(stop.delimiters) and self._server.gives_ids

    def _last_ids(self, finish: str | None) -> tuple[int, ...]:
        """What a text ends with that its server ended by itself: an end token, which it does not show, or nothing."""
        if finish is None:
            raise EngineError(f"{self.address.base} ended its answer in the middle. See its log.")
        if finish not in ENDED:
            raise nonsense(self.address, f"a text that ended for the unknown reason {finish!r}")
        if finish == "length":
            return ()
        if self.tokenizer.end_id is None:
            raise nonsense(self.address, "the end of a text, of which the tokenizer has no token")
        return (self.tokenizer.end_id,)

    def _fields(self, sampling: Sampling, stop: Stop, position: int) -> dict[str, Any]:
        """What a call for text at that position says besides the prompt; nothing that is the usual anyway, as servers
        differ there.

        Raises:
            UsageError: the server would ignore or refuse some of it.
        """
        fields: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": stop.max_tokens,
            "temperature": sampling.temperature,
        }
        if not self._in_one_piece(stop):
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._server.extended:
            fields["skip_special_tokens"] = False
        if self._server.gives_ids:
            fields["return_token_ids"] = True
            fields |= {"stop": list(stop.delimiters), "include_stop_str_in_output": True}
            fields |= {"stop_token_ids": sorted(stop.token_ids)}
        if sampling.temperature > 0:
            fields["seed"] = sampling.seed_at(position)
        if sampling.top_p != 1.0:
            fields["top_p"] = sampling.top_p
        if sampling.logit_bias:
            fields["logit_bias"] = {str(id): amount for id, amount in sampling.logit_bias}
        further = {name: getattr(sampling, name) for name in FURTHER if getattr(sampling, name) != getattr(USUAL, name)}
        if sampling.allowed is not None:
            further["allowed_token_ids"] = sorted(sampling.allowed)
        if further and not self._server.extended:
            raise UsageError(
                f"{self.address.base} takes no fields beyond OpenAI's, so it cannot sample with {', '.join(further)}."
            )
        return fields | further

    async def verify(
        self, prompt: TokenBuffer, continuation: Sequence[int], probes: Sequence[Probe] = (), *, scores: bool = True
    ) -> Verification:
        """See `Engine.verify`. Every question is one token that the server writes behind what it has cached; they all
        go in one call where it takes several prompts, but for scores, which have a call of their own."""
        check_room(self, len(prompt), len(continuation) + max((len(probe.ids) for probe in probes), default=0) + 1)
        asked_ids = (ids for probe in probes for ids in (probe.ids, probe.labels))
        check_ids(self.name, self.tokenizer.num_ids, prompt, continuation, *asked_ids)
        ends = [[*continuation, *probe.ids] for probe in probes]
        if scores and self._server.scores:
            own, asked = await side_by_side(self._scored(prompt, continuation), self._tokens_after(prompt, ends))
        else:
            first, *asked = await self._tokens_after(prompt, [continuation, *ends])
            own = Verification(None, None, self._token_of(first))
        found = [self._label_logprobs(choice, probe.labels) for choice, probe in zip(asked, probes, strict=True)]
        return replace(
            own,
            probe_choices=tuple(map(self._token_of, asked)),
            probe_logprobs=tuple(logprobs for logprobs in found if logprobs is not None),
            passes=1 + len(probes),
        )

    async def _tokens_after(self, prompt: TokenBuffer, furthers: Sequence[Sequence[int]]) -> Sequence[Choice]:
        """The most likely token behind the prompt and each of these."""
        if not furthers:
            return []
        fields = self._one_token_fields(self._server.num_logprobs)
        if len(furthers) == 1 or self._server.several_prompts:
            answer = await self._asked(prompt, fields, furthers)
            by_index = {choice.index: choice for choice in answer.choices}
            if len(answer.choices) != len(furthers) or by_index.keys() != set(range(len(furthers))):
                raise nonsense(self.address, f"{len(answer.choices)} choices where {len(furthers)} were asked for")
            return [by_index[index] for index in range(len(furthers))]
        answers = await side_by_side(*(self._asked(prompt, fields, [further]) for further in furthers))
        return [answer.only_choice(self.address) for answer in answers]

    def _label_logprobs(self, choice: Choice, labels: Sequence[int]) -> tuple[float, ...] | None:
        """The log-probabilities of labels, if the server shows any."""
        if not self._server.num_logprobs:
            return None
        tops = choice.top_logprobs()
        if tops is None:
            raise nonsense(self.address, "no log-probabilities, although it gave them before")
        return label_logprobs(tops, labels, self.tokenizer)

    async def _scored(self, prompt: TokenBuffer, continuation: Sequence[int]) -> Verification:
        """A continuation's log-probabilities and the model's own choices beside them."""
        if self._server.scores == "generate":
            return await self._scored_by_generate(prompt, continuation)
        fields, prompt_length = self._one_token_fields(0) | {"prompt_logprobs": 1}, len(prompt)
        answer = await self._asked(prompt, fields, [continuation])
        choice = answer.only_choice(self.address)
        rows = (choice.prompt_logprobs or [])[prompt_length:]
        try:
            tops = [row or {} for row in rows]
            logprobs = tuple(top[id].logprob for top, id in zip(tops, continuation, strict=True))
            choices = tuple(next(id for id, entry in top.items() if entry.rank == 1) for top in tops)
        except (KeyError, ValueError, StopIteration):
            raise nonsense(self.address, "prompt log-probabilities that do not fit the prompt") from None
        return Verification(logprobs, self._checked(choices), self._token_of(choice))

    async def _scored_by_generate(self, prompt: TokenBuffer, continuation: Sequence[int]) -> Verification:
        """The same by SGLang's own path."""
        conversation = self._conversation(prompt)
        body = conversation.body(prompt, generate_fields(len(prompt)), [continuation], "input_ids")
        found, headers = await self._wire.ask(f"{self.address.root}/generate", body, conversation.headers)
        conversation.replay(headers)
        answer, count = validated(Generated, self.address, found, "scored text"), len(continuation)
        meta = answer.meta_info
        rows, tops = meta.input_token_logprobs[-count:], meta.input_top_logprobs[-count:]
        logprobs = tuple(logprob for logprob, _, _ in rows if logprob is not None) if count else ()
        choices = tuple(top[0][1] for top in tops if top) if count else ()
        if len(logprobs) != count or len(choices) != count:
            raise nonsense(self.address, "log-probabilities that do not fit the prompt")
        self._note(prompt, Usage())
        own, *_ = self._checked(answer.output_ids)
        return Verification(logprobs, self._checked(choices), own, cached=meta.cached_tokens or 0)

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(checked_ids(self.address, ids, self.tokenizer.num_ids))

    async def _asked(
        self, prompt: TokenBuffer, fields: Mapping[str, Any], furthers: Sequence[Sequence[int]]
    ) -> Completion:
        conversation = self._conversation(prompt)
        answer = await self._answer(conversation, conversation.body(prompt, fields, furthers))
        self._note(prompt, answer.usage or Usage())
        return answer

    def _one_token_fields(self, num_logprobs: int) -> dict[str, Any]:
        return one_token_fields(self._server.model, num_logprobs, extended=self._server.extended)

    def _token_of(self, choice: Choice) -> int:
        """The only token of an answer; the end of the text where nothing was written."""
        written = _Pieces(self.address, self._server, self.tokenizer).of(choice, whole=True)
        if ids := written or self._last_ids(choice.finish_reason):
            return ids[0]
        raise nonsense(self.address, "nothing where a token was asked for")

    def _conversation(self, prompt: TokenBuffer) -> Conversation:
        if prompt not in self._conversations:
            as_ids = self._server.takes_ids
            self._conversations[prompt] = Conversation(
                self.address, self.tokenizer, prompt, as_ids=as_ids, cache_salt=self._cache_salt
            )
        return self._conversations[prompt]

    def _note(self, prompt: TokenBuffer, usage: Usage) -> None:
        self._metrics.prompt_tokens += usage.prompt_tokens or len(prompt)
        self._metrics.cached_tokens += usage.cached

    async def forget(self) -> None:
        """See `Engine.forget`. Requests from now on carry a new salt where the server divides its prefixes by one."""
        if self._server.takes_salt:
            self._cache_salt = uuid.uuid4().hex

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._wire.aclose()


class _Pieces:
    """The ids of what a server writes, piece by piece."""

    def __init__(self, address: Address, server: Server, tokenizer: HuggingFaceTokenizer) -> None:
        self._address = address
        self._server = server
        self._tokenizer = tokenizer
        self._held = ""

    def of(self, choice: Choice, *, whole: bool = False) -> Sequence[int]:
        """Those of the next piece. Of text the beginning of what may be a tag is held back, unless it is `whole`."""
        if self._server.gives_ids:
            if choice.token_ids is None:
                raise nonsense(self._address, "text without token ids, although it gave them before")
            return checked_ids(self._address, choice.token_ids, self._tokenizer.num_ids)
        text, self._held = self._held + choice.text.encode("utf-8", "replace").decode(), ""  # JSON has half characters
        start = text.rfind("<", -MAX_TAG)
        if start >= 0 and ">" not in text[start:] and not whole and choice.finish_reason is None:
            text, self._held = text[:start], text[start:]
        return self._tokenizer.encode(text)


def _fed(watch: StopWatch, ids: Sequence[int]) -> tuple[Any, int]:
    """What ends the text among these ids, and how many belong to it."""
    for count, id in enumerate(ids, 1):
        if (end := watch.feed(id)) is not None:
            return end, count
    return None, len(ids)


def _with_metrics(chunk: Chunk, event: Completion) -> Chunk:
    """A chunk with what the server says of its call."""
    assert event.metrics is not None
    speculation = event.metrics.speculative_decoding
    if speculation is not None:
        chunk = replace(chunk, drafted=speculation.num_draft_tokens, accepted=speculation.num_accepted_draft_tokens)
    return replace(chunk, queue_s=(event.metrics.queue_time_ms or 0.0) / 1000)
