"""The exact judge: a step stands if the target would have written it itself.

The text then follows the target's own distribution, as under token-level speculation (arXiv:2211.17192). At temperature
0 it is the target's text. Above, the target's choices are samples with the random numbers that it would write with.
"""

from typing import ClassVar, Literal

from stepspec.engines.protocol import Ability
from stepspec.loop.judge import Decision, Evidence, Judge


class ExactJudge(Judge):
    """Accepts a step if each of its tokens is the target's own choice. The score is the share of the step before the
    first other token."""

    exact: ClassVar[bool] = True

    kind: Literal["exact"]
    """Selects this judge."""

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset({"scores", "choices"})

    async def score(self, evidence: Evidence) -> float | None:
        """Return the share of the step before the first token that is not the target's own choice."""
        own = evidence.own_choices
        if not own:
            return None
        return (*own, False).index(False) / len(own)

    def decide(self, score: float) -> Decision:
        return "accept" if score == 1 else "reject"
