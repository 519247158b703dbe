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
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError


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


class UnknownIdError(UsageError):
    """A token id is not in a model's vocabulary."""


class TargetError(EngineError):
    """The target failed in the middle of a request. `committed` is the text that had been committed by then."""

    def __init__(self, message: str, committed: str) -> None:
        super().__init__(message)
        self.committed = committed


MOST_SHOWN = 60
"""Characters of a name that an error shows and compares."""


def unknown_name(what: str, name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """One sentence for a name that does not exist: the closest one, and all there are.

    Args:
        what: the kind of thing that is named.
        name: the name, which may come from a stranger and be of any length.
        known: the names there are.
        meant: names of other projects or other places, with those here that mean the same.
    """
    names = sorted(known)
    shown = name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}..."
    close = [meant[name]] if meant and name in meant else difflib.get_close_matches(shown, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no {what} {shown!r}.{hint} Known: {', '.join(names) or 'none'}."


def reason_of(error: BaseException) -> str:
    """What another library's error says, in one line without a full stop at its end.

    Of a text of several lines it is the first, or as many as announce another one by a colon. Of what pydantic finds
    it is the first problem of every field.
    """
    if isinstance(error, ValidationError):
        problems: dict[object, str] = {}
        for found in error.errors():
            problems.setdefault(found["loc"][:1], _problem(dict(found)))
        return "; ".join(problems.values()).rstrip(".")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    count = next((place for place, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count]).rstrip(".")


def _problem(found: dict[str, Any]) -> str:
    """One of the problems that pydantic has found; where it names a field, with that."""
    message = " ".join(str(found["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
    return f"{found['loc'][0]}: {message}, got {reprlib.repr(found['input'])}" if found["loc"] else message
