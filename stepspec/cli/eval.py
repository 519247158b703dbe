"""`stepspec eval`: run a benchmark under several policies, show progress, and print a table at the end."""

import asyncio
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from stepspec.api.scope import PairScope
from stepspec.base.printable import printable
from stepspec.cli.completion import names_of
from stepspec.cli.executor import executor_for, loader
from stepspec.cli.figures import CsvOption, PlotsOption, write_figures
from stepspec.cli.options import (
    DEFAULT_POLICIES,
    DraftOption,
    JudgeOption,
    MaxTokensOption,
    PairOption,
    PoliciesOption,
    RayOption,
    SeedOption,
    TargetOption,
    WorkerCpusOption,
    WorkerGpusOption,
    WorkersOption,
    judge_specs,
    numbers,
)
from stepspec.cli.output import show
from stepspec.cli.progress import Meter, make_meter
from stepspec.cli.signals import resumable
from stepspec.engines.protocol import Sampling
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.benchmark import Benchmark, asked
from stepspec.evaluation.records import RunRecord, Summary
from stepspec.evaluation.report import closing_table, nodes_in_words
from stepspec.evaluation.report.conditions import pair_in_words
from stepspec.evaluation.report.findings import failures_in_words, findings
from stepspec.evaluation.report.source import read_source
from stepspec.evaluation.run import (
    Evaluation,
    Executor,
    Grader,
    Keeping,
    LoadedPolicy,
    Part,
    ProblemSet,
    RunFolder,
    RunSettings,
    calibrated_settings,
    conditions,
    fit_policies,
    load_benchmark,
    load_policies,
    load_problems,
    prompt_logprobs,
)
from stepspec.loop.calibrated import proposing

NUM_READ = 50
"""Problems of a run whose prompts are compared with those of a calibration."""


def main(
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK", help="Name or TOML file of the benchmark.", autocompletion=names_of("evals")
        ),
    ],
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    policy: PoliciesOption = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            metavar="T[,T...]",
            help="Sampling temperature; each of several values gets a run. Default: the benchmark's.",
        ),
    ] = None,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Concurrent requests; each of several values gets a run.")
    ] = "1",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of requests for each problem. Default: the benchmark's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Use only this many problems, from the start.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A jsonl, csv or parquet file with the benchmark's problems.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run, to store or resume. Default: runs/TIME-BENCHMARK."),
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Run the I-th of N parts, to share a run between processes or machines.")
    ] = "1/1",
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="When resuming, repeat requests that failed.")
    ] = False,
    traces: Annotated[bool, typer.Option("--traces", help="Also store the text of every step.")] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Also store what 'stepspec replay' needs, which takes time.")
    ] = False,
    csv_file: CsvOption = None,
    plots: PlotsOption = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    worker_cpus: WorkerCpusOption = None,
    worker_gpus: WorkerGpusOption = None,
) -> None:
    """Compare policies on a benchmark: accuracy and speed, with intervals."""
    name, spec = load_benchmark(benchmark)
    settings, own_part = _settings(spec, concurrency, temperature, seed, max_tokens, repeats), Part.parse(part)
    requested = load_policies(policy or DEFAULT_POLICIES)
    judge_names = {name for each, _ in requested.values() for name in each.judge_models}
    specs = judge_specs(judge, judge_names)
    problems = load_problems(spec, data, limit)
    folder = output or Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    folders = [_folder_of(setting, folder, len(settings)) for setting in settings]
    if folder not in folders and (folder / "run.json").exists():
        raise UsageError(f"{folder} contains a single run. Choose another --output folder for several runs.")
    for each in folders:
        RunFolder(each).refuse_strangers()
    runs = [
        (setting, Keeping(each, own_part, traces, record, retry_errors))
        for setting, each in zip(settings, folders, strict=True)
    ]
    needs_draft = any(each.needs_draft for each, _ in requested.values())
    given = {"pair": pair, "needs_draft": needs_draft, "notes": False, "judge_names": judge_names}
    load = loader(target, draft, specs, ray, **given)
    comparison = _EvalPlan(name, spec, problems, requested, leave_out=policy is None)
    with (
        executor_for(load, ray, workers, worker_cpus, worker_gpus) as executor,
        resumable(folder, chosen_by_us=output is None),
    ):
        summaries = asyncio.run(comparison.run_all(executor, runs))
    num_rows = len(problems.problems) * len(summaries[0][1].policies) * (repeats or spec.default_repeats)
    print_tables(summaries, folder, num_rows)
    if csv_file or plots:
        found = zip(folders, summaries, strict=True)
        write_figures([read_source(each, summary, traces=False) for each, (summary, _) in found], csv_file, plots)


def _settings(
    benchmark: Benchmark,
    concurrency: str,
    temperature: str | None,
    seed: int,
    max_tokens: int | None,
    repeats: int | None,
) -> list[RunSettings]:
    """Return one setting for each combination of concurrency and temperature."""
    loads = numbers("--concurrency", concurrency, int)
    if min(loads) < 1:
        raise UsageError(f"--concurrency is {min(loads)}; it must be at least 1.")
    own = benchmark.sampling.temperature
    temperatures = [own] if temperature is None else numbers("--temperature", temperature, float)
    for each in temperatures:
        Sampling(temperature=each)
    return [RunSettings(seed, load, each, max_tokens, repeats) for load, each in product(loads, temperatures)]


def _folder_of(setting: RunSettings, folder: Path, num_settings: int) -> Path:
    """Return the folder of one setting: the folder itself, or a subfolder if there are several settings."""
    if num_settings == 1:
        return folder
    return folder / f"c{setting.concurrency}-t{setting.temperature:g}"


@dataclass(frozen=True)
class _EvalPlan:
    """A benchmark with its problems, and the policies that the user asked for."""

    name: str
    benchmark: Benchmark
    problems: ProblemSet
    policies: Mapping[str, LoadedPolicy]
    leave_out: bool
    """Whether to leave out a policy that the models cannot run, instead of raising an error."""

    async def run_all(
        self, executor: Executor, runs: Sequence[tuple[RunSettings, Keeping]]
    ) -> list[tuple[Summary, RunRecord]]:
        """Execute the runs one after the other, and return their summaries and conditions."""
        policies, leave_out = self.policies, self.leave_out
        async with executor:
            pair = await executor.call(lambda pair: pair.hash)
            record = any(keeping.record for _, keeping in runs)
            found = {
                name: calibrated_settings(name, policy, pair, record=record) for name, (policy, _) in policies.items()
            }
            wanted = {name: (proposing(policy, found[name]), text) for name, (policy, text) in policies.items()}
            fitted = await executor.call(lambda pair: fit_policies(wanted, pair, leave_out=leave_out))
            prompts = list[float]()
            scope = await executor.call(lambda pair: PairScope.find(pair.folder))
            if scope is not None or any(setting.reads_prompts for settings in found.values() for setting in settings):
                read = partial(prompt_logprobs, self.benchmark, self.problems.problems, NUM_READ)
                prompts = await executor.call(read)
            about = self.name, self.benchmark, self.problems, fitted.policies
            compare = partial(conditions, *about, calibrated=found, prompts=prompts)
            records = [await executor.call(partial(compare, settings)) for settings, _ in runs]
            notes = [f"{name}: {note}" for run in records for name, each in run.policies.items() for note in each.notes]
            unlike = scope.note(median(prompts)) if scope is not None and prompts else None
            settings = {name: each.calibrated for run in records for name, each in run.policies.items()}
            if tuned := [name for name, each in settings.items() if each is not None and each.steps]:
                notes.append(f"With calibrated thresholds: {', '.join(tuned)}.")
            for note in dict.fromkeys([*filter(None, [unlike]), *fitted.notes, *notes]):
                print(printable(note), file=sys.stderr)
            with make_meter() as meter:
                return [
                    await self._run(executor, fitted.policies, run, keeping, meter)
                    for run, (_, keeping) in zip(records, runs, strict=True)
                ]

    async def _run(
        self,
        executor: Executor,
        policies: Mapping[str, LoadedPolicy],
        run: RunRecord,
        keeping: Keeping,
        meter: Meter,
    ) -> tuple[Summary, RunRecord]:
        meter.begin(keeping.folder.name)
        task = Evaluation(
            run,
            {name: policy for name, (policy, _) in policies.items()},
            keeping,
            Grader(self.benchmark.grader, self.benchmark.last_number),
            ask=partial(asked, self.benchmark),
            gauges=True,
        )
        return await executor.evaluate(task, self.problems.problems, on_row=meter.show), run


def print_tables(found: Sequence[tuple[Summary, RunRecord]], folder: Path, num_rows: int) -> None:
    """Print a table and the headline of each run. A complete run has `num_rows` rows.

    Raises:
        StepSpecError: requests failed, and none finished.
    """
    if not any(summary.policies for summary, _ in found) and (why := failures_in_words(found[0][0])):
        raise StepSpecError(f"No request of {folder} finished. {why[0]}")
    for summary, run in found:
        about = f"temperature {run.temperature:g}, concurrency {run.concurrency}, at most {run.max_tokens:,} tokens"
        if summary.policies:
            show(closing_table(summary, setting=f"{about}, {pair_in_words(run.engines)}"))
        if summary.busy:
            print(f"Warning: {summary.busy}", file=sys.stderr)
        if summary.nodes:
            show(nodes_in_words(summary))
        show(*failures_in_words(summary))
        failed = sum(summary.failed.values())
        if summary.num_rows is not None and summary.num_rows + failed < num_rows:
            show(f"{summary.num_rows:,} of {num_rows:,} rows are finished. Other parts of the run are missing.")
        show(findings(run, summary).headline)
    print(f"Stored in {folder}. To see a report: stepspec report {shlex.quote(str(folder))}")
