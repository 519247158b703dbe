"""Sets the bound below which a prompt is unlike the embedded pair's problems: `python -m stepspec.mini.scope`.

It is a low quantile of the target's mean log-probability over prompts of gsm-mini's calibration split.
"""

import argparse
import asyncio
import itertools
import json
from pathlib import Path

import numpy as np

from stepspec.engine import TokenBuffer
from stepspec.mini import WEIGHTS
from stepspec.mini.problems import load_split
from stepspec.prompts import checked_messages, encode_messages
from stepspec.scope import FILE, PairScope, mean_logprob
from stepspec.torch_engine import TorchEngine

NUM_PROBLEMS, QUANTILE = 4_000, 0.0025
TOGETHER = 16
"""Prompts that share passes."""


async def means(engine: TorchEngine, questions: list[str]) -> list[float]:
    """The mean log-probability of each question's prompt."""
    found: list[float | None] = []
    for start in range(0, len(questions), TOGETHER):
        asked = ([{"role": "user", "content": question}] for question in questions[start : start + TOGETHER])
        prompts = [TokenBuffer(encode_messages(engine.tokenizer, checked_messages(each))) for each in asked]
        found += await asyncio.gather(*(mean_logprob(engine, prompt) for prompt in prompts))
    return [mean for mean in found if mean is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=WEIGHTS, help="Of the pair.")
    folder: Path = parser.parse_args().folder
    questions = [problem.question for problem in itertools.islice(load_split("calibration"), NUM_PROBLEMS)]
    engine = TorchEngine.load(str(folder / "target"))
    bound = round(float(np.quantile(asyncio.run(means(engine, questions)), QUANTILE)), 3)
    asyncio.run(engine.aclose())
    measured = f"the {QUANTILE:.2%} quantile over {NUM_PROBLEMS:,} prompts of gsm-mini's calibration split"
    scope = PairScope.load(folder).model_copy(update={"least_logprob": bound, "measured": measured})
    (folder / FILE).write_text(json.dumps(scope.model_dump(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
