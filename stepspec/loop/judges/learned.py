"""The learned judge: a logistic model of cheap signals, such as the target's and the draft's log-probabilities.

`stepspec fit-judge` fits the weights from the recorded steps of a run. A judge that has no weight for a signal of the
target needs no pass of the target, so it can come first in a cascade.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from pydantic import Field, field_validator

from stepspec.engines.protocol import Ability
from stepspec.errors import unknown_name
from stepspec.loop.judges.arithmetic import false_equalities
from stepspec.loop.judging import Evidence, ThresholdJudge

LOW = 0.1
"""The quantile of `target-low`."""


@dataclass(frozen=True)
class Signal:
    """A signal of a step.

    Attributes:
        value: returns it, or None if a model returned nothing to compute it from.
        target_needs: abilities that it needs of the target, in a pass over the step.
        draft_needs: abilities that it needs of the draft.
    """

    value: Callable[[Evidence], float | None]
    target_needs: frozenset[Ability] = frozenset()
    draft_needs: frozenset[Ability] = frozenset()


def _of_target(statistic: Callable[[Sequence[float]], float]) -> Signal:
    def value(evidence: Evidence) -> float | None:
        logprobs = evidence.verification and evidence.verification.logprobs
        return statistic(logprobs) if logprobs else None

    return Signal(value, target_needs=frozenset({"scores"}))


def _of_draft(name: Literal["logprobs", "entropies", "margins"]) -> Signal:
    def value(evidence: Evidence) -> float | None:
        values: Sequence[float] | None = getattr(evidence, f"draft_{name}")
        return fmean(values) if values else None

    return Signal(value, draft_needs=frozenset({"logprobs" if name == "logprobs" else "entropies"}))


def _low(values: Sequence[float]) -> float:
    return sorted(values)[math.floor(LOW * (len(values) - 1))]


SIGNALS: Mapping[str, Signal] = {
    "target-min": _of_target(min),
    "target-mean": _of_target(fmean),
    "target-low": _of_target(_low),
    "draft-logprob": _of_draft("logprobs"),
    "draft-entropy": _of_draft("entropies"),
    "draft-margin": _of_draft("margins"),
    "length": Signal(lambda evidence: math.log1p(len(evidence.step))),
    "position": Signal(lambda evidence: math.log1p(len(evidence.committed))),
    "arithmetic": Signal(lambda evidence: float(not false_equalities(evidence.step))),
}
"""The minimum, the mean and a low quantile of the target's log-probabilities of the step's tokens; the mean of the
draft's log-probabilities, entropies and margins; the logarithms of the step's length in characters and of the number of
steps before it; and whether it has no false equality."""


class LearnedJudge(ThresholdJudge):
    """A logistic model of several signals."""

    kind: Literal["learned"]
    """Selects this judge."""
    weights: dict[str, float] = Field(min_length=1)
    """The weight of each signal. `target-min`, `target-mean`, `target-low`: the target's log-probabilities of the
    step's tokens, the lowest, the mean, and the 10% quantile. `draft-logprob`, `draft-entropy`, `draft-margin`: means
    of what the draft returned. `length`, `position`: the logarithms of the step's characters and of the number of steps
    before it. `arithmetic`: 1 without a false equality, else 0."""
    intercept: float = 0.0
    """Added to the weighted sum."""
    threshold: float = Field(ge=0, le=1)
    """Lowest probability of a good step that accepts one."""

    @field_validator("weights")
    @classmethod
    def _known(cls, weights: dict[str, float]) -> dict[str, float]:
        for name in weights:
            if name not in SIGNALS:
                raise ValueError(unknown_name("signal", name, SIGNALS))
        return weights

    @property
    def asks_target(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a signal needs the target's pass over the step."""
        return bool(self.needs)

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset[Ability]().union(*(SIGNALS[name].target_needs for name in self.weights))

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge."""
        return frozenset[Ability]().union(*(SIGNALS[name].draft_needs for name in self.weights))

    async def score(self, evidence: Evidence) -> float | None:
        """Return the probability of a good step; None for a step without tokens."""
        values = {name: SIGNALS[name].value(evidence) for name in self.weights}
        known = [weight * value for name, weight in self.weights.items() if (value := values[name]) is not None]
        if len(known) < len(self.weights):
            return None
        return logistic(self.intercept + sum(known))


def logistic(log_odds: float) -> float:
    """Return 1 / (1 + exp(-log_odds)) without overflow."""
    if log_odds >= 0:
        return 1 / (1 + math.exp(-log_odds))
    return math.exp(log_odds) / (1 + math.exp(log_odds))


def signals_of(evidence: Evidence) -> Mapping[str, float | None]:
    """Return all signals of a step."""
    return {name: signal.value(evidence) for name, signal in SIGNALS.items()}
