"""`stepspec report`: show stored runs as tables, as Markdown and as an HTML page."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stepspec.base.extras import from_extra
from stepspec.base.file_model import load_toml
from stepspec.base.files import write_text
from stepspec.cli.output import show
from stepspec.errors import UsageError
from stepspec.evaluation.records import Summary
from stepspec.evaluation.runs import find_runs, has_gone_on, read_run, read_summary

with from_extra("eval", "stepspec report"):
    from stepspec.cli.figures import CsvOption, PlotsOption, write_figures
    from stepspec.evaluation.calibrate.folder import read_results
    from stepspec.evaluation.report.calibration import calibration_markdown, calibration_table
    from stepspec.evaluation.report.findings import failures_in_words
    from stepspec.evaluation.report.markdown import markdown_report
    from stepspec.evaluation.report.page import make_page
    from stepspec.evaluation.report.prices import Prices
    from stepspec.evaluation.report.source import Source, read_source, settings_of
    from stepspec.evaluation.report.tables import full_table
    from stepspec.evaluation.run import summary_of


def main(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of sweeps with a run in each subfolder.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for one HTML page of all runs. Default: RUN/report.html.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the Markdown of all runs. Default: RUN/report.md.")
    ] = None,
    prices: Annotated[Path | None, typer.Option(metavar="FILE", help="A TOML file of prices, to report costs.")] = None,
    csv_file: CsvOption = None,
    plots: PlotsOption = None,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Include the text of the steps in the page.")
    ] = True,
) -> None:
    """Show the results of runs: a table in the terminal, a Markdown file and an HTML page."""
    reports = {folder: _read(folder, prices, traces) for folder in dict.fromkeys(runs)}
    calibrations = {folder: found for folder in reports if (found := read_results(folder)) is not None}
    everything = [source for sources in reports.values() for source in sources]
    show(*map(calibration_table, calibrations.values()))
    for source, setting in zip(everything, _settings(everything), strict=True):
        show(full_table(source.summary, setting=setting, extras=source.extras), *failures_in_words(source.summary))
    pages = {html: list(reports)} if html else {folder / "report.html": [folder] for folder in reports}
    texts = {markdown: list(reports)} if markdown else {folder / "report.md": [folder] for folder in reports}
    for file, folders in texts.items():
        begun = [calibration_markdown(calibrations[folder]) for folder in folders if folder in calibrations]
        _write(file, "\n".join([*begun, *_markdown([each for folder in folders for each in reports[folder]])]))
    for file, folders in pages.items():
        found = [calibrations[folder] for folder in folders if folder in calibrations]
        _write(file, make_page([each for folder in folders for each in reports[folder]], found))
    write_figures(everything, csv_file, plots)


def _read(folder: Path, prices: Path | None, traces: bool) -> list[Source]:
    table = None if prices is None else load_toml(prices, Prices)[0]
    summaries = {run: _summary_of(run) for run in find_runs(folder)}
    begun = {run: summary for run, summary in summaries.items() if summary.policies}
    if not begun:
        raise UsageError(f"{folder} has no finished row yet, so there is nothing to report.")
    for run in summaries.keys() - begun:
        print(f"{run} has no finished row yet. The report omits it.", file=sys.stderr)
    return [read_source(run, summary, traces=traces, prices=table) for run, summary in begun.items()]


def _summary_of(folder: Path) -> Summary:
    """Return the stored summary, or one computed from the rows if the summary is missing or older than the rows."""
    summary = read_summary(folder)
    if summary is None or has_gone_on(folder, summary):
        summary = summary_of(read_run(folder), folder)
    return summary


def _settings(sources: Sequence[Source]) -> list[str]:
    return settings_of([source.run for source in sources], [source.folder for source in sources])


def _markdown(sources: Sequence[Source]) -> list[str]:
    return [
        markdown_report(source.run, source.summary, setting=setting, extras=source.extras)
        for source, setting in zip(sources, _settings(sources), strict=True)
    ]


def _write(file: Path, text: str) -> None:
    write_text(file, text)
    print(f"Wrote {file}.")
