"""Where the policies and benchmarks are, in a checkout, an editable install and a wheel alike.

A name is looked up among the files that exist and never becomes part of a path. A path is taken only by
`find_data_file`, which is for the person at the command line; what comes out of a request is looked up in
`list_data_files`.
"""

from pathlib import Path
from typing import Literal

from stepspec.errors import StepSpecError, UsageError, unknown_name

DataKind = Literal["policies", "evals"]

_PACKAGE = Path(__file__).resolve().parents[1]
_NOUNS: dict[DataKind, str] = {"policies": "policy", "evals": "benchmark"}


def package_folder() -> Path:
    """Where the package lies, and what is shipped inside it."""
    return _PACKAGE


def data_folder(name: DataKind) -> Path:
    """The folder of the policies or of the benchmarks: inside the package, else beside it in a checkout."""
    inside = _PACKAGE / name
    if inside.is_dir():
        return inside
    checkout = _PACKAGE.parent
    # Without the first condition, a wheel that lost its data would take a stranger's folder in site-packages.
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise StepSpecError(
        f"The folder {name!r} is neither in the package at {_PACKAGE} nor beside it. "
        "Install stepspec again, or run it from a whole checkout."
    )


def list_data_files(kind: DataKind) -> dict[str, Path]:
    """The files of that kind by name (`specreason` for `specreason.toml`), in alphabetical order."""
    return {path.stem: path for path in sorted(data_folder(kind).glob("*.toml"), key=lambda path: path.stem)}


def find_data_file(kind: DataKind, name: str) -> Path:
    """The file that a person means by `name`: one of ours by its name, one of theirs by a path.

    Whatever has a folder in it or ends in `.toml` is a path. Raises `UsageError` if there is no such file.
    """
    noun = _NOUNS[kind]
    as_path = Path(name)
    if as_path.suffix == ".toml" or as_path.name != name:
        if not as_path.is_file():
            raise UsageError(f"There is no {noun} file at {name!r}.")
        return as_path
    known = list_data_files(kind)
    if name not in known and as_path.is_file():
        raise UsageError(f"{name!r} is no {noun}: a {noun} file ends in .toml.")
    if name not in known:
        raise UsageError(unknown_name(noun, name, known))
    return known[name]
