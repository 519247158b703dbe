"""Where the models of an evaluation run: in this process, or on a cluster."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any, Protocol, TypeVar, cast

from stepspec.api.models import Pair
from stepspec.api.session import StepSpec
from stepspec.evaluation.grade import GraderKind, Grading
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.run.evaluation import Keeping, run_unfinished
from stepspec.evaluation.run.gauges import Gauges
from stepspec.evaluation.run.problems import EvalProblem
from stepspec.evaluation.run.results import OnRow, Results
from stepspec.evaluation.run.runner import Runner
from stepspec.evaluation.run.schedule import Round
from stepspec.loop.policy import Policy

T = TypeVar("T")


@dataclass(frozen=True)
class Grader:
    """What grades the answers of an evaluation.

    Attributes:
        kind: how answers are compared.
        last_number: whether the last number of a text counts as its answer if it has no other.
        make: the class.
    """

    kind: GraderKind
    last_number: bool = False
    make: type[Grading] = Grading

    def __call__(self) -> Grading:
        """Return a new one. The caller closes it."""
        return self.make(self.kind, last_number=self.last_number)


@dataclass(frozen=True)
class Evaluation:
    """The run whose jobs an executor runs.

    Attributes:
        run: the conditions.
        policies: its policies, fitted to the pair.
        keeping: where the run is stored, and what besides rows.
        grader: grades the answers.
        ask: turns a question into the full request text; with None, the models are asked by `run.prompt_id`.
        gauges: whether to read the counters of the engines before and after every block.
        only: the policies to run now; None for all of the run.
    """

    run: RunRecord
    policies: Mapping[str, Policy]
    keeping: Keeping
    grader: Grader
    ask: Callable[[str], str] | None = None
    gauges: bool = False
    only: Collection[str] | None = None

    def runner(self, pair: Pair, gradings: "Gradings") -> Runner:
        """Return what runs jobs with the models of a pair."""
        traces = self.keeping.traces or self.keeping.record
        grading = gradings.by(self.grader)
        return Runner(self.run, self.systems(pair), grading, self.ask, traces, self.gauges_of(pair))

    def systems(self, pair: Pair) -> dict[str, StepSpec]:
        """Return what answers under each policy, with the models of a pair."""
        settings = {name: self.run.policies[name].calibrated for name in self.policies}
        policies = {
            name: policy if (setting := settings[name]) is None else setting.applied(policy)
            for name, policy in self.policies.items()
        }
        return {
            name: StepSpec(policy=policy, pair=pair, record=self.keeping.record) for name, policy in policies.items()
        }

    def gauges_of(self, pair: Pair) -> Gauges:
        """Return the counters to read."""
        if not self.gauges:
            return Gauges()
        if pair.draft is None:
            return Gauges({"target": pair.target})
        return Gauges({"target": pair.target, "draft": pair.draft})


class Gradings:
    """What graders have made, so that the evaluations of a command share their processes."""

    def __init__(self) -> None:
        self._made: dict[Grader, Grading] = {}

    def by(self, grader: Grader) -> Grading:
        """Return what a grader has made."""
        if grader not in self._made:
            self._made[grader] = grader()
        return self._made[grader]

    def close(self) -> None:
        """Stop all processes."""
        for each in self._made.values():
            each.close()


class Executor(Protocol):
    """Runs work with the models of a pair. A context manager in whose block the models are loaded."""

    @property
    def num_workers(self) -> int:
        """Number of calls that can run concurrently, each with models of its own."""
        ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: Any) -> None: ...

    async def call(self, function: Callable[[Pair], T | Awaitable[T]]) -> T:
        """Call a function with the models, and return its result.

        Raises:
            StepSpecError: one that the function raised.
        """
        ...

    async def evaluate(self, task: Evaluation, problems: Sequence[EvalProblem], on_row: OnRow | None = None) -> Summary:
        """Run the unfinished jobs, and return the summary of the whole folder.

        Arguments and errors are those of `stepspec.evaluation.run.evaluate`.
        """
        ...


class Local:
    """An `Executor` in this process. It frees the models at its end."""

    num_workers = 1

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._gradings = Gradings()

    async def __aenter__(self) -> "Local":
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._gradings.close()
        await self._pair.aclose()

    async def call(self, function: Callable[[Pair], T | Awaitable[T]]) -> T:
        """See `Executor.call`."""
        return await called(function, self._pair)

    async def evaluate(self, task: Evaluation, problems: Sequence[EvalProblem], on_row: OnRow | None = None) -> Summary:
        """See `Executor.evaluate`."""
        runner = task.runner(self._pair, self._gradings)

        async def run_here(found: Sequence[Round], make_results: Callable[[], Results]) -> None:
            await runner.run_all(found, make_results())

        return await run_unfinished(task.run, problems, task.keeping, run_here, on_row=on_row, only=task.only)


async def called(function: Callable[[Pair], T | Awaitable[T]], pair: Pair) -> T:
    """Call a function, which may be a coroutine function, with a pair."""
    found = function(pair)
    return await cast(Awaitable[T], found) if isawaitable(found) else cast(T, found)
