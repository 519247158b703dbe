"""Writes a run in the log formats of other tools, so that you can view it in them.

`lm-eval` is the format of EleutherAI's lm-evaluation-harness, `inspect` that of the UK AI Security Institute's
inspect_ai. Both have one model per log, so every policy of the run becomes a separate model: `TARGET+POLICY`. Values
that a run does not record are left out or null. Logs contain the models' outputs if the run stored its traces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepspec.errors import StepSpecError, UsageError, unknown_name
from stepspec.evaluation.export import inspect_log, lm_eval
from stepspec.evaluation.export.source import ExportedRun, Written

__all__ = ["FORMATS", "Exported", "export"]

FORMATS: Mapping[str, Callable[[ExportedRun, Path], Mapping[str, Written]]] = {
    "lm-eval": lm_eval.write_logs,
    "inspect": inspect_log.write_logs,
}
"""Functions that write a run's logs into a folder, by format. They return the written files by policy."""


@dataclass(frozen=True)
class Exported:
    """The files that were written."""

    folder: Path
    logs: Mapping[str, Written]
    """By policy."""

    @property
    def num_rows(self) -> int:
        """Number of rows in all logs."""
        return sum(log.num_rows for log in self.logs.values())

    @property
    def num_texts(self) -> int:
        """Number of rows whose output texts are known."""
        return sum(log.num_texts for log in self.logs.values())


def export(run: Path, form: str, folder: Path | None = None) -> Exported:
    """Write every policy of a run as a log in the format `form`, into `folder` or else into `RUN/FORM`.

    The same run always produces the same files, so exporting it again replaces them.

    Raises:
        UsageError: there is no such format, no run in the folder, or no finished row in the run.
        StepSpecError: a file cannot be read or written.
    """
    if form not in FORMATS:
        raise UsageError(unknown_name("log format", form, FORMATS))
    folder = folder or run / form
    source = ExportedRun.open(run)
    if not source.outcomes:
        raise UsageError(f"{run} has no finished rows to export; resume it with 'stepspec eval'.")
    try:
        return Exported(folder, FORMATS[form](source, folder))
    except OSError as error:
        raise StepSpecError(f"Cannot write to {folder}: {error.strerror}.") from error
