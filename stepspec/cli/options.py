"""The flags that commands share, each defined once."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from stepspec.api.pairs import PAIRS
from stepspec.cli.completing import names_of, one_of
from stepspec.errors import UsageError

N = TypeVar("N", int, float)

MODEL_HELP = "as torch:NAME, vllm:NAME or http://HOST:PORT/v1#NAME; the embedded pair if both are left out."

TargetOption = Annotated[str | None, typer.Option("--target", help=f"The target model {MODEL_HELP}")]
DraftOption = Annotated[str | None, typer.Option("--draft", help=f"The draft model {MODEL_HELP}")]
PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        metavar="NAME",
        help=f"A pair of models by its name, instead of --target and --draft: {' or '.join(PAIRS)}.",
        autocompletion=one_of(PAIRS),
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option("--policy", metavar="NAME|FILE", help="How to speculate.", autocompletion=names_of("policies")),
]
PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME|FILE",
        help="A policy to compare, any number of times; target, token, specreason and stepspec if left out. "
        "The target is always among them.",
        autocompletion=names_of("policies"),
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Where random draws begin.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Most tokens of thinking and answer per question."),
]


def numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """What an option says that takes one number or several, each once.

    Raises:
        UsageError: it is not that.
    """
    try:
        return list(dict.fromkeys(kind(word) for word in text.split(",")))
    except ValueError as error:
        raise UsageError(f"{option} takes one number, or several like 1,4,16; {text!r} is not that.") from error
