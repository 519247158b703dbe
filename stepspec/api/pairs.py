"""Pairs of models by name: `embedded` ships with stepspec, `smol` is built once on each machine.

A built pair is a folder in the user's cache folder. `manifest.json` in it names every file and its hash, and the
folder's name has a hash of what it was built from, so that another version of stepspec builds its own.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from stepspec.base.files import package_folder
from stepspec.errors import ModelError, UsageError, unknown_name
from stepspec.loop.policy import FileModel, Version

EMBEDDED_NAME = "embedded"
"""What is taken if nothing is named."""

PAIRS: Sequence[str] = (EMBEDDED_NAME,)
EMBEDDED = package_folder() / "mini" / "weights"
SMOL = package_folder() / "mini" / "smol"
SMOL_WEIGHTS = SMOL / "weights"
"""What of the pair `smol` ships with stepspec; the rest is in a package that it is built from."""

MANIFEST = "manifest.json"


class Manifest(FileModel):
    """The files of a built pair."""

    version: Version
    sha256: Annotated[dict[str, str], Field(min_length=1)]
    """By path below the pair's folder, with forward slashes."""

    @classmethod
    def of(cls, folder: Path) -> "Manifest":
        """Describes the files that are there now."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        return cls(version=1, sha256={path.relative_to(folder).as_posix(): file_hash(path) for path in files})


def find_pair(name: str) -> Path:
    """The folder of a pair: `target`, `draft` and `pair.json` are in it. A built one is checked by hash.

    Raises:
        UsageError: there is no pair of that name.
        ModelError: it has to be built first, or is damaged.
    """
    if name not in PAIRS:
        raise UsageError(unknown_name("pair", name, PAIRS))
    if name == EMBEDDED_NAME:
        return EMBEDDED
    folder = built_folder(name)
    if not folder.exists():
        raise ModelError(f"The pair {name} has not been built on this machine. Build it: stepspec pair build {name}")
    damage = damage_of(folder)
    if damage is not None:
        raise ModelError(
            f"The pair {name} in {folder} is damaged: {damage}. Build it again: stepspec pair build {name}"
        )
    return folder


def built_folder(name: str) -> Path:
    """Where a built pair lies, whether or not it is there."""
    import platformdirs

    sources = [*sorted(path for path in SMOL_WEIGHTS.iterdir() if path.is_file()), SMOL / "base.py", SMOL / "build.py"]
    recipe = repr([(path.name, file_hash(path)) for path in sources])
    return platformdirs.user_cache_path("stepspec") / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def damage_of(folder: Path) -> str | None:
    """What is wrong with a built pair's files, or None."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return f"its {MANIFEST} cannot be read"
    for name, expected in manifest.sha256.items():
        try:
            found = file_hash(folder / name)
        except OSError:
            return f"{name} cannot be read"
        if found != expected:
            return f"{name} has changed"
    return None


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
