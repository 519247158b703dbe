"""Pairs of models by name: `embedded` ships with stepspec, `smol` is built once on each machine.

A built pair is a folder in the user's cache folder, with the hash of every file in `manifest.json`. The folder's name
has a hash of the sources of the pair, so a stepspec version with other sources builds its own pair.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from stepspec.base.file_model import FileModel, Version
from stepspec.base.files import package_folder
from stepspec.errors import ModelError, UsageError, unknown_name

EMBEDDED_NAME = "embedded"
"""The default pair."""

PAIRS: Sequence[str] = (EMBEDDED_NAME, "smol")
EMBEDDED = package_folder() / "mini" / "weights"
SMOL = package_folder() / "mini" / "smol"
SMOL_WEIGHTS = SMOL / "weights"
"""The part of the pair `smol` that ships with stepspec. The build takes the rest from another package."""

MANIFEST = "manifest.json"


class Manifest(FileModel):
    """The files of a built pair."""

    version: Version
    sha256: Annotated[dict[str, str], Field(min_length=1)]
    """SHA-256 by file path, relative to the pair's folder, with forward slashes."""

    @classmethod
    def of(cls, folder: Path) -> "Manifest":
        """Create the manifest of the files in a folder."""
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
        return cls(version=1, sha256={path.relative_to(folder).as_posix(): file_hash(path) for path in files})


def find_pair(name: str) -> Path:
    """Return the folder of a pair, which has `target`, `draft` and `pair.json`. Check a built pair by its hashes.

    Raises:
        UsageError: there is no pair of that name.
        ModelError: the pair has not been built, or is damaged.
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
    """Return the folder of a built pair. It may not exist."""
    import platformdirs

    sources = sorted(path for path in SMOL_WEIGHTS.iterdir() if path.is_file())
    sources += [SMOL / name for name in ("base.py", "build.py", "lora.py")]
    recipe = repr([(path.name, file_hash(path)) for path in sources])
    return platformdirs.user_cache_path("stepspec") / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def damage_of(folder: Path) -> str | None:
    """Return the first problem with the files of a built pair, or None."""
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
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
