"""Decides again about recorded steps: the judges and the salvage of a policy, on what the models returned then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan

from stepspec.engines.protocol import Verification
from stepspec.errors import UsageError
from stepspec.evaluation.records import JudgedStepRecord, StepRecord, Trace
from stepspec.loop.commit import agreed_prefix
from stepspec.loop.judge import Decision, Evidence, Judge
from stepspec.loop.policy import Policy
from stepspec.loop.step import Proposal, Step

SETTINGS_OF_DECISIONS = ("threshold", "reject_below")
"""Settings of a judge that change its decisions, but not its scores."""


@dataclass(frozen=True)
class Decided:
    """A policy's decision about a recorded step."""

    accepted: bool
    num_kept: int
    """Tokens kept of the step: all of an accepted one, the salvaged ones of a rejected one."""
    asks_target: bool
    """Whether it takes a pass of the target."""

    def same_text(self, step: JudgedStepRecord) -> bool:
        """Whether the text goes on as it did in the recorded run."""
        return self.accepted == step.accepted and (self.accepted or self.num_kept == step.num_salvaged)


def check_replayable(name: str, policy: Policy, recorded_name: str, recorded: Policy) -> None:
    """Check that recorded steps can say what a policy does: it differs in judges and the bound of salvage at most.

    Raises:
        UsageError: the policy differs in more than that, or a judge was not recorded.
    """
    changed = {"summary", "paper", "judges", "judging", "salvage"}
    own, other = (each.model_dump(exclude=changed) for each in (policy, recorded))
    different = [key for key in own if own[key] != other[key]]
    if _redrafts(policy) != _redrafts(recorded):
        different.append("salvage.redraft")
    if different:
        raise UsageError(
            f"{name!r} cannot be replayed: it differs from the recorded {recorded_name!r} in {', '.join(different)}. A "
            "replay can change only the judges and min_logprob of [salvage]. Run it with 'stepspec eval'."
        )
    for judge in policy.judges:
        if not (is_computed(judge) or any(same_scores(judge, each) for each in recorded.judges)):
            raise UsageError(
                f"{name!r} cannot be replayed: its judge {judge.name} was not recorded. Record a run with a policy "
                "that asks it."
            )


def _redrafts(policy: Policy) -> bool:
    return policy.salvage is not None and policy.salvage.redraft


def is_computed(judge: Judge) -> bool:
    """Return whether recorded log-probabilities and texts give the score of a judge: it asks no model a question."""
    return type(judge).probe is Judge.probe and judge.model_needs is None


def same_scores(judge: Judge, other: Judge) -> bool:
    """Return whether two judges differ at most in their thresholds."""
    own, others = (each.model_dump(exclude=set(SETTINGS_OF_DECISIONS)) for each in (judge, other))
    return type(judge) is type(other) and own == others


Scores = Sequence[Mapping[str, float | None]]
"""For each recorded step of a trace, the score of each judge by name."""


async def scores_of(judges: Sequence[Judge], trace: Trace, recorded: Policy) -> Scores:
    """Return the scores that judges give to the recorded steps of a trace, of those whose score can be known."""
    found: list[dict[str, float | None]] = []
    for step in trace.judged_steps:
        scores: dict[str, float | None] = {}
        for judge in judges:
            if judge.name in step.scores and any(same_scores(judge, each) for each in recorded.judges):
                scores[judge.name] = step.scores[judge.name]
            elif step.asked and is_computed(judge) and not _missing(judge, step):
                score = await judge.score(evidence_of(step, trace))
                scores[judge.name] = None if score is None or isnan(score) else score
        found.append(scores)
    return found


def _missing(judge: Judge, step: JudgedStepRecord) -> list[str]:
    """Return what a judge needs and the run did not record."""
    known = {
        "choices": step.own_choices,
        "scores": step.target_logprobs,
        "logprobs": step.draft_logprobs,
    }
    return [name for name in (*judge.needs, *judge.draft_needs) if known.get(name, ()) is None]


def evidence_of(step: JudgedStepRecord, trace: Trace) -> Evidence:
    """Return what a judge sees of a recorded step."""
    return Evidence(
        question=trace.question,
        committed=[_committed(index, each) for index, each in enumerate(trace.steps[: step.index])],
        step=step.text,
        draft_logprobs=_frozen(step.draft_logprobs),
        verification=Verification(_frozen(step.target_logprobs), None, next_choice=-1),
        own_choices=step.own_choices,
    )


def _frozen(values: Sequence[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


def _committed(index: int, step: StepRecord) -> Step:
    return Step(index, step.origin, step.text or "", step.num_tokens, step.num_from_draft, "delimiter", step.scores)


def decide(policy: Policy, step: JudgedStepRecord, scores: Mapping[str, float | None]) -> Decided:
    """Return a policy's decision about a recorded step, see `stepspec.loop.judge.Panel.judge`.

    Steps whose form decides, such as empty ones, keep the recorded decision.

    Raises:
        UsageError: a judge that has to be asked has no recorded score.
    """
    if not step.asked:
        return Decided(step.accepted, step.num_salvaged, asks_target=True)
    decisions: list[Decision] = []
    asks_target = False
    for judge in policy.judges:
        if judge.name not in scores:
            needs = " and ".join(_missing(judge, step)) or "a question to a model"
            raise UsageError(f"The judge {judge.name} needs {needs}, which was not recorded of every step.")
        score = scores[judge.name]
        asks_target |= judge.asks_target
        decisions.append(judge.without_score if score is None else judge.decide(score))
        if policy.judging == "cascade" and decisions[-1] != "undecided":
            break
    if "accept" in decisions and "reject" not in decisions:
        return Decided(True, step.num_tokens, asks_target)
    if policy.salvage is None or step.target_logprobs is None:
        return Decided(False, 0, asks_target)
    return Decided(False, _salvaged(step, policy.salvage.min_logprob), asks_target=True)


def _salvaged(step: JudgedStepRecord, min_logprob: float) -> int:
    """Return how many tokens of a rejected step are kept, by the rule of the loop."""
    assert step.target_logprobs is not None
    ids = tuple(range(step.num_tokens))
    choices = None if step.own_choices is None else tuple(n if own else -1 for n, own in enumerate(step.own_choices))
    seen = Verification(tuple(step.target_logprobs), choices, next_choice=-1)
    return agreed_prefix(Proposal(ids, step.text, step.num_tokens), seen, min_logprob)
