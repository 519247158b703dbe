"""Runs the experiment: times both models, tries drafters, runs policies on the user's prompts, and gives advice."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tomlkit

from stepspec.api.models import Pair
from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import Sampling
from stepspec.evaluation.advise.candidates import Candidates, baseline_of, make_candidates
from stepspec.evaluation.advise.findings import Advice, Findings, LoadFindings, Measured, Memory, PairCosts
from stepspec.evaluation.advise.loads import make_load
from stepspec.evaluation.advise.measurements import load_costs, try_drafters
from stepspec.evaluation.advise.measurements_file import (
    AdvicePlan,
    identity,
    keep_measured,
    read_measured,
    refuse_strangers,
)
from stepspec.evaluation.advise.prompts import Prompts
from stepspec.evaluation.advise.references import Agreement, ask_target
from stepspec.evaluation.advise.rule import choose, pays, reasons
from stepspec.evaluation.advise.thresholds import RECORDED, chosen_thresholds, fitted
from stepspec.evaluation.advise.words import sentences
from stepspec.evaluation.benchmark import Benchmark, FileData
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import BASELINE, Conditions, EngineRecord
from stepspec.evaluation.replay.path import bold
from stepspec.evaluation.run import (
    Evaluation,
    Executor,
    Grader,
    Keeping,
    LoadedPolicy,
    ProblemSet,
    RunSettings,
    conditions,
)
from stepspec.evaluation.run.conditions import current_conditions, engine_records
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.runs import iter_rows
from stepspec.loop.policy import Policy

STEPS = "two-level"
"""The policy whose thresholds are chosen for the models."""
GRADED, AGREED = "prompts", "prompts (accuracy is agreement with the target)"
"""Names of the runs, with and without right answers."""


@dataclass(frozen=True)
class Watcher:
    """Callbacks for progress: `begin` at the start of a stage, `show` within it."""

    begin: Callable[[str], None]
    show: OnRow


async def advise(executor: Executor, prompts: Prompts, plan: AdvicePlan, folder: Path, watcher: Watcher) -> Findings:
    """Measure, run what is not finished yet in the folder, and return the findings.

    Raises:
        UsageError: there is nothing to compare, or the folder holds something else.
        StepSpecError: an engine or the disk failed; finished results are stored.
    """
    refuse_strangers(folder)
    # Record the conditions first, because files may change during the measurement.
    where, pair_hash, engines = await executor.call(_about)
    measured = read_measured(folder, pair_hash, prompts, plan)
    measured = measured or await _measure(executor, pair_hash, prompts, plan, watcher)
    candidates = await executor.call(partial(make_candidates, measured.trials))
    keep_measured(measured, folder)
    if not prompts.asked.graded and not measured.references:
        references = await _own_answers(executor, prompts, plan, watcher)
        measured = measured.model_copy(update={"references": references})
        keep_measured(measured, folder)
    task = _Experiment(executor, prompts.with_golds(measured.references), prompts, plan, candidates, watcher)
    if STEPS in candidates.policies:
        if measured.step_policy is None:
            measured = measured.model_copy(update={"step_policy": await task.thresholds(folder / "recorded")})
            keep_measured(measured, folder)
        if measured.step_policy:
            candidates.policies[STEPS] = fitted(measured.step_policy, candidates.policies[STEPS])
        else:
            del candidates.policies[STEPS]
            candidates.left_out[STEPS] = "No step of the recorded prompts was judged, which shows no threshold."
    loads = [await task.run(costs, folder / f"c{costs.concurrency}") for costs in measured.costs]
    return Findings(
        **dict(where),
        engines=engines,
        pair=pair_hash,
        temperature=plan.temperature,
        max_tokens=plan.max_tokens,
        seed=plan.seed,
        prompts=prompts.asked,
        memory=measured.memory,
        trials=measured.trials,
        left_out=candidates.left_out,
        loads=loads,
        advice=_advice(loads, candidates, measured, prompts),
    )


def _about(pair: Pair) -> tuple[Conditions, str, dict[str, EngineRecord | None]]:
    """Return the conditions where the models are, the hash of the pair, and the record of each model."""
    return current_conditions(pair), pair.hash, engine_records(pair)


async def _measure(
    executor: Executor, pair_hash: str, prompts: Prompts, plan: AdvicePlan, watcher: Watcher
) -> Measured:
    texts = await executor.call(partial(_rendered, [each.question for each in prompts.problems]))
    sampling = Sampling(plan.temperature, seed=plan.seed)
    num_stages = len(plan.loads) + 1
    watcher.begin("timing both models")
    costs: list[PairCosts] = []
    for load in plan.loads:
        watcher.show(None, len(costs), num_stages)
        costs.append(await executor.call(partial(load_costs, prompts=texts, concurrency=load)))
    watcher.show(None, len(costs), num_stages)
    trials = await executor.call(
        partial(try_drafters, prompts=texts, costs=costs[0], sampling=sampling, max_tokens=plan.max_tokens)
    )
    watcher.show(None, num_stages, num_stages)
    references: dict[str, str] = {}  # the target is asked for them after these measurements are stored
    memory, rereads = await executor.call(_memory_and_reading)
    results = {"costs": costs, "trials": trials, "memory": memory, "references": references}
    return Measured.model_validate({**identity(pair_hash, prompts, plan), **results, "rereads": rereads})


def _rendered(questions: Sequence[str], pair: Pair) -> list[str]:
    """Return the prompts as the target gets them."""
    tokenizer = pair.target.tokenizer
    return [tokenizer.decode(encode_request(tokenizer, question)) for question in questions]


def _memory_and_reading(pair: Pair) -> tuple[Memory, bool]:
    """Return the memory of both models, and whether the target reads the whole prompt again to score a step."""
    return memory_of(pair), "scores" in pair.target.abilities and "cached scores" not in pair.target.abilities


async def _own_answers(executor: Executor, prompts: Prompts, plan: AdvicePlan, watcher: Watcher) -> Mapping[str, str]:
    """Return the target's own answers by prompt, to compare with if there are no right answers."""
    watcher.begin("the target's own answers")
    return await ask_target(
        executor,
        (await executor.call(baseline_of))[0],
        prompts.problems,
        Agreement(),
        Sampling(plan.temperature, seed=plan.seed),
        plan.max_tokens,
        plan.loads[0],
        lambda done: watcher.show(None, done, len(prompts.problems)),
    )


@dataclass(frozen=True)
class _Experiment:
    """Everything that is the same for all loads."""

    executor: Executor
    problems: ProblemSet
    prompts: Prompts
    plan: AdvicePlan
    candidates: Candidates
    watcher: Watcher

    async def thresholds(self, folder: Path) -> str:
        """Return the text of `two-level` with thresholds for these models; empty if a recording shows none."""
        self.watcher.begin("recording steps")
        policy, text = self.candidates.policies[STEPS]
        in_file = bold(Policy.model_validate(tomllib.loads(text))).model_dump(mode="json", exclude_none=True)
        policies = {
            BASELINE: self.candidates.policies[BASELINE],
            STEPS: (policy, text),
            "bold": (bold(policy), tomlkit.dumps(in_file)),
        }
        evaluation = await self._evaluation(1, policies, Keeping(folder, record=True))
        await self.executor.evaluate(evaluation, self.problems.problems[:RECORDED], on_row=self.watcher.show)
        return await chosen_thresholds(text, folder)

    async def run(self, costs: PairCosts, folder: Path) -> LoadFindings:
        requests = "1 request" if costs.concurrency == 1 else f"{costs.concurrency} requests"
        self.watcher.begin(f"policies, {requests} concurrent")
        evaluation = await self._evaluation(costs.concurrency, self.candidates.policies, Keeping(folder))
        summary = await self.executor.evaluate(evaluation, self.problems.problems, on_row=self.watcher.show)
        return make_load(costs, evaluation.run, evaluation.policies, summary, iter_rows(folder))

    async def _evaluation(self, concurrency: int, policies: Mapping[str, LoadedPolicy], keeping: Keeping) -> Evaluation:
        name = GRADED if self.prompts.asked.graded else AGREED
        benchmark = Benchmark(
            version=1,
            title=name,
            summary="prompts of the user's",
            grader="math",
            last_number=True,
            data=FileData(kind="file"),
        )
        plan = self.plan
        settings = RunSettings(plan.seed, concurrency, plan.temperature, plan.max_tokens, 1)
        run = await self.executor.call(partial(conditions, name, benchmark, self.problems, policies, settings))
        return Evaluation(
            run,
            {name: policy for name, (policy, _) in policies.items()},
            keeping,
            Grader(benchmark.grader, benchmark.last_number, Grading if self.prompts.asked.graded else Agreement),
            gauges=not keeping.record,
        )


def _advice(loads: Sequence[LoadFindings], candidates: Candidates, measured: Measured, prompts: Prompts) -> Advice:
    """Return the advice for the lowest concurrency. Higher ones show up to where it pays."""
    first = loads[0]
    choice = choose(first)
    chosen = first.named(choice.policy)
    alone = choice.policy == BASELINE
    advice = Advice(
        policy=choice.policy,
        policy_text=candidates.policies[choice.policy][1],
        speedup=chosen.speedup if chosen and not alone else None,
        speedup_ci=chosen.speedup_ci if chosen and not alone else None,
        unproven=choice.unproven,
        pays_up_to=None if alone else _pays_up_to(choice.policy, loads),
        reasons=reasons(first, measured.trials, measured.memory) if alone else [],
        sentences=[],
    )
    texts = sentences(advice, loads, measured.trials, measured.memory, prompts.asked, rereads=measured.rereads)
    return advice.model_copy(update={"sentences": texts})


def _pays_up_to(policy: str, loads: Iterable[LoadFindings]) -> int:
    """Return the largest load at which a policy pays, if it also pays at all smaller loads."""
    largest = 1
    for load in loads:
        candidate = load.named(policy)
        if candidate is None or not pays(candidate, load.costs.concurrency):
            break
        largest = load.costs.concurrency
    return largest


def memory_of(pair: Pair) -> Memory:
    """Return the bytes that weights and caches of both models take now, with shared weights counted once."""
    target = pair.target.metrics().memory_bytes
    own = sum(size for name, size in target.items() if not name.startswith("draft"))
    drafting = {name: size for name, size in target.items() if name.startswith("draft")}
    draft = pair.draft.metrics().memory_bytes if pair.draft else {}
    if "weights" in draft:  # the target's drafter shares them
        drafting.pop("draft weights", None)
    draft_bytes = sum(drafting.values()) + sum(draft.values())
    return Memory(target_bytes=own or None, draft_bytes=draft_bytes or None)
