"""Scores for a proposed step. Each judge says what it wants read in the verifying pass, and what it makes of that."""

from collections.abc import Sequence
from typing import Protocol

from stepspec.engines.protocol import Probe, Tokenizer, Verification
from stepspec.loop.judges.likelihood import LikelihoodJudge
from stepspec.loop.judges.rating import RatingJudge
from stepspec.loop.policy import JudgeSpec, RatingSpec
from stepspec.loop.step import Verdict


class Judge(Protocol):
    """Scores a step from what one pass of the target has shown."""

    @property
    def name(self) -> str: ...

    @property
    def probe(self) -> Probe | None:
        """What the target is to be asked after the step; None if the step's own distribution is enough."""
        ...

    def score(self, verification: Verification, probe_index: int) -> float | None:
        """The step's score, higher is better; None if it cannot be read. `probe_index` is that of `probe`."""
        ...

    def accepts(self, score: float) -> bool:
        """Whether the score is good enough."""
        ...


class Panel:
    """The judges of a policy, read from one pass together; the step is accepted if every one of them accepts."""

    def __init__(self, specs: Sequence[JudgeSpec], tokenizer: Tokenizer) -> None:
        self._judges = [_build(spec, tokenizer) for spec in specs]
        self.probes = tuple(judge.probe for judge in self._judges if judge.probe is not None)

    def judge(self, verification: Verification) -> Verdict:
        """The verdict on the step that was verified. A judge that cannot read a score rejects."""
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
