"""What the way to the draft costs each policy: the target in this process, the draft on a server behind a relay.

Every policy runs with both models in this process, and those that use the draft also with the draft at each distance.
All of them take turns problem by problem, so that they share what the machine does.
"""

import asyncio
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table

from evals.bench.delay import far
from evals.bench.rows import unkept_rows
from evals.bench.speed import UNKNOWN, cells_table, with_interval
from stepspec.api.models import Pair, choose_models, close_now, load_pair
from stepspec.api.policy_support import fit_policy
from stepspec.api.session import StepSpec
from stepspec.cli.completion import names_of
from stepspec.cli.options import PairOption, SeedOption
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import Distant
from stepspec.engines.remote.replicas import Replicas
from stepspec.errors import EngineError, UsageError
from stepspec.evaluation.benchmark import Benchmark
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import BASELINE, Conditions, EngineRecord, Record, ResultRow
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.run import load_benchmark, load_problems
from stepspec.evaluation.run.conditions import RunSettings, engine_record
from stepspec.evaluation.run.policies import LoadedPolicy, can_serve
from stepspec.evaluation.run.problems import ProblemSet
from stepspec.evaluation.run.results import OnRow
from stepspec.evaluation.stats.ratios import ratio_of_sums
from stepspec.loop.policy import load_policy

POLICIES = (BASELINE, "token", "specreason", "two-level", "lookahead")
ROUND_TRIPS_MS = (0.0, 1.0, 5.0, 20.0)


class AtDistance(Record):
    """A policy with the draft at one distance.

    Attributes:
        policy: its name.
        round_trip_ms: what the relay adds to a request; None with both models in this process.
        measured_ms: what the draft's smallest request took; None in this process.
        problems: number of problems.
        seconds: mean wall seconds of a request.
        speedup: over the target alone, on the same problems.
        speedup_ci: its 95% interval; None if the problems are too few.
        correct: share of right answers.
        steps_accepted: share of judged steps that were accepted; None if none was judged.
        from_draft: share of the committed tokens that the draft's steps gave.
    """

    policy: str
    round_trip_ms: float | None
    measured_ms: float | None
    problems: int
    seconds: float
    speedup: float
    speedup_ci: tuple[float, float] | None
    correct: float
    steps_accepted: float | None
    from_draft: float


class Distances(Conditions):
    """The file that `python -m evals.bench distance --json` writes."""

    version: Literal[1] = 1
    benchmark: str
    temperature: float
    seed: int
    engines: dict[str, EngineRecord | None]
    results: list[AtDistance]


@dataclass
class Place:
    """A pair of models whose draft is at one distance; see `AtDistance` for the times."""

    pair: Pair
    round_trip_ms: float | None = None
    measured_ms: float | None = None


@contextmanager
def places(pair: str | None, draft: str, round_trips_ms: Sequence[float]) -> Generator[list[Place]]:
    """Load a pair in this process, and its target with the draft of a server at each distance.

    Args:
        pair: name of a pair; None for the embedded one.
        draft: address of a server with the pair's draft.
        round_trips_ms: the distances.

    Raises:
        UsageError: the server's model has another vocabulary than the pair's draft.
        UsageError, ModelError, EngineError: see `load_pair` and `far`.
    """
    opened: list[Any] = []
    with ExitStack() as relays:
        addresses = [relays.enter_context(far(draft, each / 1000)) for each in round_trips_ms]
        try:
            opened.append(direct := Replicas.load(draft))  # an error names the server, and not a relay
            opened.append(near := load_pair(pair=pair, notes=False))
            if near.draft is not None and not near.draft.tokenizer.same_vocabulary(direct.tokenizer):
                raise UsageError(f"The model at {draft} has another vocabulary than the draft of the pair. Serve that.")
            opened.append(alone := load_pair(choose_models(None, None, pair).target, needs_draft=False, notes=False))
            found = [Place(near)]
            for address, each in zip(addresses, round_trips_ms, strict=True):
                opened.append(distant := Replicas.load(address))
                same = alone.target.tokenizer.same_vocabulary(distant.tokenizer)
                found.append(Place(Pair(alone.target, distant, same), each))
            yield found
        finally:
            close_now(*opened)


def policies_for(place: Place, names: Sequence[str]) -> Mapping[str, LoadedPolicy]:
    """Return the policies to run at a place by name: all that the pair supports, and only those that use the draft if
    it is distant."""
    found = {Path(name).stem: load_policy(name) for name in names}
    if place.round_trip_ms is not None:
        found = {name: loaded for name, loaded in found.items() if loaded[0].needs_draft}
    return {
        name: (fit_policy(policy, place.pair)[0], text)
        for name, (policy, text) in found.items()
        if can_serve(policy, place.pair)
    }


async def distances(
    found: Sequence[Place],
    names: Sequence[str],
    benchmark: tuple[str, Benchmark],
    problems: ProblemSet,
    settings: RunSettings,
    on_row: OnRow | None = None,
) -> list[AtDistance]:
    """Run all policies at all places, one request at a time, and compare them with the target alone.

    Raises:
        UsageError: the target alone is not among the policies, or none uses a distant draft.
        StepSpecError: an engine failed several times in a row, or no request was answered under a policy.
    """
    at: dict[str, tuple[str, Place]] = {}
    policies: dict[str, LoadedPolicy] = {}
    for place in found:
        if isinstance(place.pair.draft, Distant):
            place.measured_ms = 1000 * await place.pair.draft.round_trip_s()
        for name, loaded in policies_for(place, names).items():
            key = name if place.round_trip_ms is None else f"{name}, {place.round_trip_ms:g} ms"
            at[key], policies[key] = (name, place), loaded
    if all(place.round_trip_ms is None for _, place in at.values()):
        raise UsageError("No policy uses a distant draft. Choose one of steps, such as --policy specreason.")
    systems = {key: StepSpec(policy=policies[key][0], pair=place.pair) for key, (_, place) in at.items()}
    rows: dict[str, list[ResultRow]] = {key: [] for key in policies}
    for row in await unkept_rows(benchmark, problems, policies, systems, settings, found[0].pair, on_row):
        rows[row.policy].append(row)
    baseline = {row.problem: row for row in rows[BASELINE]}
    return [_compared(name, place, rows[key], baseline) for key, (name, place) in at.items()]


def _compared(name: str, place: Place, rows: Collection[ResultRow], baseline: Mapping[str, ResultRow]) -> AtDistance:
    both = [(baseline[row.problem].wall_s, row.wall_s) for row in rows if row.problem in baseline]
    if not both:
        raise EngineError(f"No request was answered under {name}. The prompts may be too long for a model.")
    seconds = np.array(both)
    speedup, interval = ratio_of_sums(seconds[:, 0], seconds[:, 1], np.random.default_rng(0))
    judged = sum(row.steps_judged for row in rows)
    return AtDistance(
        policy=name,
        round_trip_ms=place.round_trip_ms,
        measured_ms=place.measured_ms,
        problems=len(both),
        seconds=fmean(row.wall_s for row in rows),
        speedup=speedup,
        speedup_ci=interval,
        correct=fmean(row.status == "correct" for row in rows),
        steps_accepted=sum(row.steps_accepted for row in rows) / judged if judged else None,
        from_draft=sum(row.tokens.accepted for row in rows) / sum(row.tokens.committed for row in rows),
    )


def engines_of(found: Sequence[Place]) -> dict[str, EngineRecord | None]:
    """Return the models in this process, and the draft of the server."""
    near, *distant = (place.pair for place in found)
    models = {"target": near.target, "draft": near.draft}
    models |= {"distant draft": distant[0].draft} if distant else {}
    return {role: engine_record(model) for role, model in models.items()}


HEADS = ("policy", "round trip", "measured", "seconds", "speedup", "correct", "steps accepted", "from the draft")


def rows_of(found: Distances) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`: each policy with its distances."""
    names = list(dict.fromkeys(each.policy for each in found.results))
    return [_row(each) for name in names for each in found.results if each.policy == name]


def _row(each: AtDistance) -> list[str]:
    return [
        each.policy,
        "in this process" if each.round_trip_ms is None else f"{each.round_trip_ms:g} ms",
        UNKNOWN if each.measured_ms is None else f"{each.measured_ms:.1f} ms",
        f"{each.seconds:.3f}",
        with_interval(each.speedup, each.speedup_ci),
        f"{each.correct:.1%}",
        UNKNOWN if each.steps_accepted is None else f"{each.steps_accepted:.1%}",
        f"{each.from_draft:.0%}",
    ]


SHOWN_MS = (0.0, 5.0, 20.0)
"""Distances that documents show."""
SPEEDUP_HEADS = ("policy", "in this process", *(f"{each:g} ms" for each in SHOWN_MS))


def speedup_rows(found: Distances) -> list[list[str]]:
    """Return the speedups of the policies that use the draft and pay with both models in this process, by
    `SPEEDUP_HEADS`."""
    by_policy: dict[str, dict[float | None, AtDistance]] = {}
    for each in found.results:
        by_policy.setdefault(each.policy, {})[each.round_trip_ms] = each
    return [
        [policy, *(_speedup(at.get(distance)) for distance in (None, *SHOWN_MS))]
        for policy, at in by_policy.items()
        if at.keys() != {None} and (near := at.get(None)) is not None and near.speedup >= 1
    ]


def _speedup(each: AtDistance | None) -> str:
    return UNKNOWN if each is None else with_interval(each.speedup, each.speedup_ci)


def speedups_in_words(found: Distances) -> str:
    """Return what `speedup_rows` shows."""
    return f"Speedup over the target alone, by delay; {in_words(found)}"


def in_words(found: Distances) -> str:
    """Return what was measured."""
    about = f"{found.benchmark}, {found.results[0].problems:,} problems, one request at a time, temperature"
    return f"{about} {found.temperature:g}, seed {found.seed}; {models_in_words(found.engines)}"


def distances_table(found: Distances) -> Table:
    """Return a terminal table of the policies by distance."""
    return cells_table("The draft at a distance", HEADS, rows_of(found))


def main(
    draft: Annotated[str, typer.Option(help="A server with the pair's draft, as http://HOST:PORT/v1#NAME.")],
    pair: PairOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy; repeat it for several. Default: token, specreason, two-level and lookahead. The target is "
            "always included."
        ),
    ] = None,
    round_trip: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=10_000,
            metavar="MS",
            help="Milliseconds to the draft and back; repeat it for several. Default: 0, 1, 5 and 20.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems; an interval needs 10.")] = 50,
    benchmark: Annotated[str, typer.Option(help="A benchmark.", autocompletion=names_of("evals"))] = "gsm-mini",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what a round trip to the draft costs each policy, with the draft's server behind a delaying relay."""
    name, loaded = load_benchmark(benchmark)
    problems, about = load_problems(loaded, None, limit), conditions()
    names = list(dict.fromkeys([BASELINE, *(policy or POLICIES)]))
    trips = list(dict.fromkeys(round_trip or ROUND_TRIPS_MS))
    settings = RunSettings(seed, temperature=temperature)
    with places(pair, draft, trips) as found, asyncio.Runner() as runner, make_meter() as meter:
        meter.begin("requests")
        run = distances(found, names, (name, loaded), problems, settings, meter.show)
        results, engines = runner.run(run), engines_of(found)
    about |= {"benchmark": name, "temperature": temperature, "seed": seed, "engines": engines}
    measured = Distances.model_validate({**about, "results": results})
    finish([distances_table(measured)], measured, json_file)
