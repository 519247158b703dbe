"""vLLM's field `prompt_logprobs`, with which it reads the whole prompt again."""

from collections.abc import Sequence

from stepspec.engines.protocol import TokenBuffer, Verification, read_prompt_logprobs
from stepspec.engines.remote.answers import ServerCompletion
from stepspec.engines.remote.dialects.base import Scorer
from stepspec.engines.remote.problems import nonsense
from stepspec.engines.remote.trials import TRIAL_IDS, Trials


class PromptLogprobsScorer(Scorer):
    """See the module."""

    abilities = frozenset({"scores", "choices"})

    @staticmethod
    async def works(trials: Trials, model: str) -> bool:
        """See `Scorer.works`."""
        fields = {"model": model, "prompt": TRIAL_IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        answer = await trials.try_post(ServerCompletion, f"{trials.address.base}/completions", fields)
        return answer is not None and [len(each.prompt_logprobs or ()) for each in answer.choices] == [len(TRIAL_IDS)]

    async def scored(self, prompt: TokenBuffer, continuation: Sequence[int], top: int) -> Verification:
        """See `Scorer.scored`."""
        calls, prompt_length = self._calls, len(prompt)
        answer = await calls.one_token(prompt, [continuation], prompt_logprobs=max(1, top))
        choice = answer.only_choice(calls.address)
        rows = [row or {} for row in (choice.prompt_logprobs or [])[prompt_length:]]
        try:
            logprobs, choices, found = read_prompt_logprobs(rows, continuation, top)
        except (KeyError, ValueError):
            raise nonsense(calls.address, "prompt log-probabilities that do not match the prompt") from None
        return Verification(logprobs, calls.checked(choices), calls.token_of(choice), top=found)
