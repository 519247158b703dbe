"""Train a process reward model on labelled steps: a head on the last hidden state of a model after each step.

The model stays as it is, and the head is one row of weights. So a small file of labels is enough, and what is stored is
the row. Its area under the ROC is that of problems which were not trained on, in five folds.

    python -m evals.bench reward_head STEPS MODEL_FOLDER HEAD.safetensors

`evals.pairs.reward` writes the folder of a reward model from the row and the folder of the model.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from evals.training.reward import FOLDS, fit, scores_on_others, states_after, write_head
from stepspec.base.files import file_hash
from stepspec.cli.output import JsonOption, finish
from stepspec.errors import UsageError
from stepspec.evaluation.judge_bench import MIN_CLASS, read_labelled_steps
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions
from stepspec.evaluation.stats.judge_scores import auc


class RewardHead(Conditions):
    """The file that `--json` writes."""

    version: Literal[1] = 1
    model: str
    data_sha256: str
    num_steps: int
    num_problems: int
    area: float
    """Area under the ROC on problems that were not trained on."""
    interval: tuple[float, float]
    """Over problems."""


HEADS = ("judge", "steps", "area")


def rows_of(found: RewardHead) -> list[list[str]]:
    """Return the row of a table."""
    low, high = found.interval
    return [["reward", f"{found.num_steps:,}", f"{found.area:.2f} [{low:.2f}, {high:.2f}]"]]


def in_words(found: RewardHead) -> str:
    """Return what the area is of."""
    return f"Area under the ROC on problems that were not trained on, in {FOLDS} folds of {found.num_problems} problems"


def main(
    data: Annotated[Path, typer.Argument(metavar="STEPS", help="Labelled steps, as `labels` writes them.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model under the head.")],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="File of the head's weights, .safetensors.")],
    json_file: JsonOption = None,
) -> None:
    """Train a reward head on labelled steps, and say how well it separates right steps from wrong ones."""
    if not (model / "config.json").is_file():
        raise UsageError(f"{model} is not the folder of a model: it has no config.json.")
    if not output.parent.is_dir():
        raise UsageError(f"There is no folder {output.parent} for {output.name}.")
    solutions, about = read_labelled_steps(data), conditions()
    questions = [each.question for each in solutions for _ in each.judged]
    numbers = {question: number for number, question in enumerate(dict.fromkeys(questions))}
    labels = [label for each in solutions for label in each.judged]
    states = states_after(solutions, str(model))
    scores = scores_on_others(states, labels, [numbers[question] for question in questions])
    area = auc(scores, labels, questions, MIN_CLASS)
    if area.value is None or area.interval is None:
        raise UsageError(f"{data} has too few labelled steps: {area.why}.")
    write_head(fit(states, labels), output)
    found = RewardHead(
        **about,
        model=model.name,
        data_sha256=file_hash(data),
        num_steps=len(labels),
        num_problems=len(numbers),
        area=area.value,
        interval=area.interval,
    )
    finish([f"{in_words(found)}: {rows_of(found)[0][-1]}."], found, json_file)
