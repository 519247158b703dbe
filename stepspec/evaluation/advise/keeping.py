"""What of an experiment is kept before its policies are run, so that one that was ended goes on where it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from stepspec.api.session import Pair
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.advise.findings import Measured
from stepspec.evaluation.advise.prompts import Prompts
from stepspec.evaluation.running.folder import write_whole

MEASURED = "measured.json"
"""Beside the runs, one folder for each load."""


@dataclass(frozen=True)
class Plan:
    """What the person who asks may choose. `loads` are the requests at once, from few to many."""

    loads: Sequence[int] = (1,)
    temperature: float = 0.0
    max_tokens: int = 1024
    seed: int = 0


def refuse_strangers(folder: Path) -> None:
    """Refuses a folder with files that are not an experiment's.

    Raises:
        UsageError: it is one.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / MEASURED).is_file())):
        raise UsageError(f"{folder} is not empty and holds no experiment of advise; give another with --output.")


def read_measured(folder: Path, pair: Pair, prompts: Prompts, plan: Plan) -> Measured | None:
    """What an earlier start has measured.

    Raises:
        UsageError: that was another experiment, or the file is damaged.
    """
    file = folder / MEASURED
    if not file.is_file():
        return None
    try:
        kept = Measured.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{file} is damaged, or of another version; give another folder with --output.") from error
    mine = identity(pair, prompts, plan)
    different = [name for name, value in mine.items() if getattr(kept, name) != value]
    if [costs.concurrency for costs in kept.costs] != list(plan.loads):
        different.append("concurrency")
    if different:
        raise UsageError(
            f"{folder} holds an experiment that differs in {', '.join(different)}; give another folder with --output, "
            "or the same settings to go on with that one."
        )
    return kept


def keep_measured(measured: Measured, folder: Path) -> None:
    """Writes it, and makes the folder if need be.

    Raises:
        StepSpecError: the disk refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / MEASURED, measured.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise StepSpecError(f"Cannot keep the runs in {folder}: {error.strerror}. Give another --output.") from error


def identity(pair: Pair, prompts: Prompts, plan: Plan) -> dict[str, str | float | int]:
    """What has to agree for an experiment to go on."""
    return {
        "pair": pair.hash,
        "data_sha256": prompts.sha256,
        "temperature": plan.temperature,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
    }
