"""The service behind the routes: checks who asks, prepares requests, and queues them."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Protocol, Self, TypeVar

from fastapi import Request

from stepspec.api.models import Pair
from stepspec.api.session import PreparedRequest, Question
from stepspec.engines.protocol import group_of
from stepspec.engines.thinking import ThinkingTags
from stepspec.serve.admission import Admission
from stepspec.serve.bodies import read_body
from stepspec.serve.errors import BusyError, RateError
from stepspec.serve.fields import MAX_ID_CHARACTERS, Speculation, TextRequest
from stepspec.serve.generation import Generation
from stepspec.serve.keys import Client, Rates, authorization_of
from stepspec.serve.log import entry_of
from stepspec.serve.messages_request import CountRequest
from stepspec.serve.models import ServedModels
from stepspec.serve.monitor import Monitor
from stepspec.serve.settings import Settings
from stepspec.serve.tokenize import TokenizeRequest

logger = logging.getLogger("stepspec.serve")


class RequestBody(Protocol):
    """The body of a request."""

    @classmethod
    def parsed(cls, body: bytes) -> Self:
        """Parse and validate a request body.

        Raises:
            RefusedError: the body is invalid.
        """
        ...

    def in_its_words(self) -> AbstractContextManager[None]:
        """Convert errors of the Python API to errors that name the request's fields."""
        ...


class TextBody(RequestBody, Protocol):
    """The body of a request for text, in the format of its route."""

    @property
    def text_request(self) -> TextRequest:
        """The same request in the format in which the service answers it."""
        ...

    def questions(self) -> Sequence[Question]:
        """Return the conversations or prompts.

        Raises:
            RefusedError: there are none, or too many.
        """
        ...

    @property
    def ignored(self) -> Sequence[str]:
        """Names of the unknown fields."""
        ...

    def fit(self, tags: ThinkingTags | None) -> None:
        """See `Body.fit`."""
        ...


B = TypeVar("B", bound=TextBody)
R = TypeVar("R", bound=RequestBody)


class Service:
    """The models, the queue, the keys and the metrics of a service."""

    def __init__(self, pairs: Mapping[str, Pair], policy: str, settings: Settings) -> None:
        """Raises:
        UsageError: a pair does not support the policy.
        """
        self.settings = settings
        self.models = ServedModels(pairs, policy)
        self.admission = Admission(settings.limits)
        self.monitor = Monitor(self.admission, pairs, policy)
        self.rates = Rates()
        models = [model for pair in pairs.values() for model in pair.loaded.values()]
        if settings.keys.are_needed:
            for name in {each.name for each in models if "forget" not in each.abilities}:
                logger.warning("%s keeps the texts of different keys in one cache, see SECURITY.md.", name)

    def client(self, request: Request) -> Client:
        """Return the client that sends a request.

        Raises:
            NoKeyError: it has no valid key.
        """
        client = self.settings.keys.client(authorization_of(request.headers.get))
        entry_of(request.scope).client = client.name
        return client

    @asynccontextmanager
    async def entering(self, request: Request) -> AsyncGenerator[Client]:
        """Return the client of a request, which counts as entering while the block reads and encodes it.

        Raises:
            NoKeyError: it has no valid key.
            RateError: it has used up its limits.
            BusyError: the service cannot take the request now.
        """
        client = self.client(request)
        try:
            self.admission.check()
            async with self.admission.entrance.place(client.name):  # first, so that one turned away does not count
                self.rates.check(client)
                yield client
        except RateError:
            self.monitor.rejected("rate")
            raise
        except BusyError as error:
            self.monitor.rejected(error.reason)
            raise

    @asynccontextmanager
    async def reading(self, request: Request, kind: type[R]) -> AsyncGenerator[tuple[Client, R]]:
        """Read and check a request. Errors in the block name its fields.

        Yields:
            its client, which counts as entering while the block runs, and its body.

        Raises:
            UsageError: the client may not send it now, or it is invalid.
            EngineError: the service cannot take it now.
        """
        async with self.entering(request) as client:
            body = await read_body(request, self.settings.max_body_bytes, kind.parsed)
            with body.in_its_words():
                yield client, body

    async def received(self, request: Request, kind: type[B]) -> tuple[B, Generation]:
        """Read, check and encode a request for text.

        Raises:
            UsageError: the client may not send it now, or it is invalid or not supported.
            EngineError: the service cannot take it now, or a model failed.
        """
        async with self.reading(request, kind) as (client, body):
            body.fit(self.models.find(body.text_request.model)[0].pair.target.tokenizer.thinking)
            entry_of(request.scope).ignored = body.ignored
            return body, await self._prepared(body.text_request, body.questions(), client, request)

    async def _prepared(
        self, asked: TextRequest, questions: Sequence[Question], client: Client, request: Request
    ) -> Generation:
        since = time.perf_counter()
        model, named = self.models.find(asked.model)
        policy, session = model.session(named, asked.speculation)
        entry = entry_of(request.scope)
        entry.request_id = asked.request_id or entry.request_id
        entry.session_id = asked.session_id or request.headers.get("x-session-id", "")[:MAX_ID_CHARACTERS] or None
        tokenizer = model.pair.target.tokenizer
        identity = {"session_id": entry.session_id, "cache_salt": group_of(client.group, asked.cache_salt)}
        options = asked.options(tokenizer.end_ids, tokenizer.num_ids).model_copy(update=identity)
        prompts: list[PreparedRequest] = []
        for question in questions:
            prompts.append(await session.prepare(question, options))
            await asyncio.sleep(0)  # many short prompts together would block the event loop
        entry.model, entry.policy = model.name, policy
        if self.settings.log_prompts:
            entry.prompt = "\n".join(tokenizer.decode(prompt.prompt) for prompt in prompts)
        return Generation(
            prompts=prompts,
            num_answers=asked.num_answers,
            model=model,
            policy=policy,
            client=client,
            priority=max(asked.priority or 0, client.priority),
            has_choices=bool(asked.form.choices),
            log=entry,
            deadline_s=options.deadline_s,
            since=since,
            admission=self.admission,
            rates=self.rates,
            monitor=self.monitor,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the service takes requests."""
        return not self.admission.is_full

    async def tokenized(self, request: Request) -> dict[str, Any]:
        """Return the tokens of the prompt of a request, in the format of vLLM's `/tokenize`.

        Raises:
            UsageError: the client may not send it now, it is invalid, or the prompt does not fit the context.
            EngineError: the service cannot take it now, or a model failed.
        """
        async with self.reading(request, TokenizeRequest) as (_, asked):
            model, _ = self.models.find(asked.model)
            session = model.session(None, Speculation())[1]
            ids = (await session.prepare(asked.question(), asked.options())).prompt
        target = model.pair.target
        return {
            "count": len(ids),
            "max_model_len": target.max_context,
            "tokens": list(ids),
            "token_strs": [*map(target.tokenizer.piece, ids)] if asked.return_token_strs else None,
        }

    async def counted(self, request: Request) -> dict[str, int]:
        """Return the number of tokens of a conversation, in the format of Anthropic's API. It may exceed the context.

        Raises:
            UsageError: the client may not send it now, or it is invalid.
            EngineError: the service cannot take it now, or a model failed.
        """
        async with self.reading(request, CountRequest) as (_, asked):
            model, named = self.models.find(asked.model)
            asked.fit(model.pair.target.tokenizer.thinking)
            session = model.session(named, Speculation())[1]
            options = asked.text_request.options(model.pair.target.tokenizer.end_ids)
            (messages,) = asked.questions()
            found = await session.prepared(messages, options, time.perf_counter(), must_fit=False)
            return {"input_tokens": len(found.prompt)}

    async def aclose(self) -> None:
        """Free all models."""
        for pair in self.models.pairs.values():
            await pair.aclose()
