"""`stepspec bench agent`: agents with tools on a running service."""

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stepspec.base.extras import from_extra
from stepspec.base.files import list_data_files, write_text
from stepspec.cli.completing import one_of
from stepspec.cli.options import SeedOption
from stepspec.cli.output import STDOUT, JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.errors import EngineError, UsageError, unknown_name

if TYPE_CHECKING:
    from evals.bench.agent import Agents, ToolChoice

POLICIES = ("stepspec", "target", "token")
CLIENTS = ("langchain", "openai")


def bench_agent(
    pair: Annotated[
        str, typer.Option(metavar="NAME", help="The pair of the service that the command starts.")
    ] = "smol",
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
    from evals.bench.agent import TOOL_CHOICES, Agents, agents_table, compare, in_words, model_for
    from evals.bench.agent_tasks import make_tasks
    from evals.bench.engine_records import engine_records
    from stepspec.evaluation.machine import commit, hardware, versions

    with from_extra("dev", "stepspec bench agent"):
        own = importlib.import_module("evals.bench.agent_clients")
        openai_error: type[Exception] = importlib.import_module("openai").OpenAIError
    if tool_choice not in TOOL_CHOICES:
        raise UsageError(unknown_name("tool_choice", tool_choice, TOOL_CHOICES))
    choice = cast("ToolChoice", tool_choice)
    for name in client or ():
        if name not in CLIENTS:
            raise UsageError(unknown_name("client", name, CLIENTS))
    policies, names = list(dict.fromkeys(policy or POLICIES)), list(dict.fromkeys(client or CLIENTS))
    found = Agents.model_validate(
        {
            "versions": versions(),
            "commit": commit(),
            "hardware": hardware(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "service": base_url or pair,
            "clients": names,
            "policies": [Path(each).stem for each in policies],
            "tool_choice": choice,
            "seed": seed,
            "temperature": temperature,
            "engines": {} if base_url else engine_records(pair),
            "runs": [],
        }
    )
    if json_file is not None and json_file.exists():
        found = _continued(json_file, found)
    key = os.environ.get("STEPSPEC_API_KEY", "none")
    with _service(pair, base_url, policies) as address, make_meter() as meter:
        try:
            served = own.served_models(address, key)
            models = {Path(each).stem: model_for(each, served) for each in policies}
            begin = own.clients(address, key, temperature)
            meter.begin("tasks")
            chosen = {name: begin[name] for name in names}
            for runs in compare(make_tasks(limit, seed), chosen, models, choice, found.num_tasks):
                found.runs.extend(runs)
                if json_file not in (None, STDOUT):
                    write_text(json_file, found.model_dump_json(indent=2) + "\n")
                meter.show(None, found.num_tasks, limit)
        except openai_error as error:
            raise EngineError(f"The service at {address} failed: {error}") from error
    finish([agents_table(found), in_words(found)], found, json_file)


def _continued(file: Path, wanted: "Agents") -> "Agents":
    """Return the runs of a file, which have to be of the same settings on the same machine.

    Raises:
        UsageError: the file is none of this command, or has other settings.
    """
    from evals.bench.agent import Agents

    try:
        found = Agents.model_validate_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} exists and is not a file of stepspec bench agent. Name another file.") from error
    free = {"runs", "started", "commit"}
    own, others = wanted.model_dump(exclude=free), found.model_dump(exclude=free)
    if differing := [name for name in own if own[name] != others[name]]:
        raise UsageError(f"{file} has runs with other {', '.join(differing)}. Name another file.")
    return found


@contextmanager
def _service(pair: str, base_url: str | None, policies: list[str]) -> Generator[str]:
    """Yield the address of a service: a running one, or one that is started and stopped here."""
    if base_url is not None:
        yield base_url
        return
    with from_extra("dev", "stepspec bench agent"):
        from evals.bench.service.process import started
    files = [each for each in policies if each not in list_data_files("policies")]
    if len(files) > 1:
        raise UsageError(f"A service has one policy from a file, and there are {len(files)}. Remove all but one.")
    command = [sys.executable, "-m", "stepspec", "serve", "--pair", pair, "--port", "0"]
    command += ["--policy", files[0]] if files else []
    with started(command) as service:
        yield f"http://{service.address.host}:{service.address.port}/v1"
