"""Checks of keyword arguments: an unknown one raises `UsageError` with the closest known name, not `TypeError`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar, get_args

from stepspec.errors import UsageError, unknown_name

P = ParamSpec("P")
R = TypeVar("R")

MEANT: Mapping[str, str] = {
    "target": "model",
    "model": "target",
    "draft_model": "draft",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "max_thinking_tokens",
    "stop_sequences": "stop",
    "response_format": "json_schema",
}
"""Names on the command line or in other libraries, with the name of the same option here."""


def check_known(given: Iterable[str], known: Iterable[str], what: str = "option") -> None:
    """Check that all names are known.

    Args:
        given: the names to check.
        known: all valid names.
        what: what a name stands for, for the error message.

    Raises:
        UsageError: a name is unknown; the message suggests the closest one.
    """
    names = set(known)
    meant = {name: here for name, here in MEANT.items() if here in names}
    for name in given:
        if name not in names:
            raise UsageError(unknown_name(what, name, names, meant))


def known_options(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to raise `UsageError` for unknown keyword arguments.

    If it takes any keywords, those are the fields of the model that its parameter `options` has, and its signature for
    `help` lists them.
    """
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    if len(parameters) < len(signature.parameters):
        model, _ = get_args(signature.parameters["options"].annotation)  # of RequestOptions | None
        parameters += inspect.signature(model).parameters.values()
    names = {each.name for each in parameters} - {"self"}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_known(kwargs, names)
        return function(*args, **kwargs)

    checked.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return checked
