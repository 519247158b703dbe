"""The decision judge: a decision model of LangChain is asked whether the step is correct."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from stepspec.engines.judge_model import JudgeAbility
from stepspec.loop.judge import Decision, Evidence, ThresholdJudge

INSTRUCTIONS = "Is the step correct, given the problem and the steps before it?"


class DecisionJudge(ThresholdJudge):
    """A decision model's probability that the step is correct. It is undecided where the model abstains or fails."""

    asks_target: ClassVar[bool] = False
    model_needs: ClassVar[JudgeAbility | None] = "decide"
    without_score: ClassVar[Decision] = "undecided"

    kind: Literal["decision"]
    """Selects this judge."""
    model: str = "decision"
    """Name of the judge model, as in `--judge NAME=python:MODULE:NAME`."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """Lowest accepted score."""

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return self.kind if self.model == self.kind else f"{self.kind}.{self.model}"

    async def score(self, evidence: Evidence) -> float | None:
        """Return the probability; None if the model abstains."""
        model: Any = evidence.models[self.model]  # a `stepspec.engines.decision_model.DecisionModel`
        before = "".join(step.text for step in evidence.committed)
        return await model.decide(
            INSTRUCTIONS, {"problem": evidence.question, "steps before": before, "step": evidence.step}
        )
