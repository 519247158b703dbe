"""The rating judge: the target rates the step with a digit from 0 to 9 (arXiv:2504.07891, section 4).

An uncalibrated digit is a weak judge: arXiv:2506.19830, table 2, finds it no better than chance on hard problems. It is
supported because published systems use it.
"""

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, field_validator

from stepspec.chat.prompts import RATING_PROMPTS, rating_prompt, render_probe
from stepspec.engines.protocol import Ability, Probe, Tokenizer
from stepspec.errors import ModelError, unknown_name
from stepspec.loop.judge import Evidence, ThresholdJudge


class RatingJudge(ThresholdJudge):
    """The target rates the step with a digit from 0 to 9."""

    kind: Literal["rating"]
    """Selects this judge."""
    prompt: str = "short"
    """The question to the target: `short`, or `specreason`, the published one."""
    readout: Literal["greedy", "expected"] = "greedy"
    """`greedy`: the most likely token, if it is a digit. `expected`: the mean over the ten digits."""
    threshold: float = Field(default=7.0, ge=0, le=9)
    """Lowest accepted rating."""

    @field_validator("prompt")
    @classmethod
    def _known(cls, prompt: str) -> str:
        if prompt not in RATING_PROMPTS:
            raise ValueError(unknown_name("rating prompt", prompt, RATING_PROMPTS))
        return prompt

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return f"rating.{self.prompt}"

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset({"label logprobs"}) if self.readout == "expected" else frozenset()

    def probe(self, tokenizer: Tokenizer) -> Probe:
        """Return the rating prompt. Its labels are the ten digits.

        Raises:
            ModelError: the tokenizer does not give each digit its own token.
        """
        digits = tuple(tokenizer.encode(str(digit))[-1] for digit in range(10))
        if len(set(digits)) < 10:
            raise ModelError("The target's tokenizer does not give each digit its own token, so it cannot rate steps.")
        return Probe(tuple(tokenizer.encode(render_probe(tokenizer, rating_prompt(self.prompt)))), digits)

    async def score(self, evidence: Evidence) -> float | None:
        """Return the chosen digit, or the expected digit; None if the target does not answer with a digit."""
        if self.readout == "expected":
            return expected_digit(evidence.label_logprobs)
        assert evidence.probe is not None
        digits = evidence.probe.labels
        return float(digits.index(evidence.choice)) if evidence.choice in digits else None


def expected_digit(logprobs: Sequence[float]) -> float | None:
    """Return the expected digit, 0 to 9, with probabilities renormalized over the ten digits.

    None if the ten digits together have a probability of at most 1e-6.
    """
    weights = [math.exp(logprob) for logprob in logprobs]
    mass = sum(weights)
    return sum(digit * weight for digit, weight in enumerate(weights)) / mass if mass > 1e-6 else None
