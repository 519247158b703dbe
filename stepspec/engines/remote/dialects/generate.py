"""SGLang's `/generate`, which scores a text from a position on, after the prompt in its prefix cache."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field

from stepspec.engines.protocol import TokenBuffer, Verification, most_likely
from stepspec.engines.remote.answers import Count, Logprob, ServerUsage, validated
from stepspec.engines.remote.dialects.base import Scorer
from stepspec.engines.remote.problems import nonsense
from stepspec.engines.remote.trials import TRIAL_IDS, Trials


class GenerateScorer(Scorer):
    """See the module."""

    abilities = frozenset({"scores", "choices", "cached scores"})

    @staticmethod
    async def works(trials: Trials, model: str) -> bool:
        """See `Scorer.works`."""
        fields = _fields(1, 1) | {"input_ids": TRIAL_IDS}
        scored = await trials.try_post(Generated, f"{trials.address.root}/generate", fields)
        meta = scored.meta_info if scored else GenerateMeta()
        return bool(meta.input_token_logprobs and meta.input_top_logprobs)

    async def scored(self, prompt: TokenBuffer, continuation: Sequence[int], top: int) -> Verification:
        """See `Scorer.scored`."""
        calls, count = self._calls, len(continuation)
        fields = _fields(len(prompt), max(1, top))
        found = await calls.post(f"{calls.address.root}/generate", prompt, fields, [continuation], "input_ids")
        answer = validated(Generated, calls.address, found, "scored text")
        meta = answer.meta_info
        rows, tops = meta.input_token_logprobs[-count:], meta.input_top_logprobs[-count:]
        logprobs = tuple(logprob for logprob, _, _ in rows if logprob is not None) if count else ()
        choices = tuple(top[0][1] for top in tops if top) if count else ()
        if len(logprobs) != count or len(choices) != count:
            raise nonsense(calls.address, "log-probabilities that do not match the prompt")
        calls.note(prompt, ServerUsage())
        own, *_ = calls.checked(answer.output_ids)
        listed = [{id: logprob for logprob, id, _ in each or () if logprob is not None} for each in tops]
        best = tuple(most_likely(each, top) for each in listed)
        return Verification(logprobs, calls.checked(choices), own, cached=meta.cached_tokens or 0, top=best)


class GenerateMeta(BaseModel):
    """Metadata from SGLang's `/generate`: log-probability, id and text of each token."""

    input_token_logprobs: list[tuple[Logprob | None, int, Any]] = []
    input_top_logprobs: list[list[tuple[Logprob | None, int, Any]] | None] = []
    cached_tokens: Count | None = None


class Generated(BaseModel):
    """A response of SGLang's `/generate`."""

    output_ids: list[int] = Field(min_length=1)
    meta_info: GenerateMeta


def _fields(start: int, top: int) -> dict[str, Any]:
    """Return the fields of a call that scores `input_ids` from position `start` on, with the `top` most likely ids."""
    return {
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": start - 1,
        "top_logprobs_num": top,
    }
