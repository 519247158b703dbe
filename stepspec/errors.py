"""The exception hierarchy.

StepSpecError
├── UsageError          the request is invalid: unknown name, bad option, bad file           exit code 2
│   ├── ModelError      a model cannot be used: not a model folder, unsupported layers, another vocabulary
│   └── ContextError    the prompt does not fit the model's context
├── MissingExtraError   a package of an optional extra is not installed; also an ImportError    exit code 1
└── EngineError         an engine failed at run time                                         exit code 1
    └── TargetError     the target failed; carries the committed text
"""

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError


class StepSpecError(Exception):
    """Base class of all stepspec errors. The message says what happened and what to do."""


class UsageError(StepSpecError):
    """A name, option, file or request is invalid or not supported."""


class ModelError(UsageError):
    """A model, or a pair of models, cannot be loaded or used in its role."""


class ContextError(UsageError):
    """A prompt is longer than the model's context."""


class MissingExtraError(StepSpecError, ModuleNotFoundError):
    """A package that an extra of stepspec installs is missing."""


class EngineError(StepSpecError):
    """An engine failed at run time."""


class UnknownIdError(UsageError):
    """A token id is not in a model's vocabulary."""


class TargetError(EngineError):
    """The target failed during a request. `committed` is the text committed before the failure."""

    def __init__(self, message: str, committed: str) -> None:
        super().__init__(message, committed)
        self.committed = committed

    def __str__(self) -> str:
        return str(self.args[0])


MAX_SHOWN = 60
"""Maximum number of characters of a name that an error shows and compares."""


def unknown_name(what: str, name: str, known: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Return an error sentence for an unknown name, with the closest known name and all known names.

    Args:
        what: the kind of thing that the name refers to, such as "policy".
        name: the unknown name. It may be untrusted input of any length.
        known: all valid names.
        meant: names from other libraries, mapped to the valid name with the same meaning.
    """
    names = sorted(known)
    shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
    close = [meant[name]] if meant and name in meant else difflib.get_close_matches(shown, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no {what} {shown!r}.{hint} Known: {', '.join(names) or 'none'}."


def reason_of(error: BaseException) -> str:
    """Return the message of another library's error as one line without a final period.

    A message of several lines is cut after its first line that does not end in a colon. A pydantic error is reduced to
    the first problem of each field.
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
    """Return the message of one pydantic problem, with the field and its value if it names a field."""
    message = " ".join(str(found["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ").split())
    return f"{found['loc'][0]}: {message}, got {reprlib.repr(found['input'])}" if found["loc"] else message
