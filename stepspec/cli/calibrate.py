"""`stepspec calibrate`: find a policy's thresholds for a pair, and certify what they may cost in accuracy."""

import asyncio
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from stepspec.base.files import find_data_file
from stepspec.cli.completion import names_of
from stepspec.cli.executor import executor_for, loader
from stepspec.cli.options import (
    DraftOption,
    JudgeOption,
    MaxTokensOption,
    PairOption,
    PolicyOption,
    RayOption,
    SeedOption,
    TargetOption,
    WorkerCpusOption,
    WorkerGpusOption,
    WorkersOption,
    judge_specs,
)
from stepspec.cli.output import show
from stepspec.cli.progress import make_meter
from stepspec.cli.signals import resumable
from stepspec.engines.protocol import Sampling
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import Benchmark, GraderKind
from stepspec.evaluation.calibrate import (
    Budget,
    Calibrated,
    CalibrationPlan,
    CalibrationWatcher,
    calibrate,
    check_policy,
    load_task,
)
from stepspec.evaluation.calibrate.task import calibration_split
from stepspec.evaluation.report.calibration import calibration_table
from stepspec.evaluation.run import Executor, load_benchmark
from stepspec.loop.calibrated import CalibratedSetting, settings_of, store, user_folder
from stepspec.loop.policy import load_policy

DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".parquet")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def main(
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK|FILE",
            help="Name or TOML file of a benchmark, or a jsonl, csv or parquet file with questions.",
            autocompletion=names_of("evals"),
        ),
    ],
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    policy: PolicyOption = "two-level",
    split: Annotated[
        str | None, typer.Option(help="Split of gsm-mini: calibration or train. A test split is refused.")
    ] = None,
    max_loss: Annotated[float, typer.Option(help="Largest loss of accuracy, as a share of the problems.")] = 0.01,
    confidence: Annotated[float, typer.Option(help="Confidence of the certificate.")] = 0.95,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Compare answers with the target's own. Needs no right answers.")
    ] = False,
    grader: Annotated[
        str | None, typer.Option(help="How answers of a FILE are compared: integer, number or math.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop after this time, such as 30m or 2h. Resume to go on.")
    ] = None,
    max_problems: Annotated[int, typer.Option(min=1, help="Use at most this many problems.")] = 6000,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature. Default: the benchmark's.")] = None,
    max_tokens: MaxTokensOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent requests while testing settings.")] = 1,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Number of requests for each problem. Default: the benchmark's.")
    ] = None,
    seed: SeedOption = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the calibration, to store or resume. Default: runs/TIME-calibrate.")
    ] = None,
    ray: RayOption = None,
    workers: WorkersOption = None,
    worker_cpus: WorkerCpusOption = None,
    worker_gpus: WorkerGpusOption = None,
) -> None:
    """Find a policy's thresholds for your models, and certify what they may cost in accuracy."""
    _check_shares(max_loss, confidence)
    seconds = None if budget is None else _seconds(budget)
    if temperature is not None:
        Sampling(temperature=temperature)
    _check_folder(user_folder())
    plan = CalibrationPlan(
        max_loss,
        confidence,
        max_problems,
        "agreement" if agreement else "accuracy",
        temperature,
        max_tokens,
        seed,
        concurrency,
        repeats,
    )
    name, spec, data = _problems(benchmark, grader, split)
    wanted, text = load_policy(policy)
    check_policy(wanted)
    folder = output or Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-calibrate")
    specs = judge_specs(judge, set(wanted.judge_models))
    load = loader(target, draft, specs, ray, pair=pair, notes=False, judge_names=wanted.judge_models)

    async def run(executor: Executor) -> tuple[Calibrated, CalibratedSetting]:
        async with executor:
            task = await load_task(name, spec, data, text, executor, plan)
            with make_meter() as meter:
                watcher = CalibrationWatcher(meter.begin, meter.show, lambda words: print(words, file=sys.stderr))
                return await calibrate(task, executor, folder, Budget(seconds), watcher)

    with (
        executor_for(load, ray, workers, worker_cpus, worker_gpus) as executor,
        resumable(folder, chosen_by_us=output is None),
    ):
        results, setting = asyncio.run(run(executor))
    pair = results.identity.pair
    there = next((each for each in settings_of(wanted, pair) if each.temperature == setting.temperature), None)
    keeps = setting.steps and setting.certificate is None and there is not None and there.certificate is not None
    _print_results(results)
    given = {"--target": target, "--draft": draft, "--pair": pair}
    models = [word for option, value in given.items() if value is not None for word in (option, value)]
    if keeps:
        print(f"Not stored, because these models have a certified setting, which stays; the runs are in {folder}.")
    else:
        file = store(setting, find_data_file("policies", policy).stem, pair)
        print(f"Stored for these models in {file}; the runs are in {folder}.")
    undecided = [each for each in results.path if each.status in ("unknown", "not tested")]
    if seconds is not None and undecided and undecided[0].num_problems < results.num_for_test:
        words = ["stepspec", *sys.argv[1:], *(["--output", str(folder)] if output is None else [])]
        print(f"The budget ended the test. To go on: {shlex.join(words)}")
    print(f"Next: {shlex.join(['stepspec', 'run', 'YOUR QUESTION', *models, '--policy', policy])}")


def _check_shares(max_loss: float, confidence: float) -> None:
    if not 0 < max_loss < 1:
        raise UsageError(f"--max-loss must be above 0 and below 1, such as 0.01 for one point, got {max_loss:g}.")
    if not 0.5 < confidence < 1:
        raise UsageError(f"--confidence must be above 0.5 and below 1, got {confidence:g}.")


def _check_folder(folder: Path) -> None:
    """Check that the result can be stored at the end.

    Raises:
        UsageError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror}. Set XDG_CONFIG_HOME to another.") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} is not writable. Set XDG_CONFIG_HOME to another folder.")


def _seconds(text: str) -> float:
    """Return the seconds of a time such as 90s, 30m or 2h."""
    number, unit = text[:-1], UNITS.get(text[-1:])
    try:
        seconds = float(number) * (unit or 0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(f"--budget takes a time such as 90s, 30m or 2h, got {text!r}.")
    return seconds


def _problems(benchmark: str, grader: str | None, split: str | None) -> tuple[str, Benchmark, Path | None]:
    """Return the name of the problems, their benchmark, and the user's file if they are in one."""
    if benchmark.lower().endswith(DATA_SUFFIXES):
        if split is not None:
            raise UsageError("--split is for a benchmark. All questions of a FILE are used.")
        _, spec = load_benchmark("questions")
        kinds: dict[str, GraderKind] = {"integer": "integer", "number": "number", "math": "math"}
        if grader is not None and grader not in kinds:
            raise UsageError(f"--grader must be integer, number or math, got {grader!r}.")
        spec = spec if grader is None else spec.model_copy(update={"grader": kinds[grader]})
        return Path(benchmark).name, spec, Path(benchmark)
    if grader is not None:
        raise UsageError("--grader is for a FILE of questions. A benchmark has its own.")
    name, spec = load_benchmark(benchmark)
    return name, calibration_split(name, spec, split), None


def _print_results(results: Calibrated) -> None:
    show(calibration_table(results), *(f"- {sentence}" for sentence in results.sentences))
