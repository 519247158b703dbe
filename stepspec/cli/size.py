"""`stepspec size`: how many replicas a number of agents needs, from measured costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stepspec.capacity.costs import read_costs
from stepspec.capacity.plan import (
    MAX_AGENTS,
    Plan,
    Requirements,
    Sizing,
    alone_p95_s,
    check_wanted,
    plan_agents,
    plan_gpus,
)
from stepspec.capacity.tables import assumptions, placement, plans_table
from stepspec.cli.options import SeedOption, numbers
from stepspec.cli.output import JsonOption, show, write_results
from stepspec.cli.progress import make_meter
from stepspec.errors import UsageError


def main(
    costs: Annotated[Path, typer.Option(metavar="FILE", help="Costs, as `stepspec costs service` writes them.")],
    agents: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Concurrent agents. Optional with --gpus.")
    ] = None,
    think: Annotated[float, typer.Option(help="Mean seconds between an answer and the next request.")] = 10.0,
    p95: Annotated[
        float | None,
        typer.Option(help="95th percentile of the latency, at most, in seconds. Default: twice that of one request."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Also find the most agents that this number of GPUs can serve.")
    ] = None,
    gpus_per_replica: Annotated[int, typer.Option(min=1, help="GPUs of a replica.")] = 1,
    max_running: Annotated[
        int | None,
        typer.Option(
            min=1, help="Answers that a replica generates concurrently. Default: the most that were measured."
        ),
    ] = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Find the number of replicas for a number of concurrent agents, from measured costs and simulations."""
    counts = _agents(agents, gpus)
    found = read_costs(costs)
    most = max_running or min(found.busiest.concurrency, found.max_running)
    wanted = Requirements(think, 2 * alone_p95_s(found) if p95 is None else p95, most, gpus_per_replica, seed)
    check_wanted(found, wanted)
    if json_file is not None and json_file.resolve() == costs.resolve():
        raise UsageError("--json must be another file than --costs, which it would replace.")
    plans, for_gpus = list[Plan](), None
    total = len(counts) + (gpus is not None)
    with make_meter() as meter:
        meter.begin("simulated plans")
        meter.show(None, 0, total)
        for count in counts:
            plans.append(plan_agents(found, wanted, count))
            meter.show(None, len(plans), total)
        if gpus is not None:
            for_gpus = plan_gpus(found, wanted, gpus)
            meter.show(None, total, total)
    sizing = Sizing(
        costs=found,
        think_s=think,
        p95_s=wanted.p95_s,
        max_running=most,
        gpus_per_replica=gpus_per_replica,
        seed=seed,
        plans=plans,
        gpus=gpus,
        for_gpus=for_gpus,
    )
    show(plans_table(sizing))
    _print_list("What to put where", placement(sizing))
    _print_list("Assumptions", assumptions(sizing))
    write_results(sizing, json_file)


def _agents(text: str | None, gpus: int | None) -> list[int]:
    if text is None:
        if gpus is None:
            raise UsageError("Give --agents N, or --gpus to find the most agents that they can serve.")
        return []
    counts = numbers("--agents", text, int)
    for count in counts:
        if not 1 <= count <= MAX_AGENTS:
            raise UsageError(f"--agents must be between 1 and {MAX_AGENTS:,}, got {count:,}.")
    return counts


def _print_list(title: str, sentences: Sequence[str]) -> None:
    show("", f"{title}:", *(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)))
