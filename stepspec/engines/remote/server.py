"""Detection of a server's features by test requests, once, when the engine is loaded."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import Generated, GenerateMeta, ServerChoice, ServerCompletion, TokenScores
from stepspec.engines.remote.problems import refused
from stepspec.engines.remote.trials import TRIAL_IDS, TRIAL_TEXT, Trials, detected
from stepspec.errors import EngineError, StepSpecError

MAX_LOGPROBS = (20, 5)
"""Numbers of log-probabilities to try: the maximum of vLLM, then of OpenAI."""

ScoreRoute = Literal["inference", "prompt_logprobs", "generate"]
"""How a server scores a continuation: vLLM's `/inference/v1/generate` or SGLang's `/generate`, which read it after the
prompt in their prefix caches, or vLLM's field `prompt_logprobs`, which reads the whole prompt again."""

SchemaField = Literal["structured_outputs", "json_schema", "json_schema as text"]
"""The request field for a JSON schema: `structured_outputs` in vLLM, `json_schema` in llama.cpp and, with the schema's
text, in SGLang."""

INFERENCE = "/inference/v1/generate"
TRIAL_SCHEMA = '{"enum": ["stepspec"]}'
TRIAL_VALUE = '"stepspec"'
"""The only text that matches the schema."""


@dataclass(frozen=True)
class RemoteServer:
    """One model on a server, with the features that the server supports for it."""

    model: str
    folder: str
    """Folder or Hub name of the weights and tokenizer, if the server reports it; else the model's name."""
    kind: str
    """The server's name and version, if it reports them."""
    max_context: int | None
    extended: bool
    """Whether the server supports fields beyond OpenAI's API. Other servers may ignore unknown fields."""
    shows_special: bool
    """Whether it takes `skip_special_tokens`, without which it may leave tags out of the text."""
    takes_ids: bool
    gives_ids: bool
    num_logprobs: int
    """Maximum number of top tokens with log-probabilities; 0 if the server returns none."""
    written_logprobs: bool
    """Whether the server returns the log-probabilities of the tokens that it generates."""
    several_prompts: bool
    """Whether one call can have several prompts."""
    scores: ScoreRoute | None
    schema_field: SchemaField | None
    speculation: str | None
    """The server's built-in speculation; "none" if there is none, None if unknown."""
    takes_salt: bool
    may_take_salt: bool
    """See `ServerKind`, like the field before."""

    @classmethod
    def found(cls, address: Address) -> "RemoteServer":
        """Detect the features of the server at an address.

        Raises:
            ModelError: there is no such server or model, or it does not complete text.
        """
        return detected(address, lambda *given: _ServerDetector(*given).server())


class _FeatureTrial(NamedTuple):
    prompt: list[int] | str
    num_logprobs: int
    extended: bool
    special: bool = True

    def fields(self, model: str) -> dict[str, Any]:
        """Return the fields of a call for the argmax next token, without the prompt."""
        return one_token_fields(model, self.num_logprobs, extended=self.extended, special=self.special)


TRIALS = [_FeatureTrial(prompt, count, True) for prompt in (TRIAL_IDS, TRIAL_TEXT) for count in (*MAX_LOGPROBS, 0)]
TRIALS += [
    _FeatureTrial(prompt, count, False, special)
    for special in (True, False)
    for prompt in (TRIAL_IDS, TRIAL_TEXT)
    for count in (MAX_LOGPROBS[-1], 0)
]


class _ServerDetector(Trials):
    async def server(self) -> RemoteServer:
        card = await self.model_card()
        trial, choice = await self._trial(card.id)
        tops = choice.top_logprobs() or {}
        return RemoteServer(
            model=card.id,
            folder=card.root or card.id,
            kind=await self.kind(card),
            max_context=card.max_context,
            extended=trial.extended,
            shows_special=trial.special,
            takes_ids=trial.prompt is TRIAL_IDS,
            gives_ids=bool(choice.token_ids),
            num_logprobs=trial.num_logprobs if tops else 0,
            written_logprobs=bool(choice.logprobs and choice.logprobs.token_logprobs),
            several_prompts=await self._takes_several(card.id, trial),
            scores=await self._score_route(card.id) if trial.prompt is TRIAL_IDS else None,
            schema_field=await self._schema_field(card.id, trial),
            speculation=await self._speculation(),
            takes_salt=card.server.takes_salt,
            may_take_salt=card.server.may_take_salt,
        )

    async def _trial(self, model: str) -> tuple[_FeatureTrial, ServerChoice]:
        """Return the first test call in `TRIALS` that the server supports, and its choice."""
        refusal: StepSpecError | None = None
        for trial in TRIALS:
            fields = trial.fields(model) | {"prompt": trial.prompt}
            reply = await self.post(self._completions, fields)
            status = reply.response.status_code
            if status in (400, 422, 500):
                refusal = refused(self.address, status, reply.body)
                continue
            if not reply.response.is_success:
                raise refused(self.address, status, reply.body)
            answer = ServerCompletion.read(self.address, self.json(reply))
            num_read = answer.usage.prompt_tokens if answer.usage else 0
            if trial.prompt is TRIAL_TEXT or num_read in (0, len(TRIAL_IDS)):  # else it misread the ids
                return trial, answer.only_choice(self.address)
        raise refusal or EngineError(f"{self.address.base} accepts neither token ids nor text as a prompt.")

    async def _takes_several(self, model: str, trial: "_FeatureTrial") -> bool:
        fields = trial.fields(model) | {"prompt": [trial.prompt] * 2}
        answer = await self.try_post(ServerCompletion, self._completions, fields)
        return answer is not None and sorted(choice.index for choice in answer.choices) == [0, 1]

    async def _score_route(self, model: str) -> ScoreRoute | None:
        fields = inference_fields(model, TRIAL_IDS[1:], 1) | {"token_ids": TRIAL_IDS}
        given = await self.try_post(TokenScores, f"{self.address.root}{INFERENCE}", fields)
        with suppress(ValueError):
            if given and len(given.logprobs()) == len(TRIAL_IDS) - 1:
                return "inference"
        fields = {"model": model, "prompt": TRIAL_IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        answer = await self.try_post(ServerCompletion, self._completions, fields)
        if answer and len(answer.choices) == 1 and len(answer.choices[0].prompt_logprobs or ()) == len(TRIAL_IDS):
            return "prompt_logprobs"
        fields = generate_fields(1) | {"input_ids": TRIAL_IDS}
        scored = await self.try_post(Generated, f"{self.address.root}/generate", fields)
        meta = scored.meta_info if scored else GenerateMeta()
        return "generate" if meta.input_token_logprobs and meta.input_top_logprobs else None

    async def _schema_field(self, model: str, trial: "_FeatureTrial") -> SchemaField | None:
        """Return the first field that constrains the text. Servers ignore or reject other fields."""
        for field in get_args(SchemaField):
            fields = {"model": model, "prompt": trial.prompt, "max_tokens": 16, "temperature": 0}
            answer = await self.try_post(
                ServerCompletion, self._completions, fields | schema_fields(field, TRIAL_SCHEMA)
            )
            if answer and answer.choices and answer.choices[0].text.strip() == TRIAL_VALUE:
                return field
        return None

    async def _speculation(self) -> str | None:
        """Detect speculation from vLLM's metrics, which count drafted tokens only if speculation is on."""
        try:
            reply = await self.get(f"{self.address.root}/metrics")
        except EngineError:
            return None
        if not reply.response.is_success or b"vllm:" not in reply.body:
            return None
        return "as its server was started" if b"vllm:spec_decode_num_drafts" in reply.body else "none"

    @property
    def _completions(self) -> str:
        return f"{self.address.base}/completions"


def one_token_fields(model: str, num_logprobs: int, *, extended: bool, special: bool) -> dict[str, Any]:
    """Return the fields of a call for the argmax next token. `extended` and `special` are those of `RemoteServer`."""
    fields: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    if num_logprobs:
        fields["logprobs"] = num_logprobs
    if extended:
        fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if special:
        fields["skip_special_tokens"] = False
    return fields


def schema_fields(field: SchemaField, schema: str) -> dict[str, Any]:
    """Return the field that constrains a call to a JSON schema."""
    if field == "json_schema as text":
        return {"json_schema": schema}
    form = json.loads(schema)
    return {"structured_outputs": {"json": form}} if field == "structured_outputs" else {"json_schema": form}


def inference_fields(model: str, ids: Sequence[int], start: int, *, cached: bool = True) -> dict[str, Any]:
    """Return the fields of a call to vLLM's `/inference/v1/generate` that scores ids from position `start` on. They go
    with the `token_ids` of the whole text. `cached`: whether the text before may come from the prefix cache."""
    sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "prompt_logprob_start": start - 1}
    sampling |= {"prompt_logprob_token_ids": [[id] for id in ids], "skip_reading_prefix_cache": not cached}
    return {"model": model, "sampling_params": sampling}


def generate_fields(start: int) -> dict[str, Any]:
    """Return the fields of a call to SGLang's `/generate` that scores `input_ids` from position `start` on."""
    return {
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": 1,
    }
