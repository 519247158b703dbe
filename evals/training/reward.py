"""A reward head: weights on the last hidden state of a model after each step, from labelled steps."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel

from stepspec.cli.progress import make_meter
from stepspec.engines.hugging_face import load_config, load_tokenizer
from stepspec.engines.judge_model import RewardIds
from stepspec.engines.thinking import NONE
from stepspec.evaluation.judge_bench import LabelledSolution

FOLDS = 5
PENALTY = 0.3
"""Factor on the squared weights, of inputs with a standard deviation of one."""


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


def fit(states: Tensor, labels: Sequence[float]) -> Tensor:
    """Return the weights [D] of a logistic regression without a bias, which heads of sequence classifiers have not."""
    scale = states.std(0).clamp(min=1e-6)
    scaled, right = states / scale, torch.tensor(labels)
    weights = torch.zeros(states.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        error = torch.nn.functional.binary_cross_entropy_with_logits(scaled @ weights, right)
        total = error + PENALTY * weights.square().sum()
        total.backward()
        return total

    optimizer.step(loss)
    return weights.detach() / scale


def scores_on_others(states: Tensor, labels: Sequence[float], problems: Sequence[int]) -> list[float]:
    """Return the score of each step by a head that was trained on the problems of the other folds.

    Args:
        states: hidden states, [N, D].
        labels: probabilities that the N steps are right.
        problems: numbers from 0 of the steps' problems.
    """
    order = torch.randperm(max(problems) + 1, generator=torch.Generator().manual_seed(0))
    scores, folds, right = torch.empty(len(labels)), order[torch.tensor(problems)] % FOLDS, torch.tensor(labels)
    for fold in range(FOLDS):
        inside = folds == fold
        scores[inside] = states[inside] @ fit(states[~inside], right[~inside].tolist())
    return scores.tolist()


def write_head(weights: Tensor, file: Path) -> None:
    """Write weights [D] as the head of a sequence classifier."""
    save_file({"score.weight": weights[None]}, file, {"format": "pt"})
