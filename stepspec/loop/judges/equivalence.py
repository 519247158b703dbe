"""The equivalence judge: whether the draft's step and the target's own say the same (arXiv:2506.19830, section 3).

The paper asks a third model, which sees the two steps alone. Here the target answers, with the problem in view, and its
two answers are weighed against each other.
"""

from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Literal

from pydantic import Field

from stepspec.chat.prompts import EQUIVALENCE_PROMPT, render_probe, yes_no_labels
from stepspec.engines.protocol import Ability, Probe, Tokenizer
from stepspec.loop.judge import Evidence, ThresholdJudge, share_of_yes


class EquivalenceJudge(ThresholdJudge):
    """The target's probability of "yes" as its answer to whether two steps say the same, against "no"."""

    asks_target: ClassVar[bool] = False
    families = ("compare",)

    kind: Literal["equivalence"]
    """Selects this judge."""
    threshold: float = Field(default=0.5, ge=0, le=1)
    """Lowest accepted score."""

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset({"label logprobs"})

    def probe(self, tokenizer: Tokenizer) -> None:
        """Check that the question can be asked. It depends on the steps, so it is no common probe.

        Raises:
            ModelError: "yes" and "no" end with the same token.
            UsageError: the chat template drops turns.
        """
        yes_no_labels(tokenizer)
        _question(tokenizer)

    async def score(self, evidence: Evidence) -> float | None:
        """Return p(yes) / (p(yes) + p(no)). None if the target gives neither a probability above 1e-6, or if a step has
        the text of a control token."""
        assert evidence.tokenizer is not None
        assert evidence.ask is not None
        tokenizer, steps = evidence.tokenizer, (evidence.own_step.strip(), evidence.step.strip())
        if any(map(tokenizer.special_spans, steps)):
            return None
        before, between, after = _question(tokenizer)
        text = "".join((before, steps[0], between, steps[1], after))
        answer = await evidence.ask(Probe(tuple(tokenizer.encode(text)), yes_no_labels(tokenizer)))
        return share_of_yes(answer.label_logprobs)


@lru_cache(maxsize=16)
def _question(tokenizer: Tokenizer) -> tuple[str, str, str]:
    """Return the text of the question before, between and after the two steps."""
    first, second = "(the first step)", "(the second step)"
    user = EQUIVALENCE_PROMPT.user.format(first=first, second=second)
    text = render_probe(tokenizer, replace(EQUIVALENCE_PROMPT, user=user))
    before, _, rest = text.partition(first)
    between, _, after = rest.partition(second)
    return before, between, after
