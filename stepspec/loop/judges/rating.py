"""The rating judge: the target rates the step with a digit from 0 to 9 (arXiv:2504.07891, section 4).

An uncalibrated digit is a weak judge: arXiv:2506.19830, table 2, finds it no better than chance on hard problems. It is
supported because published systems use it.
"""

import math

from stepspec.chat.prompts import rating_prompt, render_probe
from stepspec.engines.protocol import Probe, Tokenizer, Verification
from stepspec.errors import ModelError
from stepspec.loop.policy import RatingSpec


class RatingJudge:
    """Reads the digit that follows the rating prompt's prefill."""

    def __init__(self, spec: RatingSpec, tokenizer: Tokenizer) -> None:
        self.name = spec.name
        self._spec = spec
        ids = tokenizer.encode(render_probe(tokenizer, rating_prompt(spec.prompt)))
        self.probe = Probe(tuple(ids), _digit_ids(tokenizer))

    def score(self, verification: Verification, probe_index: int) -> float | None:
        """Return the chosen digit, or the expected digit; None if the target does not answer with a digit."""
        if self._spec.readout == "greedy":
            choice = verification.probe_choices[probe_index]
            return float(self.probe.labels.index(choice)) if choice in self.probe.labels else None
        return expected_digit(verification.probe_logprobs[probe_index])

    def accepts(self, score: float) -> bool:
        return score >= self._spec.threshold


def expected_digit(logprobs: tuple[float, ...]) -> float | None:
    """Return the expected digit, 0 to 9, with probabilities renormalized over the ten digits.

    None if the ten digits together have a probability of at most 1e-6.
    """
    weights = [math.exp(logprob) for logprob in logprobs]
    mass = sum(weights)
    return sum(digit * weight for digit, weight in enumerate(weights)) / mass if mass > 1e-6 else None


def _digit_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(str(digit))[-1] for digit in range(10))
    if len(set(ids)) < 10:
        raise ModelError("The target's tokenizer does not give each digit its own token, so it cannot rate steps.")
    return ids
