"""Stores a calibration in its folder: `plan.json`, `references.json`, and the runs in folders of their own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from stepspec.base.files import write_text
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.calibrate.records import Calibrated, Identity, Planned
from stepspec.evaluation.records import Record

R = TypeVar("R", bound=Record)
_REFERENCES = TypeAdapter(dict[str, str])
STARTED, PLAN, REFERENCES, RESULTS = "identity.json", "plan.json", "references.json", "calibration.json"


def begin(folder: Path, identity: Identity) -> None:
    """Create the folder, or check that the calibration in it is the same one.

    Raises:
        UsageError: the folder holds something else, or another calibration.
        StepSpecError: it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / STARTED).is_file())):
        raise UsageError(f"{folder} is not empty and holds no calibration. Choose another --output.")
    if (folder / STARTED).is_file():
        _refuse_another(folder, _read(folder / STARTED, Identity), identity)
        return
    write_text(folder / STARTED, identity.model_dump_json(indent=2) + "\n")


def read_plan(folder: Path, identity: Identity) -> Planned | None:
    """Return the plan of an earlier start; None if there is none yet.

    Raises:
        UsageError: it is of another calibration, or damaged.
    """
    if not (folder / PLAN).is_file():
        return None
    plan = _read(folder / PLAN, Planned)
    _refuse_another(folder, plan.identity, identity)
    return plan


def store_plan(folder: Path, plan: Planned) -> None:
    """Write the plan."""
    write_text(folder / PLAN, plan.model_dump_json(indent=2) + "\n")


def read_results(folder: Path) -> Calibrated | None:
    """Return the results of a finished calibration; None if the folder holds none.

    Raises:
        UsageError: they are damaged.
        StepSpecError: they cannot be read.
    """
    return _read(folder / RESULTS, Calibrated) if (folder / RESULTS).is_file() else None


def read_references(folder: Path) -> dict[str, str]:
    """Return the target's own answers of an earlier start, by prompt."""
    file = folder / REFERENCES
    try:
        return _REFERENCES.validate_json(file.read_bytes()) if file.is_file() else {}
    except ValidationError as error:
        raise UsageError(f"{file} is damaged. Delete it; the target is asked again.") from error


def store_references(folder: Path, references: Mapping[str, str]) -> None:
    """Write the target's own answers."""
    write_text(folder / REFERENCES, json.dumps(references, indent=0) + "\n")


def _refuse_another(folder: Path, there: Identity, here: Identity) -> None:
    stored, wanted = there.model_dump(), here.model_dump()
    different = [name for name, value in wanted.items() if stored[name] != value]
    if different:
        raise UsageError(
            f"{folder} holds a calibration with another {', '.join(different)}. Choose another --output, or give "
            "the same settings to resume that one."
        )


def _read(file: Path, model: type[R]) -> R:
    try:
        return model.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{file} is damaged, or of another version. Calibrate into another folder.") from error
    except OSError as error:
        raise StepSpecError(f"Cannot read {file}: {error.strerror}.") from error
