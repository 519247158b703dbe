"""A wrapper for a draft whose tokenizer differs from the target's: it takes and returns the target's ids.

The draft and the target each keep their own append-only ids. If the target accepts the draft's text unchanged, the
draft's original ids are reused. All other committed text is encoded once with the draft's tokenizer, at the next call.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    Ability,
    DrafterName,
    Engine,
    Generate,
    Stop,
    TokenBuffer,
    TokenChunk,
    Tokenizer,
    Verification,
    Verify,
    collect,
)
from stepspec.engines.text import TextReader, visible_ids
from stepspec.errors import UsageError


class TranslatedDraft:
    """The draft of one request, behind an interface in the target's ids."""

    def __init__(
        self,
        draft: Engine,
        prompt: Sequence[int],
        tokenizer: Tokenizer,
        start: int,
        session: str | None = None,
        group: str | None = None,
    ) -> None:
        """
        Args:
            draft: the draft's engine.
            prompt: the request in the draft's ids, rendered with the draft's chat template.
            tokenizer: the target's tokenizer.
            start: length of the request in the target's ids.
            session: see `TokenBuffer`, also for `group`.
        """
        self.name = draft.name
        self.tokenizer = tokenizer
        self.max_context = draft.max_context
        self._draft = draft
        self._draft_buffer = TokenBuffer(prompt, session, group)
        self._start = start
        self._reader: TextReader | None = None
        self._ahead: dict[tuple[int, ...], tuple[int, ...]] = {}
        """What the draft has written after the committed text, without end tags: its own ids by the target's ids."""
        own, other = draft.tokenizer.thinking, tokenizer.thinking
        end = min(tokenizer.end_ids, default=None)
        # If only one model has thinking tags, the other's end of text stands for the end of the thinking. So does the
        # target's own if it ends its thinking with a text, which the target then writes instead.
        end_of_thinking = end if other is None or other.end is None else other.end
        self._tags = dict.fromkeys(draft.tokenizer.end_ids, end if own is not None else end_of_thinking)
        self._tags |= dict.fromkeys(own.ends if own is not None else (), end_of_thinking)

    @property
    def abilities(self) -> frozenset[Ability]:
        """See `Engine.abilities`. A draft only generates, and the target judges."""
        return self._draft.abilities & {"logprobs", "entropies"}

    @property
    def drafters(self) -> Sequence[DrafterName]:
        """See `Engine.drafters`."""
        return self._draft.drafters

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """See `Engine.default_sampling`."""
        return self._draft.default_sampling

    @property
    def own_speculation(self) -> str | None:
        """See `Engine.own_speculation`."""
        return self._draft.own_speculation

    async def generate(self, call: Generate) -> AsyncGenerator[TokenChunk, None]:
        """See `Engine.generate`. Log-probabilities are of the draft's own ids, of which there may be another number. If
        the text is cut, they are of those ids that begin before the cut.

        The prompt must be the same buffer at every call, and no call may be open when it grows. All ids come in one
        chunk. `logit_bias` and `allowed` have no effect, as they are about the target's ids.
        """
        sampling, stop = replace(call.sampling, logit_bias=(), allowed=None), call.stop
        self._catch_up(call.prompt)
        own_stop = Stop(stop.max_tokens, stop.delimiters, frozenset(self._tags))
        after = self._translated(tuple(call.after))
        own = replace(call, prompt=self._draft_buffer, sampling=sampling, after=after, stop=own_stop)
        chunk = await collect(self._draft.generate(own))
        written = chunk.ids[:-1] if chunk.end == "token" else chunk.ids
        tokenizer = self._draft.tokenizer
        ids = self.tokenizer.encode_text(tokenizer.decode(visible_ids(tokenizer, written)))
        self._ahead[(*call.after, *ids)] = (*after, *written)
        tag = self._tags.get(chunk.ids[-1]) if chunk.end == "token" else None
        output = ids if tag is None else [*ids, tag]
        translated = TokenChunk(
            tuple(output),
            chunk.end,
            chunk.queue_s,
            chunk.passes,
            logprobs=chunk.logprobs,
            entropies=chunk.entropies,
        )
        end = next((length for length, id in enumerate(output, 1) if id in stop.token_ids), None)
        if end is not None and (end < len(output) or tag is None):
            yield self._cut(translated, written, end, "token")
        elif len(output) > stop.max_tokens:
            yield self._cut(translated, written, stop.max_tokens, "length")
        else:
            yield translated

    def _cut(
        self, chunk: TokenChunk, written: Sequence[int], length: int, end: Literal["token", "length"]
    ) -> TokenChunk:
        """Return the first `length` ids of a chunk for which the draft has written `written`."""
        tokenizer, kept = self._draft.tokenizer, chunk.ids[:length]
        num_characters, count = len(self.tokenizer.decode(visible_ids(self.tokenizer, kept))), 0
        while count < len(written) and len(tokenizer.decode(visible_ids(tokenizer, written[:count]))) < num_characters:
            count += 1
        values = {"logprobs": chunk.logprobs, "entropies": chunk.entropies}
        details: dict[str, Any] = {name: each and each[: count + (end == "token")] for name, each in values.items()}
        return replace(chunk, ids=kept, end=end, **details)

    def _translated(self, ids: tuple[int, ...]) -> Sequence[int]:
        """Return uncommitted ids of the target in the draft's ids."""
        if not ids:
            return ()
        if ids in self._ahead:
            return self._ahead[ids]
        return self._draft.tokenizer.encode_text(self.tokenizer.decode(visible_ids(self.tokenizer, ids)))

    def _catch_up(self, prompt: TokenBuffer) -> None:
        """Append the text committed since the last call to the draft's ids."""
        if self._reader is None:
            self._reader = TextReader(self.tokenizer, prompt, self._start, partial(visible_ids, self.tokenizer))
        new = tuple(prompt.since(self._reader.position))
        if not new:
            return
        for target_ids in sorted(self._ahead, key=len, reverse=True):
            if target_ids and new[: len(target_ids)] == target_ids:
                self._draft_buffer.append(self._ahead[target_ids])
                self._reader.position += len(target_ids)
                break
        self._ahead.clear()
        if text := self._reader.read(len(prompt), to_the_end=False):
            self._draft_buffer.append(self._draft.tokenizer.encode_text(text))

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`."""
        await self._draft.check_schema(json_schema)

    async def verify(self, call: Verify) -> Verification:
        """Not supported for a draft.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.name} has another vocabulary than the target, so it cannot judge the target's tokens.")

    def describe(self) -> Mapping[str, str | int | None]:
        """See `Engine.describe`."""
        return self._draft.describe()

    def metrics(self) -> EngineMetrics:
        """See `Engine.metrics`."""
        return self._draft.metrics()

    async def forget(self) -> None:
        """See `Engine.forget`."""
        await self._draft.forget()

    async def aclose(self) -> None:
        """Do nothing: other requests share the draft."""
