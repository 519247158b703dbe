"""Error messages for TOML files: one sentence in TOML terms from pydantic's errors."""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from stepspec.errors import unknown_name

Location = Sequence[Any]
Problem = Mapping[str, Any]
Table = type[BaseModel]

KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


def first_problem(error: ValidationError, model: Table) -> str:
    """Return a sentence about the first problem to fix.

    >>> first_problem(error, Policy)
    "token.drafter 'prompt-lokup' is unknown; did you mean 'prompt-lookup'? Known: 'none', 'prompt-lookup'."
    """
    problems: list[Any] = error.errors()
    # Report a misspelled key first, because it is usually the cause of a missing key.
    problem: Problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in problem["loc"])
    return _sentence(problem, where or "the file", model)


def _sentence(problem: Problem, where: str, model: Table) -> str:
    kind, location, value = problem["type"], problem["loc"], problem["input"]
    context: Mapping[str, Any] = problem.get("ctx", {})
    if _tables_meant(kind, location, model):
        several = kind in ("tuple_type", "list_type") or isinstance(location[-1], int) or type(value) is list
        return _tables_wanted(location, value, several=several)
    if kind in KINDS:
        return f"{where} must be {KINDS[kind]}, got {_shown(value)}."
    if kind in BOUNDS:
        words, bound = BOUNDS[kind]
        return f"{where} must be {words} {context[bound]:g}, got {_shown(value)}."
    if sentence := SENTENCES.get(kind):
        return sentence(problem, where, model)
    message = f"{problem['msg'].removeprefix('Value error, ').removesuffix('.')}."
    return f"{where}: {message}" if location else message


def _unknown_key(problem: Problem, where: str, model: Table) -> str:
    known = {key for table in _tables_at(problem["loc"][:-1], model) for key in table.model_fields}
    return f"{unknown_name('key', str(problem['loc'][-1]), known)} (at {where})"


def _unknown_value(problem: Problem, where: str, model: Table) -> str:
    value, expected = problem["input"], problem["ctx"]["expected"]
    known = _quoted(expected)
    if not isinstance(value, str) or not known:
        return f"{where} must be {expected}, got {_shown(value)}."
    return f"{where} {_nearest(value, known)}"


def _unknown_tag(problem: Problem, where: str, model: Table) -> str:
    context = problem["ctx"]
    nearest = _nearest(context["tag"], _quoted(context["expected_tags"]))
    package = " For another one, install its package." if problem["loc"][0] == "judges" else ""
    return f"{where}.{_quoted(context['discriminator'])[0]} {nearest}{package}"


def _missing_tag(problem: Problem, where: str, model: Table) -> str:
    (key,) = _quoted(problem["ctx"]["discriminator"])
    tables = _tables_at(problem["loc"], model)
    known = [value for table in tables for value in get_args(table.model_fields[key].annotation)]
    return f"{where} needs {key} = {' or '.join(map(_shown, known))}."


SENTENCES: Mapping[str, Callable[[Problem, str, Table], str]] = {
    "extra_forbidden": _unknown_key,
    "literal_error": _unknown_value,
    "union_tag_invalid": _unknown_tag,
    "union_tag_not_found": _missing_tag,
    "kind_missing": lambda problem, where, model: f"{where} {problem['msg']}.",
    "missing": lambda problem, where, model: f"{where} is missing.",
    "string_too_short": lambda problem, where, model: f"{where} must not be empty.",
    "too_short": lambda problem, where, model: f"{where} must not be empty.",
}


def _nearest(value: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(value, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{value!r} is unknown{hint} Known: {', '.join(map(repr, known))}."


def _quoted(words: str) -> list[str]:
    """Return the names in a list as pydantic formats it: 'a', 'b' or 'c'."""
    return re.findall(r"'([^']*)'", words)


def _tables_meant(kind: str, location: Location, model: Table) -> bool:
    """Return whether the location needs one or several tables but has another value."""
    if kind in ("tuple_type", "list_type"):
        return bool(_tables_at(location, model))
    return kind in ("model_type", "model_attributes_type", "dict_type")


def _tables_wanted(location: Location, value: Any, *, several: bool) -> str:
    *_, name = (part for part in ("the file", *location) if isinstance(part, str))
    if several:
        return f"{name} must be tables: [[{name}]]."
    return f"{name} must be a table: [{name}], got {_shown(value)}."


def _shown(value: object) -> str:
    """Return a value in TOML syntax; tables and lists become "a table" and "a list"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value if len(value) < 60 else f"{value[:60]}...", ensure_ascii=False)
    if isinstance(value, Mapping):
        return "a table"
    return "a list" if type(value) is list else str(value)


def _tables_at(location: Location, model: Table) -> list[Table]:
    """Return the tables that are valid at a location. If it names a kind, only tables of that kind."""
    tables = [model]
    for part in location:
        if any(part in table.model_fields for table in tables):
            fields = [table.model_fields[part] for table in tables if part in table.model_fields]
            tables = [inner for field in fields for inner in _tables_in(field.annotation)]
        elif isinstance(part, str):  # the kind of a table
            named = [table for table in tables if get_args(table.model_fields["kind"].annotation) == (part,)]
            tables = named or tables
    return tables


def _tables_in(annotation: Any) -> list[Table]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (_subclasses(annotation) if inspect.isabstract(annotation) else []) or [annotation]
    return [table for part in get_args(annotation) for table in _tables_in(part)]


def _subclasses(table: Table) -> list[Table]:
    """Return the concrete subclasses that are loaded."""
    found = [each for direct in table.__subclasses__() for each in (direct, *_subclasses(direct))]
    return [each for each in found if not inspect.isabstract(each)]
