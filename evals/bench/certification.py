"""Coverage and power of certificates.

The run is a run of several policies, such as the settings of a calibration's path. Its problems are a population of
outcomes: whether the target, and each policy, is right. For coverage, the population is weighted so that the target has
a given accuracy and every policy loses exactly the limit (exponential tilting); then every certificate is a false one.
For power, a policy loses nothing and answers a given share of the problems otherwise. Each cell draws many calibrations
with replacement. Each of them orders the policies by how many answers they change on problems of its own, drops those
that look as if they lost more than the limit, and tests the others as `stepspec.evaluation.calibrate.fixed_sequence`
does.

Two further cells are about what is certified. `switched`: half of the requests, at random, are answered by token-level
speculation instead, as under load, and what runs then loses exactly the limit. `several`: each policy gets a
certificate of its own from the same problems, and at least one of them counts.
"""

import json
import platform
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from evals.bench import lab
from evals.bench.rows import finished_rows
from stepspec.cli.output import JsonOption, write_results
from stepspec.errors import UsageError
from stepspec.evaluation.calibrate.fixed_sequence import LossLimits, status_of
from stepspec.evaluation.records import BASELINE
from stepspec.evaluation.report.tables import markdown_table
from stepspec.evaluation.runs import iter_rows, read_run
from stepspec.evaluation.stats.runs import Floats

SIMULATIONS = 10_000
SEED = 25
LIMITS = (0.005, 0.01, 0.02)
ACCURACIES = (0.6, 0.9, 0.98)
REPEATS = (1, 4)
NUM_RECORDED, NUM_PROBLEMS = 200, 2000
POWER_SIZES = (500, 2000, 6000)
CHANGED = (0.05, 0.10, 0.15)
POWER_LIMIT = 0.01
MAX_CERTIFIED = 0.055
SWITCHED = 0.5
RULES_ACCURACY = 0.6
"""Accuracy of the target in the cells `switched` and `several`, about that of `qwen`."""


@dataclass(frozen=True)
class Population:
    """Outcomes of problems: 1 for a right answer of the target, [N, repeats], and of each policy, [K, N, repeats]."""

    target: Floats
    policies: Floats

    @property
    def losses(self) -> Floats:
        """The loss of each policy on each problem, [K, N]."""
        return np.asarray((self.target - self.policies).mean(axis=2), dtype=np.float64)


@dataclass(frozen=True)
class Cell:
    """One kind of calibration, and how many of them certified something.

    Attributes:
        kind: `coverage`, `switched`, `several` or `power`.
        limit: the limit of the loss.
        num_problems: problems of a calibration.
        num_repeats: requests for each problem.
        accuracy: of the target; None where it is that of the recorded run.
        changed: share of the problems that a policy answers otherwise.
        certified: share of the calibrations that certify at least one setting.
        num_certificates: certificates from the same problems.
    """

    kind: str
    limit: float
    num_problems: int
    num_repeats: int
    accuracy: float | None
    changed: float
    certified: float
    num_certificates: int = 1


def read_population(folder: Path) -> Population:
    """Return the outcomes of a run: of the problems that finished under every policy, in all repeats.

    Raises:
        UsageError: there is no run, or no such problem.
    """
    run = read_run(folder)
    right: dict[str, dict[tuple[str, int], float]] = {name: {} for name in run.policies}
    for row in iter_rows(folder):
        right[row.policy][row.problem, row.repeat] = row.status == "correct"
    others = [name for name in run.policies if name != BASELINE]
    problems = sorted({problem for problem, _ in right[BASELINE]})
    finished = [
        problem
        for problem in problems
        if all((problem, repeat) in of for of in right.values() for repeat in range(run.num_repeats))
    ]
    if not finished or not others:
        raise UsageError(f"{folder} has no problem that finished under the target and another policy.")

    def scores(name: str) -> list[list[float]]:
        return [[right[name][problem, repeat] for repeat in range(run.num_repeats)] for problem in finished]

    return Population(np.array(scores(BASELINE), np.float64), np.array([scores(name) for name in others], np.float64))


def lab_population(file: Path) -> Population:
    """Return the outcomes in a file of `python -m evals.bench lab`: of the problems, at each temperature, that finished
    under all settings.

    Raises:
        UsageError: there is no such problem, or the file has other rows.
    """
    right: dict[str, dict[tuple[float, str], float]] = {}
    for row in finished_rows(file, lab.Row):
        right.setdefault(row.setting, {})[row.temperature, row.problem] = row.status == "correct"
    finished = sorted(key for key in right.get(BASELINE, {}) if all(key in found for found in right.values()))
    if not finished or len(right) < 2:
        raise UsageError(f"{file} has no problem that finished under the target and another setting.")
    scores = {name: [[found[key]] for key in finished] for name, found in right.items()}
    others = [each for name, each in scores.items() if name != BASELINE]
    return Population(np.array(scores[BASELINE], np.float64), np.array(others, np.float64))


def tilted(population: Population, accuracy: float | None, losses: Floats) -> Floats:
    """Return weights of the problems, [N], with the given mean losses, [K], and accuracy of the target.

    They are as near as possible to equal weights, by Kullback-Leibler divergence (Newton's method on its dual).

    Raises:
        UsageError: no weights have these means.
    """
    features, wanted = population.losses.T, losses  # [N, K]
    if accuracy is not None:
        features = np.column_stack([features, population.target.mean(axis=1)])
        wanted = np.append(losses, accuracy)
    centered: Floats = features - wanted
    tilt: Floats = np.zeros(len(wanted))
    weights: Floats = np.full(len(features), 1 / len(features))
    for _ in range(200):
        logits = centered @ tilt
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        gradient = weights @ centered
        if float(np.abs(gradient).max()) < 1e-10:
            return weights
        spread = (centered * weights[:, None]).T @ centered - np.outer(gradient, gradient)
        change = np.linalg.solve(spread + 1e-10 * np.eye(len(wanted)), gradient)
        tilt = tilt - change * min(1.0, 2.0 / max(1e-12, float(np.abs(change).max())))
    raise UsageError("The recorded problems cannot be weighted to these accuracies: too few differ between policies.")


def share_certified(
    losses: Floats,
    weights: Floats,
    limits: LossLimits,
    simulations: int,
    *,
    switched: float = 0.0,
    separately: bool = False,
) -> float:
    """Return the share of calibrations that certify a setting, over problems drawn with these weights.

    Args:
        losses: of each setting on each problem of the population, [K, N].
        weights: of the problems, [N].
        limits: the test; `num_planned` is the number of problems of a calibration.
        simulations: number of calibrations.
        switched: share of the requests that lose nothing, because the setting is not used for them.
        separately: whether each setting has a calibration of its own, on the same problems.
    """
    rng = np.random.default_rng(SEED)
    found = 0
    for _ in range(simulations):
        drawn = losses[:, rng.choice(len(weights), NUM_RECORDED + limits.num_planned, p=weights)]
        if switched:
            drawn = drawn * (rng.random(drawn.shape) >= switched)
        path = _path(drawn[:, :NUM_RECORDED], limits.max_loss)
        paths = [[place] for place in range(len(losses))] if separately else [path]
        found += any(certified_settings(drawn[each, NUM_RECORDED:], limits) > 0 for each in paths)
    return found / simulations


def certified_settings(losses: Floats, limits: LossLimits) -> int:
    """Return how many settings of a path, [settings, N], are certified, from the first one on."""
    for number, of_setting in enumerate(losses):
        if status_of(of_setting, limits) != "certified":
            return number
    return len(losses)


def _path(recorded: Floats, max_loss: float) -> NDArray[np.int64]:
    """Return the settings to test, careful ones first, by their losses on recorded problems, [K, R]."""
    order = np.argsort(np.abs(recorded).mean(axis=1), kind="stable")
    promising = [place for place in order if recorded[place].mean() <= max_loss]
    return np.array(promising or order[:1], dtype=np.int64)


def with_repeats(population: Population, num_repeats: int) -> Population:
    """Return the population with fewer repeats, the first ones.

    Raises:
        UsageError: it has fewer.
    """
    if population.target.shape[1] < num_repeats:
        raise UsageError(f"The run has {population.target.shape[1]} repeats, and {num_repeats} are wanted.")
    return Population(population.target[:, :num_repeats], population.policies[:, :, :num_repeats])


def coverage(population: Population, limit: float, accuracy: float, num_repeats: int, simulations: int) -> Cell:
    """Return how often something is certified although every setting loses exactly the limit."""
    known = with_repeats(population, num_repeats)
    weights = tilted(known, accuracy, np.full(len(known.losses), limit))
    limits = LossLimits(limit, 0.95, NUM_PROBLEMS)
    changed = float(weights @ (known.losses[0] != 0))
    certified = share_certified(known.losses, weights, limits, simulations)
    return Cell("coverage", limit, NUM_PROBLEMS, num_repeats, accuracy, changed, certified)


def switched(population: Population, limit: float, accuracy: float, simulations: int) -> Cell:
    """Return `coverage` where half of the requests lose nothing, and the others twice the limit."""
    weights = tilted(population, accuracy, np.full(len(population.losses), limit / (1 - SWITCHED)))
    changed = (1 - SWITCHED) * float(weights @ (population.losses[0] != 0))
    limits = LossLimits(limit, 0.95, NUM_PROBLEMS)
    certified = share_certified(population.losses, weights, limits, simulations, switched=SWITCHED)
    return Cell("switched", limit, NUM_PROBLEMS, 1, accuracy, changed, certified)


def several(population: Population, limit: float, accuracy: float, simulations: int) -> Cell:
    """Return how often at least one of the settings is certified, each for itself on the same problems, although every
    one loses exactly the limit."""
    number = len(population.losses)
    weights = tilted(population, accuracy, np.full(number, limit))
    changed = float(weights @ (population.losses[0] != 0))
    limits = LossLimits(limit, 0.95, NUM_PROBLEMS)
    certified = share_certified(population.losses, weights, limits, simulations, separately=True)
    return Cell("several", limit, NUM_PROBLEMS, 1, accuracy, changed, certified, number)


def power(changed: float, num_problems: int, simulations: int) -> Cell:
    """Return how often a setting without loss is certified that answers a share of the problems otherwise."""
    losses = np.array([[1.0, 0.0, -1.0]])
    weights = np.array([changed / 2, 1 - changed, changed / 2])
    certified = share_certified(losses, weights, LossLimits(POWER_LIMIT, 0.95, num_problems), simulations)
    return Cell("power", POWER_LIMIT, num_problems, 1, None, changed, certified)


def cells(population: Population, simulations: int = SIMULATIONS) -> Iterator[Cell]:
    """Yield all cells, several at a time on as many processes as there are cores. Those of the power do not depend on
    the population."""
    with ProcessPoolExecutor() as workers:
        repeats = [each for each in REPEATS if each <= population.target.shape[1]]
        tasks = [
            workers.submit(coverage, population, *each, simulations) for each in product(LIMITS, ACCURACIES, repeats)
        ]
        tasks += [
            workers.submit(cell, with_repeats(population, 1), limit, RULES_ACCURACY, simulations)
            for cell, limit in product((switched, several), LIMITS)
        ]
        tasks += [workers.submit(power, *each, max(1, simulations // 10)) for each in product(CHANGED, POWER_SIZES)]
        for task in tasks:
            yield task.result()


RULES = {
    "switched": f"{SWITCHED:.0%} of the requests by token level, at random",
    "several": "{0.num_certificates} certificates from the same problems",
}


def certification_block(file: Path) -> str:
    """Return Markdown tables of what `--json` wrote: coverage, the rules of what is certified, and power."""
    found = [Cell(**each) for each in json.loads(file.read_text("utf-8"))["cells"]]
    shares: dict[float, list[float]] = {}
    for each in found:
        if each.kind == "coverage":
            shares.setdefault(each.limit, []).append(each.certified)
    coverages = [[f"{100 * limit:g} points", f"{min(each):.1%} to {max(each):.1%}"] for limit, each in shares.items()]
    powers = {each.changed: [f"{each.changed:.0%}"] for each in found if each.kind == "power"}
    for each in found:
        if each.kind == "power":
            powers[each.changed].append(f"{each.certified:.0%}")
    sizes = [f"{each:,} problems" for each in POWER_SIZES]
    rules = [
        [f"{100 * each.limit:g} points", RULES[each.kind].format(each), f"{each.certified:.2%}"]
        for each in found
        if each.kind in RULES
    ]
    tables = [markdown_table(["loss of every setting = limit", "certified"], coverages)]
    if rules:
        tables.append(markdown_table(["loss of what runs = limit", "with", "at least one certified"], rules))
    if powers:
        tables.append(markdown_table(["answered otherwise", *sizes], list(powers.values())))
    return "\n\n".join(tables)


def main(
    run: Annotated[
        Path, typer.Argument(help="Folder of the run with the population, or rows of `python -m evals.bench lab`.")
    ],
    simulations: Annotated[int, typer.Option(min=1, help="Calibrations for each cell.")] = SIMULATIONS,
    json_file: JsonOption = None,
) -> None:
    """Measure how often calibrations certify a policy."""
    if not run.exists():
        raise UsageError(f"There is no {run}.")
    population = lab_population(run) if run.is_file() else read_population(run)
    found: list[Cell] = []
    for cell in cells(population, simulations):
        found.append(cell)
        accuracy = "" if cell.accuracy is None else f", accuracy {cell.accuracy:.2f}"
        size = f"{cell.num_problems} x {cell.num_repeats}, limit {cell.limit:.3f}"
        print(f"{cell.kind:8}  {cell.certified:.4f} certified  {size}{accuracy}, {cell.changed:.1%} changed")
    about = {
        "simulations": simulations,
        "seed": SEED,
        "problems": population.target.shape[0],
        "settings": len(population.policies),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
    }
    write_results({**about, "cells": [asdict(each) for each in found]}, json_file)
