"""The calibration of a policy from the user's settings to the policy file."""

import random
import tomllib
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import get_args

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.base.files import write_text
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.advise.prompts import choose_prompts
from stepspec.evaluation.benchmark import Benchmark, FileData, ShippedData, Split, wording_version
from stepspec.evaluation.calibrate.calibration import (
    Budget,
    CalibratedModels,
    Calibration,
    CalibrationOutcome,
    CalibrationWatcher,
    Sizes,
    Task,
    check_policy,
    num_to_record,
)
from stepspec.evaluation.calibrate.folder import RESULTS, begin
from stepspec.evaluation.calibrate.records import Calibrated, Identity, Measure, Speed
from stepspec.evaluation.calibrate.words import sentences
from stepspec.evaluation.policy_files import certificate_for, policy_text
from stepspec.evaluation.records import compared_models
from stepspec.evaluation.replay.path import changed_policy
from stepspec.evaluation.report.conditions import hardware_in_words, pair_in_words
from stepspec.evaluation.run import Executor, load_problems
from stepspec.evaluation.run.conditions import current_conditions, engine_records
from stepspec.loop.certificate import Certificate
from stepspec.loop.policy import Policy

COMMENT_WIDTH = 118
USUAL = Sizes()


@dataclass(frozen=True)
class CalibrationPlan:
    """The user's settings. None means the benchmark's default."""

    max_loss: float = 0.01
    confidence: float = 0.95
    max_problems: int = 6000
    measure: Measure = "accuracy"
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    concurrency: int = 1
    num_repeats: int | None = None


def calibration_split(name: str, benchmark: Benchmark, split: str | None) -> Benchmark:
    """Return a benchmark with another split of its problems, if one is named.

    Raises:
        UsageError: there is no such split, or it is a test split, whose problems must stay unused.
    """
    data = benchmark.data
    if split is not None:
        if not isinstance(data, ShippedData):
            raise UsageError(f"{name} has no splits to choose from. --split is for gsm-mini.")
        if split not in get_args(Split):
            raise UsageError(unknown_name("split", split, get_args(Split)))
        data = data.model_copy(update={"split": split})
        benchmark = benchmark.model_copy(update={"data": data, "title": f"{benchmark.title}, {split} split"})
    if not isinstance(data, FileData) and data.split == "test":
        others = "Add --split calibration." if isinstance(data, ShippedData) else "Name a file of other questions."
        raise UsageError(f"A calibration must not use the test split of {name}, so that it stays unused. {others}")
    return benchmark


async def load_task(
    name: str, benchmark: Benchmark, data: Path | None, policy_text: str, executor: Executor, plan: CalibrationPlan
) -> Task:
    """Load the problems, in a random order, and return the task.

    Raises:
        UsageError: the problems cannot be loaded, or the pair cannot run the policy.
    """
    if plan.measure == "agreement" and data is not None:  # right answers are not needed
        prompts = await choose_prompts(data, executor, plan.max_problems)
        found = prompts.with_golds({})
    else:
        found = load_problems(benchmark, data, plan.max_problems)
    order = list({each.question: each for each in reversed(found.problems)}.values())[::-1]
    random.Random(plan.seed).shuffle(order)
    sampling = benchmark.sampling
    pair, models, stored = await executor.call(_about)
    identity = Identity(
        pair=pair,
        models=models,
        benchmark=name,
        data_sha256=found.sha256,
        prompt_version=wording_version(benchmark),
        policy=policy_text,
        measure=plan.measure,
        max_loss=plan.max_loss,
        confidence=plan.confidence,
        temperature=sampling.temperature if plan.temperature is None else plan.temperature,
        top_p=sampling.top_p,
        max_tokens=plan.max_tokens or benchmark.max_tokens,
        seed=plan.seed,
        concurrency=plan.concurrency,
        num_repeats=plan.num_repeats or benchmark.default_repeats,
    )
    given = Policy.model_validate(tomllib.loads(policy_text)).at(identity.temperature)
    check_policy(given)
    await executor.call(partial(_check_fits, given))
    # The losses are those of speculation on every step, however fast it is.
    given = given.without_overhead_limit()
    policy = changed_policy(given, {}, None if given.salvage is None else given.salvage.min_logprob)
    num_repeated = len(found.problems) - len(order)
    return Task(stored, policy, policy_text, name, benchmark, order, identity, num_repeated)


def _about(pair: Pair) -> tuple[str, dict[str, str], CalibratedModels]:
    """Return the hash of a pair, those of its models by role, and what else is stored about them."""
    return pair.hash, dict(pair.models), CalibratedModels(engine_records(pair), pair.template_sha256)


def _check_fits(policy: Policy, pair: Pair) -> None:
    """Check that a pair runs the judges that a calibration changes.

    Raises:
        UsageError: it does not.
    """
    if (missing := policy.on(pair.target.abilities)[1]) is not None:
        raise UsageError(
            f"{pair.target.name} lacks {missing!r}, so the judges of the table [[fallbacks]] would run, and calibrate "
            "changes those in [[judges]]. Put the judges of that table there, in a policy of its own."
        )
    fit_policy(policy, pair)


async def calibrate(
    task: Task,
    executor: Executor,
    folder: Path,
    budget: Budget,
    watcher: CalibrationWatcher,
    sizes: Sizes = USUAL,
    at_most: float | None = None,
) -> tuple[Calibrated, str]:
    """Run what is not finished of a calibration. Return its results and the text of the policy file.

    Args:
        task: what to calibrate.
        executor: runs the models.
        folder: where the calibration is stored.
        budget: how long it may take.
        watcher: callbacks for progress.
        sizes: numbers of problems.
        at_most: highest temperature that the settings are for in the policy file, see `policy_text`.

    Raises:
        UsageError: the folder holds another calibration, or there are too few problems.
        StepSpecError: an engine or the disk failed; finished rows are stored.
    """
    num_to_record(task, sizes)
    begin(folder, task.identity)
    outcome = await Calibration(task, folder, budget, watcher, executor, sizes).run()
    results = Calibrated(
        **dict(await executor.call(current_conditions)),
        identity=task.identity,
        engines=dict(task.models.records),
        num_recorded=outcome.plan.num_recorded,
        num_for_test=len(task.problems) - outcome.plan.num_recorded,
        num_repeated=task.num_repeated,
        num_refused=outcome.num_refused,
        path=list(outcome.tested),
        chosen=outcome.plan.path[outcome.chosen].name,
        certified=outcome.certified,
        speed=outcome.speed,
        sentences=[],
    )
    results = results.model_copy(update={"sentences": sentences(results)})
    write_text(folder / RESULTS, results.model_dump_json(indent=2) + "\n")
    return results, _text(task, outcome, results, at_most)


def _text(task: Task, outcome: CalibrationOutcome, results: Calibrated, at_most: float | None) -> str:
    setting = outcome.plan.path[outcome.chosen]
    certificate = _certificate(task, outcome, results, outcome.policy(task)) if outcome.certified else None
    comments = [*chain.from_iterable(wrap(each, COMMENT_WIDTH) for each in results.sentences)]
    return policy_text(task.text, comments, setting.thresholds, setting.min_logprob, certificate, at_most)


def _certificate(task: Task, outcome: CalibrationOutcome, results: Calibrated, policy: Policy) -> Certificate:
    found, identity = outcome.tested[outcome.chosen], task.identity
    assert found.loss_upper is not None, "a certified setting was tested"
    speed: Speed | None = outcome.speed
    compared = compared_models(task.models.records)
    fields = {
        "measure": identity.measure,
        "max_loss": identity.max_loss,
        "loss_upper": round(found.loss_upper, 6),
        "confidence": identity.confidence,
        "num_problems": found.num_problems,
        "benchmark": identity.benchmark,
        "data_sha256": identity.data_sha256,
        "prompt_version": identity.prompt_version,
        "template_sha256": task.models.template_sha256,
        "models": dict(identity.models),
        "pair": pair_in_words(task.models.records),
        "dtypes": compared["dtypes"],
        "engines": compared["engines"],
        "max_overhead": "none",
        "temperature": identity.temperature,
        "top_p": identity.top_p,
        "max_tokens": identity.max_tokens,
        "speedup": speed and _rounded(speed.vs_target),
        "speedup_interval": speed and speed.vs_target_ci and tuple(map(_rounded, speed.vs_target_ci)),
        "hardware": hardware_in_words(results.hardware),
        "date": results.started[:10],
    }
    return certificate_for(policy, fields)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
