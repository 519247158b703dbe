"""The calibration of a policy, from the user's settings to the thresholds that are stored for the models."""

import random
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from stepspec.evaluation.calibrate.words import prospects, sentences
from stepspec.evaluation.records import compared_models
from stepspec.evaluation.report.conditions import hardware_in_words, pair_in_words
from stepspec.evaluation.run import Executor, load_problems, prompt_logprobs
from stepspec.evaluation.run.conditions import current_conditions, engine_records
from stepspec.loop.calibrated import CalibratedSetting, others_from
from stepspec.loop.certificate import Certificate, least_logprob
from stepspec.loop.policy import Policy

USUAL = Sizes()
NUM_READ = 400
"""Problems whose prompts set the bound `least_logprob`."""


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
    name: str, benchmark: Benchmark, data: Path | None, policy: str, executor: Executor, plan: CalibrationPlan
) -> Task:
    """Load the problems, in a random order, and return the task.

    Args:
        name: name of the benchmark.
        benchmark: the benchmark.
        data: the user's file of problems.
        policy: the text of the policy's file.
        executor: runs the models.
        plan: the user's settings.

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
        policy=policy,
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
    given = Policy.model_validate(tomllib.loads(policy))
    check_policy(given)
    await executor.call(partial(fit_policy, given))
    num_repeated = len(found.problems) - len(order)
    # The losses are those of speculation on every step, however fast it is.
    return Task(stored, given.without_overhead_limit(), name, benchmark, order, identity, num_repeated)


def _about(pair: Pair) -> tuple[str, dict[str, str], CalibratedModels]:
    """Return the hash of a pair, those of its models by role, and what else is stored about them."""
    return pair.hash, dict(pair.models), CalibratedModels(engine_records(pair), pair.template_sha256)


async def calibrate(
    task: Task,
    executor: Executor,
    folder: Path,
    budget: Budget,
    watcher: CalibrationWatcher,
    sizes: Sizes = USUAL,
) -> tuple[Calibrated, CalibratedSetting]:
    """Run what is not finished of a calibration. Return its results, and what to store for the models.

    Args:
        task: what to calibrate.
        executor: runs the models.
        folder: where the calibration is stored.
        budget: how long it may take.
        watcher: callbacks for progress.
        sizes: numbers of problems.

    Raises:
        UsageError: the folder holds another calibration, or there are too few problems.
        StepSpecError: an engine or the disk failed; finished rows are stored.
    """
    watcher.say(prospects(len(task.problems) - num_to_record(task, sizes), task.identity.confidence))
    begin(folder, task.identity)
    outcome = await Calibration(task, folder, budget, watcher, executor, sizes).run()
    identity, policy = task.identity, Policy.model_validate(tomllib.loads(task.identity.policy))
    results = Calibrated(
        **dict(await executor.call(current_conditions)),
        identity=task.identity,
        engines=dict(task.models.records),
        num_recorded=outcome.plan.num_recorded,
        draft_accuracy=outcome.alone and outcome.alone[0],
        recorded_target_accuracy=outcome.alone and outcome.alone[1],
        num_for_test=len(task.problems) - outcome.plan.num_recorded,
        num_repeated=task.num_repeated,
        num_refused=outcome.num_refused,
        path=list(outcome.tested),
        chosen=outcome.plan.path[outcome.chosen].name,
        certified=outcome.certified,
        num_certificates=1 + others_from(identity.data_sha256, identity.pair, policy, identity.temperature),
        pays=outcome.pays(task.identity.max_loss),
        speed=outcome.speed,
        sentences=[],
    )
    results = results.model_copy(update={"sentences": sentences(results)})
    write_text(folder / RESULTS, results.model_dump_json(indent=2) + "\n")
    bound = None
    if outcome.certified:
        read = partial(prompt_logprobs, task.benchmark, task.problems, NUM_READ)
        bound = least_logprob(await executor.call(read))
    return results, _setting(task, policy, outcome, results, bound)


def _setting(
    task: Task, policy: Policy, outcome: CalibrationOutcome, results: Calibrated, bound: float | None
) -> CalibratedSetting:
    setting = outcome.plan.path[outcome.chosen]
    return CalibratedSetting(
        policy_sha256=policy.settings_sha256,
        pair=pair_in_words(task.models.records),
        temperature=task.identity.temperature,
        steps=results.pays,
        thresholds=dict(setting.thresholds),
        min_logprob=setting.min_logprob,
        certificate=_certificate(task, outcome, results, bound) if outcome.certified else None,
        sentences=results.sentences,
    )


def _certificate(task: Task, outcome: CalibrationOutcome, results: Calibrated, bound: float | None) -> Certificate:
    found, identity = outcome.tested[outcome.chosen], task.identity
    assert found.loss_upper is not None, "a certified setting was tested"
    speed: Speed | None = outcome.speed
    compared = compared_models(task.models.records)
    return Certificate(
        measure=identity.measure,
        max_loss=identity.max_loss,
        loss_upper=found.loss_upper,
        confidence=identity.confidence,
        num_problems=found.num_problems,
        benchmark=identity.benchmark,
        data_sha256=identity.data_sha256,
        prompt_version=identity.prompt_version,
        template_sha256=task.models.template_sha256,
        models=identity.models,
        dtypes=compared["dtypes"],
        engines=compared["engines"],
        temperature=identity.temperature,
        top_p=identity.top_p,
        max_tokens=identity.max_tokens,
        least_logprob=bound,
        speedup=speed and speed.vs_target,
        speedup_interval=speed and speed.vs_target_ci,
        hardware=hardware_in_words(results.hardware),
        date=results.started[:10],
    )
