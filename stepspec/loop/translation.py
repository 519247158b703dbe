"""A draft with another tokenizer than the target's, as the target's side sees it.

Each side keeps ids of its own that only grow. What the draft wrote and the target took as it was stays what the draft
wrote; what else was committed is encoded once, by the draft's tokenizer, when the draft is asked next.
"""

from collections.abc import AsyncGenerator, Sequence
from functools import partial

from stepspec.chat.prompts import think_end_id
from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import (
    Ability,
    Chunk,
    DrafterName,
    Drafting,
    Engine,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Tokenizer,
    Verification,
    collect,
)
from stepspec.engines.text import TextReader, visible_ids
from stepspec.errors import UsageError


class TranslatedDraft:
    """The draft of one request, in the target's ids."""

    def __init__(self, draft: Engine, prompt: Sequence[int], tokenizer: Tokenizer, start: int) -> None:
        """`prompt` is the request as the draft's own template puts it, `tokenizer` the target's, and `start` the length
        of the request in its ids."""
        self.name = draft.name
        self.tokenizer = tokenizer
        self.max_context = draft.max_context
        self._draft = draft
        self._own = TokenBuffer(prompt)
        self._start = start
        self._reader: TextReader | None = None
        self._proposed: tuple[list[int], Sequence[int]] = [], ()
        """What was written last, in the target's ids and in the draft's own, tags left out."""
        own, theirs = think_end_id(draft.tokenizer), think_end_id(tokenizer)
        end = min(tokenizer.end_ids, default=None)
        # A model that does not think between tags ends its text where another one ends its thinking.
        self._tags = dict.fromkeys(draft.tokenizer.end_ids, theirs if own is None and theirs is not None else end)
        if own is not None:
            self._tags[own] = end if theirs is None else theirs

    @property
    def abilities(self) -> frozenset[Ability]:
        """None: a draft writes, and the target judges."""
        return frozenset()

    @property
    def drafters(self) -> Sequence[DrafterName]:
        """See `Engine.drafters`."""
        return self._draft.drafters

    @property
    def own_speculation(self) -> str | None:
        """See `Engine.own_speculation`."""
        return self._draft.own_speculation

    async def generate(
        self,
        prompt: TokenBuffer,
        sampling: Sampling,
        stop: Stop,
        drafting: Drafting = Drafting(),
        hint: Sequence[int] = (),
        json_schema: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`; `prompt` is the same buffer at every call. All ids come in one chunk.

        Raises:
            UsageError: the sampling names ids of the target's.
        """
        if sampling.logit_bias or sampling.allowed is not None:
            raise UsageError(
                f"{self.name} has other token ids than the target; logit_bias and allowed name the target's."
            )
        self._catch_up(prompt)
        own_stop = Stop(stop.max_tokens, stop.delimiters, frozenset(self._tags))
        chunk = await collect(self._draft.generate(self._own, sampling, own_stop, drafting, json_schema=json_schema))
        written = chunk.ids[:-1] if chunk.end == "token" else chunk.ids
        own = self._draft.tokenizer
        ids = self.tokenizer.encode_text(own.decode(visible_ids(own, written)))
        self._proposed = ids, written
        tag = self._tags.get(chunk.ids[-1]) if chunk.end == "token" else None
        whole = ids if tag is None else [*ids, tag]
        end = next((place for place, id in enumerate(whole, 1) if id in stop.token_ids), None)
        if end is not None and (end < len(whole) or tag is None):
            yield Chunk(tuple(whole[:end]), "token", chunk.queue_s, chunk.passes)
        elif len(whole) > stop.max_tokens:
            yield Chunk(tuple(whole[: stop.max_tokens]), "length", chunk.queue_s, chunk.passes)
        else:
            yield Chunk(tuple(whole), chunk.end, chunk.queue_s, chunk.passes)

    def _catch_up(self, prompt: TokenBuffer) -> None:
        """Takes over what was committed since the last call."""
        if self._reader is None:
            self._reader = TextReader(self.tokenizer, prompt, self._start, partial(visible_ids, self.tokenizer))
        theirs, own = self._proposed
        if theirs and prompt.since(self._reader.position)[: len(theirs)] == theirs:
            self._own.append(own)
            self._reader.position += len(theirs)
        if text := self._reader.read(len(prompt), to_the_end=False):
            self._own.append(self._draft.tokenizer.encode_text(text))

    async def check_schema(self, json_schema: str) -> None:
        """See `Engine.check_schema`."""
        await self._draft.check_schema(json_schema)

    async def verify(
        self, prompt: TokenBuffer, continuation: Sequence[int], probes: Sequence[Probe] = (), *, scores: bool = True
    ) -> Verification:
        """Not for a draft.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.name} has another vocabulary than the target, so it cannot judge the target's tokens.")

    def describe(self) -> dict[str, str | None]:
        """See `Engine.describe`."""
        return self._draft.describe()

    def metrics(self) -> Metrics:
        """See `Engine.metrics`."""
        return self._draft.metrics()

    async def forget(self) -> None:
        """See `Engine.forget`."""
        await self._draft.forget()

    async def aclose(self) -> None:
        """Nothing to free: the draft serves other requests too."""
