"""Coverage of the bound of the accuracy loss.

Each cell is a number of problems and repeats, an accuracy of the target and a true loss of the policy. Each cell is
simulated with several distributions of the loss over problems. `Paired` computes the bound of every evaluation.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

import numpy as np
import scipy  # pyright: ignore[reportMissingTypeStubs]
import typer

from evals.bench.simulated import lost_everywhere, lost_in_some, same_in_all_repeats
from stepspec.cli.output import JsonOption, write_results
from stepspec.evaluation.stats.intervals import z_value
from stepspec.evaluation.stats.paired import Paired
from stepspec.evaluation.stats.runs import Floats

SIMULATIONS = 10_000
SEED = 21
SIZES = ((30, 16), (100, 4), (300, 4), (300, 1))  # problems, repeats
ACCURACIES = (0.6, 0.9, 0.98)
LOSSES = (0.0, 0.01, 0.03)
MIN_COVERAGE = 0.94
MAX_EXCESS = 1.25
"""Maximum ratio to the excess of the normal bound with known variance, for at least `LARGE` problems."""
LARGE = 300

Draw = Callable[[np.random.Generator, "Cell", float], tuple[Floats, Floats]]
"""Samples correct runs of the policy and of the target, both [problems, repeats], with this correlation of repeats."""
DISTRIBUTIONS: Mapping[str, Draw] = {
    "lost everywhere": lambda rng, cell, alike: lost_everywhere(rng, *cell.conditions, alike),
    "lost in some problems": lambda rng, cell, alike: lost_in_some(rng, *cell.conditions, alike),
    "same in all repeats": lambda rng, cell, alike: same_in_all_repeats(rng, *cell.conditions, alike),
}
"""How the loss spreads over problems."""
CORRELATIONS = (0.0, 0.5, 0.9)
"""Correlations of two repeats of a problem: 0 if all problems are equally hard, 1 if repeats always agree."""
USUAL_CORRELATION = 0.5
"""Largest correlation to which `MAX_EXCESS` applies. Beyond it, too few problems are discordant."""


@dataclass(frozen=True)
class Cell:
    """One kind of evaluation."""

    num_problems: int
    num_repeats: int
    accuracy: float
    loss: float

    @property
    def conditions(self) -> tuple[int, int, float, float]:
        """The cell as arguments of the distributions."""
        return self.num_problems, self.num_repeats, self.accuracy, self.loss


@dataclass(frozen=True)
class LossCoverage:
    """Coverage and excess of the bound in a cell under one distribution."""

    num_problems: int
    num_repeats: int
    accuracy: float
    loss: float
    distribution: str
    correlation: float
    coverage: float
    """Share of evaluations in which the bound is at least the true loss."""
    median_excess: float
    """Median of the bound minus the true loss."""
    normal_excess: float
    """Median excess of the normal bound with known variance."""

    @property
    def excess_ratio(self) -> float:
        """`median_excess` over `normal_excess`."""
        return self.median_excess / self.normal_excess


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    for (n, repeats), accuracy, loss in product(SIZES, ACCURACIES, LOSSES):
        yield Cell(n, repeats, accuracy, loss)


def measure(cell: Cell, distribution: str, correlation: float, simulations: int = SIMULATIONS) -> LossCoverage:
    """Simulate evaluations of one cell. The result is deterministic."""
    rng = np.random.default_rng(SEED)
    pairs = [Paired.of(*DISTRIBUTIONS[distribution](rng, cell, correlation)) for _ in range(simulations)]
    bounds = np.array([pair.loss_upper() for pair in pairs])
    spread = float(np.std([pair.difference for pair in pairs]))
    return LossCoverage(
        *cell.conditions,
        distribution=distribution,
        correlation=correlation,
        # The tolerance allows for rounding if the bound equals the loss.
        coverage=float(np.mean(bounds >= cell.loss - 1e-12)),
        median_excess=float(np.median(bounds)) - cell.loss,
        normal_excess=z_value(0.9) * spread,
    )


def main(
    simulations: Annotated[int, typer.Option(min=1, help="Evaluations for each cell and distribution.")] = SIMULATIONS,
    json_file: JsonOption = None,
) -> None:
    """Measure how often the bound of the accuracy loss holds, and by how much it exceeds the loss."""
    rows: list[LossCoverage] = []
    with ProcessPoolExecutor() as workers:
        tasks = [
            workers.submit(measure, cell, distribution, correlation, simulations)
            for cell, distribution, correlation in product(cells(), DISTRIBUTIONS, CORRELATIONS)
        ]
    for row in (task.result() for task in tasks):
        rows.append(row)
        where = f"{row.num_problems:4} x {row.num_repeats:2}  accuracy {row.accuracy:.2f}, loss {row.loss:.2f}"
        how = f"{row.distribution}, correlation {row.correlation}"
        print(f"{where}  {row.coverage:.4f}  excess {row.excess_ratio:.2f}  {how}")
    versions = {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__}
    found = {"confidence": 0.95, "simulations": simulations, "seed": SEED, "versions": versions}
    write_results({**found, "cells": [asdict(row) for row in rows]}, json_file)
