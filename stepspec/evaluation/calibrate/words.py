"""Says in sentences what a calibration found, for the terminal, reports and those who use the setting."""

import math
from statistics import NormalDist

from stepspec.evaluation.calibrate.records import Calibrated, Tested
from stepspec.evaluation.report.cells import joined, times

FEW = 0.5
"""A share of accepted steps below this one of the predicted share raises doubts."""
MAX_NEEDED = 1_000_000
"""Larger numbers of problems are as good as impossible."""


TYPICAL_CHANGE = 0.15
"""Share of the problems that a policy typically answers differently from the target."""


def prospects(num_problems: int, confidence: float) -> str:
    """Return what a test on so many problems can show, and how many problems a limit of 1, 2 or 5 points takes."""
    quantile = NormalDist().inv_cdf(confidence)
    margin = quantile * math.sqrt(TYPICAL_CHANGE / max(1, num_problems))
    needed = [f"{math.ceil(TYPICAL_CHANGE * (quantile / limit) ** 2):,}" for limit in (0.01, 0.02, 0.05)]
    return (
        f"For a policy that answers {TYPICAL_CHANGE:.0%} of the problems differently, {num_problems:,} problems put "
        f"the bound of the loss {100 * margin:.1f} points above the loss itself. Without a loss, a limit of 1, 2 or 5 "
        f"points takes about {needed[0]}, {needed[1]} or {needed[2]} problems."
    )


def sentences(results: Calibrated) -> list[str]:
    """Return what to know about the setting that a calibration chose."""
    identity = results.identity
    where = f"{identity.benchmark} at temperature {identity.temperature:g}"
    chosen = next(each for each in results.path if each.setting.name == results.chosen)
    limit = _amount(identity.max_loss)
    what = "of right answers" if identity.measure == "accuracy" else "of agreement with the target's own answers"
    said: list[str] = []
    if not results.pays:
        why = _why_not(chosen, identity.max_loss)
        said.append(
            f"On these models the policy is token-level speculation at temperature {identity.temperature:g}, which "
            f"costs no accuracy: {why}."
        )
    if results.certified:
        said.append(
            f"Certified on {where}: this setting loses at most {limit} {what}, at {100 * identity.confidence:g}% "
            f"confidence ({chosen.num_problems:,} problems, upper bound {_points(chosen.loss_upper)})."
        )
        if (number := results.num_certificates) > 1:
            said.append(
                f"It is one of {number:,} certificates from these problems. With a probability of up to "
                f"{1 - identity.confidence**number:.0%}, at least one of them is wrong: use other problems."
            )
    elif chosen.status != "not tested":
        said.append(
            f"Not certified: on {where}, {chosen.num_problems:,} problems do not show that this setting, the most "
            f"careful one of the path, loses at most {limit} {what}."
        )
        said.append(_why(chosen, limit))
    if chosen.status == "certified" and not _drafts_as_predicted(chosen):
        said.append(
            "In the test, far fewer steps were accepted than the recording predicts, perhaps because the draft was too "
            "slow under the load. Under a lower load the policy may lose more: calibrate again with --concurrency 1."
        )
    if results.speed is not None and results.speed.vs_target is not None:
        speed = f"It is {joined(times(results.speed.vs_target, results.speed.vs_target_ci))} as fast as the target"
        if results.speed.vs_token is not None:
            token = joined(times(results.speed.vs_token, results.speed.vs_token_ci))
            speed += f" and {token} as fast as token-level speculation"
        said.append(f"{speed} ({results.speed.num_problems} problems, one request at a time).")
    if chosen.target_accuracy in (0.0, 1.0):
        always = "all" if chosen.target_accuracy else "none"
        said.append(f"The target solves {always} of these problems, so they say little about others.")
    if (alone := results.draft_accuracy) is not None and alone >= (results.recorded_target_accuracy or 0.0):
        said.append(
            f"The draft alone is right on {alone:.1%} of the {results.num_recorded:,} recorded problems and the target "
            f"on {results.recorded_target_accuracy:.1%}: the policy 'draft' may be all that you need."
        )
    if results.num_repeated:
        said.append(f"{results.num_repeated:,} problems are left out: another one has the same question.")
    if results.num_refused:
        said.append(f"{results.num_refused:,} prompts are left out: the target's answer to them cannot be found.")
    return said


def _why_not(setting: Tested, max_loss: float) -> str:
    """Return why the draft proposes no steps."""
    if setting.setting.is_slower_than_tokens and setting.status == "not tested":
        return "by the recorded steps no setting is faster"
    if setting.loss is None:
        return "the budget ended before a setting was tested; resume the calibration with a larger one"
    lost = f"the most careful setting loses {_points(setting.loss)} on {setting.num_problems:,} problems"
    return lost if setting.loss > max_loss else "the chosen setting is not faster"


def _why(setting: Tested, limit: str) -> str:
    if setting.status == "loses more":
        return f"It is known to lose more than {limit}."
    bound = f"The upper bound of its loss is {_points(setting.loss_upper)}."
    if setting.num_needed is None or setting.num_needed > MAX_NEEDED:
        return f"{bound} On these problems it loses as much as the limit or more, so it is not known how many would do."
    needed = max(setting.num_needed, setting.num_problems + 1)
    return f"{bound} About {needed:,} problems would show it, if they are like these."


def _drafts_as_predicted(setting: Tested) -> bool:
    predicted = setting.setting.predicted_acceptance
    return not predicted or (setting.step_acceptance or 0.0) >= FEW * predicted


def _amount(share: float) -> str:
    return "1 point" if share == 0.01 else f"{100 * share:g} points"


def _points(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.2f} points"
