"""Writes a run as logs of the UK AI Security Institute's inspect_ai, so that you can view it there.

Such a log has one model, so every policy of the run becomes a separate model: `TARGET+POLICY`. Values that a run does
not record are left out or null. Logs contain the models' outputs if the run stored its traces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.export.inspect_log import Written, write_logs
from stepspec.evaluation.export.source import ExportedRun

__all__ = ["Exported", "export"]


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


def export(run: Path, folder: Path | None = None) -> Exported:
    """Write every policy of a run as a log, into `folder` or else into `RUN/inspect`.

    The same run always produces the same files, so exporting it again replaces them.

    Raises:
        UsageError: there is no run in the folder, or no finished row in the run.
        StepSpecError: a file cannot be read or written.
    """
    folder = folder or run / "inspect"
    source = ExportedRun.open(run)
    if not source.outcomes:
        raise UsageError(f"{run} has no finished rows to export; resume it with 'stepspec eval'.")
    try:
        return Exported(folder, write_logs(source, folder))
    except OSError as error:
        raise StepSpecError(f"Cannot write to {folder}: {error.strerror}.") from error
