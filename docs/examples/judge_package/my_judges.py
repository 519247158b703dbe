"""A judge for policy files. The pyproject.toml beside it names the class under its kind."""

from typing import ClassVar, Literal

from stepspec.loop.judge import Evidence, ThresholdJudge


class ShortJudge(ThresholdJudge):
    """Accepts steps with few words."""

    asks_target: ClassVar[bool] = False  # it needs no forward pass of the target

    kind: Literal["short"]
    threshold: float = -40.0

    async def score(self, evidence: Evidence) -> float:
        """Return the number of words, negated, because a higher score is better."""
        return -float(len(evidence.step.split()))
