"""Writes a policy file with other thresholds, and keeps the comments of the file it comes from."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import tomlkit

from stepspec.loop.policy import Policy

WRITTEN = "# Written by stepspec:"
"""First line of generated comments, which end with an empty comment."""


def with_comments(text: str, comments: Sequence[str]) -> str:
    """Return the text of a policy file with generated comments above it, instead of those of an earlier time."""
    return "".join(f"{line}\n" for line in (WRITTEN, *(f"# {each}" for each in comments), "#")) + without_comments(text)


def generated_comments(text: str) -> list[str]:
    """Return the generated comments of a policy file, without the number signs."""
    lines = text.removesuffix(without_comments(text)).splitlines()
    return [line.removeprefix("# ") for line in lines if line not in (WRITTEN, "#")]


def without_comments(text: str) -> str:
    """Return the text of a policy file without generated comments."""
    if not text.startswith(WRITTEN):
        return text
    return text.partition("\n#\n")[2]


def policy_text(text: str, comments: Sequence[str], thresholds: Mapping[str, float], min_logprob: float | None) -> str:
    """Return the text of a policy file with other settings.

    Args:
        text: the text of the file that it comes from.
        comments: lines to put above the settings.
        thresholds: the new threshold of each judge, by the judge's name.
        min_logprob: the bound of `[salvage]`; None if the policy does not salvage.
    """
    document: Any = tomlkit.parse(without_comments(text))
    policy = Policy.model_validate(tomllib.loads(text))
    for judge, table in zip(policy.judges, document["judges"], strict=True):
        if judge.name in thresholds:
            table["threshold"] = thresholds[judge.name]
    if min_logprob is not None:
        document["salvage"]["min_logprob"] = min_logprob
    return with_comments(tomlkit.dumps(document), comments)
