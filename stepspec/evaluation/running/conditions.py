"""The conditions of a run, as stored in `run.json`: policies, models, settings, versions and hardware."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from stepspec.engines.judge_model import JudgeModel
from stepspec.engines.protocol import Engine
from stepspec.evaluation.benchmark import Benchmark, wording_version
from stepspec.evaluation.machine import commit, hardware, versions
from stepspec.evaluation.records import EngineRecord, PolicyRecord, RunRecord
from stepspec.evaluation.running.policies import LoadedPolicy
from stepspec.evaluation.running.problems import ProblemSet
from stepspec.loop.policy import Policy


@dataclass(frozen=True)
class Settings:
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
    engines: Mapping[str, Engine | None],
    pair_hash: str,
    settings: Settings,
    judges: Mapping[str, JudgeModel] | None = None,
) -> RunRecord:
    """Return the record of a run that is about to start on this machine."""
    sampling = benchmark.sampling
    temperature = settings.temperature if settings.temperature is not None else sampling.temperature
    return RunRecord(
        benchmark=name,
        data_sha256=problems.sha256,
        num_problems=len(problems.problems),
        prompt_id=benchmark.prompt,
        prompt_version=wording_version(benchmark),
        policies={name: _policy_record(policy, text, engines["target"]) for name, (policy, text) in policies.items()},
        engines={role: engine_record(engine) for role, engine in engines.items()} | judge_records(judges or {}),
        pair=pair_hash,
        temperature=temperature,
        top_p=sampling.top_p,
        max_tokens=settings.max_tokens if settings.max_tokens is not None else benchmark.max_tokens,
        seed=settings.seed,
        concurrency=settings.concurrency,
        grader=benchmark.grader,
        num_repeats=settings.num_repeats if settings.num_repeats is not None else benchmark.default_repeats,
        versions=versions(),
        commit=commit(),
        hardware=hardware(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def engine_record(engine: Engine | None) -> EngineRecord | None:
    """Return the record of a model, as stored in results."""
    if engine is None:
        return None
    behavior = {"speculation": engine.own_speculation, "forgets": "forget" in engine.abilities}
    return EngineRecord.model_validate({**engine.describe(), **behavior})


def judge_records(judges: Mapping[str, JudgeModel]) -> dict[str, EngineRecord | None]:
    """Return the records of judge models, by "judge" and their names."""
    return {f"judge {name}": EngineRecord.model_validate(judge.describe()) for name, judge in judges.items()}


def _policy_record(policy: Policy, text: str, target: Engine | None) -> PolicyRecord:
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return PolicyRecord(
        text=text,
        sha256=sha256,
        token_level_exact=policy.token_level_exact,
        kind=policy.kind(target.own_speculation if target else None),
        drafter=policy.token.drafter,
        judges=tuple(judge.name for judge in policy.judges),
    )
