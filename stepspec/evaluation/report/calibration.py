"""A calibration in reports: the tested settings with the bounds of their loss, and what was found."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from stepspec.evaluation.calibrate.records import Calibrated, Tested
from stepspec.evaluation.report.cells import UNKNOWN, in_markdown
from stepspec.evaluation.report.tables import markdown_table

PATH_HEAD = ("setting", "thresholds", "predicted", "test", "problems", "loss at most", "accuracy", "target's")


def path_rows(results: Calibrated) -> list[Sequence[str]]:
    """Return a row of cells for each setting of the path, the most careful first. `PATH_HEAD` has their titles."""
    return [_cells(each) for each in results.path]


def calibration_table(results: Calibrated) -> Table:
    """Return the path as a terminal table, with the chosen setting in bold."""
    table = Table(*PATH_HEAD)
    for each, row in zip(results.path, path_rows(results), strict=True):
        table.add_row(*map(Text, row), style="bold" if each.setting.name == results.chosen else None)
    return table


def calibration_markdown(results: Calibrated) -> str:
    """Return the Markdown of a calibration: its sentences and the table of its path."""
    results = in_markdown(results)
    blocks = [
        f"# Calibration on {results.identity.benchmark}",
        "\n".join(f"- {sentence}" for sentence in results.sentences),
        markdown_table(PATH_HEAD, path_rows(results)),
    ]
    return "\n\n".join(blocks) + "\n"


def _cells(tested: Tested) -> Sequence[str]:
    setting = tested.setting
    thresholds = [f"{name} {value:g}" for name, value in setting.thresholds.items()]
    thresholds += [] if setting.min_logprob is None else [f"salvage {setting.min_logprob:g}"]

    def percent(share: float | None) -> str:
        return UNKNOWN if share is None else f"{100 * share:.2f}%"

    return (
        setting.name,
        ", ".join(thresholds),
        f"{setting.predicted_speedup:.2f}×",
        tested.status,
        f"{tested.num_problems:,}",
        percent(tested.loss_upper),
        percent(tested.accuracy),
        percent(tested.target_accuracy),
    )
