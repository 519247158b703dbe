"""Everything that can go wrong, as one tree.

StepSpecError
├── UsageError          what was asked for cannot be: unknown name, bad option, bad file     exit code 2
│   ├── ModelError      a model cannot serve: not a model folder, unsupported layers, another vocabulary
│   └── ContextError    the prompt does not fit the model's context
├── MissingExtraError   a package that an extra brings is not installed; an ImportError too     exit code 1
└── EngineError         an engine failed while it worked                                     exit code 1
    └── TargetError     the target failed; carries what had been committed
"""

import difflib
from collections.abc import Iterable


class StepSpecError(Exception):
    """Base of every error that stepspec raises on purpose. The message says what happened and what to do."""


class UsageError(StepSpecError):
    """What was asked for cannot be done as asked."""


class ModelError(UsageError):
    """A model, or a pair of models, cannot serve the role it was given."""


class ContextError(UsageError):
    """A prompt is longer than the model's context."""


class MissingExtraError(StepSpecError, ModuleNotFoundError):
    """A package that an extra of stepspec brings along is not installed."""


class EngineError(StepSpecError):
    """An engine failed while it worked."""


class TargetError(EngineError):
    """The target failed in the middle of a request. `committed` is the text that had been committed by then."""

    def __init__(self, message: str, committed: str) -> None:
        super().__init__(message)
        self.committed = committed


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """One sentence for a name that does not exist: the closest one, and all there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no {what} {name!r}.{hint} Known: {', '.join(names) or 'none'}."
