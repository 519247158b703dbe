"""Detection of a server's features by test requests, once, when the engine is loaded."""

from typing import Any, NamedTuple

from stepspec.engines.remote.address import Address
from stepspec.engines.remote.answers import ServerChoice, ServerCompletion
from stepspec.engines.remote.dialects import SCORERS
from stepspec.engines.remote.problems import refused
from stepspec.engines.remote.server import SCHEMA_FIELDS, RemoteServer, one_token_fields
from stepspec.engines.remote.trials import TRIAL_IDS, TRIAL_TEXT, Trials, detected
from stepspec.engines.vllm_plugin.fields import REFUSAL, TRIAL
from stepspec.errors import EngineError, StepSpecError

MAX_LOGPROBS = (20, 5)
"""Numbers of log-probabilities to try: the maximum of vLLM, then of OpenAI."""

TRIAL_SCHEMA = '{"enum": ["stepspec"]}'
TRIAL_VALUE = '"stepspec"'
"""The only text that matches the schema."""


def found_server(address: Address) -> RemoteServer:
    """Return the server at an address, with its features.

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
            scores=await self._scores(card.id) if trial.prompt is TRIAL_IDS else None,
            schema_field=await self._schema_field(card.id, trial),
            relaxes=trial.prompt is TRIAL_IDS and bool(choice.token_ids) and await self._relaxes(card.id),
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

    async def _takes_several(self, model: str, trial: _FeatureTrial) -> bool:
        fields = trial.fields(model) | {"prompt": [trial.prompt] * 2}
        answer = await self.try_post(ServerCompletion, self._completions, fields)
        return answer is not None and sorted(choice.index for choice in answer.choices) == [0, 1]

    async def _scores(self, model: str) -> str | None:
        """Return the first dialect in which the server scores a continuation."""
        for name, scorer in SCORERS.items():
            if await scorer.works(self, model):
                return name
        return None

    async def _schema_field(self, model: str, trial: _FeatureTrial) -> str | None:
        """Return the first field that constrains the text. Servers ignore or reject other fields."""
        fields = {"model": model, "prompt": trial.prompt, "max_tokens": 16, "temperature": 0}
        for name, field_of in SCHEMA_FIELDS.items():
            constrained = {**fields, **field_of(TRIAL_SCHEMA)}
            answer = await self.try_post(ServerCompletion, self._completions, constrained)
            if answer and answer.choices and answer.choices[0].text.strip() == TRIAL_VALUE:
                return name
        return None

    async def _relaxes(self, model: str) -> bool:
        """Return whether the server refuses an invalid rule as stepspec's plugin does. Others ignore the field."""
        fields = one_token_fields(model, 0, extended=True, special=True) | {"prompt": TRIAL_IDS, "vllm_xargs": TRIAL}
        try:
            return REFUSAL.encode() in (await self.post(self._completions, fields)).body
        except EngineError:
            return False

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
