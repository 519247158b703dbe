"""The embedding judge: how close the draft's step is to the target's own (arXiv:2506.19830, section 5)."""

from typing import ClassVar, Literal

from pydantic import Field

from stepspec.engines.judge_model import JudgeAbility
from stepspec.loop.judge import Evidence, ThresholdJudge


class EmbeddingJudge(ThresholdJudge):
    """The cosine of the embeddings of both steps by a judge model."""

    asks_target: ClassVar[bool] = False
    families = ("compare",)
    model_needs: ClassVar[JudgeAbility | None] = "embed"

    kind: Literal["embedding"]
    """Selects this judge."""
    model: str = "embedding"
    """Name of the judge model, as in `--judge NAME=MODEL`."""
    threshold: float = Field(default=0.95, ge=-1, le=1)
    """Lowest accepted score."""

    async def score(self, evidence: Evidence) -> float:
        """Return the cosine, from -1 to 1."""
        steps = [evidence.own_step.strip(), evidence.step.strip()]
        own, draft = await evidence.models[self.model].embed(steps, evidence.group)
        return sum(a * b for a, b in zip(own, draft, strict=True))
