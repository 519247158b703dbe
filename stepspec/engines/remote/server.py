"""What a server can do, found out by asking it, once, before anything is timed."""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import httpx
from pydantic import BaseModel, Field, ValidationError

from stepspec.base.loop_thread import LoopThread
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import (
    Choice,
    Completion,
    Generated,
    GenerateMeta,
    ModelCard,
    ModelList,
    validated,
)
from stepspec.engines.remote.client import CONNECT_S
from stepspec.engines.remote.limits import BoundedTransport, read_json, read_whole
from stepspec.engines.remote.problems import nonsense, refused, unreachable
from stepspec.errors import EngineError, ModelError, StepSpecError, unknown_name

FIRST_CALLS_S = 120.0
"""A server may compile something when it is asked a thing for the first time."""

TRIAL_IDS = [5, 6, 7]
TRIAL_TEXT = "1 2 3"
MOST_LOGPROBS = (20, 5)
"""Numbers of log-probabilities that are asked for: vLLM's most, and OpenAI's."""

ScoreRoute = Literal["prompt_logprobs", "generate"]
"""How a server scores a continuation: vLLM's field of that name, which reads the whole prompt again; or SGLang's
`/generate`, which does not."""


SchemaField = Literal["structured_outputs", "json_schema"]
"""Where a server looks for the schema of a text: vLLM in the one, SGLang and llama.cpp in the other."""

TRIAL_SCHEMA = '{"enum": ["stepspec"]}'
TRIAL_VALUE = '"stepspec"'
"""The only text that the schema allows."""
MAX_NAMED = 20
"""Models that a message lists."""
A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True)
class Server:
    """One model as its server offers it."""

    model: str
    folder: str
    """Where its weights and tokenizer are, as far as the server says; else the model's name."""
    kind: str
    """The server's name and version, where it tells them."""
    max_context: int | None
    extended: bool
    """Whether it takes fields that OpenAI's own API does not know; others than that ignore what they do not know."""
    takes_ids: bool
    gives_ids: bool
    num_logprobs: int
    """Most likely tokens whose log-probabilities it gives; 0 if none."""
    several_prompts: bool
    """Whether one call may have several prompts."""
    scores: ScoreRoute | None
    schema_field: SchemaField | None
    speculation: str | None
    """How it drafts tokens by itself, "none" if it does not; None where it does not say."""
    takes_salt: bool
    """Whether calls with a new `cache_salt` find no earlier prefix."""

    @classmethod
    def found(cls, address: Address) -> "Server":
        """Asks the server.

        Raises:
            ModelError: there is no such server or model, or it does not complete text.
        """
        asking = LoopThread("asks a server")  # of its own, since a loop may be running here
        try:
            return asking.run(cls._found(address))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ModelError(str(unreachable(address, error))) from error
        except StepSpecError as error:
            raise error if isinstance(error, ModelError) else ModelError(str(error)) from error
        finally:
            asking.close()

    @classmethod
    async def _found(cls, address: Address) -> "Server":
        if address.first_token_timeout is None:
            address = replace(address, first_token_timeout=max(address.timeout, FIRST_CALLS_S))
        one_call_each = httpx.Limits(max_keepalive_connections=0)  # some servers drop a connection after an error
        connections = httpx.AsyncHTTPTransport(verify=address.uses_tls, limits=one_call_each)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        bounded = BoundedTransport(connections, address)
        async with httpx.AsyncClient(transport=bounded, timeout=timeout, headers=address.headers()) as client:
            return await _Asking(address, client).server()


class _Trial(NamedTuple):
    prompt: list[int] | str
    num_logprobs: int
    extended: bool


TRIALS = [_Trial(prompt, count, True) for prompt in (TRIAL_IDS, TRIAL_TEXT) for count in (*MOST_LOGPROBS, 0)]
TRIALS += [_Trial(TRIAL_TEXT, count, False) for count in (MOST_LOGPROBS[-1], 0)]


class _Reply(NamedTuple):
    response: httpx.Response
    body: bytes


@dataclass
class _Asking:
    address: Address
    client: httpx.AsyncClient

    async def server(self) -> Server:
        card = await self._model_card()
        trial, choice = await self._trial(card.id)
        tops = choice.top_logprobs() or {}
        return Server(
            model=card.id,
            folder=card.root or card.id,
            kind=await self._kind(card),
            max_context=card.max_context,
            extended=trial.extended,
            takes_ids=trial.prompt is TRIAL_IDS,
            gives_ids=bool(choice.token_ids),
            num_logprobs=trial.num_logprobs if tops else 0,
            several_prompts=await self._takes_several(card.id, trial),
            scores=await self._score_route(card.id) if trial.prompt is TRIAL_IDS else None,
            schema_field=await self._schema_field(card.id, trial),
            speculation=await self._speculation(),
            takes_salt=card.owned_by == "vllm",
        )

    async def _model_card(self) -> ModelCard:
        """What the server says of the model."""
        reply = await self._get(f"{self.address.base}/models")
        status = reply.response.status_code
        if not reply.response.is_success:
            if self.address.model is not None and status not in (401, 403):
                return ModelCard(id=self.address.model)  # some do not list them
            raise refused(self.address, status, reply.body)
        named = {card.id: card for card in validated(ModelList, self.address, self._json(reply), "list of models").data}
        wanted = self.address.model
        if wanted is None and len(named) == 1:
            return next(iter(named.values()))
        if wanted is None:
            names = ", ".join([*islice(named, MAX_NAMED), *(["..."] if len(named) > MAX_NAMED else [])])
            raise ModelError(f"{self.address.base} has {len(named)} models; write one behind '#': {names}")
        if wanted not in named:
            raise ModelError(f"At {self.address.base}: {unknown_name('model', wanted, named)}")
        return named[wanted]

    async def _trial(self, model: str) -> tuple[_Trial, Choice]:
        """The most demanding call that it serves, and its answer."""
        refusal: StepSpecError | None = None
        for trial in TRIALS:
            fields = one_token_fields(model, trial.num_logprobs, extended=trial.extended) | {"prompt": trial.prompt}
            reply = await self._post(self._completions, fields)
            status = reply.response.status_code
            if status in (400, 422, 500):
                refusal = refused(self.address, status, reply.body)
                continue
            if not reply.response.is_success:
                raise refused(self.address, status, reply.body)
            answer = Completion.read(self.address, self._json(reply))
            num_read = answer.usage.prompt_tokens if answer.usage else 0
            if trial.prompt is TRIAL_TEXT or num_read in (0, len(TRIAL_IDS)):  # else it took ids for something else
                return trial, answer.only_choice(self.address)
        raise refusal or EngineError(f"{self.address.base} completes neither ids nor text.")

    async def _takes_several(self, model: str, trial: "_Trial") -> bool:
        fields = one_token_fields(model, trial.num_logprobs, extended=trial.extended) | {"prompt": [trial.prompt] * 2}
        answer = await self._tried(Completion, self._completions, fields)
        return answer is not None and sorted(choice.index for choice in answer.choices) == [0, 1]

    async def _score_route(self, model: str) -> ScoreRoute | None:
        fields = {"model": model, "prompt": TRIAL_IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        answer = await self._tried(Completion, self._completions, fields)
        if answer and len(answer.choices) == 1 and len(answer.choices[0].prompt_logprobs or ()) == len(TRIAL_IDS):
            return "prompt_logprobs"
        fields = generate_fields(1) | {"input_ids": TRIAL_IDS}
        scored = await self._tried(Generated, f"{self.address.root}/generate", fields)
        meta = scored.meta_info if scored else GenerateMeta()
        return "generate" if meta.input_token_logprobs and meta.input_top_logprobs else None

    async def _schema_field(self, model: str, trial: "_Trial") -> SchemaField | None:
        """The field that has an effect: others than that are ignored, or refused."""
        for field in get_args(SchemaField):
            fields = {"model": model, "prompt": trial.prompt, "max_tokens": 16, "temperature": 0}
            answer = await self._tried(Completion, self._completions, fields | schema_fields(field, TRIAL_SCHEMA))
            if answer and answer.choices and answer.choices[0].text.strip() == TRIAL_VALUE:
                return field
        return None

    async def _speculation(self) -> str | None:
        """Whether vLLM has counters of drafted tokens, which are there only if it was started to draft some."""
        try:
            reply = await self._get(f"{self.address.root}/metrics")
        except EngineError:
            return None
        if not reply.response.is_success or b"vllm:" not in reply.body:
            return None
        return "as its server was started" if b"vllm:spec_decode_num_drafts" in reply.body else "none"

    async def _kind(self, card: ModelCard) -> str:
        """Who serves, and its version where that is told."""
        name = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}.get(str(card.owned_by), "")
        try:
            reply = await self._get(f"{self.address.root}/version")
            version = _Version.model_validate_json(reply.body).version if reply.response.is_success else ""
        except (ValidationError, EngineError):
            version = ""
        return f"{name or 'a server'} {version}".strip()

    @property
    def _completions(self) -> str:
        return f"{self.address.base}/completions"

    async def _tried(self, kind: type[A], url: str, fields: Mapping[str, Any]) -> A | None:
        """An answer to a call that some servers refuse, or answer with something else."""
        try:
            reply = await self._post(url, fields)
            return kind.model_validate(self._json(reply)) if reply.response.is_success else None
        except (ValidationError, EngineError):
            return None

    async def _get(self, url: str) -> _Reply:
        return await self._read(self.client.stream("GET", url))

    async def _post(self, url: str, fields: Mapping[str, Any]) -> _Reply:
        return await self._read(self.client.stream("POST", url, json=fields))

    async def _read(self, sent: AbstractAsyncContextManager[httpx.Response]) -> _Reply:
        async with sent as response:
            return _Reply(response, await read_whole(self.address, response))

    def _json(self, reply: _Reply) -> Any:
        found = read_json(self.address, *reply)
        if not isinstance(found, dict):
            raise nonsense(self.address, "JSON that is no object")
        return found


class _Version(BaseModel):
    version: Annotated[str, Field(max_length=100)] = ""


def one_token_fields(model: str, num_logprobs: int, *, extended: bool) -> dict[str, Any]:
    """A call for the most likely next token."""
    fields: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    if num_logprobs:
        fields["logprobs"] = num_logprobs
    if extended:
        fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "skip_special_tokens": False}
    return fields


def schema_fields(field: SchemaField, schema: str) -> dict[str, Any]:
    """What holds a call to a schema."""
    form = json.loads(schema)
    return {"structured_outputs": {"json": form}} if field == "structured_outputs" else {"json_schema": form}


def generate_fields(start: int) -> dict[str, Any]:
    """A call of SGLang's `/generate` that scores its `input_ids` from position `start` on."""
    return {
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": 1,
    }
