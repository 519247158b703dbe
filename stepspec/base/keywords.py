"""Keyword arguments that a function does not know are refused with the nearest name, not by Python's `TypeError`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_type_hints, is_typeddict

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
"""What is called otherwise elsewhere, on the command line or by other libraries."""


def check_known(given: Iterable[str], known: Iterable[str], what: str = "option") -> None:
    """Checks that all names are known.

    Raises:
        UsageError: one is not; the message has the nearest name.
    """
    names = set(known)
    meant = {name: here for name, here in MEANT.items() if here in names}
    for name in given:
        if name not in names:
            raise UsageError(unknown_name(what, name, names, meant))


def known_options(function: Callable[P, R]) -> Callable[P, R]:
    """Has a function refuse unknown keyword arguments by `UsageError`, those of an unpacked `TypedDict` too."""
    names = _keywords(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_known(kwargs, names)
        return function(*args, **kwargs)

    return checked


def _keywords(function: Callable[..., Any]) -> set[str]:
    names: set[str] = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            (unpacked,) = parameter.annotation.__args__  # of Unpack[Options]
            assert is_typeddict(unpacked)
            names |= get_type_hints(unpacked).keys()
        elif parameter.name != "self":
            names.add(parameter.name)
    return names
