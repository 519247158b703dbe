"""Train a process reward model on labelled steps: a head on the last hidden state of a model after each step.

The model stays as it is, and the head is one row of weights. So a small file of labels is enough, and what is stored is
the row. Its area under the ROC is that of problems which were not trained on, in five folds.

    python -m evals.bench reward_head STEPS MODEL_FOLDER HEAD.safetensors

`evals.pairs.reward` writes the folder of a reward model from the row and the folder of the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel

from stepspec.base.files import file_hash
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.hugging_face import load_config, load_tokenizer
from stepspec.engines.judge_model import RewardIds
from stepspec.engines.thinking import NONE
from stepspec.errors import UsageError
from stepspec.evaluation.judge_bench import MIN_CLASS, LabelledSolution, read_labelled_steps
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions
from stepspec.evaluation.stats.judge_scores import auc

FOLDS = 5
PENALTY = 0.3
"""Factor on the squared weights, of inputs with a standard deviation of one."""


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


def states_after(solutions: Sequence[LabelledSolution], folder: str) -> Tensor:
    """Return the last hidden states of a model after each labelled step, float32 [N, D]."""
    config = load_config(folder)
    ids = RewardIds(load_tokenizer(folder, config, thinking=NONE))
    network = AutoModel.from_pretrained(folder, config=config, dtype=torch.bfloat16, use_safetensors=True).eval()
    found: list[Tensor] = []
    with make_meter() as meter, torch.inference_mode():
        meter.begin("solutions")
        for number, each in enumerate(solutions, 1):
            steps = each.steps[: len(each.judged)]
            ends = [len(ids.of(each.question, steps[: last + 1])) - 1 for last in range(len(steps))]
            hidden = network(input_ids=torch.tensor([ids.of(each.question, steps)])).last_hidden_state
            found.append(hidden[0, ends].float())
            meter.show(None, number, len(solutions))
    return torch.cat(found)


def fit(states: Tensor, labels: Tensor) -> Tensor:
    """Return the weights [D] of a logistic regression without a bias, which heads of sequence classifiers have not."""
    scale = states.std(0).clamp(min=1e-6)
    scaled, weights = states / scale, torch.zeros(states.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = torch.nn.functional.binary_cross_entropy_with_logits(scaled @ weights, labels)
        total = error + PENALTY * weights.square().sum()
        total.backward()
        return total

    optimizer.step(loss)  # pyright: ignore[reportArgumentType] -- it takes tensors
    return weights.detach() / scale


def scores_on_others(states: Tensor, labels: Tensor, problems: Tensor) -> Tensor:
    """Return the score [N] of each step by a head that was trained on the problems of the other folds.

    Args:
        states: hidden states, [N, D].
        labels: probabilities that steps are right, [N].
        problems: numbers from 0 of the steps' problems, [N].
    """
    order = torch.randperm(int(problems.max()) + 1, generator=torch.Generator().manual_seed(0))
    scores, folds = torch.empty(len(labels)), order[problems] % FOLDS
    for fold in range(FOLDS):
        inside = folds == fold
        scores[inside] = states[inside] @ fit(states[~inside], labels[~inside])
    return scores


def main(
    data: Annotated[Path, typer.Argument(metavar="STEPS", help="Labelled steps, as `labels` writes them.")],
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the model under the head.")],
    output: Annotated[Path, typer.Argument(metavar="FILE", help="File of the head's weights, .safetensors.")],
    json_file: JsonOption = None,
) -> None:
    """Train a reward head on labelled steps, and say how well it separates right steps from wrong ones."""
    solutions, about = read_labelled_steps(data), conditions()
    questions = [each.question for each in solutions for _ in each.judged]
    numbers = {question: number for number, question in enumerate(dict.fromkeys(questions))}
    labels = torch.tensor([label for each in solutions for label in each.judged])
    states = states_after(solutions, str(model))
    scores = scores_on_others(states, labels, torch.tensor([numbers[question] for question in questions]))
    area = auc(scores.tolist(), labels.tolist(), questions, MIN_CLASS)
    if area.value is None or area.interval is None:
        raise UsageError(f"{data} has too few labelled steps: {area.why}.")
    save_file({"score.weight": fit(states, labels)[None]}, output, {"format": "pt"})
    found = RewardHead(
        **about,
        model=model.name,
        data_sha256=file_hash(data),
        num_steps=len(labels),
        num_problems=len(numbers),
        area=area.value,
        interval=area.interval,
    )
    low, high = found.interval
    finish([f"Area under the ROC on other problems: {found.area:.2f} [{low:.2f}, {high:.2f}]."], found, json_file)
