"""Shell completion for names of policies and benchmarks. If no name matches, the shell completes file names itself."""

from collections.abc import Callable, Sequence

from stepspec.base.files import DataKind, list_data_files
from stepspec.errors import StepSpecError


def names_of(kind: DataKind) -> Callable[[str], Sequence[str]]:
    """Return a completion function for the names of the data files that come with stepspec."""

    def complete(incomplete: str) -> Sequence[str]:
        try:
            return [name for name in list_data_files(kind) if name.startswith(incomplete)]
        except StepSpecError:  # shell completion cannot show a message
            return []

    return complete


def one_of(names: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """Return a completion function for these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]
