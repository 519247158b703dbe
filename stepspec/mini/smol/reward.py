"""Fit the reward head of the pair `smol`: `python -m stepspec.mini.smol.reward --work FOLDER --target FOLDER`.

The head is linear in the target's last hidden state at the end of a step, and predicts whether the step is right. It
learns from a model's proposed steps (`stepspec.mini.smol.proposals`) and from corrupted ones. Held-out problems
measure it.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stepspec.chat.prompts import checked_messages
from stepspec.mini.forward import forward_hidden
from stepspec.mini.measure import SOURCES, roc_area
from stepspec.mini.smol.sequences import Tree, TreeMaker, collate
from stepspec.mini.smol.texts import PROPOSALS_FILE, Proposed, load_proposals, problem_of

FILE = "reward.safetensors"
CORRUPTED_SHARE = 0.5
"""Share of right proposed steps for which a corrupted step is added."""

DECAY = 1e-3
HELD_OUT = 5
"""One problem in `HELD_OUT` is held out to measure the head."""


def labelled_steps(rng: random.Random, proposed: Proposed) -> list[tuple[int, str, bool]]:
    """Return the proposed and corrupted steps of a problem: index, text, and whether the step is right."""
    problem, found = problem_of(proposed.kind, proposed.number), list(proposed.steps)
    for place, _, right in proposed.steps:
        if right and rng.random() < CORRUPTED_SHARE:
            wrong = SOURCES[f"gsm-{proposed.kind}"].wrong(problem, place, rng)
            found += [] if wrong is None else [(place, wrong, False)]
    return found


def tree_of(maker: TreeMaker, problem: Any, steps: Sequence[tuple[int, str, bool]]) -> Tree:
    """Return a problem's reference solution with each step on a branch at its position."""
    tree = Tree()
    asked = checked_messages([{"role": "user", "content": problem.question}])
    opening = maker.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    tree.add(maker.encode(opening), learned=False)
    ends = [len(tree.ids)]
    for reference in problem.steps:
        tree.add(maker.encode(f"{reference}\n\n"), learned=False)
        ends.append(len(tree.ids))
    for place, step, _ in steps:
        tree.branch(ends[place], maker.encode(f"{step}\n\n"), 0)
    return tree


@torch.no_grad()
def states_of(target: Any, tree: Tree) -> torch.Tensor:
    """Return the target's last hidden state at the end of each branch, [branches, width] in float32."""
    row = collate([tree])
    hidden = forward_hidden(target, row["ids"], row["positions"], row["mask"]).hidden[0].float()
    segments = torch.tensor(tree.segments)
    ends = [int((segments == number).nonzero().max()) for number in range(1, int(segments.max()) + 1)]
    return hidden[ends]


def fit(states: torch.Tensor, right: torch.Tensor, decay: float = DECAY) -> torch.Tensor:
    """Return the weights of a logistic regression without an intercept, [width].

    Args:
        states: hidden states, [N, width].
        right: labels, [N], 1 for right and 0 for wrong.
        decay: weight of half the squared norm, for states with unit mean square.
    """
    scale = states.square().mean().sqrt()
    inputs, weights = states / scale, torch.zeros(states.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights, right)
        value = value + decay * weights.square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return weights.detach() / scale


def fit_head(target: Any, maker: TreeMaker, proposals: Sequence[Proposed], path: Path) -> float | None:
    """Write the head to a file, and return its ROC area on the held-out problems; None without two classes."""
    states, right, held_out = list[torch.Tensor](), list[bool](), list[bool]()
    for number, proposed in enumerate(proposals):
        steps = labelled_steps(random.Random(number), proposed)
        if not steps:
            continue
        states.append(states_of(target, tree_of(maker, problem_of(proposed.kind, proposed.number), steps)))
        right += [each[2] for each in steps]
        held_out += [number % HELD_OUT == 0] * len(steps)
    every, labels, out = torch.cat(states), torch.tensor(right), torch.tensor(held_out)
    weights = fit(every[~out], labels[~out].float())
    save_file({"score.weight": weights[None]}, path)
    scores = every[out] @ weights
    return roc_area(scores[labels[out]].tolist(), scores[~labels[out]].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="Read the proposed steps from this folder and write the head there."
    )
    parser.add_argument("--target", type=Path, required=True, help="Load the target from this folder.")
    parser.add_argument("--problems", type=int, default=1_500, help="Number of problems.")
    arguments = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    maker = TreeMaker(AutoTokenizer.from_pretrained(arguments.target))
    proposals = load_proposals(arguments.work / PROPOSALS_FILE)[: arguments.problems]
    print(f"Area under the ROC curve: {fit_head(target, maker, proposals, arguments.work / FILE)}")


if __name__ == "__main__":
    main()
