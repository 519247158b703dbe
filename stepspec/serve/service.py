"""The service behind the routes: checks who asks, prepares requests, and queues them."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request

from stepspec.api.loading import Pair
from stepspec.api.session import PreparedRequest, Question
from stepspec.serve.admission import Admission
from stepspec.serve.errors import BusyError, RateError
from stepspec.serve.fields import MAX_ID_CHARACTERS, Speculation, TextRequest
from stepspec.serve.generation import Generation
from stepspec.serve.keys import Client, Rates
from stepspec.serve.log import entry_of
from stepspec.serve.models import ServedModels
from stepspec.serve.monitor import Monitor
from stepspec.serve.settings import Settings
from stepspec.serve.tokenize import TokenizeRequest


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
        self._rates = Rates()

    def client(self, request: Request) -> Client:
        """Return the client that sends a request.

        Raises:
            NoKeyError: it has no valid key.
        """
        client = self.settings.keys.client(request.headers.get("authorization"))
        entry_of(request.scope).client = client.name
        return client

    def enter(self, request: Request) -> Client:
        """Return the client of a request for text, before its body is read.

        Raises:
            NoKeyError: it has no valid key.
            RateError: it has used up its limits.
            BusyError: the service cannot take the request now.
        """
        client = self.client(request)
        try:
            self.admission.check()  # first, so that a request that is turned away here does not count
            self._rates.check(client)
        except RateError:
            self.monitor.rejected("rate")
            raise
        except BusyError as error:
            self.monitor.rejected(error.reason)
            raise
        return client

    async def prepare(
        self, asked: TextRequest, questions: Sequence[Question], client: Client, request: Request
    ) -> Generation:
        """Check and encode a request for text.

        Raises:
            UsageError: the request is invalid or not supported.
            EngineError: a model failed.
        """
        model, named = self.models.find(asked.model)
        policy, session = model.session(named, asked.speculation)
        options = asked.options(model.pair.target.tokenizer.end_ids)
        prompts: list[PreparedRequest] = [await session.prepare(question, options) for question in questions]
        entry = entry_of(request.scope)
        entry.request_id = asked.request_id or entry.request_id
        entry.session_id = asked.session_id or request.headers.get("x-session-id", "")[:MAX_ID_CHARACTERS] or None
        entry.model, entry.policy, entry.ignored = model.name, policy, asked.ignored
        if self.settings.log_prompts:
            tokenizer = model.pair.target.tokenizer
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
            admission=self.admission,
            rates=self._rates,
            monitor=self.monitor,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the service takes requests."""
        return not self.admission.is_full

    async def tokenized(self, asked: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a prompt, in the format of vLLM's `/tokenize`.

        Raises:
            UsageError: the request is invalid, or the prompt does not fit the context.
        """
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

    async def aclose(self) -> None:
        """Free all models."""
        for pair in self.models.pairs.values():
            await pair.aclose()
