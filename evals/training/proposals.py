"""The draft's steps on training problems with labels from the oracle. The target learns to judge them."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from evals.training.gsm_mini import step_content, train_problem, true_values
from evals.training.oracle import Oracle
from evals.training.sequences import VOICES, Proposals
from evals.training.tokenizer import load_tokenizer, opening

BATCH = 128
TEMPERATURES = (0.0, 0.8)  # the problems alternate between greedy and sampled steps
MAX_STEP_TOKENS = 80


def load_proposals(draft: Path, path: Path, num_problems: int, device: str) -> Proposals:
    """Load the proposals of a file. If there is no file, generate it with the draft.

    An existing file is not updated when the draft changes. Delete it to generate new proposals.

    Args:
        draft: folder of the draft model.
        path: the file of proposals.
        num_problems: the number of training problems to generate proposals for.
        device: the device that runs the draft.
    """
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("w") as file:
            for number, index, text, right in _propose(draft, num_problems, device):
                file.write(json.dumps([number, index, text, right]) + "\n")
        partial.replace(path)
    proposals: dict[int, list[tuple[int, str, bool]]] = {}
    for line in path.read_text().splitlines():
        number, index, text, right = json.loads(line)
        proposals.setdefault(number, []).append((index, text, right))
    return proposals


def _propose(folder: Path, num_problems: int, device: str) -> Iterator[tuple[int, int, str, bool]]:
    tokenizer = load_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()
    torch.manual_seed(0)
    prefixes = sorted(_prefixes(num_problems), key=lambda prefix: (prefix[0] % len(TEMPERATURES), len(prefix[2])))
    for _, same_temperature in itertools.groupby(prefixes, key=lambda prefix: prefix[0] % len(TEMPERATURES)):
        group = list(same_temperature)
        for start in track(range(0, len(group), BATCH), description="the draft's own steps"):
            chunk = group[start : start + BATCH]
            temperature = TEMPERATURES[chunk[0][0] % len(TEMPERATURES)]
            steps = _generate_steps(model, tokenizer, [text for _, _, text, _ in chunk], temperature)
            for (number, index, _, oracle), step in zip(chunk, steps, strict=True):
                yield number, index, step, oracle.judge(step)


def _prefixes(num_problems: int) -> Iterator[tuple[int, int, str, Oracle]]:
    """Yield problem number, step index, the text before the step, and the oracle, for the first training problems."""
    for number in range(num_problems):
        problem = train_problem(number)
        rng, values, oracle = random.Random(problem.id + "/proposals"), true_values(problem), Oracle(problem)
        text = opening(problem.question)
        for index, relation in enumerate(problem.plan):
            yield number, index, text, oracle
            text += step_content(problem.scene, relation, values).word(rng, rng.choice(VOICES)) + "\n\n"


@torch.no_grad()
def _generate_steps(
    model: Any, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], temperature: float
) -> list[str]:
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    ends = tokenizer.convert_tokens_to_ids(["\u010a\u010a", "</think>", "<|end|>"])  # the first is a blank line
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(
        **inputs.to(model.device), max_new_tokens=MAX_STEP_TOKENS, eos_token_id=ends, pad_token_id=0, **sampling
    )
    written = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [step.strip() for step in written]
