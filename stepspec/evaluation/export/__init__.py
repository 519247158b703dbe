"""Writes a run in the log formats of other tools, so that it can be looked at in what people already have.

`lm-eval` is the format of EleutherAI's lm-evaluation-harness, `inspect` that of the UK AI Security Institute's
inspect_ai. Either has one model per log, so every policy of the run becomes a model of its own: `TARGET+POLICY`.
What a run does not know is left out or null, never made up. What the models said is there if the run kept its traces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepspec.errors import StepSpecError, UsageError, unknown_name
from stepspec.evaluation.export import inspect_log, lm_eval
from stepspec.evaluation.export.source import Source, Written

__all__ = ["FORMATS", "Exported", "export"]

FORMATS: Mapping[str, Callable[[Source, Path], Mapping[str, Written]]] = {
    "lm-eval": lm_eval.write_logs,
    "inspect": inspect_log.write_logs,
}
"""What writes a run's logs into a folder, by policy."""


@dataclass(frozen=True)
class Exported:
    """What was written where. `num_texts` says for how many of the rows it is known what the models said."""

    folder: Path
    logs: Mapping[str, Written]
    """By policy."""

    @property
    def num_rows(self) -> int:
        """Rows of all logs."""
        return sum(log.num_rows for log in self.logs.values())

    @property
    def num_texts(self) -> int:
        """Rows with what the models said."""
        return sum(log.num_texts for log in self.logs.values())


def export(run: Path, form: str, folder: Path | None = None) -> Exported:
    """Writes every policy of a run, as a log of the given form, into `folder` or else into `RUN/FORM`.

    The same run always becomes the same files, so that writing it again replaces them.

    Raises:
        UsageError: there is no such form, no run in the folder, or no finished row in the run.
        StepSpecError: the disk refuses.
    """
    if form not in FORMATS:
        raise UsageError(unknown_name("log format", form, FORMATS))
    folder = folder or run / form
    source = Source.open(run)
    if not source.outcomes:
        raise UsageError(f"{run} has no finished rows to export; take it up again with 'stepspec eval'.")
    try:
        return Exported(folder, FORMATS[form](source, folder))
    except OSError as error:
        raise StepSpecError(f"Cannot write to {folder}: {error.strerror}.") from error
