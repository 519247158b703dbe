"""Runs the experiment: times both models, tries drafters, runs policies on the user's prompts, and gives advice."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import tomlkit

from stepspec.api.loading import Pair
from stepspec.api.session import StepSpec
from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import Engine, Sampling
from stepspec.evaluation.advise.candidates import Candidates, baseline_of, make_candidates
from stepspec.evaluation.advise.findings import Advice, Findings, Load, LoadCosts, Measured, Memory
from stepspec.evaluation.advise.keeping import Plan, identity, keep_measured, read_measured, refuse_strangers
from stepspec.evaluation.advise.loads import make_load
from stepspec.evaluation.advise.measuring import load_costs, try_drafters
from stepspec.evaluation.advise.prompts import Prompts
from stepspec.evaluation.advise.references import Agreement, ask_target
from stepspec.evaluation.advise.rule import choose, pays, reasons
from stepspec.evaluation.advise.thresholds import RECORDED, chosen_thresholds, fitted
from stepspec.evaluation.advise.words import sentences
from stepspec.evaluation.benchmark import Benchmark, FileData
from stepspec.evaluation.energy import EnergyMeter
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.machine import commit, hardware, versions
from stepspec.evaluation.records import BASELINE, Conditions, RunRecord
from stepspec.evaluation.replay.path import bold
from stepspec.evaluation.running import (
    Gauges,
    Keeping,
    LoadedPolicy,
    ProblemSet,
    Settings,
    conditions,
    evaluate,
)
from stepspec.evaluation.running.conditions import engine_record
from stepspec.evaluation.running.results import OnRow
from stepspec.evaluation.runs import iter_rows
from stepspec.loop.policy import Policy

STEPS = "stepspec"
"""The policy whose thresholds are chosen for the models."""
GRADED, AGREED = "prompts", "prompts (accuracy is agreement with the target)"
"""Names of the runs, with and without right answers."""


@dataclass(frozen=True)
class Watcher:
    """Callbacks for progress: `begin` at the start of a stage, `show` within it."""

    begin: Callable[[str], None]
    show: OnRow


async def advise(pair: Pair, prompts: Prompts, plan: Plan, folder: Path, watcher: Watcher) -> Findings:
    """Measure, run what is not finished yet in the folder, and return the findings. The caller closes the pair.

    Raises:
        UsageError: there is nothing to compare, or the folder holds something else.
        StepSpecError: an engine or the disk failed; finished results are stored.
    """
    refuse_strangers(folder)
    # Record the conditions first, because files may change during the measurement.
    where = Conditions(
        versions=versions(),
        commit=commit(),
        hardware=hardware(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with _grading(prompts) as grading:
        measured = read_measured(folder, pair, prompts, plan) or await _measure(pair, prompts, plan, watcher)
        candidates = make_candidates(pair, measured.trials)
        keep_measured(measured, folder)
        if isinstance(grading, Agreement) and not measured.references:
            references = await _own_answers(pair, prompts, plan, watcher, grading)
            measured = measured.model_copy(update={"references": references})
            keep_measured(measured, folder)
        task = _Task(pair, prompts.with_golds(measured.references), prompts, plan, candidates, grading, watcher)
        if STEPS in candidates.policies:
            if measured.step_policy is None:
                measured = measured.model_copy(update={"step_policy": await task.thresholds(folder / "recorded")})
                keep_measured(measured, folder)
            if measured.step_policy:
                candidates.policies[STEPS] = fitted(measured.step_policy, candidates.policies[STEPS])
        loads = [await task.run(costs, folder / f"c{costs.concurrency}") for costs in measured.costs]
    return Findings(
        **dict(where),
        engines={role: engine_record(engine) for role, engine in (("target", pair.target), ("draft", pair.draft))},
        pair=pair.hash,
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


def _grading(prompts: Prompts) -> Grading:
    return Grading("math", last_number=True) if prompts.asked.graded else Agreement()


async def _measure(pair: Pair, prompts: Prompts, plan: Plan, watcher: Watcher) -> Measured:
    tokenizer = pair.target.tokenizer
    texts = [tokenizer.decode(encode_request(tokenizer, each.question)) for each in prompts.problems]
    sampling = Sampling(plan.temperature, seed=plan.seed)
    num_stages = len(plan.loads) + 1
    watcher.begin("timing both models")
    costs: list[LoadCosts] = []
    for load in plan.loads:
        watcher.show(None, len(costs), num_stages)
        costs.append(await load_costs(pair, texts, load))
    watcher.show(None, len(costs), num_stages)
    trials = await try_drafters(pair, texts, costs[0], sampling, plan.max_tokens)
    watcher.show(None, num_stages, num_stages)
    references: dict[str, str] = {}  # the target is asked for them after these measurements are stored
    rereads = "scores" in pair.target.abilities and "cached scores" not in pair.target.abilities
    results = {"costs": costs, "trials": trials, "memory": memory_of(pair), "references": references}
    return Measured.model_validate({**identity(pair, prompts, plan), **results, "rereads": rereads})


async def _own_answers(
    pair: Pair, prompts: Prompts, plan: Plan, watcher: Watcher, agreement: Agreement
) -> Mapping[str, str]:
    """Return the target's own answers by prompt, to compare with if there are no right answers."""
    watcher.begin("the target's own answers")
    return await ask_target(
        StepSpec(policy=baseline_of(pair)[0], pair=pair),
        prompts.problems,
        agreement,
        Sampling(plan.temperature, seed=plan.seed),
        plan.max_tokens,
        plan.loads[0],
        lambda done: watcher.show(None, done, len(prompts.problems)),
    )


@dataclass(frozen=True)
class _Task:
    """Everything that is the same for all loads."""

    pair: Pair
    problems: ProblemSet
    prompts: Prompts
    plan: Plan
    candidates: Candidates
    grading: Grading
    watcher: Watcher

    async def thresholds(self, folder: Path) -> str:
        """Return the text of `stepspec` with thresholds for these models; empty if a recording shows none."""
        self.watcher.begin("recording steps")
        policy, text = self.candidates.policies[STEPS]
        in_file = bold(Policy.model_validate(tomllib.loads(text))).model_dump(mode="json", exclude_none=True)
        policies = {
            BASELINE: self.candidates.policies[BASELINE],
            STEPS: (policy, text),
            "bold": (bold(policy), tomlkit.dumps(in_file)),
        }
        engines = {"target": self.pair.target, "draft": self.pair.draft}
        await evaluate(
            self._conditions(1, engines, policies),
            self.problems.problems[:RECORDED],
            {name: StepSpec(policy=policy, pair=self.pair, record=True) for name, (policy, _) in policies.items()},
            Keeping(folder, record=True),
            grading=self.grading,
            on_row=self.watcher.show,
        )
        return await chosen_thresholds(text, folder)

    async def run(self, costs: LoadCosts, folder: Path) -> Load:
        engines = {"target": self.pair.target, "draft": self.pair.draft}
        run = self._conditions(costs.concurrency, engines, self.candidates.policies)
        requests = "1 request" if costs.concurrency == 1 else f"{costs.concurrency} requests"
        self.watcher.begin(f"policies, {requests} concurrent")
        summary = await evaluate(
            run,
            self.problems.problems,
            {name: StepSpec(policy=policy, pair=self.pair) for name, (policy, _) in self.candidates.policies.items()},
            Keeping(folder),
            grading=self.grading,
            gauges=Gauges({role: engine for role, engine in engines.items() if engine}, EnergyMeter()),
            on_row=self.watcher.show,
        )
        policies = {name: policy for name, (policy, _) in self.candidates.policies.items()}
        return make_load(costs, run, policies, summary, iter_rows(folder))

    def _conditions(
        self, concurrency: int, engines: Mapping[str, Engine | None], policies: Mapping[str, LoadedPolicy]
    ) -> RunRecord:
        name = GRADED if self.prompts.asked.graded else AGREED
        benchmark = Benchmark(
            version=1, title=name, summary="prompts of the user's", grader="math", data=FileData(kind="file")
        )
        plan = self.plan
        settings = Settings(plan.seed, concurrency, plan.temperature, plan.max_tokens, 1)
        return conditions(name, benchmark, self.problems, policies, engines, self.pair.hash, settings)


def _advice(loads: Sequence[Load], candidates: Candidates, measured: Measured, prompts: Prompts) -> Advice:
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


def _pays_up_to(policy: str, loads: Iterable[Load]) -> int:
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
