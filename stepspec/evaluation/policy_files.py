"""Writes a policy file with other thresholds and a certificate, and keeps the comments of the file it comes from."""

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


def without_comments(text: str) -> str:
    """Return the text of a policy file without generated comments."""
    if not text.startswith(WRITTEN):
        return text
    return text.partition("\n#\n")[2]


def policy_text(
    text: str,
    comments: Sequence[str],
    thresholds: Mapping[int, float],
    min_logprob: float | None,
    certificate: Certificate | None,
) -> str:
    """Return the text of a policy file with changes.

    Args:
        text: the text of the file that it comes from.
        comments: lines to put above it.
        thresholds: the new threshold of each judge, by its place in the file.
        min_logprob: the bound of `[salvage]`; None if the policy does not salvage.
        certificate: the certificate, which replaces an old one; None for none.
    """
    document: Any = tomlkit.parse(without_comments(text))
    for key in ("certificate", "temperatures"):
        document.pop(key, None)
    judges: Any = document["judges"]
    for place, threshold in thresholds.items():
        judges[place]["threshold"] = threshold
    if min_logprob is not None:
        salvage: Any = document["salvage"]
        salvage["min_logprob"] = min_logprob
    if certificate is not None:
        document.append("certificate", _table(certificate.model_dump(mode="json", exclude_none=True)))
    return with_comments(tomlkit.dumps(document), comments)


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
