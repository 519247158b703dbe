"""Folders of judge models with the embedded pair's tokenizer: tiny random ones, and a reward model that was fitted."""

import random
import shutil
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, LlamaModel

from evals.pairs.reward import write_reward_model
from evals.training.corrupt import corrupt_step
from evals.training.gsm_mini import Problem, load_split, true_values
from evals.training.reward import fit, states_after, write_head
from stepspec.evaluation.judge_bench import LabelledSolution
from stepspec.mini import WEIGHTS


def judge_folders(root: Path) -> dict[str, Path]:
    """Make two folders: `reward`, a reward model, and `embedding`, an encoder. Both have a context of 256 tokens."""
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(WEIGHTS / "target")),
        hidden_size=64,  # heads of 32, the smallest of vLLM on a CPU
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_labels=1,
    )
    torch.manual_seed(0)
    found: dict[str, Path] = {}
    for name, kind in (("reward", LlamaForSequenceClassification), ("embedding", LlamaModel)):
        found[name] = root / name
        kind(config).save_pretrained(found[name])
        _copy_tokenizer(found[name])
    return found


def fitted_reward(folder: Path, num_problems: int = 60) -> Path:
    """Make a reward model: the embedded target with a linear head that tells right steps from wrong ones."""
    solutions = [
        LabelledSolution(question=problem.question, steps=steps, labels=[1.0] * (len(steps) - 1) + [last], source="")
        for problem in islice(load_split("train"), num_problems)
        for steps, last in zip(right_and_wrong(problem), (1.0, 0.0), strict=True)
    ]
    labels = [label for each in solutions for label in each.labels]
    head = folder.with_suffix(".safetensors")
    write_head(fit(states_after(solutions, str(WEIGHTS / "target")), labels), head)
    write_reward_model(WEIGHTS / "target", head, folder)
    return folder


def right_and_wrong(problem: Problem) -> tuple[list[str], list[str]]:
    """Return the first steps of a problem, and the same steps with a mistake in the last one."""
    rng = random.Random(problem.id)
    place = rng.randrange(len(problem.plan))
    wrong = corrupt_step(problem, place, true_values(problem), rng).word(rng, "draft")
    steps = [f"{step}\n\n" for step in problem.steps]
    return steps[: place + 1], [*steps[:place], f"{wrong}\n\n"]


def _copy_tokenizer(folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (WEIGHTS / "target" / file).exists():
            shutil.copy(WEIGHTS / "target" / file, folder)
