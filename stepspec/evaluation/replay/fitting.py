"""Fits a learned judge: a logistic regression of recorded signals on which steps were good.

A step is good if the answer of the text that it is part of is right (`answers`), or if the recorded judges accepted it
(`verdicts`). The first is noisy, since a right step may stand before a wrong one. Areas are of held-out problems: each
is scored by a judge that was fitted without it.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tomlkit
from numpy.typing import NDArray
from pydantic import ValidationError

from stepspec.errors import UsageError
from stepspec.evaluation.policy_files import with_comments, without_comments
from stepspec.evaluation.replay.deciding import evidence_of
from stepspec.evaluation.replay.recordings import Recordings
from stepspec.evaluation.stats import Area, auc
from stepspec.evaluation.stats.runs import Floats
from stepspec.loop.judges.learned import SIGNALS, signals_of
from stepspec.loop.policy import Policy

Labels = Literal["answers", "verdicts"]
FOLDS = 5
PENALTY = 10.0
"""Of the squared weights, for signals with a standard deviation of 1."""
LEAST_STEPS = 100
SURE = 0.98
"""Share of good steps among those that the first judge of a cascade accepts, and of bad ones among the rejected."""
LEAST_SURE = 50
"""Steps that a share of good or bad ones needs to count."""
_NEWTON_STEPS = 50


@dataclass(frozen=True)
class Fitted:
    """A fitted judge.

    Attributes:
        weights: of the signals as they are.
        intercept: of the log odds.
        threshold: accepts as large a share of the steps as the recorded judges did.
        sure: scores from which, and below which, at least `SURE` of the steps are good and bad; None if there are none.
        num_steps: steps that it was fitted on.
        areas: the area of the judge and of each signal alone, on held-out problems.
    """

    weights: Mapping[str, float]
    intercept: float
    threshold: float
    sure: tuple[float | None, float | None]
    num_steps: int
    areas: Mapping[str, Area]

    def table(self, *, cascade: bool = False) -> dict[str, Any]:
        """Return the `[[judges]]` table. In a cascade, unclear steps are left to the next judge.

        Raises:
            UsageError: the judge is never sure, so it cannot come first in a cascade.
        """
        values: dict[str, Any] = {"kind": "learned", "threshold": _rounded(self.threshold)}
        if cascade:
            accept, reject = self.sure
            if accept is None and reject is None:
                raise UsageError("No score makes the judge sure enough to decide alone, so a cascade would not help.")
            values["threshold"] = 1.0 if accept is None else _rounded(accept)
            values["reject_below"] = 0.0 if reject is None else min(_rounded(reject), values["threshold"] - 1e-6)
        weights = {name: _rounded(each) for name, each in self.weights.items()}
        return values | {"intercept": _rounded(self.intercept), "weights": weights}


def fit_judge(recordings: Recordings, labels: Labels, signals: Sequence[str]) -> Fitted:
    """Fit a judge on the recorded steps of a run.

    Raises:
        UsageError: there are too few steps, all are good or all bad, or a signal was not recorded.
    """
    every = _steps(recordings, "verdicts", signals)
    steps = every if labels == "verdicts" else _steps(recordings, labels, signals)
    good = steps.good == 1
    if len(good) < LEAST_STEPS or good.all() or not good.any():
        raise UsageError(
            f"The run has {len(good):,} recorded steps, {int(good.sum()):,} of them good. A judge needs at least "
            f"{LEAST_STEPS} steps, good and bad ones."
        )
    if len(np.unique(steps.problems)) < FOLDS:
        raise UsageError(f"The run has recorded steps of fewer than {FOLDS} problems.")
    weights, intercept = _fit(steps.signals, steps.good)
    held_out = _held_out(steps)
    areas = {"learned": auc(held_out, steps.good, steps.problems)}
    areas |= {name: auc(_signed(steps, place), steps.good, steps.problems) for place, name in enumerate(signals)}
    found = dict(zip(signals, weights.tolist(), strict=True))
    threshold = float(np.quantile(_chances(every.signals, weights, intercept), 1 - every.accepted.mean()))
    return Fitted(found, intercept, threshold, _sure(held_out, steps.good), len(good), areas)


@dataclass(frozen=True)
class _Steps:
    """Recorded steps as arrays: their signals, [steps, signals], whether they are good and accepted, their problems."""

    signals: Floats
    good: Floats
    accepted: NDArray[np.bool_]
    problems: NDArray[np.int64]


def _steps(recordings: Recordings, labels: Labels, signals: Sequence[str]) -> _Steps:
    rows: list[list[float]] = []
    good, accepted, problems = list[bool](), list[bool](), list[int]()
    numbers: dict[str, int] = {}
    for recording in recordings.recordings:
        for (problem, _), request in recording.requests.items():
            for step in request.trace.judged_steps:
                if not step.asked or (labels == "answers" and not step.accepted):
                    continue
                values = signals_of(evidence_of(step, request.trace))
                missing = [name for name in signals if values[name] is None]
                if missing:
                    raise UsageError(f"The run did not record what the signal {missing[0]} needs. Leave it out.")
                rows.append([values[name] or 0.0 for name in signals])
                good.append(request.correct if labels == "answers" else step.accepted)
                accepted.append(step.accepted)
                problems.append(numbers.setdefault(problem, len(numbers)))
    shape = len(rows), len(signals)
    return _Steps(
        np.array(rows, dtype=np.float64).reshape(shape),
        np.array(good, dtype=np.float64),
        np.array(accepted, dtype=np.bool_),
        np.array(problems, dtype=np.int64),
    )


def _fit(signals: Floats, good: Floats) -> tuple[Floats, float]:
    """Return weights and intercept of a logistic regression with an L2 penalty, by Newton's method."""
    mean, spread = signals.mean(axis=0), signals.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    inputs = np.column_stack([(signals - mean) / spread, np.ones(len(good))])
    penalty = np.diag([PENALTY] * signals.shape[1] + [0.0])
    beta: Floats = np.zeros(inputs.shape[1])
    for _ in range(_NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ beta, -30, 30)))
        gradient = inputs.T @ (good - chance) - penalty @ beta
        hessian = (inputs * (chance * (1 - chance))[:, None]).T @ inputs + penalty + 1e-9 * np.eye(len(beta))
        change = np.linalg.solve(hessian, gradient)
        beta = beta + change
        if float(np.abs(change).max()) < 1e-8:
            break
    weights: Floats = beta[:-1] / spread
    return weights, float(beta[-1] - weights @ mean)


def _held_out(steps: _Steps) -> Floats:
    """Return each step's score by a judge that was fitted without its problem, [steps]."""
    scores: Floats = np.zeros(len(steps.good))
    for fold in range(FOLDS):
        out = steps.problems % FOLDS == fold
        weights, intercept = _fit(steps.signals[~out], steps.good[~out])
        scores[out] = _chances(steps.signals[out], weights, intercept)
    return scores


def _chances(signals: Floats, weights: Floats, intercept: float) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(signals @ weights + intercept, -30, 30))), dtype=np.float64)


def _signed(steps: _Steps, place: int) -> Floats:
    """Return one signal, negated where it is lower for the good steps of the other folds."""
    values: Floats = steps.signals[:, place].copy()
    good = steps.good == 1
    for fold in range(FOLDS):
        out = steps.problems % FOLDS == fold
        if steps.signals[~out & good, place].mean() < steps.signals[~out & ~good, place].mean():
            values[out] *= -1
    return values


def _sure(scores: Floats, good: Floats) -> tuple[float | None, float | None]:
    order = np.argsort(scores)
    ranked, label = scores[order], good[order]
    good_above = np.cumsum(label[::-1])[::-1] / np.arange(len(label), 0, -1)
    bad_below = np.cumsum(1 - label) / np.arange(1, len(label) + 1)
    good_above[len(label) - LEAST_SURE + 1 :] = bad_below[: LEAST_SURE - 1] = 0  # too few to trust
    (accepts,), (rejects,) = np.nonzero(good_above >= SURE), np.nonzero(bad_below >= SURE)
    accept = float(ranked[accepts[0]]) if len(accepts) else None
    reject = math.nextafter(float(ranked[rejects[-1]]), 2.0) if len(rejects) else None
    if accept is not None and reject is not None and reject >= accept:
        reject = None
    return accept, reject


def _rounded(value: float) -> float:
    return round(value, 6)


def chosen_signals(names: str) -> list[str]:
    """Return the signals named in a comma-separated list; `draft` and `target` are all of a model, `all` is all.

    Raises:
        UsageError: a name is unknown.
    """
    groups = {
        "all": list(SIGNALS),
        "draft": [name for name, each in SIGNALS.items() if not each.target_needs],
        "target": [name for name, each in SIGNALS.items() if not each.draft_needs],
    }
    found: list[str] = []
    for name in names.split(","):
        if name not in groups and name not in SIGNALS:
            known = ", ".join((*groups, *SIGNALS))
            raise UsageError(f"There is no signal {name!r}. Known: {known}.")
        found += [each for each in groups.get(name, [name]) if each not in found]
    return found


def judged_by(text: str, table: Mapping[str, Any], *, cascade: bool, comments: Sequence[str]) -> str:
    """Return the text of a policy file with a learned judge instead of its judges, or before them in a cascade.

    Raises:
        UsageError: the file already has a learned judge, and it is to be before the others.
    """
    document = tomlkit.parse(without_comments(text))
    for key in ("certificate", "temperatures"):
        document.pop(key, None)
    kept: list[Any] = list(document.get("judges", [])) if cascade else []
    tables = tomlkit.aot()
    learned = tomlkit.table()
    for key, value in table.items():
        if isinstance(value, dict):
            weights = tomlkit.inline_table()
            weights.update(value)
            learned.append(key, weights)
        else:
            learned.append(key, value)
    for each in (learned, *kept):
        tables.append(each)
    document["judges"] = tables
    if cascade:
        document["judging"] = "cascade"
    document["summary"] = "draft steps judged by a learned judge" + (
        ", and by others where it is unsure" if cascade else ""
    )
    document.pop("paper", None)
    found = tomlkit.dumps(document)
    try:
        Policy.model_validate(tomllib.loads(found))
    except ValidationError as error:
        raise UsageError(f"The judge does not fit the recorded policy: {error.errors()[0]['msg']}.") from error
    return with_comments(found, comments)
