"""Imports from optional extras, with an installation hint if a package is missing."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stepspec.base.files import package_folder
from stepspec.errors import MissingExtraError


@contextmanager
def from_extra(extra: str, needed_by: str) -> Generator[None]:
    """Wrap imports of packages that an extra of stepspec installs.

    Args:
        extra: name of the extra.
        needed_by: the feature that needs it, which starts the error message.

    Raises:
        MissingExtraError: one of the packages is not installed.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "stepspec":  # a bug in stepspec, not a missing package
            raise
        raise MissingExtraError(
            f"{needed_by} needs {error.name}, which is not installed: {install_command(extra)}", name=error.name
        ) from error


def install_command(extra: str) -> str:
    """Return the command that installs an extra: of this checkout, or of the installed package."""
    checkout = package_folder().parent
    if not (checkout / "pyproject.toml").is_file():
        return f'pip install "stepspec[{extra}]"'
    return f'pip install "{"." if checkout == Path.cwd() else checkout}[{extra}]"'
