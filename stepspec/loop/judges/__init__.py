"""Judges that score a proposed step. Each judge names its probe for the verifying pass and scores the pass's output."""

from collections.abc import Sequence
from typing import Protocol

from stepspec.engines.protocol import Probe, Tokenizer, Verification
from stepspec.loop.judges.likelihood import LikelihoodJudge
from stepspec.loop.judges.rating import RatingJudge
from stepspec.loop.policy import JudgeSpec, RatingSpec
from stepspec.loop.step import Verdict


class Judge(Protocol):
    """Scores a step from the output of one target pass."""

    @property
    def name(self) -> str: ...

    @property
    def probe(self) -> Probe | None:
        """The probe appended after the step; None if the log-probs of the step's own tokens are enough."""
        ...

    def score(self, verification: Verification, probe_index: int) -> float | None:
        """Return the step's score, higher is better; None if there is none.

        Args:
            verification: the output of the verifying pass.
            probe_index: index of this judge's probe in the output.
        """
        ...

    def accepts(self, score: float) -> bool:
        """Whether the score reaches the threshold."""
        ...


class Panel:
    """The judges of a policy. They share one verifying pass; a step is accepted if all of them accept it."""

    def __init__(self, specs: Sequence[JudgeSpec], tokenizer: Tokenizer) -> None:
        self._judges = [_build(spec, tokenizer) for spec in specs]
        self.probes = tuple(judge.probe for judge in self._judges if judge.probe is not None)

    def judge(self, verification: Verification) -> Verdict:
        """Return the verdict on the verified step. A judge without a score rejects the step."""
        scores: dict[str, float | None] = {}
        accepted = True
        probe_index = 0
        for judge in self._judges:
            score = judge.score(verification, probe_index)
            probe_index += judge.probe is not None
            scores[judge.name] = score
            accepted = accepted and score is not None and judge.accepts(score)
        return Verdict(accepted, scores)


def _build(spec: JudgeSpec, tokenizer: Tokenizer) -> Judge:
    return RatingJudge(spec, tokenizer) if isinstance(spec, RatingSpec) else LikelihoodJudge(spec)
