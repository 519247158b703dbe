"""The remote engine: a model on an OpenAI-compatible server, called through `/v1/completions`.

If the server supports token ids, requests and responses use ids, and committed text is never encoded again. Otherwise
they use text: each chunk of a response is encoded once and cut where a step ends. The engine detects the features of
the server when it is loaded, never during a request.
"""

import json
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from statistics import median
from typing import Any

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
    TokenChunk,
    Verification,
    Verify,
    check_acceptance,
    check_ids,
    check_room,
    may_be_relaxed,
    side_by_side,
)
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerChoice, ServerCompletion, ServerUsage
from stepspec.engines.remote.calls import ModelCalls
from stepspec.engines.remote.detection import found_server
from stepspec.engines.remote.dialects import SCORERS
from stepspec.engines.remote.limits import TokenDeadline
from stepspec.engines.remote.problems import RejectedError, nonsense, tokenizer_hint
from stepspec.engines.remote.server import FURTHER, SCHEMA_FIELDS, RemoteServer, text_fields
from stepspec.engines.stops import StopMatcher
from stepspec.engines.vllm_plugin.fields import fields_of
from stepspec.errors import UsageError

UNKNOWN_CONTEXT = 1 << 20
"""Context length in tokens if it is unknown. The server rejects prompts that are too long."""

SCHEMAS_KNOWN = 64
"""Number of accepted schemas to remember."""

ROUND_TRIPS = 9
"""Number of requests that measure the round trip."""


class RemoteEngine:
    """One model on one server. The server decides how to batch concurrent calls."""

    drafters: tuple[DrafterName, ...] = ("engine",)

    def __init__(
        self, address: Address, server: RemoteServer, tokenizer: HuggingFaceTokenizer, title: str | None = None
    ) -> None:
        self.name = title or server.model
        self.tokenizer = tokenizer
        self.max_context = address.context or server.max_context or context_of(server.folder) or UNKNOWN_CONTEXT
        self._calls = ModelCalls(address, server, tokenizer)
        self._scorer = None if server.scores is None else SCORERS[server.scores](self._calls)
        scores: Iterable[Ability] = self._scorer.abilities if self._scorer else ()
        labels: list[Ability] = ["label logprobs"] if server.num_logprobs else []
        written: list[Ability] = ["logprobs"] if server.written_logprobs and server.gives_ids else []
        schemas: list[Ability] = ["json schema"] if server.schema_field else []
        forgets: list[Ability] = ["forget"] if server.takes_salt else []
        relaxes: list[Ability] = ["relaxed acceptance"] if server.relaxes else []
        self.abilities: frozenset[Ability] = frozenset([*scores, *labels, *written, *schemas, *forgets, *relaxes])
        self.own_speculation = server.speculation
        found = default_sampling(address.tokenizer or server.folder)
        self.default_sampling = {name: found[name] for name in found if server.extended or name not in FURTHER}
        self.address = address
        self.server = server
        """The features of the server."""
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
        server = found_server(address)
        with tokenizer_hint():
            tokenizer = load_tokenizer(address.tokenizer or server.folder, thinking=address.thinking)
        return cls(address, server, tokenizer, title)

    def describe(self) -> dict[str, str | None]:
        """See `Engine.describe`."""
        where = f"{self.server.kind} at {self.address.base}"
        return {"name": self.name, "weights": weights_hash(self.server.folder), "dtype": None, "device": where}

    def metrics(self) -> EngineMetrics:
        """Return the totals over all calls so far."""
        return replace(self._calls.metrics.copied(), **vars(self._calls.wire.traffic))

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`. The server drafts as it was started; of `drafting`, it uses `acceptance`.

        Servers do not say which tokens are relaxed. At temperature 0 without penalties or bias, they are those that are
        not the most likely ones. Otherwise every token that may be counts as relaxed.
        """
        prompt, sampling, calls, server = call.prompt, call.sampling, self._calls, self.server
        length, rule = len(prompt) + len(call.after), call.drafting.acceptance
        check_acceptance(self, rule)
        check_room(self, length, 1)
        check_ids(self.name, self.tokenizer.num_ids, prompt, call.after, sampling.named_ids)
        stop = replace(call.stop, max_tokens=min(call.stop.max_tokens, self.max_context - length))
        watch = StopMatcher(stop, self.tokenizer.piece, self.tokenizer.end_ids)
        fields = text_fields(self.address, server, sampling, stop, length)
        if call.json_schema is not None and server.schema_field:
            fields |= SCHEMA_FIELDS[server.schema_field](call.json_schema)
        with_logprobs = call.logprobs and "logprobs" in self.abilities
        if with_logprobs:
            fields["logprobs"] = 1
        shows_relaxed = not (rule.is_exact or sampling.temperature > 0 or sampling.is_edited or call.json_schema)
        if not rule.is_exact:
            fields["vllm_xargs"] = fields_of(rule)
        if shows_relaxed:
            fields |= {"logprobs": 2, "return_tokens_as_token_ids": True}  # two, to see a token that is as likely
        reader = calls.reader()
        deadline = TokenDeadline(self.address)
        total, usage, finish, unfinished = TokenChunk((), "length"), ServerUsage(), None, True
        streams = server.streams(stop)
        async with aclosing(calls.answers(prompt, fields, call.after, deadline if streams else None)) as answers:
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
                relaxed = None if rule.is_exact else may_be_relaxed(self.tokenizer, ids)
                if relaxed and shows_relaxed:
                    relaxed = tuple(place for place in relaxed if choice.has_rival(self.address, place, ids[place]))
                if ids and unfinished:
                    deadline.token_came()
                end, count = watch.feed_all(ids)
                total = replace(total, passes=total.passes + bool(ids))
                calls.metrics.generated += count
                if end is not None:
                    unfinished = False
                    total = replace(total, ids=tuple(ids[:count]), end=end, logprobs=logprobs and logprobs[:count])
                    total = replace(total, relaxed=relaxed and tuple(place for place in relaxed if place < count))
                    if not finish:  # the server would continue; leaving cancels the request
                        break
                elif ids and unfinished:
                    yield replace(total, ids=tuple(ids), end=None, logprobs=logprobs, relaxed=relaxed)
        if unfinished:
            last = calls.last_ids(finish)
            left_out = (math.nan,) * len(last) if with_logprobs else None
            total = replace(total, ids=last, end="token" if finish == "stop" else "length", logprobs=left_out)
            total = replace(total, relaxed=None if rule.is_exact else ())
        if not streams:
            total = replace(total, passes=max(usage.completion_tokens - total.accepted, 0))
        calls.note(prompt, usage)
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
        if not self.server.schema_field or json_schema in self._accepted_schemas:
            return
        fields: dict[str, Any] = {"model": self.server.model, "prompt": "1", "max_tokens": 1}
        try:
            fields |= SCHEMA_FIELDS[self.server.schema_field](json_schema)
            await self._calls.wire.ask(self._calls.completions, json.dumps(fields).encode(), {})
        except (RejectedError, ValueError) as error:
            raise UsageError(f"The JSON schema is not supported: {error}") from error
        self._accepted_schemas.append(json_schema)

    async def verify(self, call: Verify) -> Verification:
        """See `Engine.verify`. Every probe generates one token after the cached prompt.

        All probes share one call if the server supports several prompts. Scores always take a separate call.
        """
        prompt, continuation, probes = call.prompt, call.continuation, call.probes
        check_room(self, len(prompt), len(continuation) + max((len(probe.ids) for probe in probes), default=0) + 1)
        probe_ids = (ids for probe in probes for ids in (probe.ids, probe.labels))
        check_ids(self.name, self.tokenizer.num_ids, prompt, continuation, *probe_ids)
        ends = [probe.after(continuation) for probe in probes]
        calls, scorer = self._calls, self._scorer
        if call.scores and scorer is not None:
            scored = scorer.scored(prompt, continuation, call.top)
            if scorer.comes_first:
                own, probed = await scored, await calls.tokens_after(prompt, ends)
            else:
                own, probed = await side_by_side(scored, calls.tokens_after(prompt, ends))
        else:
            first, *probed = await calls.tokens_after(prompt, [continuation, *ends])
            own = Verification(None, None, calls.token_of(first))
        found = [calls.label_logprobs(choice, probe.labels) for choice, probe in zip(probed, probes, strict=True)]
        return replace(
            own,
            probe_choices=tuple(map(calls.token_of, probed)),
            probe_logprobs=tuple(logprobs for logprobs in found if logprobs is not None),
            passes=1 + len(probes),
        )

    async def check_health(self) -> None:
        """Check that the server answers.

        Raises:
            EngineError: it does not.
        """
        await self._calls.wire.check(f"{self.address.base}/models")

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
        self._calls.forget()

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._calls.wire.aclose()


def _with_metrics(chunk: TokenChunk, event: ServerCompletion) -> TokenChunk:
    """Return the chunk with the metrics that the server reports."""
    assert event.metrics is not None
    speculation = event.metrics.speculative_decoding
    if speculation is not None:
        chunk = replace(chunk, drafted=speculation.num_draft_tokens, accepted=speculation.num_accepted_draft_tokens)
    return replace(chunk, queue_s=(event.metrics.queue_time_ms or 0.0) / 1000)
