"""The remote engine: a model on an OpenAI-compatible server, called through `/v1/completions`.

If the server supports token ids, requests and responses use ids, and committed text is never encoded again. Otherwise
they use text: each chunk of a response is encoded once and cut where a step ends. The engine detects the features of
the server when it is loaded, never during a request.
"""

import json
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

from stepspec.engines.draft_vocabulary import load_draft_vocabulary, within
from stepspec.engines.hugging_face import (
    HuggingFaceTokenizer,
    context_of,
    default_sampling,
    load_tokenizer,
    weights_hash,
)
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    Ability,
    DrafterName,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Verification,
    Verify,
    check_ids,
    check_room,
    hash_of,
    most_likely,
    side_by_side,
)
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import (
    Generated,
    ServerChoice,
    ServerCompletion,
    ServerUsage,
    TokenScores,
    checked_ids,
    label_logprobs,
    validated,
)
from stepspec.engines.remote.client import Wire
from stepspec.engines.remote.conversation import Conversation
from stepspec.engines.remote.limits import TokenDeadline
from stepspec.engines.remote.problems import RejectedError, nonsense, tokenizer_hint
from stepspec.engines.remote.server import (
    INFERENCE,
    RemoteServer,
    generate_fields,
    inference_fields,
    one_token_fields,
    schema_fields,
)
from stepspec.engines.stops import StopMatcher
from stepspec.errors import EngineError, UsageError

UNKNOWN_CONTEXT = 1 << 20
"""Context length in tokens if it is unknown. The server rejects prompts that are too long."""

SCHEMAS_KNOWN = 64
"""Number of accepted schemas to remember."""

USUAL = Sampling()
FURTHER = ("top_k", "min_p", "repetition_penalty")
"""Sampling fields that OpenAI's own API does not have."""

MAX_TAG = 64
"""Maximum length of an incomplete tag that is held back from encoding, in characters."""

ROUND_TRIPS = 9
"""Number of requests that measure the round trip."""

ENDED = {"stop", "length"}
"""Known values of `finish_reason`."""


class RemoteEngine:
    """One model on one server. The server decides how to batch concurrent calls."""

    drafters: tuple[DrafterName, ...] = ("engine",)

    def __init__(
        self, address: Address, server: RemoteServer, tokenizer: HuggingFaceTokenizer, title: str | None = None
    ) -> None:
        self.name = title or server.model
        self.tokenizer = tokenizer
        self.max_context = address.context or server.max_context or context_of(server.folder) or UNKNOWN_CONTEXT
        scores: list[Ability] = ["scores"] if server.scores else []
        if server.scores in ("prompt_logprobs", "generate"):
            scores.append("choices")
        cached: list[Ability] = ["cached scores"] if server.scores in ("inference", "generate") else []
        labels: list[Ability] = ["label logprobs"] if server.num_logprobs else []
        written: list[Ability] = ["logprobs"] if server.written_logprobs and server.gives_ids else []
        schemas: list[Ability] = ["json schema"] if server.schema_field else []
        forgets: list[Ability] = ["forget"] if server.takes_salt else []
        self.abilities: frozenset[Ability] = frozenset([*scores, *cached, *labels, *written, *schemas, *forgets])
        self.own_speculation = server.speculation
        found = default_sampling(address.tokenizer or server.folder)
        self.default_sampling = {name: found[name] for name in found if server.extended or name not in FURTHER}
        self.address = address
        self._server = server
        self._wire = Wire(address)
        self._metrics = EngineMetrics()
        # Servers without support for the field sample from the whole vocabulary.
        vocabulary = load_draft_vocabulary(server.folder, tokenizer.num_ids) if server.extended else None
        self._vocabulary = None if vocabulary is None else frozenset(vocabulary)
        self._cache_salt: str | None = None
        self._conversations: WeakKeyDictionary[TokenBuffer, Conversation] = WeakKeyDictionary()
        self._accepted_schemas: deque[str] = deque(maxlen=SCHEMAS_KNOWN)
        """The last schemas that the server accepted."""

    @classmethod
    def load(cls, spec: str, title: str | None = None) -> "RemoteEngine":
        """Detect the features of a server and load the model's tokenizer.

        Args:
            spec: the server's address, see `Address`.
            title: the model's name in results; None uses its name on the server.

        Raises:
            UsageError: the address is invalid.
            ModelError: the server does not answer or does not have the model, or its tokenizer cannot be loaded.
        """
        return cls.at(Address.parsed(spec), title)

    @classmethod
    def at(cls, address: Address, title: str | None = None) -> "RemoteEngine":
        """Return the engine of the server at an address, see `load`."""
        server = RemoteServer.found(address)
        with tokenizer_hint():
            tokenizer = load_tokenizer(address.tokenizer or server.folder, thinking=address.thinking)
        return cls(address, server, tokenizer, title)

    @property
    def server(self) -> RemoteServer:
        """The features of the server."""
        return self._server

    def describe(self) -> dict[str, str | None]:
        """See `Engine.describe`."""
        where = f"{self._server.kind} at {self.address.base}"
        return {"name": self.name, "weights": weights_hash(self._server.folder), "dtype": None, "device": where}

    def metrics(self) -> EngineMetrics:
        """Return the totals over all calls so far."""
        return replace(self._metrics.copied(), **vars(self._wire.traffic))

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`. The server drafts as it was started; `drafting` and `hint` have no effect."""
        prompt, sampling = call.prompt, call.sampling
        length = len(prompt) + len(call.after)
        check_room(self, length, 1)
        check_ids(self.name, self.tokenizer.num_ids, prompt, call.after, sampling.named_ids)
        stop = replace(call.stop, max_tokens=min(call.stop.max_tokens, self.max_context - length))
        watch = StopMatcher(stop, self.tokenizer.piece, self.tokenizer.end_ids)
        conversation = self._conversation(prompt)
        fields = self._fields(within(sampling, self._vocabulary), stop, length)
        if call.json_schema is not None and self._server.schema_field:
            fields |= schema_fields(self._server.schema_field, call.json_schema)
        with_logprobs = call.logprobs and "logprobs" in self.abilities
        if with_logprobs:
            fields["logprobs"] = 1
        body = conversation.body(prompt, fields, [call.after])
        reader = _ChunkReader(self.address, self._server, self.tokenizer)
        deadline = TokenDeadline(self.address)
        total, usage, finish, unfinished = TokenChunk((), "length"), ServerUsage(), None, True
        streams = self._streams(stop)
        async with aclosing(self._answers(conversation, body, deadline if streams else None)) as answers:
            async for answer in answers:
                usage = answer.usage or usage
                if answer.metrics is not None:
                    total = _with_metrics(total, answer)
                if not answer.choices:
                    continue
                choice = answer.only_choice(self.address)
                finish = choice.finish_reason or finish
                ids = reader.read(choice)
                logprobs = self._written_logprobs(choice, ids) if with_logprobs else None
                if ids and unfinished:
                    deadline.token_came()
                end, count = _fed(watch, ids)
                total = replace(total, passes=total.passes + bool(ids))
                self._metrics.generated += count
                if end is not None:
                    unfinished = False
                    total = replace(total, ids=tuple(ids[:count]), end=end, logprobs=logprobs and logprobs[:count])
                    if not finish:  # the server would continue; leaving cancels the request
                        break
                elif ids and unfinished:
                    yield TokenChunk(tuple(ids), logprobs=logprobs)
        if unfinished:
            last = self._last_ids(finish)
            left_out = (math.nan,) * len(last) if with_logprobs else None
            total = replace(total, ids=last, end="token" if finish == "stop" else "length", logprobs=left_out)
        if not streams:
            total = replace(total, passes=max(usage.completion_tokens - total.accepted, 0))
        self._note(prompt, usage)
        yield replace(total, cached=usage.cached)

    def _written_logprobs(self, choice: ServerChoice, ids: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probabilities of a chunk's ids."""
        found = choice.logprobs.token_logprobs if choice.logprobs else None
        logprobs = tuple(each for each in found or () if each is not None)
        if len(logprobs) != len(ids):
            raise nonsense(self.address, "no log-probabilities, although it returned them before")
        return logprobs

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`. It requests one token with the schema, unless the server accepted it recently."""
        if not self._server.schema_field or json_schema in self._accepted_schemas:
            return
        fields: dict[str, Any] = {"model": self._server.model, "prompt": "1", "max_tokens": 1}
        try:
            fields |= schema_fields(self._server.schema_field, json_schema)
            await self._wire.ask(f"{self.address.base}/completions", json.dumps(fields).encode(), {})
        except (RejectedError, ValueError) as error:
            raise UsageError(f"The JSON schema is not supported: {error}") from error
        self._accepted_schemas.append(json_schema)

    async def _answers(
        self, conversation: Conversation, body: bytes, deadline: TokenDeadline | None
    ) -> AsyncGenerator[ServerCompletion, None]:
        """Yield the events of a streamed response. Without a deadline, yield one response that is not streamed."""
        if deadline is None:
            yield await self._answer(conversation, body)
            return
        url = f"{self.address.base}/completions"
        async with self._wire.stream(url, body, conversation.headers, deadline) as (events, headers):
            conversation.replay(headers)
            async for found in events:
                yield ServerCompletion.read(self.address, found)

    async def _answer(self, conversation: Conversation, body: bytes) -> ServerCompletion:
        """Send a call without streaming and return its response."""
        started = time.perf_counter()
        found, headers = await self._wire.ask(f"{self.address.base}/completions", body, conversation.headers)
        conversation.replay(headers)
        answer = ServerCompletion.read(self.address, found)
        if (metrics := answer.metrics) is not None and metrics.time_to_first_token_ms is not None:
            compute_ms = metrics.time_to_first_token_ms + (metrics.generation_time_ms or 0.0)
            elapsed_s = time.perf_counter() - started
            self._metrics.note_call((metrics.queue_time_ms or 0.0) / 1000, compute_ms / 1000, elapsed_s)
        return answer

    def _streams(self, stop: Stop) -> bool:
        """Return whether to stream a text.

        A step is not streamed if the server can stop at its end, since users never see a part of a step.
        """
        return not (stop.delimiters and self._server.gives_ids)

    def _last_ids(self, finish: str | None) -> tuple[int, ...]:
        """Return the last ids of a text that the server ended: an end token, which servers leave out, or nothing."""
        if finish is None:
            raise EngineError(f"{self.address.base} ended the response before it was complete. See the server's log.")
        if finish not in ENDED:
            raise nonsense(self.address, f"the unknown finish_reason {finish!r}")
        if finish == "length":
            return ()
        if self.tokenizer.end_id is None:
            raise nonsense(self.address, "the end of a text, but the tokenizer has no end token")
        return (self.tokenizer.end_id,)

    def _fields(self, sampling: Sampling, stop: Stop, position: int) -> dict[str, Any]:
        """Return the fields of a call for text at a position, without the prompt.

        Most fields with default values are left out, since servers differ in their support.

        Raises:
            UsageError: the server does not support one of the sampling parameters.
        """
        fields: dict[str, Any] = {
            "model": self._server.model,
            "max_tokens": stop.max_tokens,
            "temperature": sampling.temperature,
        }
        if self._streams(stop):
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._server.shows_special:
            fields["skip_special_tokens"] = False
        if self._server.gives_ids:
            fields["return_token_ids"] = True
            fields |= {"stop": list(stop.delimiters), "include_stop_str_in_output": True}
            fields |= {"stop_token_ids": sorted(stop.token_ids)}
        if sampling.temperature > 0:
            fields["seed"] = sampling.seed_at(position)
        if sampling.top_p != 1.0:
            fields["top_p"] = sampling.top_p
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(sampling, name):
                fields[name] = getattr(sampling, name)
        if sampling.logit_bias:
            fields["logit_bias"] = {str(id): amount for id, amount in sampling.logit_bias}
        further = {name: getattr(sampling, name) for name in FURTHER if getattr(sampling, name) != getattr(USUAL, name)}
        if sampling.allowed is not None:
            further["allowed_token_ids"] = sorted(sampling.allowed)
        if further and not self._server.extended:
            raise UsageError(
                f"{self.address.base} supports only OpenAI's fields, so it cannot sample with {', '.join(further)}."
            )
        return fields | further

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`. Every probe generates one token after the cached prompt.

        All probes share one call if the server supports several prompts. Scores always take a separate call.
        """
        prompt, continuation, probes = call.prompt, call.continuation, call.probes
        check_room(self, len(prompt), len(continuation) + max((len(probe.ids) for probe in probes), default=0) + 1)
        probe_ids = (ids for probe in probes for ids in (probe.ids, probe.labels))
        check_ids(self.name, self.tokenizer.num_ids, prompt, continuation, *probe_ids)
        ends = [probe.after(continuation) for probe in probes]
        if call.scores and self._server.scores:
            scored = self._scored(prompt, continuation, call.top)
            if self._server.scores == "inference":  # it does not score what the probes have put into the prefix cache
                own, probed = await scored, await self._tokens_after(prompt, ends)
            else:
                own, probed = await side_by_side(scored, self._tokens_after(prompt, ends))
        else:
            first, *probed = await self._tokens_after(prompt, [continuation, *ends])
            own = Verification(None, None, self._token_of(first))
        found = [self._label_logprobs(choice, probe.labels) for choice, probe in zip(probed, probes, strict=True)]
        return replace(
            own,
            probe_choices=tuple(map(self._token_of, probed)),
            probe_logprobs=tuple(logprobs for logprobs in found if logprobs is not None),
            passes=1 + len(probes),
        )

    async def _tokens_after(self, prompt: TokenBuffer, furthers: Sequence[Sequence[int]]) -> Sequence[ServerChoice]:
        """Return the choices with the argmax token after the prompt and each of `furthers`."""
        if not furthers:
            return []
        fields = self._one_token_fields(self._server.num_logprobs)
        if len(furthers) == 1 or self._server.several_prompts:
            answer = await self._complete(prompt, fields, furthers)
            by_index = {choice.index: choice for choice in answer.choices}
            if len(answer.choices) != len(furthers) or by_index.keys() != set(range(len(furthers))):
                raise nonsense(self.address, f"{len(answer.choices)} choices instead of {len(furthers)}")
            return [by_index[index] for index in range(len(furthers))]
        answers = await side_by_side(*(self._complete(prompt, fields, [further]) for further in furthers))
        return [answer.only_choice(self.address) for answer in answers]

    def _label_logprobs(self, choice: ServerChoice, labels: Sequence[int]) -> tuple[float, ...] | None:
        """Return the log-probabilities of labels; None if the server returns none."""
        if not self._server.num_logprobs:
            return None
        tops = choice.top_logprobs()
        if tops is None:
            raise nonsense(self.address, "no log-probabilities, although it returned them before")
        return label_logprobs(tops, labels, self.tokenizer)

    async def _scored(self, prompt: TokenBuffer, continuation: Sequence[int], top: int) -> Verification:
        """Return the log-probabilities of a continuation and the argmax tokens at its positions."""
        if self._server.scores == "generate":
            return await self._scored_by_generate(prompt, continuation, top)
        if self._server.scores == "inference" and not top and continuation:
            return await self._scored_by_inference(prompt, continuation)
        fields, prompt_length = self._one_token_fields(0) | {"prompt_logprobs": max(1, top)}, len(prompt)
        answer = await self._complete(prompt, fields, [continuation])
        choice = answer.only_choice(self.address)
        rows = (choice.prompt_logprobs or [])[prompt_length:]
        try:
            tops = [row or {} for row in rows]
            logprobs = tuple(top[id].logprob for top, id in zip(tops, continuation, strict=True))
            choices = tuple(next(id for id, entry in top.items() if entry.rank == 1) for top in tops)
        except (KeyError, ValueError, StopIteration):
            raise nonsense(self.address, "prompt log-probabilities that do not match the prompt") from None
        found = tuple(most_likely({id: entry.logprob for id, entry in each.items()}, top) for each in tops)
        return Verification(logprobs, self._checked(choices), self._token_of(choice), top=found)

    async def _scored_by_inference(self, prompt: TokenBuffer, continuation: Sequence[int]) -> Verification:
        """Score a continuation with vLLM's `/inference/v1/generate`. Without the argmax tokens at its positions."""
        answer = await self._inference(prompt, continuation, cached=True)
        if answer.prompt_token_id_logprobs is None:
            answer = await self._inference(prompt, continuation, cached=False)
        try:
            logprobs = answer.logprobs()
        except ValueError:
            logprobs = ()
        if len(logprobs) != len(continuation):
            raise nonsense(self.address, "log-probabilities that do not match the prompt")
        usage = answer.usage or ServerUsage()
        self._note(prompt, usage)
        own, *_ = self._checked(answer.choices[0].token_ids)
        return Verification(logprobs, None, own, cached=usage.cached)

    async def _inference(self, prompt: TokenBuffer, continuation: Sequence[int], *, cached: bool) -> TokenScores:
        conversation = self._conversation(prompt)
        fields = inference_fields(self._server.model, continuation, len(prompt), cached=cached)
        body = conversation.body(prompt, fields, [continuation], "token_ids")
        found, headers = await self._wire.ask(f"{self.address.root}{INFERENCE}", body, conversation.headers)
        conversation.replay(headers)
        return validated(TokenScores, self.address, found, "scored text")

    async def _scored_by_generate(self, prompt: TokenBuffer, continuation: Sequence[int], top: int) -> Verification:
        """Score a continuation with SGLang's `/generate`."""
        conversation = self._conversation(prompt)
        fields = generate_fields(len(prompt)) | {"top_logprobs_num": max(1, top)}
        body = conversation.body(prompt, fields, [continuation], "input_ids")
        found, headers = await self._wire.ask(f"{self.address.root}/generate", body, conversation.headers)
        conversation.replay(headers)
        answer, count = validated(Generated, self.address, found, "scored text"), len(continuation)
        meta = answer.meta_info
        rows, tops = meta.input_token_logprobs[-count:], meta.input_top_logprobs[-count:]
        logprobs = tuple(logprob for logprob, _, _ in rows if logprob is not None) if count else ()
        choices = tuple(top[0][1] for top in tops if top) if count else ()
        if len(logprobs) != count or len(choices) != count:
            raise nonsense(self.address, "log-probabilities that do not match the prompt")
        self._note(prompt, ServerUsage())
        own, *_ = self._checked(answer.output_ids)
        listed = [{id: logprob for logprob, id, _ in each or () if logprob is not None} for each in tops]
        best = tuple(most_likely(each, top) for each in listed)
        return Verification(logprobs, self._checked(choices), own, cached=meta.cached_tokens or 0, top=best)

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(checked_ids(self.address, ids, self.tokenizer.num_ids))

    async def _complete(
        self, prompt: TokenBuffer, fields: Mapping[str, Any], furthers: Sequence[Sequence[int]]
    ) -> ServerCompletion:
        conversation = self._conversation(prompt)
        answer = await self._answer(conversation, conversation.body(prompt, fields, furthers))
        self._note(prompt, answer.usage or ServerUsage())
        return answer

    def _one_token_fields(self, num_logprobs: int) -> dict[str, Any]:
        server = self._server
        return one_token_fields(server.model, num_logprobs, extended=server.extended, special=server.shows_special)

    def _token_of(self, choice: ServerChoice) -> int:
        """Return the only token of a choice; the end token if the text is empty."""
        generated = _ChunkReader(self.address, self._server, self.tokenizer).read(choice, is_last=True)
        if ids := generated or self._last_ids(choice.finish_reason):
            return ids[0]
        raise nonsense(self.address, "no token where one was requested")

    def _conversation(self, prompt: TokenBuffer) -> Conversation:
        if prompt not in self._conversations:
            server = self._server
            salt = hash_of(prompt.group, self._cache_salt) if server.may_take_salt else None
            self._conversations[prompt] = Conversation(
                self.address, self.tokenizer, prompt, as_ids=server.takes_ids, cache_salt=salt
            )
        return self._conversations[prompt]

    def _note(self, prompt: TokenBuffer, usage: ServerUsage) -> None:
        self._metrics.prompt_tokens += usage.prompt_tokens or len(prompt)
        self._metrics.cached_tokens += usage.cached

    async def check_health(self) -> None:
        """Check that the server answers.

        Raises:
            EngineError: it does not.
        """
        await self._wire.check(f"{self.address.base}/models")

    async def round_trip_s(self) -> float:
        """See `Distant.round_trip_s`. The median of a few requests for the list of models, over an open connection."""
        await self.check_health()  # opens the connection
        found = list[float]()
        for _ in range(ROUND_TRIPS):
            since = time.perf_counter()
            await self.check_health()
            found.append(time.perf_counter() - since)
        return median(found)

    async def forget(self) -> None:
        """See `Engine.forget`. Later requests have a new cache salt, if the server supports one."""
        if self._server.may_take_salt:
            self._cache_salt = uuid.uuid4().hex

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._wire.aclose()


class _ChunkReader:
    """Converts the chunks of one response to token ids."""

    def __init__(self, address: Address, server: RemoteServer, tokenizer: HuggingFaceTokenizer) -> None:
        self._address = address
        self._server = server
        self._tokenizer = tokenizer
        self._held = ""

    def read(self, choice: ServerChoice, *, is_last: bool = False) -> Sequence[int]:
        """Return the ids of the next chunk.

        If the server returns text, the start of a possible tag is held back, unless `is_last` is set.
        """
        if self._server.gives_ids:
            if choice.token_ids is None:
                raise nonsense(self._address, "text without token ids, although it returned them before")
            return checked_ids(self._address, choice.token_ids, self._tokenizer.num_ids)
        # The text of a JSON string can have lone surrogates, which cannot be encoded.
        text, self._held = self._held + choice.text.encode("utf-8", "replace").decode(), ""
        start = text.rfind("<", -MAX_TAG)
        if start >= 0 and ">" not in text[start:] and not is_last and choice.finish_reason is None:
            text, self._held = text[:start], text[start:]
        return self._tokenizer.encode(text)


def _fed(watch: StopMatcher, ids: Sequence[int]) -> tuple[Any, int]:
    """Feed ids to the watch. Return why the text ends, or None, and the number of ids that belong to it."""
    for count, id in enumerate(ids, 1):
        if (end := watch.feed(id)) is not None:
            return end, count
    return None, len(ids)


def _with_metrics(chunk: TokenChunk, event: ServerCompletion) -> TokenChunk:
    """Return the chunk with the metrics that the server reports."""
    assert event.metrics is not None
    speculation = event.metrics.speculative_decoding
    if speculation is not None:
        chunk = replace(chunk, drafted=speculation.num_draft_tokens, accepted=speculation.num_accepted_draft_tokens)
    return replace(chunk, queue_s=(event.metrics.queue_time_ms or 0.0) / 1000)
