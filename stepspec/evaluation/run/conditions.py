"""The conditions of a run, as stored in `run.json`: policies, models, settings, versions and hardware."""

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from stepspec.api.models import Pair
from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import Engine
from stepspec.errors import EngineError
from stepspec.evaluation.benchmark import Benchmark, asked, wording_version
from stepspec.evaluation.machine import conditions as measured_conditions
from stepspec.evaluation.machine import machine
from stepspec.evaluation.records import Conditions, EngineRecord, PolicyRecord, RunRecord
from stepspec.evaluation.run.policies import LoadedPolicy
from stepspec.evaluation.run.problems import EvalProblem, ProblemSet
from stepspec.loop.calibrated import CalibratedSetting, setting_at
from stepspec.loop.policy import Policy

logger = logging.getLogger(__name__)

TOGETHER = 16
"""Prompts that are read concurrently."""


def current_conditions(_: Pair) -> Conditions:
    """Return the conditions on this machine now. The pair is that of an `Executor.call`."""
    return Conditions(**measured_conditions(), machine=machine())


@dataclass(frozen=True)
class RunSettings:
    """Settings that the user chooses for a run. None means the benchmark's default."""

    seed: int = 0
    concurrency: int = 1
    temperature: float | None = None
    max_tokens: int | None = None
    num_repeats: int | None = None


def conditions(
    name: str,
    benchmark: Benchmark,
    problems: ProblemSet,
    policies: Mapping[str, LoadedPolicy],
    settings: RunSettings,
    pair: Pair,
    *,
    calibrated: Mapping[str, Sequence[CalibratedSetting]] = MappingProxyType({}),
    prompts: Sequence[float] = (),
) -> RunRecord:
    """Return the record of a run that is about to start on this machine.

    Args:
        name: the benchmark's name.
        benchmark: the benchmark.
        problems: its problems.
        policies: the policies, fitted to the pair.
        settings: the user's settings.
        pair: the models.
        calibrated: what was calibrated for these models, by policy, see `settings_of`.
        prompts: what `prompt_logprobs` returns for some of the problems.
    """
    sampling = benchmark.sampling
    temperature = settings.temperature if settings.temperature is not None else sampling.temperature
    max_tokens = settings.max_tokens if settings.max_tokens is not None else benchmark.max_tokens
    about: dict[str, Any] = {
        "benchmark": name,
        "data_sha256": problems.sha256,
        "temperature": temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "template_sha256": pair.template_sha256,
        "prompt_version": wording_version(benchmark),
    }

    def record(policy: Policy, text: str, found: Sequence[CalibratedSetting]) -> PolicyRecord:
        setting, notes = setting_at(found, temperature), list[str]()
        if setting is not None:
            notes = [note for _, note in setting.notes(pair.by_role, policy.max_overhead, prompts, **about)]
            policy = setting.applied(policy)
        return PolicyRecord(
            text=text,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            token_level_exact=policy.token_level_exact,
            step_level_exact=policy.step_level_exact,
            kind=policy.kind(pair.target.own_speculation),
            drafter=policy.token.drafter,
            judges=tuple(judge.name for judge in policy.judges),
            calibrated=setting,
            notes=tuple(notes),
        )

    tokenizer, first = pair.target.tokenizer, asked(benchmark, problems.problems[0].question)
    return RunRecord(
        num_problems=len(problems.problems),
        first_prompt=tokenizer.decode(encode_request(tokenizer, first)),
        prompt_id=benchmark.prompt,
        policies={name: record(policy, text, calibrated.get(name, ())) for name, (policy, text) in policies.items()},
        engines=engine_records(pair),
        pair=pair.hash,
        seed=settings.seed,
        concurrency=settings.concurrency,
        grader=benchmark.grader,
        last_number=benchmark.last_number,
        num_repeats=settings.num_repeats if settings.num_repeats is not None else benchmark.default_repeats,
        **{key: value for key, value in about.items() if key != "template_sha256"},
        **dict(current_conditions(pair)),
    )


async def prompt_logprobs(benchmark: Benchmark, problems: Sequence[EvalProblem], num: int, pair: Pair) -> list[float]:
    """Return the mean log-probability of the prompts of `num` of the problems; empty if the target computes none, or
    fails: the results of a run or a calibration are right without them."""
    found = list[float | None]()
    chosen = problems[:: max(1, len(problems) // num)][:num]
    prompts = [encode_request(pair.target.tokenizer, asked(benchmark, problem.question)) for problem in chosen]
    try:
        for start in range(0, len(prompts), TOGETHER):
            found += await asyncio.gather(*map(pair.prompts.mean_logprob, prompts[start : start + TOGETHER]))
    except EngineError as error:
        logger.warning("The kind of problems is not compared: %s", error)
        return []
    return [each for each in found if each is not None]


def engine_record(engine: Engine | None) -> EngineRecord | None:
    """Return the record of a model, as stored in results."""
    if engine is None:
        return None
    behavior = {"speculation": engine.own_speculation, "forgets": "forget" in engine.abilities}
    return EngineRecord.model_validate({**engine.describe(), **behavior})


def engine_records(pair: Pair) -> dict[str, EngineRecord | None]:
    """Return the records of all models of a pair by role: "target", "draft", and "judge" with the name of a judge."""
    models = {"target": engine_record(pair.target), "draft": engine_record(pair.draft)}
    return models | {
        f"judge {name}": EngineRecord.model_validate(judge.describe()) for name, judge in pair.judges.items()
    }
