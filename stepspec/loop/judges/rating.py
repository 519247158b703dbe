"""The rating judge: the target rates the step with a digit from 0 to 9 (arXiv:2504.07891, section 4).

An uncalibrated digit is a weak judge: arXiv:2506.19830, table 2, finds it no better than chance on hard problems. It is
supported because published systems use it.
"""

from collections.abc import Mapping
from typing import Literal, cast

from pydantic import Field, model_validator

from stepspec.chat.prompts import RATING_PROMPT, render_probe
from stepspec.engines.protocol import Probe, Tokenizer
from stepspec.errors import ModelError
from stepspec.loop.judge import Evidence, ThresholdJudge


class RatingJudge(ThresholdJudge):
    """The target rates the step with a digit from 0 to 9, the most likely token after the published question."""

    kind: Literal["rating"]
    """Selects this judge."""
    threshold: float = Field(default=7.0, ge=0, le=9)
    """Lowest accepted rating."""

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, table: object) -> object:
        if isinstance(table, Mapping) and {"prompt", "readout"} & table.keys():
            raise ValueError("there is one question now, the published one, read greedily: remove prompt and readout")
        return cast("object", table)

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return "rating.specreason"

    def probe(self, tokenizer: Tokenizer) -> Probe:
        """Return the rating prompt. Its labels are the ten digits.

        Raises:
            ModelError: the tokenizer does not give each digit its own token.
        """
        digits = tuple(tokenizer.encode(str(digit))[-1] for digit in range(10))
        if len(set(digits)) < 10:
            raise ModelError("The target's tokenizer does not give each digit its own token, so it cannot rate steps.")
        return Probe(tuple(tokenizer.encode(render_probe(tokenizer, RATING_PROMPT))), digits)

    async def score(self, evidence: Evidence) -> float | None:
        """Return the digit; None if the target does not answer with one."""
        assert evidence.probe is not None
        digits = evidence.probe.labels
        return float(digits.index(evidence.choice)) if evidence.choice in digits else None
