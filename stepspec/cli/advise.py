"""`stepspec advise`: measure on the user's own prompts whether speculation pays, and write the policy to use."""

import asyncio
import os
import shlex
import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from stepspec.base.files import write_text
from stepspec.cli.executor import executor_for, loader
from stepspec.cli.options import (
    DraftOption,
    MaxTokensOption,
    PairOption,
    RayOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    WorkerCpusOption,
    WorkerGpusOption,
    WorkersOption,
    numbers,
)
from stepspec.cli.output import JsonOption, show, write_results
from stepspec.cli.progress import make_meter
from stepspec.cli.signals import resumable
from stepspec.engines.protocol import Sampling
from stepspec.errors import UsageError
from stepspec.evaluation.advise import (
    AdvicePlan,
    Findings,
    Watcher,
    advise,
    choose_prompts,
    no_prompts,
    read_prompts,
    refuse_strangers,
)
from stepspec.evaluation.advise.policy_file import generated_comments, with_comments
from stepspec.evaluation.advise.tables import costs_table, policies_table
from stepspec.evaluation.run import Executor

COMMENT_WIDTH = 118


def main(
    data: Annotated[
        Path,
        typer.Option(
            help="Your prompts: jsonl, csv or parquet with question, prompt or messages, and optionally answer or gold."
        ),
    ],
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Use only this many prompts, from the start.")] = 20,
    concurrency: Annotated[
        str,
        typer.Option(metavar="N[,N...]", help="Concurrent requests. Several values show at which the advice holds."),
    ] = "1",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the runs, to store or resume. Default: runs/TIME-advise.")
    ] = None,
    policy_file: Annotated[Path, typer.Option(help="File for the advised policy.")] = Path("advised.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the policy file.")] = False,
    json_file: JsonOption = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    worker_cpus: WorkerCpusOption = None,
    worker_gpus: WorkerGpusOption = None,
) -> None:
    """Measure on your own prompts whether speculation pays, and write the policy to use."""
    plan = _plan(concurrency, temperature, max_tokens, seed, limit)
    check_policy_file(policy_file, force)
    # Report errors in the request before a model loads, which can take minutes.
    if not list(islice(read_prompts(data), limit)):
        raise no_prompts(data)
    folder = output or Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-advise")
    refuse_strangers(folder)
    load = loader(target, draft, {}, ray, pair=pair, needs_draft=False, notes=False)
    with (
        executor_for(load, ray, workers, worker_cpus, worker_gpus) as executor,
        resumable(folder, chosen_by_us=output is None),
    ):
        findings = asyncio.run(_measured(executor, data, limit, plan, folder))
    text = policy_text(findings)
    write_text(policy_file, text)
    _print_report(findings, folder, policy_file)
    write_results(findings, json_file)
    models = _options({"--target": target, "--draft": draft, "--pair": pair})
    print(f"Next: {shlex.join(['stepspec', 'run', 'YOUR QUESTION', *models, '--policy', str(policy_file)])}")
    settings = {"--max-tokens": max_tokens, "--temperature": temperature, "--seed": seed, "--concurrency": concurrency}
    _print_settling_command(findings, [*models, *_options({"--data": data, **settings})], limit, policy_file)


def _plan(concurrency: str, temperature: float, max_tokens: int | None, seed: int, limit: int) -> AdvicePlan:
    loads = sorted(numbers("--concurrency", concurrency, int))
    if loads[0] < 1:
        raise UsageError(f"--concurrency is {loads[0]}; it must be at least 1.")
    if loads[-1] > limit:
        raise UsageError(f"--concurrency {loads[-1]} needs at least as many prompts, but --limit is {limit}.")
    Sampling(temperature=temperature)
    return AdvicePlan(loads, temperature, max_tokens or AdvicePlan.max_tokens, seed)


def check_policy_file(file: Path, force: bool) -> None:
    """Check that the policy file can be written at the end.

    Raises:
        UsageError: the file is not a TOML file, it exists already, or its folder is not writable.
    """
    if file.suffix != ".toml":
        raise UsageError(f"A policy is a TOML file, got {file}. Use --policy-file {file.with_suffix('.toml')}.")
    if file.is_dir() or (file.exists() and not force):
        raise UsageError(f"{file} exists already. Choose another --policy-file, or overwrite it with --force.")
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise UsageError(f"The folder {file.parent.resolve()} is not writable. Choose another --policy-file.")


async def _measured(executor: Executor, data: Path, limit: int, plan: AdvicePlan, folder: Path) -> Findings:
    """Run the experiment and return its findings. Frees the models at the end."""
    async with executor:
        prompts = await choose_prompts(data, executor, limit)
        with make_meter() as meter:
            return await advise(executor, prompts, plan, folder, Watcher(meter.begin, meter.show))


def policy_text(findings: Findings) -> str:
    """Return the text of the policy file, whose comments say for what it was advised, and why."""
    sentences = [
        f"Advised by stepspec on {findings.started[:10]}, for {_models(findings)}.",
        *findings.advice.sentences,
    ]
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, COMMENT_WIDTH)]
    text = findings.advice.policy_text
    return with_comments(text, [*lines, *generated_comments(text)])


def _models(findings: Findings) -> str:
    return " and ".join(engine.name for engine in findings.engines.values() if engine is not None)


def _print_report(findings: Findings, folder: Path, policy_file: Path) -> None:
    show(costs_table(findings))
    for load in findings.loads:
        show("", policies_table(load, graded=findings.prompts.graded))
    show("", *(f"- {sentence}" for sentence in findings.advice.sentences), "")
    show(*(f"Not run: {name}. {why}" for name, why in findings.left_out.items()))
    print(f"Policy written to {policy_file}; the runs are in {folder}.")


def _options(given: Mapping[str, str | Path | float | None]) -> list[str]:
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def _print_settling_command(findings: Findings, given: Sequence[str], limit: int, policy_file: Path) -> None:
    """Print the command that determines whether a faster policy keeps the answers."""
    unproven = findings.loads[0].named(findings.advice.unproven or "")
    if unproven is None or unproven.num_to_know is None or unproven.loss_upper is None:
        return
    wanted = max(unproven.num_to_know, limit + 1)
    num_rows = findings.prompts.num_rows
    only = f" (the file has only {num_rows:,})" if num_rows < limit else ""
    command = shlex.join(settling_command(given, wanted, policy_file))
    print(f"To find out whether {unproven.name} keeps the answers, run {wanted:,} prompts{only}: {command}")


def settling_command(given: Sequence[str], num_prompts: int, policy_file: Path) -> list[str]:
    """Return the command that repeats the experiment with more prompts and writes another policy file."""
    beside = policy_file.with_name("settled.toml")
    if beside.exists():
        beside = policy_file.with_stem(f"{policy_file.stem}-settled")
    return ["stepspec", "advise", *given, "--limit", str(num_prompts), "--policy-file", str(beside)]
