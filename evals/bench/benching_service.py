"""`stepspec bench service`: throughput, streams, overload, faults and costs of the service."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from stepspec.cli.help import WholeHelp
from stepspec.cli.options import DraftOption, PairOption, PolicyOption, SeedOption, TargetOption, numbers
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from evals.bench.service.records import Scenario

NUM_FILES = 16_384
"""Open files that a process may have, for a connection of each stream."""

app = typer.Typer(cls=WholeHelp, no_args_is_help=True, help="Measure the service.", rich_markup_mode=None)


@app.callback()
def _commands() -> None:
    """Measure the service over HTTP, in a process of its own on this machine."""
    with suppress(ImportError, OSError, ValueError):  # not on Windows, or not permitted
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, most) if most > 0 else NUM_FILES, most))


@app.command("instant")
def bench_instant(
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 16,
    requests: Annotated[int, typer.Option(min=10, help="Number of requests.")] = 10_000,
    json_file: JsonOption = None,
) -> None:
    """Measure what the service adds to a request, with engines that answer instantly."""
    from evals.bench.service.instant import BLOCKS, Instant, instant
    from evals.bench.service.process import scripted_command, started
    from evals.bench.service.records import scenario_table
    from evals.bench.service.script import POLICY, Script, scripted_pair
    from stepspec.api.session import StepSpec

    conditions, script = _conditions(), Script()
    count = -(-requests // BLOCKS) * BLOCKS
    with started(scripted_command(script)) as service, make_meter() as meter:
        spec = StepSpec(policy=POLICY, pair=scripted_pair(script))
        meter.begin("requests")
        figures = asyncio.run(instant(service, spec, concurrency, count, meter.show))
    found = Instant.model_validate({**conditions, "figures": figures})
    _finish([scenario_table(found)], found, json_file)


@app.command("streams")
def bench_streams(
    streams: Annotated[int, typer.Option(min=1, help="Number of streams.")] = 1000,
    rate: Annotated[float, typer.Option(min=0.1, help="Streams opened a second.")] = 100.0,
    chunks: Annotated[int, typer.Option(min=2, max=120, help="Steps of each stream, one a second.")] = 16,
    json_file: JsonOption = None,
) -> None:
    """Open many streams that get a chunk a second, and measure how soon they begin."""
    from evals.bench.service.process import scripted_command, started
    from evals.bench.service.records import scenario_table
    from evals.bench.service.script import Script
    from evals.bench.service.streams import Streams
    from evals.bench.service.streams import streams as measure

    conditions, script = _conditions(), Script(chunks, 0.0, 1.0)
    with started(scripted_command(script, max_running=streams)) as service:
        figures = asyncio.run(measure(service, script, streams, rate))
    found = Streams.model_validate({**conditions, "figures": figures})
    _finish([scenario_table(found)], found, json_file)


@app.command("concurrency")
def bench_concurrency(
    pair: PairOption = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1, 2, 4, 8, 16, 32 and 64.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of problems; an interval needs 10.")] = 12,
    rounds: Annotated[
        int, typer.Option(min=1, help="Problems of a block for each concurrent request. A block has at least 8.")
    ] = 2,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Compare the throughput of the default policy with that of the target alone."""
    from evals.bench.engine_records import engine_records
    from evals.bench.service.concurrency import (
        CONCURRENCIES,
        MIN_BLOCK,
        Concurrency,
        at_concurrency,
        concurrency_table,
        models_of,
    )
    from evals.bench.service.process import started
    from evals.bench.service.records import scenario_table
    from evals.training.gsm_mini import load_split
    from stepspec.api.loading import choose_models

    choose_models(None, None, pair)  # refuses an unknown name before a service starts
    conditions, results = _conditions(), list[Any]()
    command = [sys.executable, "-m", "stepspec", "serve", "--port", "0", *(["--pair", pair] if pair else [])]
    with started(command) as service, asyncio.Runner() as runner, make_meter() as meter:
        policy, *models = runner.run(models_of(service))
        for number in concurrency or CONCURRENCIES:
            meter.begin(f"concurrency {number}")
            count = blocks * max(rounds * number, MIN_BLOCK)
            questions = [each.question for each in islice(load_split("test"), count)]
            run = at_concurrency(service, (models[0], models[1]), questions, number, blocks, temperature, meter.show)
            results.append(runner.run(run))
    about = {"policy": policy, "benchmark": "gsm-mini", "temperature": temperature, "engines": engine_records(pair)}
    found = Concurrency.model_validate({**conditions, **about, "results": results})
    _finish([concurrency_table(found), scenario_table(found)], found, json_file)


@app.command("overload")
def bench_overload(
    max_running: Annotated[int, typer.Option(min=1, help="Requests that run concurrently.")] = 16,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that wait.")] = 8,
    service_s: Annotated[float, typer.Option(min=0.01, help="Seconds that the engine takes for a request.")] = 0.2,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 30.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Send three times the requests that the service can answer."""
    from evals.bench.service.overload import Overload, overload
    from evals.bench.service.process import scripted_command, started
    from evals.bench.service.records import scenario_table
    from evals.bench.service.script import Script

    conditions, limits = _conditions(), {"max_running": max_running, "max_queued": max_queued}
    with started(scripted_command(Script(1, service_s), **limits)) as service:
        figures = asyncio.run(overload(service, max_running, max_queued, service_s, seconds, seed))
    found = Overload.model_validate({**conditions, "figures": figures})
    _finish([scenario_table(found)], found, json_file)


@app.command("faults")
def bench_faults(
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that leave at a random time.")] = 1000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Let faulty and hostile clients visit the service, and look for what they leave."""
    from evals.bench.service.faults import Faults, end_under_load, faults, visits_table
    from evals.bench.service.process import scripted_command, started
    from evals.bench.service.records import scenario_table
    from evals.bench.service.script import Script
    from evals.bench.service.visits import MAX_BODY_BYTES

    conditions, script = _conditions(), Script(4, 0.05, 0.05)
    with started(scripted_command(script, max_body_bytes=MAX_BODY_BYTES)) as service:
        left = asyncio.run(faults(service, script.seconds, disconnects, seed))
    with started(scripted_command(script, max_running=8)) as service:
        end = asyncio.run(end_under_load(service))
    found = Faults.model_validate({**conditions, "faults": left, "end": end})
    _finish([visits_table(found), scenario_table(found)], found, json_file)


@app.command("replicas")
def bench_replicas(
    requests: Annotated[int, typer.Option(min=100, help="Requests for each number of replicas.")] = 1000,
    max_running: Annotated[int, typer.Option(min=1, help="Requests that a replica runs concurrently.")] = 4,
    service_s: Annotated[float, typer.Option(min=0.01, help="Seconds that the engine takes for a request.")] = 0.2,
    seconds: Annotated[float, typer.Option(min=5, help="Least seconds of load while a replica is killed.")] = 30.0,
    json_file: JsonOption = None,
) -> None:
    """Compare two replicas on a local Ray with one, and kill one of two under load."""
    from evals.bench.service.records import scenario_table
    from evals.bench.service.replicas import Replicas, killed, of_replicas

    conditions = _conditions()
    results = [of_replicas(replicas, requests, max_running, service_s) for replicas in (1, 2)]
    figures = {"results": results, "killed": killed(seconds, max_running, service_s)}
    about = {"max_running": max_running, "service_s": service_s}
    found = Replicas.model_validate({**conditions, **about, **figures})
    _finish([scenario_table(found)], found, json_file)


@app.command("affinity")
def bench_affinity(
    conversations: Annotated[int, typer.Option(min=2, help="Conversations under each policy.")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=16, help="Turns of a conversation.")] = 6,
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Python with vLLM and vllm-router. Default: that of .venv-vllm."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare the prefix caches of two vLLM servers behind a router with that of one, with affinity and without."""
    from evals.bench.service.affinity import SETTINGS, Affinity, affinity_table, conversations_of, reuse
    from evals.bench.service.records import scenario_table
    from evals.bench.service.vllm_servers import PYTHON, vllm_versions

    python, conditions, results = vllm or PYTHON, _conditions(), list[Any]()
    conditions["versions"] = {**conditions["versions"], **vllm_versions(python)}
    talks = conversations_of(conversations, turns)
    with make_meter() as meter:
        for setting in SETTINGS:
            meter.begin(setting.name)
            results += asyncio.run(reuse(setting, python, talks, meter.show))
    about = {"conversations": conversations, "turns": turns}
    found = Affinity.model_validate({**conditions, **about, "results": results})
    _finish([affinity_table(found), scenario_table(found)], found, json_file)


@app.command("costs")
def bench_costs(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    policy: PolicyOption = "stepspec",
    concurrency: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Concurrent requests; the least is 1.")
    ] = "1,2,4,8",
    requests: Annotated[int, typer.Option(min=10, help="Requests at each; at least 4 for each concurrent one.")] = 200,
    benchmark: Annotated[str, typer.Option(help="gsm-mini or gsm-plain.")] = "gsm-mini",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Measure what requests to one service cost, for `stepspec size`."""
    from evals.bench.same_texts import PROBLEMS
    from evals.bench.service.costs import MIN_ROUNDS, costs_table, memory_of, service_costs
    from evals.bench.service.process import started
    from stepspec.api.loading import choose_models, load_pair
    from stepspec.evaluation.running.conditions import engine_record
    from stepspec.loop.policy import load_policy
    from stepspec.sizing.costs import Costs

    loads = _loads(concurrency, requests, MIN_ROUNDS)
    # Unknown names are refused before a service starts. Models are loaded here only after the timed requests, so that
    # these have all the memory.
    choose_models(target, draft, pair)
    load_policy(policy)
    if benchmark not in PROBLEMS:
        raise UsageError(unknown_name("benchmark", benchmark, [*PROBLEMS]))
    count = len(loads) * requests + sum(loads)  # no question twice, which would be in the prefix cache
    questions = [each.question for each in islice(PROBLEMS[benchmark]("test"), count)]
    if len(questions) < count:
        raise UsageError(
            f"{benchmark} has {len(questions):,} questions, and these are {count:,}. Give fewer --requests."
        )
    conditions, models = _conditions(), {"--target": target, "--draft": draft, "--pair": pair}
    given = [word for name, value in models.items() if value is not None for word in (name, value)]
    limits = ["--max-running", str(max(loads)), "--policy", policy, "--port", "0"]

    with started([sys.executable, "-m", "stepspec", "serve", *limits, *given]) as service, make_meter() as meter:
        meter.begin("numbers of concurrent requests")
        results = asyncio.run(service_costs(service, questions, loads, requests, temperature, meter.show))
    loaded = load_pair(target, draft, pair=pair, needs_draft=False, notes=False)
    about = {
        "policy": policy,
        "benchmark": benchmark,
        "temperature": temperature,
        "max_running": max(loads),
        "engines": {"target": engine_record(loaded.target), "draft": loaded.draft and engine_record(loaded.draft)},
        "memory": memory_of(loaded),
        "loads": results,
    }
    asyncio.run(loaded.aclose())
    found = Costs.model_validate({**conditions, **about})
    finish([costs_table(found)], found, json_file)


@app.command("sizing")
def bench_sizing(
    requests: Annotated[int, typer.Option(min=20, help="Measured requests of each run.")] = 1000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare the simulation of `stepspec size` with real replicas on a local Ray."""
    from evals.bench.service.records import scenario_table
    from evals.bench.service.sizing import (
        LOADS,
        REPLICAS,
        THINK_S,
        Compared,
        SizingCheck,
        compared,
        measured_costs,
        sizing_table,
    )

    conditions, runs = _conditions(), [(load, replicas) for replicas in REPLICAS for load in LOADS]
    with make_meter() as meter:
        meter.begin("costs and runs")
        meter.show(None, 0, 1 + len(runs))
        costs, results = measured_costs(conditions, requests), list[Compared]()
        for done, (load, replicas) in enumerate(runs, 1):
            meter.show(None, done, 1 + len(runs))
            results.append(compared(costs, load, replicas, requests, seed))
        meter.show(None, 1 + len(runs), 1 + len(runs))
    found = SizingCheck.model_validate({**conditions, "costs": costs, "think_s": THINK_S, "results": results})
    _finish([sizing_table(found), scenario_table(found)], found, json_file)


def _loads(text: str, requests: int, rounds: int) -> list[int]:
    """Return the numbers of concurrent requests.

    Raises:
        UsageError: 1 is not among them, one is below it, or there are too few requests for the largest.
    """
    loads = sorted(numbers("--concurrency", text, int))
    if loads[0] != 1:
        raise UsageError(f"--concurrency must start with 1, got {text}.")
    if requests < rounds * loads[-1]:
        raise UsageError(f"--concurrency {loads[-1]} needs at least {rounds * loads[-1]} --requests, got {requests}.")
    return loads


def _conditions() -> dict[str, Any]:
    """Return hardware, versions, commit and start time. Call it before measuring, as files can change meanwhile."""
    from stepspec.evaluation.machine import commit, hardware, versions

    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions(), "commit": commit(), "hardware": hardware(), "started": started}


def _finish(tables: Sequence[Table], found: "Scenario", json_file: Path | None) -> None:
    """Print the tables and write the file.

    Raises:
        typer.Exit: a figure is past its limit.
    """
    finish(tables, found, json_file)
    if not found.holds:
        raise typer.Exit(1)
