"""`stepspec judge-bench`: measure judges on labelled steps."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from stepspec.api.models import load_pair
from stepspec.base.files import file_hash, list_data_files, write_text
from stepspec.cli.figures import CsvOption, PlotsOption, write_csv, write_plots
from stepspec.cli.options import DraftOption, JudgeOption, PairOption, TargetOption, judge_specs, policy_option
from stepspec.cli.output import show
from stepspec.cli.progress import make_meter
from stepspec.cli.signals import resumable
from stepspec.evaluation import judge_bench as bench
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.report.plots import risk_plot
from stepspec.evaluation.run import load_policies
from stepspec.evaluation.run.conditions import engine_records


def main(
    data: Annotated[Path, typer.Argument(metavar="STEPS", help="Labelled steps: a jsonl file, which may be gzipped.")],
    policy: Annotated[
        list[str] | None,
        policy_option("A policy with judges; repeat it for several. Default: all that ship with stepspec."),
    ] = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    judge: JudgeOption = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the results, to store or resume. Default: runs/TIME-judge-bench.")
    ] = None,
    csv_file: CsvOption = None,
    plots: PlotsOption = None,
) -> None:
    """Measure judges on labelled steps: what their scores say, and what a judgment costs."""
    solutions = bench.read_labelled_steps(data)
    policies = {name: each for name, (each, _) in load_policies(policy or list_data_files("policies")).items()}
    wanted = {name for each in policies.values() for name in each.judge_models}
    specs = judge_specs(judge, wanted)
    print("Loading the models.", file=sys.stderr)
    models = load_pair(target, draft, pair=pair, needs_draft=False, notes=False, judges=specs, judge_names=wanted)
    about = {**conditions(), "data": data.name, "data_sha256": file_hash(data), "engines": engine_records(models)}
    judges, notes = bench.choose_judges(policies, models, solutions)
    chosen_by_us, output = output is None, output or Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-judge-bench")
    with resumable(output, chosen_by_us=chosen_by_us), make_meter() as meter:
        meter.begin("steps")
        judged = bench.judge_steps(models, judges, solutions, output / "judgments.jsonl", meter.show)
        figures, errors = asyncio.run(judged)
    found = bench.judge_bench({**about, "judges": figures, "notes": notes | errors}, solutions)
    table = Table(*bench.HEADS)
    for row in bench.rows_of(found):
        table.add_row(*row)
    unknown = (f"No area or no interval: {why}." for why in dict.fromkeys(each.why for each in figures) if why)
    noted = (f"{name} is {why}" for name, why in found.notes.items())
    show(table, f"{bench.in_words(found)}. Intervals are 95%.", *unknown, *noted)
    write_text(output / "judges.json", found.model_dump_json(indent=2) + "\n")
    print(f"Stored in {output}: judges.json and judgments.jsonl.")
    write_csv(bench.csv_rows(figures), csv_file or output / "judges.csv")
    write_plots([("judges", risk_plot("judges", {each.judge: each.risks for each in figures}))], plots or output)
