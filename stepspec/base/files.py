"""Locations of the policy and benchmark files, in a checkout, an editable install and a wheel.

A name is looked up among the existing files and never becomes part of a path. Only `find_data_file` accepts a path;
use it for input from the command line. Look up names from requests in `list_data_files`.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

from stepspec.errors import StepSpecError, UsageError, unknown_name

DataKind = Literal["policies", "evals"]

_PACKAGE = Path(__file__).resolve().parents[1]
_NOUNS: dict[DataKind, str] = {"policies": "policy", "evals": "benchmark"}
_FORMER: Mapping[DataKind, Mapping[str, str]] = {
    "policies": {"stepspec": "The policy 'stepspec' is called 'two-level' since 0.2.0."},
    "evals": {
        "gsm-plain": "The benchmark 'gsm-plain' was removed in 0.2.0. Use 'gsm-mini', which is generated too, or "
        "'typed', problems as people type them."
    },
}
"""Error sentences by the former name of a file: what to use instead."""


def package_folder() -> Path:
    """Return the folder of the installed package."""
    return _PACKAGE


def cache_folder() -> Path:
    """Return the folder of what stepspec builds on this machine. It may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepspec"


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_space(folder: Path, num_bytes: int) -> None:
    """Check the free space of a disk. The folder may not exist yet.

    Raises:
        StepSpecError: it is less than `num_bytes`.
    """
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise StepSpecError(
            f"{folder} needs {num_bytes // 1_000_000:,} MB of free space, and its disk has {free // 1_000_000:,} MB."
        )


def write_text(file: Path, text: str) -> None:
    """Write a text file, see `whole_file`.

    Raises:
        StepSpecError: the file cannot be written.
    """
    try:
        with whole_file(file) as stream:
            stream.write(text)
    except OSError as error:
        raise StepSpecError(f"Cannot write {file}: {error.strerror}.") from error


@contextmanager
def whole_file(file: Path) -> Generator[TextIO]:
    """Open a file to write that appears under its name only when it is complete. Its folder is created if needed.

    A file that replaces another one has its permissions.
    Lone surrogates in the text become question marks.

    Raises:
        OSError: the file cannot be written, or is a symbolic link to another one.
    """
    if is_link(file):
        raise OSError(errno.ELOOP, "it is a symbolic link; remove it, or give another path")
    file.parent.mkdir(parents=True, exist_ok=True)
    if _is_stream(file) or (file.exists() and not file.is_file()):  # a terminal or a pipe
        with file.open("w", encoding="utf-8", errors="replace") as stream:
            yield stream
        return
    old_mode = stat.S_IMODE(file.stat().st_mode) if file.exists() else None
    opener = partial(os.open, mode=0o666 if old_mode is None else old_mode)  # the kernel subtracts the umask
    temporary = file.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", errors="replace", opener=opener) as stream:
            if old_mode is not None:
                temporary.chmod(old_mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def name_for_file(text: str) -> str:
    """Return a text as part of a file name, with every character that a file system may refuse replaced."""
    return re.sub(r"[^\w.,+-]", "-", text)[:100]


def is_link(file: Path) -> bool:
    """Return whether writing a file would write another one, through a symbolic link in its place."""
    return file.is_symlink() and (file.is_file() or not file.exists()) and not _is_stream(file)


def _is_stream(file: Path) -> bool:
    """Return whether a path names an open file of this process. Others in /dev, as in /dev/shm, can be anybody's."""
    return str(file) in ("/dev/stdout", "/dev/stderr", "/dev/tty") or file.parent == Path("/dev/fd")


def data_folder(name: DataKind) -> Path:
    """Return the folder of the policies or benchmarks: inside the package, or next to it in a checkout.

    Raises:
        StepSpecError: neither folder exists.
    """
    inside = _PACKAGE / name
    if inside.is_dir():
        return inside
    checkout = _PACKAGE.parent
    # Without the first condition, a wheel without its data would use an unrelated folder in site-packages.
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise StepSpecError(
        f"The folder {name!r} is neither in the package at {_PACKAGE} nor next to it. "
        "Install stepspec again, or run it from a complete checkout."
    )


def list_data_files(kind: DataKind) -> dict[str, Path]:
    """Return the files of a kind by name (`specreason` for `specreason.toml`), in alphabetical order."""
    return {path.stem: path for path in sorted(data_folder(kind).glob("*.toml"), key=lambda path: path.stem)}


def find_data_file(kind: DataKind, name: str) -> Path:
    """Find a data file by the name of a built-in file, or by a path.

    A value that contains a folder or ends in `.toml` is a path.

    Raises:
        UsageError: there is no such file.
    """
    noun = _NOUNS[kind]
    as_path = Path(name)
    if as_path.suffix == ".toml" or as_path.name != name:
        if not as_path.is_file():
            raise UsageError(f"There is no {noun} file at {name!r}.")
        return as_path
    known = list_data_files(kind)
    if name not in known and as_path.is_file():
        raise UsageError(f"{name!r} is not a {noun}: the name of a {noun} file must end in .toml.")
    if name not in known:
        raise UsageError(former_name(kind, name) or unknown_name(noun, name, known))
    return known[name]


def former_name(kind: DataKind, name: str) -> str | None:
    """Return an error sentence that says what to use instead, for the former name of a file; None for other names."""
    return _FORMER[kind].get(name)
