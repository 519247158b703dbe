"""The yes-no judge: the target says whether the step is correct, and the two answers are weighed against each other."""

from typing import ClassVar, Literal

from pydantic import Field

from stepspec.chat.prompts import YES_NO_PROMPT, render_probe, yes_no_labels
from stepspec.engines.protocol import Ability, Probe, Tokenizer
from stepspec.loop.judge import Evidence, ThresholdJudge, share_of_yes


class YesNoJudge(ThresholdJudge):
    """The target's probability of "yes" as its answer to whether the step is correct, against "no"."""

    is_probability: ClassVar[bool] = True

    kind: Literal["yes-no"]
    """Selects this judge."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """Lowest accepted score."""

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset({"label logprobs"})

    def probe(self, tokenizer: Tokenizer) -> Probe:
        """Return the question. Its labels are the last tokens of " yes" and " no".

        Raises:
            ModelError: both answers end with the same token.
        """
        return Probe(tuple(tokenizer.encode(render_probe(tokenizer, YES_NO_PROMPT))), yes_no_labels(tokenizer))

    async def score(self, evidence: Evidence) -> float | None:
        """Return p(yes) / (p(yes) + p(no)); None if the target gives neither a probability above 1e-6."""
        return share_of_yes(evidence.label_logprobs)
