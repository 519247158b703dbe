"""Set the bound below which a prompt counts as out of scope for the embedded pair: `python -m evals.training.scope`.

The bound is a low quantile of the target's mean log-probability over prompts like those that the pair was trained on.
"""

import argparse
import asyncio
import itertools
import json

import numpy as np

from evals.training.gsm_mini import load_split
from stepspec.api.pairs import EMBEDDED
from stepspec.api.scope import FILE, PairScope, PromptReader
from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.engines.torch_engine import TorchEngine

NUM_PROMPTS, QUANTILE = 4_000, 0.0025
TOGETHER = 16
"""Number of prompts that are scored concurrently."""


async def means(engine: TorchEngine, questions: list[str]) -> list[float]:
    """Return the mean log-probability of each question's prompt."""
    found: list[float | None] = []
    reader = PromptReader(engine)
    for start in range(0, len(questions), TOGETHER):
        asked = ([{"role": "user", "content": question}] for question in questions[start : start + TOGETHER])
        prompts = [encode_messages(engine.tokenizer, checked_messages(each)) for each in asked]
        found += await asyncio.gather(*(reader.mean_logprob(prompt) for prompt in prompts))
    return [mean for mean in found if mean is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="Number of prompts.")
    arguments = parser.parse_args()
    questions = [problem.question for problem in itertools.islice(load_split("calibration"), arguments.prompts)]
    engine = TorchEngine.load(str(EMBEDDED / "target"))
    bound = round(float(np.quantile(asyncio.run(means(engine, questions)), QUANTILE)), 3)
    asyncio.run(engine.aclose())
    measured = f"the {QUANTILE:.2%} quantile over {len(questions):,} prompts of gsm-mini's calibration split"
    scope = PairScope.load(EMBEDDED).model_copy(update={"least_logprob": bound, "measured": measured})
    (EMBEDDED / FILE).write_text(json.dumps(scope.model_dump(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
