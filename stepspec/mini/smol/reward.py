"""Fits the reward head of the pair `smol`: `python -m stepspec.mini.smol.reward --work FOLDER --target FOLDER`.

The head is linear in the target's last hidden state at a step's end, and says how likely the step is right. It learns
from the draft's own steps (`stepspec.mini.smol.proposals`) and from corrupted ones. Problems of its own measure it.
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
"""Of right steps of the draft, those that a corrupted step stands beside."""

DECAY = 1e-3
HELD_OUT = 5
"""One problem in so many measures the head and does not teach it."""


def labelled_steps(rng: random.Random, proposed: Proposed) -> list[tuple[int, str, bool]]:
    """The draft's steps of a problem and corrupted ones: place, text, and whether it is right."""
    problem, found = problem_of(proposed.kind, proposed.number), list(proposed.steps)
    for place, _, right in proposed.steps:
        if right and rng.random() < CORRUPTED_SHARE:
            wrong = SOURCES[f"gsm-{proposed.kind}"].wrong(problem, place, rng)
            found += [] if wrong is None else [(place, wrong, False)]
    return found


def tree_of(maker: TreeMaker, problem: Any, steps: Sequence[tuple[int, str, bool]]) -> Tree:
    """A problem's reference solution with each step on a branch at its place."""
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
    """The target's last hidden state at the end of each branch, [branches, width] in float32."""
    row = collate([tree])
    hidden = forward_hidden(target, row["ids"], row["positions"], row["mask"]).hidden[0].float()
    segments = torch.tensor(tree.segments)
    ends = [int((segments == number).nonzero().max()) for number in range(1, int(segments.max()) + 1)]
    return hidden[ends]


def fit(states: torch.Tensor, right: torch.Tensor, decay: float = DECAY) -> torch.Tensor:
    """Weights of a logistic regression without an intercept, [width].

    Args:
        states: [N, width].
        right: [N], 1 for right and 0 for wrong.
        decay: weight of half the squared norm, for states of unit mean square.
    """
    scale = states.square().mean().sqrt()
    inputs, weights = states / scale, torch.zeros(states.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = torch.nn.functional.binary_cross_entropy_with_logits(inputs @ weights, right)
        found = found + decay * weights.square().sum() / 2
        found.backward()
        return found

    optimizer.step(loss)
    return weights.detach() / scale


def fit_head(target: Any, maker: TreeMaker, proposals: Sequence[Proposed], path: Path) -> float | None:
    """Writes the head, and returns the area under its ROC curve on the problems that did not teach it."""
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
    parser.add_argument("--work", type=Path, required=True, help="Folder of the draft's steps, and for the head.")
    parser.add_argument("--target", type=Path, required=True, help="Folder of the target.")
    parser.add_argument("--problems", type=int, default=1_500, help="How many of them.")
    arguments = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    maker = TreeMaker(AutoTokenizer.from_pretrained(arguments.target))
    proposals = load_proposals(arguments.work / PROPOSALS_FILE)[: arguments.problems]
    print(f"Area under the ROC curve: {fit_head(target, maker, proposals, arguments.work / FILE)}")


if __name__ == "__main__":
    main()
