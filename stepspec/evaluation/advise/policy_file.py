"""Writes a policy file with other thresholds and a certificate, and keeps the comments of the file it comes from."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from stepspec.loop.certificate import Certificate
from stepspec.loop.policy import Policy


def certificate_for(policy: Policy, fields: Mapping[str, Any]) -> Certificate:
    """Return the certificate of a policy with these fields, and with its hash."""
    unsigned = Certificate.model_validate({**fields, "sha256": "0" * 64})
    sha256 = policy.certificate_hash(unsigned.model_dump(mode="json"))
    return unsigned.model_copy(update={"sha256": sha256})


WRITTEN = "# Written by stepspec:"
"""First line of generated comments, which end with an empty comment."""


def with_comments(text: str, comments: Sequence[str]) -> str:
    """Return the text of a policy file with generated comments above it, instead of those of an earlier time."""
    return "".join(f"{line}\n" for line in (WRITTEN, *(f"# {each}" for each in comments), "#")) + without_comments(text)


def is_generated(file: Path) -> bool:
    """Return whether a file is a policy that stepspec wrote."""
    try:
        return file.read_text("utf-8").startswith(WRITTEN)
    except (OSError, UnicodeDecodeError):
        return False


def generated_comments(text: str) -> list[str]:
    """Return the generated comments of a policy file, without the number signs."""
    lines = text.removesuffix(without_comments(text)).splitlines()
    return [line.removeprefix("# ") for line in lines if line not in (WRITTEN, "#")]


def without_comments(text: str) -> str:
    """Return the text of a policy file without generated comments."""
    if not text.startswith(WRITTEN):
        return text
    return text.partition("\n#\n")[2]


def policy_text(
    text: str,
    comments: Sequence[str],
    thresholds: Mapping[str, float],
    min_logprob: float | None,
    certificate: Certificate | None = None,
    at_most: float | None = None,
) -> str:
    """Return the text of a policy file with other settings.

    Args:
        text: the text of the file that it comes from.
        comments: lines to put above the settings.
        thresholds: the new threshold of each judge, by the judge's name.
        min_logprob: the bound of `[salvage]`; None if the policy does not salvage.
        certificate: the certificate, which replaces an old one; None for none.
        at_most: puts the settings into a table `[[temperatures]]` for temperatures up to this one, and keeps those for
            other temperatures. None for all temperatures.
    """
    document: Any = tomlkit.parse(text if at_most is not None else without_comments(text))
    certified = None if certificate is None else _table(certificate.model_dump(mode="json", exclude_none=True))
    if at_most is not None:
        _put_range(document, at_most, _range_table(at_most, comments, thresholds, min_logprob, certified))
        return tomlkit.dumps(document)
    for key in ("certificate", "temperatures"):
        document.pop(key, None)
    policy = Policy.model_validate(tomllib.loads(text))
    for judge, table in zip(policy.judges, document["judges"], strict=True):
        if judge.name in thresholds:
            table["threshold"] = thresholds[judge.name]
    if min_logprob is not None:
        document["salvage"]["min_logprob"] = min_logprob
    if certified is not None:
        document.append("certificate", certified)
    return with_comments(tomlkit.dumps(document), comments)


def _range_table(
    at_most: float,
    comments: Sequence[str],
    thresholds: Mapping[str, float],
    min_logprob: float | None,
    certificate: Table | None,
) -> Table:
    table = tomlkit.table()
    for line in comments:
        table.add(tomlkit.comment(line))
    table.append("at_most", at_most)
    inline: Any = tomlkit.inline_table()
    inline.update(thresholds)
    table.append("thresholds", inline)
    if min_logprob is not None:
        table.append("min_logprob", min_logprob)
    if certificate is not None:
        table.append("certificate", certificate)
    return table


def _put_range(document: Any, at_most: float, table: Table) -> None:
    kept: list[Any] = [each for each in document.get("temperatures", []) if each["at_most"] != at_most]
    ranges: Any = tomlkit.aot()
    for each in sorted([*kept, table], key=lambda each: float(each["at_most"])):
        ranges.append(each)
    document["temperatures"] = ranges


def _table(values: Mapping[str, Any]) -> Table:
    table = tomlkit.table()
    for key, value in values.items():
        if isinstance(value, Mapping):
            inline: Any = tomlkit.inline_table()
            inline.update(value)
            table.append(key, inline)
        else:
            table.append(key, value)
    return table
