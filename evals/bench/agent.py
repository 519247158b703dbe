"""Agents with tools on a service, under several policies."""

import asyncio
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer
from anthropic import AnthropicError
from langchain_core.exceptions import LangChainException

from evals.bench.agent_clients import clients
from evals.bench.agent_runs import CLIENTS, POLICIES, Agents, agents_table, compare, in_words, lines_of, runs_left
from evals.bench.agent_tasks import make_tasks
from evals.bench.service.process import started
from stepspec.api.models import load_pair
from stepspec.api.pairs import EMBEDDED_NAME
from stepspec.base.files import write_text
from stepspec.cli.options import PairOption, SeedOption
from stepspec.cli.output import ON_STDOUT, JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.errors import EngineError, UsageError, unknown_name
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import EngineRecord
from stepspec.evaluation.run.conditions import engine_records


def main(
    pair: PairOption = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A policy; repeat it for several. Default: all.")
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="langchain or anthropic; repeat it for both, which is the default."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 24,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare policies on tasks with real tools, through LangChain and the anthropic client.

    It starts a service of the pair. The file of --json is written after each run. If it exists, its runs go on.
    """
    policies, names = list(dict.fromkeys(policy or POLICIES)), list(dict.fromkeys(client or CLIENTS))
    for given, known, noun in ((policies, POLICIES, "policy"), (names, CLIENTS, "client")):
        for name in given:
            if name not in known:
                raise UsageError(unknown_name(noun, name, known))
    about = {"pair": pair or EMBEDDED_NAME, "seed": seed, "temperature": temperature}
    found = Agents.model_validate({**conditions(), **about, "engines": {}, "runs": []})
    if json_file is not None and json_file.exists():
        found = _continued(json_file, found)
    else:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # whose end frees the memory of the models
            found = found.model_copy(update={"engines": pool.submit(_engines, pair).result()})
    command = [sys.executable, "-m", "stepspec", "serve", "--port", "0", *(["--pair", pair] if pair else [])]
    with started(command) as service, make_meter() as meter:
        address = f"http://{service.address.host}:{service.address.port}"
        meter.begin("runs")
        tasks = make_tasks(limit, seed)
        left = runs_left(tasks, names, policies, found.runs)
        try:
            begin = clients(address, "none", temperature)
            chosen = {name: begin[name] for name in names}
            for number, run in enumerate(compare(tasks, chosen, left), 1):
                found.runs.append(run)
                if json_file not in (None, ON_STDOUT):
                    write_text(json_file, found.model_dump_json(indent=2) + "\n")
                meter.show(None, number, len(left))
        except (AnthropicError, LangChainException) as error:
            raise EngineError(f"The service failed: {error}") from error
    finish([agents_table(found), *lines_of(found), in_words(found)], found, json_file)


def _continued(file: Path, wanted: Agents) -> Agents:
    """Return the runs of a file, which have to be of the same settings on the same machine.

    Raises:
        UsageError: the file is none of this command, or has other settings.
    """
    try:
        found = Agents.model_validate_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} exists and is not a file of this command. Name another file.") from error
    free = {"runs", "started", "commit", "engines"}
    own, others = wanted.model_dump(exclude=free), found.model_dump(exclude=free)
    if differing := [name for name in own if own[name] != others[name]]:
        raise UsageError(f"{file} has runs with other {', '.join(differing)}. Name another file.")
    return found


def _engines(pair: str | None) -> dict[str, EngineRecord | None]:
    """Return what the models of a pair run with. It loads them, so no service of theirs should run."""
    models = load_pair(pair=pair, notes=False)
    found = engine_records(models)
    asyncio.run(models.aclose())
    return found
