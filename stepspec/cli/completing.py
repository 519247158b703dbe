"""Values that the shell completes: names of policies and benchmarks; files it completes by itself where none fits."""

from collections.abc import Callable, Sequence

from stepspec.base.files import DataKind, list_data_files
from stepspec.errors import StepSpecError


def names_of(kind: DataKind) -> Callable[[str], Sequence[str]]:
    """What completes the names of the files that come with stepspec."""

    def complete(incomplete: str) -> Sequence[str]:
        try:
            return [name for name in list_data_files(kind) if name.startswith(incomplete)]
        except StepSpecError:  # a shell that completes has no place for a message
            return []

    return complete


def one_of(names: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """What completes one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]
