"""What a server can do, found out by asking it, once, before anything is timed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import httpx

from stepspec.errors import EngineError, ModelError, StepSpecError, unknown_name
from stepspec.remote.address import Address
from stepspec.remote.answers import TOKEN_ID, Choice, Completion
from stepspec.remote.client import CONNECT_S
from stepspec.remote.problems import nonsense, not_json, refused, unreachable

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
    names_ids: bool
    """Whether it calls these tokens by their ids."""
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
        timeout = httpx.Timeout(max(address.timeout, FIRST_CALLS_S), connect=CONNECT_S)
        one_call_each = httpx.Limits(max_keepalive_connections=0)  # some servers drop a connection after an error
        with httpx.Client(timeout=timeout, limits=one_call_each, headers=address.headers()) as client:
            try:
                return _Asking(address, client).server()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ModelError(str(unreachable(address, error))) from error
            except StepSpecError as error:
                raise error if isinstance(error, ModelError) else ModelError(str(error)) from error


class _Trial(NamedTuple):
    prompt: list[int] | str
    num_logprobs: int
    extended: bool


TRIALS = [_Trial(prompt, count, True) for prompt in (TRIAL_IDS, TRIAL_TEXT) for count in (*MOST_LOGPROBS, 0)]
TRIALS += [_Trial(TRIAL_TEXT, count, False) for count in (MOST_LOGPROBS[-1], 0)]


@dataclass
class _Asking:
    address: Address
    client: httpx.Client

    def server(self) -> Server:
        card = self._model_card()
        model = card["id"]
        trial, choice = self._trial(model)
        tops = choice.top_logprobs() or {}
        return Server(
            model=model,
            folder=card.get("root") or model,
            kind=self._kind(card),
            max_context=card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx"),
            extended=trial.extended,
            takes_ids=trial.prompt is TRIAL_IDS,
            gives_ids=bool(choice.token_ids),
            num_logprobs=trial.num_logprobs if tops else 0,
            names_ids=bool(tops) and all(name.startswith(TOKEN_ID) for name in tops),
            several_prompts=self._takes_several(model, trial),
            scores=self._score_route(model) if trial.prompt is TRIAL_IDS else None,
            schema_field=self._schema_field(model, trial),
            speculation=self._speculation(),
            takes_salt=card.get("owned_by") == "vllm",
        )

    def _model_card(self) -> Mapping[str, Any]:
        """What the server says of the model."""
        url = f"{self.address.base}/models"
        response = self.client.get(url)
        if response.is_error:
            if self.address.model is not None and response.status_code not in (401, 403):
                return {"id": self.address.model}  # some do not list them
            raise refused(self.address, response.status_code, response.content)
        cards = self._json(response).get("data")
        if not isinstance(cards, list) or not all(isinstance(card, dict) and "id" in card for card in cards):
            raise nonsense(self.address, "no list of models")
        named = {card["id"]: card for card in cards}
        wanted = self.address.model
        if wanted is None and len(named) == 1:
            return next(iter(named.values()))
        if wanted is None:
            raise ModelError(f"{self.address.base} has {len(named)} models; write one behind '#': {', '.join(named)}.")
        if wanted not in named:
            raise ModelError(f"At {self.address.base}: {unknown_name('model', wanted, named)}")
        return named[wanted]

    def _trial(self, model: str) -> tuple[_Trial, Choice]:
        """The most demanding call that it serves, and its answer."""
        refusal: StepSpecError | None = None
        for trial in TRIALS:
            fields = one_token_fields(model, trial.num_logprobs, extended=trial.extended) | {"prompt": trial.prompt}
            response = self.client.post(f"{self.address.base}/completions", json=fields)
            if response.status_code in (400, 422, 500):
                refusal = refused(self.address, response.status_code, response.content)
                continue
            if response.is_error:
                raise refused(self.address, response.status_code, response.content)
            answer = Completion.read(self.address, self._json(response))
            num_read = answer.usage.prompt_tokens if answer.usage else 0
            if trial.prompt is TRIAL_TEXT or num_read in (0, len(TRIAL_IDS)):  # else it took ids for something else
                return trial, answer.only_choice(self.address)
        raise refusal or EngineError(f"{self.address.base} completes neither ids nor text.")

    def _takes_several(self, model: str, trial: "_Trial") -> bool:
        fields = one_token_fields(model, trial.num_logprobs, extended=trial.extended) | {"prompt": [trial.prompt] * 2}
        response = self.client.post(f"{self.address.base}/completions", json=fields)
        try:
            choices = response.json()["choices"] if response.is_success else []
            return sorted(choice["index"] for choice in choices) == [0, 1]
        except (ValueError, KeyError, TypeError):
            return False

    def _score_route(self, model: str) -> ScoreRoute | None:
        fields = {"model": model, "prompt": TRIAL_IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        response = self.client.post(f"{self.address.base}/completions", json=fields)
        if response.is_success:
            choice = Completion.read(self.address, self._json(response)).only_choice(self.address)
            if len(choice.prompt_logprobs or ()) == len(TRIAL_IDS):
                return "prompt_logprobs"
        fields = generate_fields(1) | {"input_ids": TRIAL_IDS}
        response = self.client.post(f"{self.address.root}/generate", json=fields)
        try:
            meta = response.json()["meta_info"] if response.is_success else {}
            return "generate" if meta.get("input_token_logprobs") and meta.get("input_top_logprobs") else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _schema_field(self, model: str, trial: "_Trial") -> SchemaField | None:
        """The field that has an effect: others than that are ignored, or refused."""
        for field in get_args(SchemaField):
            fields = {"model": model, "prompt": trial.prompt, "max_tokens": 16, "temperature": 0}
            fields |= schema_fields(field, TRIAL_SCHEMA)
            response = self.client.post(f"{self.address.base}/completions", json=fields)
            try:
                if response.is_success and json.loads(response.json()["choices"][0]["text"]) == "stepspec":
                    return field
            except (ValueError, KeyError, TypeError, IndexError):
                continue
        return None

    def _speculation(self) -> str | None:
        """Whether vLLM has counters of drafted tokens, which are there only if it was started to draft some."""
        response = self.client.get(f"{self.address.root}/metrics")
        if response.is_error or "vllm:" not in response.text:
            return None
        return "as its server was started" if "vllm:spec_decode_num_drafts" in response.text else "none"

    def _kind(self, card: Mapping[str, Any]) -> str:
        """Who serves, and its version where that is told."""
        name = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}.get(str(card.get("owned_by")), "")
        response = self.client.get(f"{self.address.root}/version")
        try:
            version = response.json().get("version") if response.is_success else None
        except (ValueError, AttributeError):
            version = None
        return f"{name or 'a server'} {version or ''}".strip()

    def _json(self, response: httpx.Response) -> Any:
        try:
            found = response.json()
        except ValueError:
            raise not_json(self.address, response.headers.get("content-type", ""), response.content) from None
        if not isinstance(found, dict):
            raise nonsense(self.address, "JSON that is no object")
        return found


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
