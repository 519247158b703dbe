"""What an extra brings along, and a sentence where it is not installed."""

from collections.abc import Generator
from contextlib import contextmanager

from stepspec.errors import MissingExtraError


@contextmanager
def from_extra(extra: str, needed_by: str) -> Generator[None]:
    """Around imports that need an extra of this package.

    Raises:
        MissingExtraError: one of them is not installed.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "stepspec":  # which is no package of others
            raise
        command = f'pip install "stepspec[{extra}]"'
        raise MissingExtraError(
            f"{needed_by} needs {error.name}, which is not installed: {command}", name=error.name
        ) from error
