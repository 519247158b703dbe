"""The flags that commands share, each defined once."""

from typing import Annotated

import typer

MODEL_HELP = "as torch:NAME, vllm:NAME or http://HOST:PORT/v1#NAME; the embedded pair if both are left out."

TargetOption = Annotated[str | None, typer.Option("--target", help=f"The target model {MODEL_HELP}")]
DraftOption = Annotated[str | None, typer.Option("--draft", help=f"The draft model {MODEL_HELP}")]
PolicyOption = Annotated[str, typer.Option("--policy", metavar="NAME|FILE", help="How to speculate.")]
PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME|FILE",
        help="A policy to compare, any number of times; target, token, specreason and stepspec if left out. "
        "The target is always among them.",
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
BenchmarkTemperatureOption = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; the benchmark's own if left out.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Where random draws begin.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Most tokens generated per question, rejected ones included."),
]
