"""Whether steps of a distant draft pay, by the costs of one step. Pure functions of the measurements.

The target writes a step of n tokens in n times its time of a token, w. Speculation takes the way to the draft, what the
draft takes for n tokens, and a pass of the target over them, with the way to the target if that is distant too. Of the
steps, a share p is accepted; the target writes the others again. So a step pays up to a way of p w - draft - pass.
"""

from dataclasses import dataclass

from stepspec.evaluation.advise.findings import Candidate, LoadFindings
from stepspec.evaluation.advise.formula import RelativeCosts


@dataclass(frozen=True)
class StepCosts:
    """What a step of a policy costs, in seconds.

    Attributes:
        policy: the policy whose acceptance counts.
        num_tokens: mean tokens of a draft step.
        way_s: the round trip to the draft.
        draft_s: what the draft takes for a step, without the way.
        pass_s: what the target takes to read it, with the way to the target.
        write_s: what the target takes to write it.
        accepted: share of accepted steps.
    """

    policy: str
    num_tokens: float
    way_s: float
    draft_s: float
    pass_s: float
    write_s: float
    accepted: float

    @property
    def max_way_s(self) -> float:
        """The round trip up to which a step pays; 0 or below if it does not pay without a way either."""
        return self.accepted * self.write_s - self.draft_s - self.pass_s


def step_costs(load: LoadFindings) -> StepCosts | None:
    """Return the costs of a step under the first policy that judged steps; None if the draft is in this process, or
    no step was judged."""
    target, draft = load.costs.target, load.costs.draft
    judged = next((each for each in load.candidates if _is_known(each)), None)
    if draft is None or draft.round_trip_s is None or judged is None:
        return None
    assert judged.step_tokens is not None
    assert judged.step_acceptance is not None
    one_pass = RelativeCosts(0.0, target.pass_over_one).verifying(round(judged.step_tokens))
    return StepCosts(
        policy=judged.name,
        num_tokens=judged.step_tokens,
        way_s=draft.round_trip_s,
        draft_s=judged.step_tokens * draft.write_s,
        pass_s=one_pass * target.write_s + (target.round_trip_s or 0.0),
        write_s=judged.step_tokens * target.write_s,
        accepted=judged.step_acceptance,
    )


def _is_known(candidate: Candidate) -> bool:
    return candidate.kind == "step" and candidate.step_acceptance is not None and candidate.step_tokens is not None
