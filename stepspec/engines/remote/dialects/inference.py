"""vLLM's `/inference/v1/generate`, which scores given ids after the prompt in its prefix cache."""

import base64
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from stepspec.engines.protocol import TokenBuffer, Verification
from stepspec.engines.remote.answers import ServerUsage, validated
from stepspec.engines.remote.dialects.prompt_logprobs import PromptLogprobsScorer
from stepspec.engines.remote.problems import nonsense
from stepspec.engines.remote.trials import TRIAL_IDS, Trials

PATH = "/inference/v1/generate"


class InferenceScorer(PromptLogprobsScorer):
    """See the module. It does not return argmax tokens, nor the most likely ones; if those are asked for, the field
    `prompt_logprobs` does."""

    abilities = frozenset({"scores", "cached scores"})
    comes_first = True  # it does not score what the probes have put into the prefix cache

    @staticmethod
    async def works(trials: Trials, model: str) -> bool:
        """See `Scorer.works`."""
        fields = _fields(model, TRIAL_IDS[1:], 1) | {"token_ids": TRIAL_IDS}
        given = await trials.try_post(TokenScores, f"{trials.address.root}{PATH}", fields)
        with suppress(ValueError):
            return given is not None and len(given.logprobs()) == len(TRIAL_IDS) - 1
        return False

    async def scored(self, prompt: TokenBuffer, continuation: Sequence[int], top: int) -> Verification:
        """See `Scorer.scored`."""
        if top or not continuation:
            return await super().scored(prompt, continuation, top)
        calls = self._calls
        answer = await self._asked(prompt, continuation, cached=True)
        if answer.prompt_token_id_logprobs is None:
            answer = await self._asked(prompt, continuation, cached=False)
        try:
            logprobs = answer.logprobs()
        except ValueError:
            logprobs = ()
        if len(logprobs) != len(continuation):
            raise nonsense(calls.address, "log-probabilities that do not match the prompt")
        usage = answer.usage or ServerUsage()
        calls.note(prompt, usage)
        own, *_ = calls.checked(answer.choices[0].token_ids)
        return Verification(logprobs, None, own, cached=usage.cached)

    async def _asked(self, prompt: TokenBuffer, continuation: Sequence[int], *, cached: bool) -> "TokenScores":
        calls = self._calls
        fields = _fields(calls.server.model, continuation, len(prompt), cached=cached)
        found = await calls.post(f"{calls.address.root}{PATH}", prompt, fields, [continuation], "token_ids")
        return validated(TokenScores, calls.address, found, "scored text")


class TokenScores(BaseModel):
    """A response of vLLM's `/inference/v1/generate` with the log-probabilities of given tokens, as a NumPy file."""

    class GeneratedTokens(BaseModel):
        """The generated tokens."""

        token_ids: list[int] = Field(min_length=1)

    choices: list[GeneratedTokens] = Field(min_length=1)
    prompt_token_id_logprobs: str | None = None
    """None if the prefix cache held the given tokens too, so that the server did not read them."""
    usage: ServerUsage | None = None

    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of the first given token at each position.

        Raises:
            ValueError: there is no file, or it is not an array of one column of finite numbers.
        """
        if self.prompt_token_id_logprobs is None:
            raise ValueError("no log-probabilities")
        with io.BytesIO(base64.b64decode(self.prompt_token_id_logprobs, validate=True)) as file:
            try:
                found = np.load(file, allow_pickle=False)
            except EOFError as error:
                raise ValueError("an empty file") from error
        if found.ndim != 2 or found.shape[1] != 1 or found.dtype.kind != "f" or not np.isfinite(found).all():
            raise ValueError("no column of finite numbers")
        return tuple(found[:, 0].tolist())


def _fields(model: str, ids: Sequence[int], start: int, *, cached: bool = True) -> dict[str, Any]:
    """Return the fields of a call that scores ids from position `start` on. They go with the `token_ids` of the whole
    text. `cached`: whether the text before may come from the prefix cache."""
    sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "prompt_logprob_start": start - 1}
    sampling |= {"prompt_logprob_token_ids": [[id] for id in ids], "skip_reading_prefix_cache": not cached}
    return {"model": model, "sampling_params": sampling}
