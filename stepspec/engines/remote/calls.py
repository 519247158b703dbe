"""Calls to one model on one server, and what the tokens in its responses are."""

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from stepspec.engines.hugging_face import HuggingFaceTokenizer
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import TokenBuffer, hash_of, side_by_side
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerChoice, ServerCompletion, ServerUsage, checked_ids, label_logprobs
from stepspec.engines.remote.client import Wire
from stepspec.engines.remote.conversation import Conversation
from stepspec.engines.remote.limits import TokenDeadline
from stepspec.engines.remote.problems import nonsense
from stepspec.engines.remote.server import RemoteServer, one_token_fields
from stepspec.errors import EngineError

ENDED = {"stop", "length"}
"""Known values of `finish_reason`."""

MAX_TAG = 64
"""Maximum length of an incomplete tag that is held back from encoding, in characters."""


class ModelCalls:
    """The calls to one model on one server."""

    def __init__(self, address: Address, server: RemoteServer, tokenizer: HuggingFaceTokenizer) -> None:
        self.address = address
        self.server = server
        self.tokenizer = tokenizer
        self.wire = Wire(address)
        self.metrics = EngineMetrics()
        self._cache_salt: str | None = None
        self._conversations: WeakKeyDictionary[TokenBuffer, Conversation] = WeakKeyDictionary()

    @property
    def completions(self) -> str:
        """Address of `/v1/completions`."""
        return f"{self.address.base}/completions"

    async def post(
        self,
        url: str,
        prompt: TokenBuffer,
        fields: Mapping[str, Any],
        furthers: Sequence[Sequence[int]],
        name: str = "prompt",
    ) -> Any:
        """Send a call and return the decoded JSON of its response. `furthers` and `name` are `Conversation.body`'s."""
        conversation = self._conversation(prompt)
        body = conversation.body(prompt, fields, furthers, name)
        found, headers = await self.wire.ask(url, body, conversation.headers)
        conversation.replay(headers)
        return found

    async def answer(
        self, prompt: TokenBuffer, fields: Mapping[str, Any], furthers: Sequence[Sequence[int]]
    ) -> ServerCompletion:
        """Return the response to a call for text that is not streamed."""
        return ServerCompletion.read(self.address, await self.post(self.completions, prompt, fields, furthers))

    async def answers(
        self, prompt: TokenBuffer, fields: Mapping[str, Any], further: Sequence[int], deadline: TokenDeadline | None
    ) -> AsyncGenerator[ServerCompletion, None]:
        """Yield the events of a streamed response. Without a deadline, yield one response that is not streamed."""
        if deadline is None:
            yield await self.answer(prompt, fields, [further])
            return
        conversation = self._conversation(prompt)
        body = conversation.body(prompt, fields, [further])
        async with self.wire.stream(self.completions, body, conversation.headers, deadline) as (events, headers):
            conversation.replay(headers)
            async for found in events:
                yield ServerCompletion.read(self.address, found)

    async def one_token(
        self, prompt: TokenBuffer, furthers: Sequence[Sequence[int]], num_logprobs: int = 0, **further_fields: Any
    ) -> ServerCompletion:
        """Return the response to a call for the argmax token after the prompt and each of `furthers`."""
        server = self.server
        fields = one_token_fields(server.model, num_logprobs, extended=server.extended, special=server.shows_special)
        answer = await self.answer(prompt, fields | further_fields, furthers)
        self.note(prompt, answer.usage or ServerUsage())
        return answer

    async def tokens_after(self, prompt: TokenBuffer, furthers: Sequence[Sequence[int]]) -> Sequence[ServerChoice]:
        """Return the choices with the argmax token after the prompt and each of `furthers`."""
        if not furthers:
            return []
        num_logprobs = self.server.num_logprobs
        if len(furthers) == 1 or self.server.several_prompts:
            answer = await self.one_token(prompt, furthers, num_logprobs)
            by_index = {choice.index: choice for choice in answer.choices}
            if len(answer.choices) != len(furthers) or by_index.keys() != set(range(len(furthers))):
                raise nonsense(self.address, f"{len(answer.choices)} choices instead of {len(furthers)}")
            return [by_index[index] for index in range(len(furthers))]
        answers = await side_by_side(*(self.one_token(prompt, [further], num_logprobs) for further in furthers))
        return [answer.only_choice(self.address) for answer in answers]

    def reader(self) -> "IdChunks | TextChunks":
        """Return a reader of the ids of one response."""
        return IdChunks(self) if self.server.gives_ids else TextChunks(self.tokenizer)

    def token_of(self, choice: ServerChoice) -> int:
        """Return the only token of a choice; the end token if the text is empty."""
        generated = self.reader().read(choice, is_last=True)
        if ids := generated or self.last_ids(choice.finish_reason):
            return ids[0]
        raise nonsense(self.address, "no token where one was requested")

    def last_ids(self, finish: str | None) -> tuple[int, ...]:
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

    def label_logprobs(self, choice: ServerChoice, labels: Sequence[int]) -> tuple[float, ...] | None:
        """Return the log-probabilities of labels; None if the server returns none."""
        if not self.server.num_logprobs:
            return None
        tops = choice.top_logprobs()
        if tops is None:
            raise nonsense(self.address, "no log-probabilities, although it returned them before")
        return label_logprobs(tops, labels, self.tokenizer)

    def checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return ids of a response; see `checked_ids`."""
        return tuple(checked_ids(self.address, ids, self.tokenizer.num_ids))

    def note(self, prompt: TokenBuffer, usage: ServerUsage) -> None:
        """Count the prompt tokens of a call."""
        self.metrics.prompt_tokens += usage.prompt_tokens or len(prompt)
        self.metrics.cached_tokens += usage.cached

    def forget(self) -> None:
        """Send another cache salt from now on, if the server may support one."""
        if self.server.may_take_salt:
            self._cache_salt = uuid.uuid4().hex

    def _conversation(self, prompt: TokenBuffer) -> Conversation:
        if prompt not in self._conversations:
            server = self.server
            salt = hash_of(prompt.group, self._cache_salt) if server.may_take_salt else None
            self._conversations[prompt] = Conversation(
                self.address, self.tokenizer, prompt, as_ids=server.takes_ids, cache_salt=salt
            )
        return self._conversations[prompt]


class IdChunks:
    """Reads the ids of one response."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls

    def read(self, choice: ServerChoice, *, is_last: bool = False) -> Sequence[int]:
        """Return the ids of the next chunk."""
        if choice.token_ids is None:
            raise nonsense(self._calls.address, "text without token ids, although it returned them before")
        return self._calls.checked(choice.token_ids)


class TextChunks:
    """Encodes the text of one response."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = ""

    def read(self, choice: ServerChoice, *, is_last: bool = False) -> Sequence[int]:
        """Return the ids of the next chunk. The start of a possible tag is held back, unless `is_last` is set."""
        # The text of a JSON string can have lone surrogates, which cannot be encoded.
        text, self._held = self._held + choice.text.encode("utf-8", "replace").decode(), ""
        start = text.rfind("<", -MAX_TAG)
        if start >= 0 and ">" not in text[start:] and not is_last and choice.finish_reason is None:
            text, self._held = text[:start], text[start:]
        return self._tokenizer.encode(text)
