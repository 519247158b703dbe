"""An A/A test of the evaluation itself: every policy runs twice, under two names, and both runs must be equally fast.

For each policy, two ratios of times are compared with 1. `copy` is the time under the second name over the first.
`order` is the time of the later run over the earlier one, by problem. It shows whether a run affects the next one, even
if the balanced order hides this from `copy`. Above temperature 0 the two texts can differ in length, so times are per
committed token.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from evals.bench.rows import unkept_rows
from stepspec.api.models import Pair, load_pair
from stepspec.api.policy_support import fit_policy
from stepspec.api.session import StepSpec
from stepspec.base.files import list_data_files
from stepspec.cli.options import DraftOption, PairOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import DrafterName
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Record, ResultRow
from stepspec.evaluation.run.conditions import RunSettings
from stepspec.evaluation.run.policies import LoadedPolicy, can_serve, token_policy
from stepspec.evaluation.run.problems import load_benchmark, load_problems
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.run.runner import System
from stepspec.evaluation.stats import Interval, products_of_sums
from stepspec.loop.policy import Policy, load_policy

NUM_PROBLEMS, SEED = 60, 20261123
"""Problems and seed of the published run. They were fixed before it, so that the results could not influence them."""

TEMPERATURES = (0.0, 0.6)
CONFIDENCE = 0.95
"""Confidence that all intervals contain 1, by a Bonferroni correction."""
TOLERANCE = 0.03
"""Maximum distance of `copy` from 1. Does not apply to policies whose texts depend on timing; see `Twins.repeats`.

`order` only has to contain 1 in its interval: with 60 problems it varies by 2 to 4% by chance (`evals/LOG.md`)."""

FIXED_TOKENS = 4
OTHER_DRAFTERS: tuple[DrafterName, ...] = ("suffix",)
"""Drafters that no shipped policy uses."""

COPY = "-again"


class Twins(Record):
    """The results of a policy and its copy."""

    policy: str
    temperature: float
    repeats: bool
    """Whether both write the same texts. Above temperature 0, the text of a seed depends on the number of drafted
    tokens. This is False if the policy chooses that number online."""
    copy_ratio: float
    copy_ci: tuple[float, float] | None
    order_ratio: float
    order_ci: tuple[float, float] | None

    @property
    def holds(self) -> bool:
        """Whether both runs are equally fast: both intervals contain 1, and `copy_ratio` is within the tolerance."""
        intervals = (self.copy_ci, self.order_ci)
        if not all(interval is not None and interval[0] <= 1 <= interval[1] for interval in intervals):
            return False
        return not self.repeats or abs(self.copy_ratio - 1) <= TOLERANCE


class TwinRuns(Record):
    """Results of `python -m evals.bench twins`: all twins, and the conditions."""

    version: int = 1
    benchmark: str
    num_problems: int
    seed: int
    confidence: float = CONFIDENCE
    """Simultaneous confidence of all intervals."""
    tolerance: float = TOLERANCE
    engines: dict[str, str | None]
    versions: dict[str, str]
    commit: str | None
    hardware: dict[str, str | int | float]
    started: str
    results: list[Twins]

    @property
    def holds(self) -> bool:
        """Whether both runs of every policy are equally fast."""
        return all(each.holds for each in self.results)


def policies_to_copy(pair: Pair, *, fixed_too: bool) -> dict[str, LoadedPolicy]:
    """Return every shipped policy and every drafter that the pair supports.

    Args:
        pair: the models.
        fixed_too: for each policy that chooses the number of drafted tokens online, add a copy with a fixed number.
    """
    found = {name: load_policy(name) for name in list_data_files("policies")}
    found |= {name: token_policy(name, None) for name in OTHER_DRAFTERS}
    fitted = {
        name: (fit_policy(policy, pair)[0], text) for name, (policy, text) in found.items() if can_serve(policy, pair)
    }
    if fixed_too:
        fitted |= {
            f"{name}-{FIXED_TOKENS}": (with_fixed_tokens(policy), text)
            for name, (policy, text) in fitted.items()
            if chooses_online(policy)
        }
    return fitted


def chooses_online(policy: Policy) -> bool:
    """Return whether the policy chooses the number of drafted tokens from measured times."""
    return policy.token.drafter not in ("none", "engine") and policy.token.num_tokens == "auto"


def with_fixed_tokens(policy: Policy) -> Policy:
    """Return the policy with a fixed number of drafted tokens."""
    return policy.model_copy(update={"token": policy.token.model_copy(update={"num_tokens": FIXED_TOKENS})})


@dataclass(frozen=True)
class TwinTest:
    """An A/A test of policies on one pair at one temperature."""

    pair: Pair
    policies: Mapping[str, LoadedPolicy]
    temperature: float
    num_problems: int = NUM_PROBLEMS
    seed: int = SEED

    async def run(self, confidence: float, on_row: OnRow | None = None) -> list[Twins]:
        """Run the test and return the twins, with intervals of this confidence. The machine must be otherwise idle."""
        return self.compared(await self.rows(self.systems(), on_row), confidence)

    def compared(self, rows: Sequence[ResultRow], confidence: float) -> list[Twins]:
        """Return the twins of rows. The rows must be in the order in which they ran."""
        rng = np.random.default_rng(self.seed)
        return [self._compared(name, rows, confidence, rng) for name in self.policies]

    def systems(self) -> dict[str, System]:
        """Return both copies of every policy."""
        both = {f"{name}{end}": policy for end in ("", COPY) for name, (policy, _) in self.policies.items()}
        return {name: StepSpec(policy=policy, pair=self.pair) for name, policy in both.items()}

    async def rows(self, systems: Mapping[str, System], on_row: OnRow | None = None) -> list[ResultRow]:
        """Run one request at a time and return all rows in this order."""
        benchmark = load_benchmark("gsm-mini")
        problems = load_problems(benchmark[1], None, self.num_problems)
        texts = {f"{policy}{end}": loaded for end in ("", COPY) for policy, loaded in self.policies.items()}
        settings = RunSettings(self.seed, temperature=self.temperature)
        return await unkept_rows(benchmark, problems, texts, systems, settings, self.pair, on_row)

    def _compared(self, name: str, rows: Sequence[ResultRow], confidence: float, rng: np.random.Generator) -> Twins:
        by_problem: dict[str, list[ResultRow]] = {}
        for row in rows:
            if row.policy in (name, name + COPY):
                by_problem.setdefault(row.problem, []).append(row)
        ordered = list(by_problem.values())
        named = [sorted(both, key=lambda row: row.policy != name) for both in ordered]
        copy, copy_ci = self._ratio(named, confidence, rng)
        order, order_ci = self._ratio(ordered, confidence, rng)
        return Twins(
            policy=name,
            temperature=self.temperature,
            repeats=self.temperature == 0 or not chooses_online(self.policies[name][0]),
            copy_ratio=copy,
            copy_ci=copy_ci,
            order_ratio=order,
            order_ci=order_ci,
        )

    def _ratio(
        self, pairs: Sequence[Sequence[ResultRow]], confidence: float, rng: np.random.Generator
    ) -> tuple[float, Interval | None]:
        """Return the ratio of the second row's time to the first row's. Above temperature 0, times are per token."""
        powers = {"second s": 1, "first s": -1}
        if self.temperature > 0:
            powers |= {"second tokens": -1, "first tokens": 1}
        columns = {
            "first s": [first.wall_s for first, _ in pairs],
            "second s": [second.wall_s for _, second in pairs],
            "first tokens": [first.tokens.committed for first, _ in pairs],
            "second tokens": [second.tokens.committed for _, second in pairs],
        }
        found = products_of_sums({name: columns[name] for name in powers}, {"ratio": powers}, rng, confidence)["ratio"]
        return found.value, found.interval


def simultaneous(num_policies: int) -> float:
    """Return the confidence of each interval so that two intervals for each policy have `CONFIDENCE` together."""
    return 1 - (1 - CONFIDENCE) / (2 * num_policies)


def main(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    limit: Annotated[int, typer.Option(min=10, help="Number of gsm-mini problems.")] = NUM_PROBLEMS,
    json_file: JsonOption = None,
) -> None:
    """Run each policy twice under two names, and check that both runs are equally fast."""
    conditions_now, results = conditions(), list[Twins]()
    models = load_pair(target, draft, pair=pair, notes=False)
    tests = [
        TwinTest(models, policies_to_copy(models, fixed_too=temperature > 0), temperature, limit)
        for temperature in TEMPERATURES
    ]
    confidence = simultaneous(sum(len(test.policies) for test in tests))
    with asyncio.Runner() as runner, make_meter() as meter:
        for test in tests:
            meter.begin(f"temperature {test.temperature:g}")
            results += runner.run(test.run(confidence, meter.show))
        engines = {"target": models.target.name, "draft": models.draft.name if models.draft else None}
        runner.run(models.aclose())
    about = {**conditions_now, "benchmark": "gsm-mini", "num_problems": limit, "seed": SEED, "engines": engines}
    found = TwinRuns.model_validate({**about, "results": results})
    verdict = (
        "Every policy is as fast as its copy." if found.holds else "Some policies are not as fast as their copies."
    )
    finish([_twins_table(found), verdict], found, json_file)
    if not found.holds:
        raise typer.Exit(1)


def _twins_table(found: TwinRuns) -> Table:
    table = Table(title=f"A/A test, {found.num_problems} problems, {found.confidence:.0%} simultaneous intervals")
    for name in ("temperature", "policy", "copy", "", "later over earlier", "", "holds"):
        table.add_column(name)
    for each in found.results:
        cells = [f"{each.copy_ratio:.3f}", _interval(each.copy_ci), f"{each.order_ratio:.3f}", _interval(each.order_ci)]
        table.add_row(f"{each.temperature:g}", each.policy, *cells, "yes" if each.holds else "no")
    return table


def _interval(found: tuple[float, float] | None) -> str:
    return f"[{found[0]:.3f}, {found[1]:.3f}]" if found else ""
