"""Agents with tools on a service, under several policies."""

import asyncio
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import typer
from openai import OpenAIError

from evals.bench.agent_clients import clients, served_models
from evals.bench.agent_runs import TOOL_CHOICES, Agents, ToolChoice, agents_table, compare, in_words, model_for
from evals.bench.agent_tasks import make_tasks
from evals.bench.service.process import started
from stepspec.api.models import load_pair
from stepspec.api.pairs import EMBEDDED_NAME
from stepspec.base.files import list_data_files, write_text
from stepspec.cli.completion import one_of
from stepspec.cli.options import PairOption, SeedOption
from stepspec.cli.output import ON_STDOUT, JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.errors import EngineError, UsageError, unknown_name
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import EngineRecord
from stepspec.evaluation.run.conditions import engine_records

POLICIES = ("two-level", "target", "token")
CLIENTS = ("langchain", "openai")


def main(
    pair: PairOption = None,
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of a running service, such as http://localhost:8000/v1."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE", help="A policy; repeat it for several, one of them a file. Default: all three."
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="langchain or openai; repeat it for both, which is the default."),
    ] = None,
    tool_choice: Annotated[
        str,
        typer.Option(
            help="What the first request of a turn asks for: auto, required, or named for the right tool by name.",
            autocompletion=one_of(("auto", "required", "named")),
        ),
    ] = "named",
    limit: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare policies on three-turn tasks with tools, through LangChain and the openai client.

    The file of --json is written after each task. If it exists, its run goes on.
    """
    if tool_choice not in TOOL_CHOICES:
        raise UsageError(unknown_name("tool_choice", tool_choice, TOOL_CHOICES))
    choice = cast("ToolChoice", tool_choice)
    for name in client or ():
        if name not in CLIENTS:
            raise UsageError(unknown_name("client", name, CLIENTS))
    policies, names = list(dict.fromkeys(policy or POLICIES)), list(dict.fromkeys(client or CLIENTS))
    found = Agents.model_validate(
        {
            **conditions(),
            "service": base_url or pair or EMBEDDED_NAME,
            "clients": names,
            "policies": [Path(each).stem for each in policies],
            "tool_choice": choice,
            "seed": seed,
            "temperature": temperature,
            "engines": {} if base_url else _engines(pair),
            "runs": [],
        }
    )
    if json_file is not None and json_file.exists():
        found = _continued(json_file, found)
    key = os.environ.get("STEPSPEC_API_KEY", "none")
    with _service(pair, base_url, policies) as address, make_meter() as meter:
        try:
            served = served_models(address, key)
            models = {Path(each).stem: model_for(each, served) for each in policies}
            begin = clients(address, key, temperature)
            meter.begin("tasks")
            chosen = {name: begin[name] for name in names}
            for runs in compare(make_tasks(limit, seed), chosen, models, choice, found.num_tasks):
                found.runs.extend(runs)
                if json_file not in (None, ON_STDOUT):
                    write_text(json_file, found.model_dump_json(indent=2) + "\n")
                meter.show(None, found.num_tasks, limit)
        except OpenAIError as error:
            raise EngineError(f"The service at {address} failed: {error}") from error
    finish([agents_table(found), in_words(found)], found, json_file)


def _continued(file: Path, wanted: Agents) -> Agents:
    """Return the runs of a file, which have to be of the same settings on the same machine.

    Raises:
        UsageError: the file is none of this command, or has other settings.
    """
    try:
        found = Agents.model_validate_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} exists and is not a file of this command. Name another file.") from error
    free = {"runs", "started", "commit"}
    own, others = wanted.model_dump(exclude=free), found.model_dump(exclude=free)
    if differing := [name for name in own if own[name] != others[name]]:
        raise UsageError(f"{file} has runs with other {', '.join(differing)}. Name another file.")
    return found


@contextmanager
def _service(pair: str | None, base_url: str | None, policies: list[str]) -> Generator[str]:
    """Yield the address of a service: a running one, or one that is started and stopped here."""
    if base_url is not None:
        yield base_url
        return
    files = [each for each in policies if each not in list_data_files("policies")]
    if len(files) > 1:
        raise UsageError(f"A service has one policy from a file, and there are {len(files)}. Remove all but one.")
    command = [sys.executable, "-m", "stepspec", "serve", "--port", "0", *(["--pair", pair] if pair else [])]
    command += ["--policy", files[0]] if files else []
    with started(command) as service:
        yield f"http://{service.address.host}:{service.address.port}/v1"


def _engines(pair: str | None) -> dict[str, EngineRecord | None]:
    """Return what the models of a pair run with. It loads them, so no service of theirs should run."""
    models = load_pair(pair=pair, notes=False)
    found = engine_records(models)
    asyncio.run(models.aclose())
    return found
