"""Stores the measurements of an experiment before its policies run, so that an interrupted experiment can resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from stepspec.base.files import write_text
from stepspec.errors import UsageError
from stepspec.evaluation.advise.findings import Measured
from stepspec.evaluation.advise.prompts import Prompts

MEASURED = "measured.json"
"""File with the measurements, next to the folders of the runs (one for each load)."""


@dataclass(frozen=True)
class AdvicePlan:
    """The user's settings. `loads` are the concurrencies to measure, in ascending order."""

    loads: Sequence[int] = (1,)
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int = 0


def refuse_strangers(folder: Path) -> None:
    """Reject a folder with files but no experiment.

    Raises:
        UsageError: the folder is a file, or has files but no experiment.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MEASURED).is_file())):
        raise UsageError(f"{folder} is not empty and holds no experiment of advise; give another with --output.")


def read_measured(folder: Path, pair_hash: str, prompts: Prompts, plan: AdvicePlan) -> Measured | None:
    """Return the measurements of an earlier start; None if there are none.

    Raises:
        UsageError: the folder holds another experiment, or the file is damaged.
    """
    file = folder / MEASURED
    if not file.is_file():
        return None
    try:
        stored = Measured.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{file} is damaged, or of another version; give another folder with --output.") from error
    wanted = identity(pair_hash, prompts, plan)
    different = [name for name, value in wanted.items() if getattr(stored, name) != value]
    if [costs.concurrency for costs in stored.costs] != list(plan.loads):
        different.append("concurrency")
    if different:
        raise UsageError(
            f"{folder} holds an experiment that differs in {', '.join(different)}; give another folder with --output, "
            "or the same settings to resume that one."
        )
    return stored


def keep_measured(measured: Measured, folder: Path) -> None:
    """Write the measurements to the folder, and create the folder if needed.

    Raises:
        StepSpecError: the file cannot be written.
    """
    write_text(folder / MEASURED, measured.model_dump_json(indent=2) + "\n")


def identity(pair_hash: str, prompts: Prompts, plan: AdvicePlan) -> dict[str, str | float | int]:
    """Return the fields that must match for an experiment to resume."""
    return {
        "pair": pair_hash,
        "data_sha256": prompts.sha256,
        "temperature": plan.temperature,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
    }
