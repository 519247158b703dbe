"""The reward judge: a process reward model scores the step (RSD, arXiv:2501.19324)."""

from typing import ClassVar, Literal

from pydantic import Field

from stepspec.engines.judge_model import JudgeAbility
from stepspec.loop.judge import Evidence, ThresholdJudge


class RewardJudge(ThresholdJudge):
    """The reward of the step by a judge model."""

    asks_target: ClassVar[bool] = False
    is_probability: ClassVar[bool] = True
    model_needs: ClassVar[JudgeAbility | None] = "reward"

    kind: Literal["reward"]
    """Selects this judge."""
    model: str = "reward"
    """Name of the judge model, as in `--judge NAME=MODEL`."""
    threshold: float = Field(default=0.7, ge=0, le=1)
    """Lowest accepted score."""

    async def score(self, evidence: Evidence) -> float:
        """Return the reward, from 0 to 1."""
        steps = [step.text for step in evidence.committed]
        return await evidence.models[self.model].reward(evidence.question, [*steps, evidence.step], evidence.group)
