"""Policies of a command line: a name or a file, or variants of it with other values of some keys.

`token:token.num_tokens=2,4` is two policies, with names such as `token:token.num_tokens=4`. A key is its path in the
TOML file, with indices in lists: `judges.0.threshold`. Of several keys, every combination is a variant.
"""

import json
import os.path
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, cast

import tomlkit
from pydantic import ValidationError

from stepspec.base.file_model import parse_toml
from stepspec.base.file_problems import first_problem
from stepspec.base.files import find_data_file
from stepspec.base.printable import printable
from stepspec.errors import UsageError
from stepspec.loop.calibrated import CalibratedSetting, settings_of
from stepspec.loop.policy import Policy, load_policy

LoadedPolicy = tuple[Policy, str]
"""A policy and the text of its file."""

_NEXT_KEY = re.compile(r""":(?=[\w.-]*=)(?=(?:[^"']|"[^"]*"|'[^']*')*\Z)""")
"""A colon before a key, outside quotes."""
_OWN_THRESHOLDS = re.compile(r".+?:(judges|salvage)\b[\w.-]*=")


def load_variants(argument: str) -> dict[str, LoadedPolicy]:
    """Return the policies that an argument of the command line stands for, by name.

    Raises:
        UsageError: there is no such policy, it has no such key, or does not take a value.
    """
    parts = _NEXT_KEY.split(argument)
    # The path of a file may contain what looks like a key.
    end = next((end for end in range(len(parts), 0, -1) if os.path.isfile(":".join(parts[:end]))), 1)
    base, changes = ":".join(parts[:end]), [_change(argument, part) for part in parts[end:]]
    policy, text = load_policy(base)
    name = printable(find_data_file("policies", base).stem)
    if not changes:
        return {name: (policy, text)}
    keys = [key for key, _ in changes]
    if len(set(keys)) < len(keys):
        raise UsageError(f"{argument!r} has a key twice. Give all of its values after one equals sign, as in 2,4.")
    found: dict[str, LoadedPolicy] = {}
    for values in product(*(values for _, values in changes)):
        loaded = _variant(name, text, list(zip(keys, values, strict=True)))
        own = ":".join([name, *(f"{key}={_written(value)}" for key, value in zip(keys, values, strict=True))])
        if same := next((each for each, (other, _) in found.items() if other == loaded[0]), None):
            raise UsageError(f"{argument!r} has two variants that are the same: {same!r} and {own!r}. Remove one.")
        found[printable(own)] = loaded
    return found


def calibrated_settings(name: str, policy: Policy, pair: str, *, record: bool = False) -> list[CalibratedSetting]:
    """Return the calibrated settings of a policy of a run, see `settings_of`; none for a variant that sets thresholds
    itself."""
    return [] if _OWN_THRESHOLDS.match(name) else settings_of(policy, pair, record=record)


def _change(argument: str, part: str) -> tuple[str, Sequence[Any]]:
    """Return a key and its values."""
    key, _, text = part.partition("=")
    try:
        table = parse_toml(f"values = [\n{text}\n]")
    except (ValueError, RecursionError) as error:
        wanted = "Values are those of TOML: numbers, true, false, or text in quotes"
        raise UsageError(f"{argument!r}: {key} has the values {text!r}, which are not valid. {wanted}.") from error
    if not key or not all(table.values()) or len(table) > 1 or text.rstrip().endswith(","):
        raise UsageError(f"{argument!r}: a variant is NAME:KEY=VALUE or NAME:KEY=VALUE,VALUE. No part may be empty.")
    return key, table["values"]


def _variant(name: str, text: str, changes: Sequence[tuple[str, Any]]) -> LoadedPolicy:
    table = parse_toml(text)
    about = f"{name} with {', '.join(f'{key} = {_written(value)}' for key, value in changes)}"
    for key, value in changes:
        try:
            _set(table, key, value)
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(
                f"The policy {name!r} has no key {key!r}. The path of a key in a list has an index from 0, as in "
                "judges.0.threshold."
            ) from error
    try:
        policy = Policy.model_validate(table)
    except ValidationError as error:
        paths = {path for path in _paths(table) for key, _ in changes if path.endswith(f".{key}")}
        hint = f" A key is named by its path: {', '.join(sorted(paths))}." if paths else ""
        raise UsageError(f"The policy {about}: {first_problem(error, Policy)}{hint}") from error
    # In TOML, the keys of a table come before the tables in it.
    ordered = dict(sorted(table.items(), key=lambda item: isinstance(item[1], dict | list)))
    return policy, f"# {about}\n{tomlkit.dumps(ordered)}"


def _set(table: Any, key: str, value: Any) -> None:
    *path, last = [int(part) if part.isdecimal() else part for part in key.split(".")]
    for part in path:
        if isinstance(table, dict):
            cast("dict[object, object]", table).setdefault(part, {})
        table = cast(Any, table)[part]
    table[last] = value


def _paths(table: Any, above: str = "") -> Iterator[str]:
    """Yield the paths of all keys that are set in a table."""
    items = cast("dict[str, Any]", table).items() if isinstance(table, dict) else enumerate(cast("list[Any]", table))
    for key, value in items:
        yield f"{above}{key}"
        if isinstance(value, dict | list):
            yield from _paths(value, f"{above}{key}.")


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
