"""Runs a calibration: records steps, fixes the path, tests it on unused problems, and times the setting it finds."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import tomlkit

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.engines.protocol import Sampling
from stepspec.errors import UsageError
from stepspec.evaluation.advise.references import NO_ANSWER, WHOLE_TEXT, Agreement, ask_target
from stepspec.evaluation.benchmark import Benchmark, asked
from stepspec.evaluation.calibrate.fixed_sequence import LossLimits, by_problem, loss_upper, problems_needed, status_of
from stepspec.evaluation.calibrate.folder import read_plan, read_references, store_plan, store_references
from stepspec.evaluation.calibrate.records import Identity, Planned, SettingRecord, Speed, Tested
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import BASELINE, EngineRecord, Summary
from stepspec.evaluation.replay import read_recordings
from stepspec.evaluation.replay.path import Setting, bold, make_path
from stepspec.evaluation.replay.recordings import is_recorded
from stepspec.evaluation.report.cells import count
from stepspec.evaluation.run import (
    EvalProblem,
    Evaluation,
    Executor,
    Grader,
    Keeping,
    LoadedPolicy,
    ProblemSet,
    RunSettings,
    conditions,
    fit_policies,
    load_policies,
)
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.runs import iter_failures, iter_rows
from stepspec.evaluation.stats.runs import Floats
from stepspec.loop.judge import ThresholdJudge
from stepspec.loop.policy import Policy, load_policy

RECORDED_SHARE, TIMED_SHARE = 0.2, 0.1
"""Shares of the problems and of the budget that may go into recording, and share of the budget for timing."""
DRAFT = "draft"
"""The policy of the draft alone."""
MAX_GAIN = 3
"""How many times as many requests a second concurrency is expected to give at most."""


@dataclass(frozen=True)
class CalibratedModels:
    """What a calibration stores about the models.

    Attributes:
        records: the record of each model by role.
        template_sha256: hash of the target's chat template.
    """

    records: Mapping[str, EngineRecord | None]
    template_sha256: str


@dataclass(frozen=True)
class Task:
    """What is calibrated: a policy of a pair, on the problems of a benchmark or on prompts."""

    models: CalibratedModels
    policy: Policy
    name: str
    benchmark: Benchmark
    problems: Sequence[EvalProblem]
    """In the order of the calibration."""
    identity: Identity
    num_repeated: int = 0
    """Problems that are left out, because another one has the same question."""

    @property
    def agreement(self) -> bool:
        """Whether answers are compared with the target's own."""
        return self.identity.measure == "agreement"


@dataclass(frozen=True)
class Sizes:
    """Numbers of problems.

    Attributes:
        recorded: problems to record at most.
        least_recorded: problems to record at least, and between two looks at the clock.
        chunk: problems between two looks at the clock and at the test.
        timed: problems to time the found setting on at most.
        timed_chunk: problems between two looks at the clock while timing.
    """

    recorded: int = 200
    least_recorded: int = 30
    chunk: int = 100
    timed: int = 100
    timed_chunk: int = 20


@dataclass(frozen=True)
class CalibrationWatcher:
    """Callbacks for progress: `begin` at the start of a stage, `show` within it, `say` for a sentence."""

    begin: Callable[[str], None]
    show: OnRow
    say: Callable[[str], None]


@dataclass
class Budget:
    """Seconds for this start of the calibration; None without a limit."""

    seconds: float | None
    started: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def is_spent(self, share: float, next_s: float = 0.0) -> bool:
        """Whether a share of the budget is spent, or will be after the next piece of work, of `next_s` seconds."""
        return self.seconds is not None and self.spent + next_s > share * self.seconds


@dataclass(frozen=True)
class CalibrationOutcome:
    """What a calibration found. `plan.path` and `tested` are in the same order."""

    plan: Planned
    tested: Sequence[Tested]
    chosen: int
    """Place of the setting to use: the last certified one, else the first."""
    certified: bool
    speed: Speed | None
    num_refused: int
    alone: tuple[float, float] | None = None
    """Accuracies of the draft and of the target on the recorded problems; None if not measured."""

    def pays(self, max_loss: float) -> bool:
        """Whether the chosen setting lost at most `max_loss`, certified or not, and is as fast as its baselines."""
        loss, predicted = self.tested[self.chosen].loss, self.plan.path[self.chosen]
        speeds = predicted.predicted_speedup, predicted.predicted_vs_token
        if self.speed is not None:
            speeds = self.speed.vs_target, self.speed.vs_token
        return loss is not None and loss <= max_loss and all(each is None or each >= 1 for each in speeds)


def num_to_record(task: Task, sizes: Sizes) -> int:
    """Return the number of problems whose steps are recorded.

    Raises:
        UsageError: the task has too few problems.
    """
    wanted = min(sizes.recorded, round(RECORDED_SHARE * len(task.problems)))
    if wanted < sizes.least_recorded:
        needed = round(sizes.least_recorded / RECORDED_SHARE)
        raise UsageError(f"A calibration needs at least {needed} problems, got {len(task.problems)}.")
    return wanted


class Calibration:
    """One calibration in its folder. A stopped one goes on where it stopped."""

    def __init__(
        self, task: Task, folder: Path, budget: Budget, watcher: CalibrationWatcher, executor: Executor, sizes: Sizes
    ) -> None:
        self._task, self._folder, self._budget, self._watcher = task, folder, budget, watcher
        self._executor, self._sizes = executor, sizes
        self._references: dict[str, str] = read_references(folder) if task.agreement else {}

    async def run(self) -> CalibrationOutcome:
        """Run what is not finished yet.

        Raises:
            UsageError: the folder holds another calibration, or there are too few problems.
            StepSpecError: an engine or the disk failed; finished rows are stored.
        """
        plan = read_plan(self._folder, self._task.identity)
        if plan is None:
            num_recorded = await self._record()
            plan = await self._plan(num_recorded)
            store_plan(self._folder, plan)
        if all(each.is_slower_than_tokens for each in plan.path):
            untested = [_not_tested(each) for each in plan.path]
            return CalibrationOutcome(plan, untested, 0, False, None, 0, self._alone())
        tested = await self._test(plan)
        certified = [place for place, each in enumerate(tested) if each.status == "certified"]
        chosen = certified[-1] if certified else 0
        speed = await self._time(plan, chosen)
        refused = sum(_is_refused(each) for each in self._references.values())
        return CalibrationOutcome(plan, tested, chosen, bool(certified), speed, refused, self._alone())

    def _alone(self) -> tuple[float, float] | None:
        """Return the accuracies of the draft and the target on the recorded problems."""
        if self._task.agreement:
            return None
        outcomes = _Outcomes.read(self._folder / "recorded", (DRAFT, BASELINE))
        problems = [id for id, name in outcomes.scores if name == DRAFT and (id, BASELINE) in outcomes.scores]
        means = [np.mean([[*outcomes.scores[id, name].values()] for id in problems]) for name in (DRAFT, BASELINE)]
        return (float(means[0]), float(means[1])) if problems else None

    async def _record(self) -> int:
        """Record steps under the policy and under one that accepts everything. Return the number of problems."""
        self._watcher.begin("recording steps")
        least, wanted = self._sizes.least_recorded, num_to_record(self._task, self._sizes)
        own = {"given": self._task.policy, "bold": bold(self._task.policy), DRAFT: load_policy(DRAFT)[0]}
        policies = await self._with_baselines(own)
        for end in range(least, wanted + least, least):
            end = min(end, wanted)
            await self._evaluate("recorded", policies, self._task.problems[:end], record=True, concurrency=1)
            if self._budget.is_spent(RECORDED_SHARE):
                break
        recorded = {row.problem for row in iter_rows(self._folder / "recorded")}  # an earlier start may have done more
        return 1 + max(place for place, problem in enumerate(self._task.problems) if problem.id in recorded)

    async def _plan(self, num_recorded: int) -> Planned:
        """Fix the path by replays, and the number of problems for the test by the time that they took."""
        recordings = await asyncio.to_thread(read_recordings, self._folder / "recorded")
        path = await asyncio.to_thread(make_path, "given", self._task.policy, recordings, self._task.identity.seed)
        rest, problem_s = len(self._task.problems) - num_recorded, self._problem_s()
        if self._budget.seconds is not None:
            left_s = self._budget.seconds * (1 - TIMED_SHARE) - self._budget.spent
            rest = min(rest, max(self._sizes.chunk, int(left_s / problem_s)))
        self._watcher.say(
            f"Testing up to {count(len(path), 'setting')}, each on up to {rest:,} problems. The first one takes at "
            f"most about {count(max(1, round(rest * problem_s / 60)), 'minute')}."
        )
        return Planned(
            identity=self._task.identity,
            num_recorded=num_recorded,
            num_planned=rest,
            path=[_setting_record(each) for each in path],
        )

    def _problem_s(self) -> float:
        """Return the estimated seconds for a problem of the test, under the target and one setting."""
        rows = [row for row in iter_rows(self._folder / "recorded") if row.policy in (BASELINE, "given")]
        num_problems = len({row.problem for row in rows})
        seconds = sum(row.wall_s for row in rows) / num_problems
        if self._task.agreement:
            seconds += sum(row.wall_s for row in rows if row.policy == BASELINE) / num_problems
        return seconds / min(self._task.identity.concurrency, MAX_GAIN) / self._executor.num_workers

    async def _test(self, plan: Planned) -> list[Tested]:
        """Test the settings in their order, each until it is decided, the problems or the budget end."""
        task, limits = self._task, _limits(plan)
        problems = task.problems[plan.num_recorded :]
        policies = await self._with_baselines(
            {each.name: task.policy.with_thresholds(each.thresholds, each.min_logprob) for each in plan.path},
            token_level=False,
        )
        tested: list[Tested] = []
        for number, setting in enumerate(plan.path, 1):
            if (tested and tested[-1].status != "certified") or self._budget.is_spent(1 - TIMED_SHARE):
                tested.append(_not_tested(setting))
                continue
            self._watcher.begin(f"testing setting {number} of {len(plan.path)}")
            for end in _ends(self._sizes.chunk, len(problems)):
                since = self._budget.spent
                await self._evaluate("tested", policies, problems[:end], only={BASELINE, setting.name})
                found = self._tested(setting, problems[:end], limits)
                if found.status != "unknown" or self._budget.is_spent(1 - TIMED_SHARE, self._budget.spent - since):
                    break
            tested.append(found)
            self._watcher.say(_progress_sentence(found))
        return tested

    def _tested(self, setting: SettingRecord, problems: Sequence[EvalProblem], limits: LossLimits) -> Tested:
        """Return what the finished problems say about a setting, in their order."""
        both, repeats = (setting.name, BASELINE), self._task.identity.num_repeats
        outcomes = _Outcomes.read(self._folder / "tested", both)
        ids = [each.id for each in problems if not _is_refused(self._references.get(each.id, ""))]
        finished = [id for id in ids if all(len(outcomes.scores.get((id, name), ())) == repeats for name in both)]
        own, target = (outcomes.of(finished, name, repeats) for name in both)
        losses = by_problem(own, target)
        judged, accepted = outcomes.steps[setting.name]
        return Tested(
            setting=setting,
            status=status_of(losses, limits),
            num_problems=len(finished),
            accuracy=float(own.mean()) if finished else None,
            target_accuracy=float(target.mean()) if finished else None,
            loss_upper=loss_upper(losses, limits),
            num_needed=problems_needed(losses, limits),
            step_acceptance=accepted / judged if judged else None,
        )

    async def _time(self, plan: Planned, chosen: int) -> Speed | None:
        """Time the chosen setting on problems of the test, one request at a time. None if the budget is spent."""
        if self._budget.is_spent(1.0):
            return None
        self._watcher.begin("timing the setting")
        setting = plan.path[chosen]
        policy = self._task.policy.with_thresholds(setting.thresholds, setting.min_logprob)
        policies = await self._with_baselines({setting.name: policy})
        problems = self._task.problems[plan.num_recorded :][: self._sizes.timed]
        chunk = self._sizes.timed_chunk
        for end in range(chunk, len(problems) + chunk, chunk):
            since = self._budget.spent
            summary = await self._evaluate(f"timed-{setting.name}", policies, problems[:end], concurrency=1)
            if self._budget.is_spent(1.0, self._budget.spent - since):
                break
        found = summary.policies[setting.name]
        return Speed(
            num_problems=summary.n,
            vs_target=found.speedup_vs_target if found.no_speed is None else None,
            vs_target_ci=found.speedup_vs_target_ci if found.no_speed is None else None,
            vs_token=found.speedup_vs_token if found.no_speed is None else None,
            vs_token_ci=found.speedup_vs_token_ci if found.no_speed is None else None,
            step_acceptance=found.step_acceptance,
        )

    async def _with_baselines(
        self, policies: Mapping[str, Policy], *, token_level: bool = True
    ) -> dict[str, LoadedPolicy]:
        """Return policies with the target and, if the pair supports one, an exact token-level policy."""
        own = await self._executor.call(partial(_fitted, policies))
        baselines = (await self._executor.call(partial(fit_policies, load_policies([BASELINE])))).policies
        return {**(baselines if token_level else {BASELINE: baselines[BASELINE]}), **own}

    async def _evaluate(
        self,
        folder: str,
        policies: Mapping[str, LoadedPolicy],
        problems: Sequence[EvalProblem],
        *,
        record: bool = False,
        only: set[str] | None = None,
        concurrency: int | None = None,
    ) -> Summary:
        task, identity = self._task, self._task.identity
        if task.agreement:
            problems = await self._with_references(problems)
        settings = RunSettings(
            identity.seed,
            concurrency or identity.concurrency,
            identity.temperature,
            identity.max_tokens,
            identity.num_repeats,
        )
        all_problems = ProblemSet(tuple(task.problems), identity.data_sha256)
        make_run = partial(conditions, task.name, task.benchmark, all_problems, policies, settings)
        return await self._executor.evaluate(
            Evaluation(
                await self._executor.call(make_run),
                {name: policy for name, (policy, _) in policies.items()},
                Keeping(self._folder / folder, record=record),
                Grader(task.benchmark.grader, task.benchmark.last_number, Agreement if task.agreement else Grading),
                ask=partial(asked, task.benchmark),
                only=only,
            ),
            problems,
            on_row=self._watcher.show,
        )

    async def _with_references(self, problems: Sequence[EvalProblem]) -> Sequence[EvalProblem]:
        """Return the problems that the target's own answer can be compared for, with that answer as the right one."""
        missing = [each for each in problems if each.id not in self._references]
        if missing:
            identity, benchmark = self._task.identity, self._task.benchmark
            found = await ask_target(
                self._executor,
                (await self._with_baselines({}, token_level=False))[BASELINE][0],
                [EvalProblem(each.id, asked(benchmark, each.question), "") for each in missing],
                Agreement(benchmark.grader, last_number=benchmark.last_number),
                Sampling(identity.temperature, top_p=identity.top_p, seed=identity.seed),
                identity.max_tokens,
                identity.concurrency,
                lambda done: self._watcher.show(None, done, len(missing)),
            )
            self._references.update(found)
            store_references(self._folder, self._references)
        known = [EvalProblem(each.id, each.question, self._references[each.id]) for each in problems]
        kept = [each for each in known if not _is_refused(each.gold)]
        if not kept:
            raise UsageError(
                f"None of {len(problems)} prompts has an answer that can be found in the target's text, such as a box, "
                "'the answer is' or a number. Ask for one in the prompts, or calibrate on a benchmark."
            )
        return kept


def _fitted(policies: Mapping[str, Policy], pair: Pair) -> dict[str, LoadedPolicy]:
    """Return policies as a pair runs them."""
    return {name: (fit_policy(policy, pair)[0], _as_text(policy)) for name, policy in policies.items()}


def _as_text(policy: Policy) -> str:
    """Return a policy as the text of a file, for the record of a run."""
    return tomlkit.dumps(policy.model_dump(mode="json", exclude_none=True))


def check_policy(policy: Policy) -> None:
    """Check that a calibration can change a policy.

    Raises:
        UsageError: it cannot.
    """
    if not is_recorded(policy) or not any(isinstance(judge, ThresholdJudge) for judge in policy.judges):
        raise UsageError(
            "A calibration needs a policy of family 'score' with one candidate a step, whose judge has a threshold."
        )


def _limits(plan: Planned) -> LossLimits:
    return LossLimits(plan.identity.max_loss, plan.identity.confidence, plan.num_planned)


def _is_refused(reference: str) -> bool:
    return reference == NO_ANSWER or reference.startswith(WHOLE_TEXT)


@dataclass(frozen=True)
class _Outcomes:
    """What the requests of two policies came to. A request that ended in an error counts as not right, but
    as right under the target."""

    scores: Mapping[tuple[str, str], Mapping[int, float]]
    """By problem and policy, 1 for each right answer by repeat."""
    steps: Mapping[str, tuple[int, int]]
    """By policy, the numbers of judged and of accepted steps."""

    @classmethod
    def read(cls, folder: Path, policies: Sequence[str]) -> "_Outcomes":
        scores: dict[tuple[str, str], dict[int, float]] = {}
        steps: dict[str, tuple[int, int]] = dict.fromkeys(policies, (0, 0))
        for failure in iter_failures(folder):
            failed = float(failure.policy == BASELINE)  # a failure never speaks for the policy
            scores.setdefault((failure.problem, failure.policy), {})[failure.repeat] = failed
        for row in iter_rows(folder):
            scores.setdefault((row.problem, row.policy), {})[row.repeat] = float(row.status == "correct")
            if row.policy in steps:
                judged, accepted = steps[row.policy]
                steps[row.policy] = judged + row.steps_judged, accepted + row.steps_accepted
        return cls(scores, steps)

    def of(self, problems: Sequence[str], policy: str, repeats: int) -> Floats:
        """Return the scores of a policy, [N, repeats]."""
        values = [[self.scores[problem, policy][repeat] for repeat in range(repeats)] for problem in problems]
        return np.array(values, dtype=np.float64).reshape(len(problems), repeats)


def _ends(chunk: int, num_problems: int) -> Iterator[int]:
    """Yield numbers of problems after which to look at the test, a quarter more each time and at least a chunk more."""
    end = 0
    while end < num_problems:
        end = min(num_problems, end + max(chunk, end // 4))
        yield end


def _setting_record(setting: Setting) -> SettingRecord:
    found = setting.replayed
    return SettingRecord(
        name=setting.name,
        thresholds=dict(setting.thresholds),
        min_logprob=setting.min_logprob,
        predicted_speedup=found.speedup,
        predicted_vs_token=found.speedup_vs_token,
        predicted_acceptance=found.step_acceptance,
    )


def _not_tested(setting: SettingRecord) -> Tested:
    return Tested(
        setting=setting,
        status="not tested",
        num_problems=0,
        accuracy=None,
        target_accuracy=None,
        loss_upper=None,
        num_needed=None,
        step_acceptance=None,
    )


def _progress_sentence(tested: Tested) -> str:
    bound = "" if tested.loss_upper is None else f", at most {100 * tested.loss_upper:.1f} points lost"
    return f"{tested.setting.name}: {tested.status} after {tested.num_problems:,} problems{bound}."
