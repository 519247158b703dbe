"""What differs between the conditions of two runs, and what can therefore be concluded from comparing them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepspec.errors import UsageError
from stepspec.evaluation.compare.figures import PolicyComparison
from stepspec.evaluation.records import Record, RunRecord

HASH_LENGTH = 12
"""Letters of a hash that are shown."""

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
    "versions": "the software",
    "commit": "the software",
    "hardware": "the hardware",
    "concurrency": "the requests at once",
}
"""What could change an answer, by the first part of a difference's name. The last two do it by rounding: another device
or batch adds up in another order, and below float32 a near tie may fall the other way."""

NOT_LISTED = {"version", "policies", "started"}


class Difference(Record):
    """A condition that differs; null where a run does not say."""

    name: str
    """As in `run.json`, with dots: `engines.target.dtype`."""
    a: str | None
    b: str | None


def refuse_other_data(a: RunRecord, b: RunRecord) -> None:
    """Refuses two runs of other data; the hash decides, as one data set may be asked with several prompts.

    Raises:
        UsageError: the hashes differ.
    """
    if a.data_sha256 == b.data_sha256:
        return
    hint = ""
    if a.benchmark == b.benchmark and a.num_problems != b.num_problems:
        hint = " They may well be the same problems cut at different places by --limit."
    described = " and ".join(
        f"{run.benchmark} {run.data_sha256[:HASH_LENGTH]} with {run.num_problems:,} problems" for run in (a, b)
    )
    raise UsageError(
        f"The runs are of other data ({described}).{hint} Give --force to compare the problems that have the same id "
        "and the same right answer in both."
    )


def data_warning(a: RunRecord, b: RunRecord, compared: Sequence[PolicyComparison]) -> str | None:
    """The sentence that goes with a comparison of other data."""
    if a.data_sha256 == b.data_sha256:
        return None
    others = max(each.num_other_answers for each in compared)
    num_same = max(each.num_problems for each in compared)
    left_out = f" Left out are {others:,} of the same id with another right answer." if others else ""
    return (
        f"The runs are of other data; compared are only the {num_same:,} problems that have the same id and the same "
        f"right answer in both, and whether they ask the same is not known.{left_out}"
    )


def differences(a: RunRecord, b: RunRecord, policies: Iterable[tuple[str, str]]) -> list[Difference]:
    """The conditions that differ, in the order of `run.json`, those of the compared policies last."""
    left, right = (dict(_flat(run.model_dump(exclude=NOT_LISTED))) for run in (a, b))
    names = [*left, *(name for name in right if name not in left)]
    found = [Difference(name=name, a=left.get(name), b=right.get(name)) for name in names]
    for name_a, name_b in policies:
        title = name_a if name_a == name_b else f"{name_a}={name_b}"
        hashes = (_shown(run.policies[name].sha256) for run, name in ((a, name_a), (b, name_b)))
        found.append(Difference(name=f"policies.{title}", a=next(hashes), b=next(hashes)))
    return [each for each in found if each.a != each.b]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str | None]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield before + name, _shown(value)


def _shown(value: object) -> str | None:
    """Hashes shortened, with whatever stands behind them."""
    if value is None:
        return None
    head, dash, rest = str(value).partition("-")
    is_hash = len(head) > HASH_LENGTH and set(head) <= set("0123456789abcdef") and not head.isdecimal()
    return f"{head[:HASH_LENGTH]}{dash}{rest}" if is_hash else str(value)


def conclusions(a: RunRecord, b: RunRecord, differing: Sequence[Difference]) -> list[str]:
    """What the figures allow to be said and what not, a sentence each."""
    roots = {each.name.partition(".")[0] for each in differing}
    drawn = max(a.temperature, b.temperature) > 0
    said = [_cause(roots if drawn else roots - {"seed"})]
    if drawn and "seed" in roots:
        said.append("With other seeds and a temperature above 0 two rows share their problem, not their random draws.")
    if "hardware" in roots or any(each.name.endswith(".device") for each in differing):
        said.append("The hardware differs, so times cannot be compared: they are the machines' as much as the runs'.")
    if "concurrency" in roots:
        said.append("Requests in flight differ, so times include how long requests waited for each other.")
    if "grader" in roots:
        said.append("The answers were not graded by the same rule, so accuracies cannot be compared.")
    said.append("The runs did not take turns, so time ratios include whatever else changed on the machine in between.")
    return said


def _cause(roots: Iterable[str]) -> str:
    causes = list(dict.fromkeys(CAUSES[root] for root in CAUSES if root in roots))
    if not causes:
        return "Nothing that was recorded and could change an answer differs: other answers come from chance alone."
    if len(causes) == 1:
        return f"Beside chance only {causes[0]} can have changed answers, lengths and acceptance."
    listed = f"{', '.join(causes[:-1])} and {causes[-1]}"
    return f"As {listed} differ, no change in answers, lengths or acceptance can be put down to one of them."
