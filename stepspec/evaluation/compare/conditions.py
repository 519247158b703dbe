"""Lists how the conditions of two runs differ, and what a comparison of them can therefore show."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepspec.errors import UsageError
from stepspec.evaluation.compare.figures import PolicyComparison
from stepspec.evaluation.records import Record, RunRecord
from stepspec.evaluation.report.cells import count

HASH_LENGTH = 12
"""Number of characters of a hash to show."""

CAUSES: Mapping[str, str] = {
    "data_sha256": "the data",
    "prompt_id": "the prompt",
    "prompt_version": "the prompt",
    "policies": "the policy",
    "engines": "the models",
    "pair": "the models",
    "temperature": "the sampling",
    "top_p": "the sampling",
    "max_tokens": "the token limit",
    "seed": "the seed",
    "grader": "the grading",
    "last_number": "the grading",
    "versions": "the software",
    "commit": "the software",
    "hardware": "the hardware",
    "machine": "the hardware",
    "concurrency": "the concurrency",
}
"""What can change an answer, by the first part of a difference's name. The last two do so by rounding: another device
or batch size sums in another order, and below float32 precision a near tie may be decided differently."""

NOT_LISTED = {"version", "policies", "started", "resumed", "busy"}


class Difference(Record):
    """A condition that differs; a value is null if a run does not record it."""

    name: str
    """As in `run.json`, with dots: `engines.target.dtype`."""
    a: str | None
    b: str | None


def refuse_other_data(a: RunRecord, b: RunRecord) -> None:
    """Reject two runs with different data, by content hash. One data set may be used with several prompts.

    Raises:
        UsageError: the hashes differ.
    """
    if a.data_sha256 == b.data_sha256:
        return
    hint = ""
    if a.benchmark == b.benchmark and a.num_problems != b.num_problems:
        hint = " They may be the same data with a different --limit."
    described = " and ".join(
        f"{run.benchmark} {run.data_sha256[:HASH_LENGTH]} with {run.num_problems:,} problems" for run in (a, b)
    )
    raise UsageError(
        f"The runs use different data ({described}).{hint} Give --force to compare the problems that have the same id "
        "and the same right answer in both."
    )


def data_warning(a: RunRecord, b: RunRecord, compared: Sequence[PolicyComparison]) -> str | None:
    """Return a warning for a comparison of runs with different data; None if the data are the same."""
    if a.data_sha256 == b.data_sha256:
        return None
    others = max(each.num_other_answers for each in compared)
    num_same = max(each.num_problems for each in compared)
    left_out = f" Left out: {others:,} with the same id but a different right answer." if others else ""
    return (
        f"The runs use different data. The comparison covers only the {num_same:,} problems that have the same id and "
        f"the same right answer in both; their questions may still differ.{left_out}"
    )


def differences(a: RunRecord, b: RunRecord, policies: Iterable[tuple[str, str]]) -> list[Difference]:
    """Return the conditions that differ, in the order of `run.json`, with the compared policies last."""
    left, right = (dict(_flat(run.model_dump(exclude=NOT_LISTED))) for run in (a, b))
    names = [*left, *(name for name in right if name not in left)]
    pairs = [Difference(name=name, a=left.get(name), b=right.get(name)) for name in names]
    for name_a, name_b in policies:
        title = name_a if name_a == name_b else f"{name_a}={name_b}"
        hashes = (_shown(run.policies[name].sha256) for run, name in ((a, name_a), (b, name_b)))
        pairs.append(Difference(name=f"policies.{title}", a=next(hashes), b=next(hashes)))
    return [each for each in pairs if each.a != each.b and not (_is_machine(each.name) and None in (each.a, each.b))]


def _is_machine(name: str) -> bool:
    """Return whether a difference is one of machines. What one of the runs does not say of its own is none."""
    return name.partition(".")[0] in ("hardware", "machine")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str | None]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield prefix + name, _shown(value)


def _shown(value: object) -> str | None:
    """Return a value as text, with a hash shortened but its suffix kept."""
    if value is None:
        return None
    head, dash, rest = str(value).partition("-")
    is_hash = len(head) > HASH_LENGTH and set(head) <= set("0123456789abcdef") and not head.isdecimal()
    return f"{head[:HASH_LENGTH]}{dash}{rest}" if is_hash else str(value)


def conclusions(
    a: RunRecord, b: RunRecord, differing: Sequence[Difference], compared: Sequence[PolicyComparison]
) -> list[str]:
    """Return sentences on what the figures allow to conclude and what they do not."""
    roots = {each.name.partition(".")[0] for each in differing}
    sampled = max(a.temperature, b.temperature) > 0
    sentences = [_cause(roots if sampled else roots - {"seed"})]
    if sampled and "seed" in roots:
        sentences.append("Seeds differ at a temperature above 0, so paired rows share the problem but not the seed.")
    if {"hardware", "machine"} & roots or any(each.name.endswith(".device") for each in differing):
        sentences.append("The hardware differs, so times cannot be compared: they also measure the machines.")
    elif apart := sum(each.num_apart for each in compared):
        rows = count(sum(each.num_rows for each in compared), "pair")
        sentences.append(f"{apart:,} of {rows} of rows ran on different machines, so times also measure the machines.")
    if "concurrency" in roots:
        sentences.append("The concurrency differs, so times include how long requests waited for each other.")
    if "grader" in roots:
        sentences.append("The answers were not graded by the same rule, so accuracies cannot be compared.")
    if a != b:
        sentences.append("The runs did not alternate, so time ratios include other changes on the machine in between.")
    return sentences


def _cause(roots: Iterable[str]) -> str:
    causes = list(dict.fromkeys(CAUSES[root] for root in CAUSES if root in roots))
    if not causes:
        return "No recorded condition that can change an answer differs, so different answers come from chance alone."
    if len(causes) == 1:
        return f"Apart from chance, only {causes[0]} can have changed answers, lengths and acceptance."
    listed = f"{', '.join(causes[:-1])} and {causes[-1]}"
    return f"As {listed} differ, changes in answers, lengths or acceptance cannot be attributed to one of them."
