"""Options that several commands share."""

from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer

from stepspec.api.pairs import PAIRS
from stepspec.cli.completion import names_of, one_of
from stepspec.errors import UsageError

N = TypeVar("N", int, float)

MODEL_HELP = "as a folder, torch:NAME, vllm:NAME or http://HOST:PORT/v1#NAME. Default: the embedded pair."

TargetOption = Annotated[str | None, typer.Option("--target", help=f"The target, {MODEL_HELP}")]
DraftOption = Annotated[str | None, typer.Option("--draft", help=f"The draft, {MODEL_HELP}")]
PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        metavar="NAME",
        help=f"A pair of models by name, instead of --target and --draft: {' or '.join(PAIRS)}.",
        autocompletion=one_of(PAIRS),
    ),
]
JudgeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--judge",
        metavar="NAME=MODEL",
        help="A judge model that the policy names, as torch:FOLDER, http://HOST:PORT/v1#NAME or python:MODULE:NAME; "
        "repeat it for several.",
    ),
]


def policy_option(help_text: str) -> Any:
    """Return the option `--policy` with a help text."""
    return typer.Option("--policy", metavar="NAME|FILE", help=help_text, autocompletion=names_of("policies"))


PolicyOption = Annotated[str, policy_option("The policy.")]
DEFAULT_POLICIES = ("target", "token", "draft", "always", "specreason", "specreason-decode", "two-level")
"""The policies that an evaluation compares if none is named."""
PoliciesOption = Annotated[
    list[str] | None,
    policy_option(
        "A policy to compare, or variants with other values of its keys, such as token:token.num_tokens=2,4; repeat it "
        f"for several. Default: {', '.join(DEFAULT_POLICIES)}. The target is always included."
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 is greedy.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Random seed.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Limit for thinking and answer of a question, in tokens."),
]

RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on a Ray cluster: auto, HOST:PORT, ray://HOST:PORT, or local to start one here.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, help="With --ray: sets of the models. Default: as many as the cluster has room for."
    ),
]
WorkerCpusOption = Annotated[
    float | None,
    typer.Option(
        "--worker-cpus",
        min=0.01,
        help="With --ray: CPUs of a worker. Default: 1 with GPUs, else all of the smallest machine.",
    ),
]
WorkerGpusOption = Annotated[
    float | None,
    typer.Option("--worker-gpus", min=0, help="With --ray: GPUs of a worker. Default: 1 if the cluster has any."),
]


def judge_specs(options: list[str] | None, needed: Collection[str] | None = None) -> dict[str, str]:
    """Return the spec strings of judge models by name.

    Args:
        options: the values of --judge.
        needed: the names that the policies need; None if requests may name further policies.

    Raises:
        UsageError: an option is not NAME=MODEL, two have the same name, or one is not needed.
    """
    specs: dict[str, str] = {}
    for option in options or ():
        name, separator, spec = option.partition("=")
        if not (name and separator and spec):
            raise UsageError(f"--judge takes NAME=MODEL, such as reward=torch:path/to/folder; got {option!r}.")
        if name in specs:
            raise UsageError(f"Two options --judge have the name {name!r}. Remove one.")
        if needed is not None and name not in needed:
            known = f"They need: {', '.join(sorted(needed))}." if needed else "They need none."
            raise UsageError(f"The policies need no judge model {name!r}. {known}")
        specs[name] = spec
    return specs


def numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Return the distinct numbers in a comma-separated option value.

    Raises:
        UsageError: part of the value is not a number.
    """
    try:
        return list(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError as error:
        raise UsageError(f"{option} takes one number, or several like 1,4,16; got {text!r}.") from error
