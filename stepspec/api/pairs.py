"""Pairs of models by name. `embedded` ships with stepspec."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepspec.base.files import package_folder
from stepspec.errors import UsageError, unknown_name

EMBEDDED_NAME = "embedded"
"""The default pair."""

PAIRS: Sequence[str] = (EMBEDDED_NAME,)
EMBEDDED = package_folder() / "mini" / "weights"

REMOVED: Mapping[str, str] = {"smol": "Name models of your own with --target and --draft, or use the pair 'embedded'."}
"""What to use instead, by the name of a removed pair."""


def find_pair(name: str) -> Path:
    """Return the folder of a pair, which has `target`, `draft` and `pair.json`.

    Raises:
        UsageError: there is no pair of that name.
    """
    if name in REMOVED:
        raise UsageError(f"The pair {name!r} was removed in 0.2.0. {REMOVED[name]}")
    if name not in PAIRS:
        raise UsageError(unknown_name("pair", name, PAIRS))
    return EMBEDDED


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
