"""Set the bound below which a prompt counts as out of scope for a pair: `python -m stepspec.mini.scope`.

The bound is a low quantile of the target's mean log-probability over prompts like those that the pair was trained on.
"""

import argparse
import asyncio
import itertools
import json

import numpy as np

from stepspec.api.pairs import EMBEDDED, PAIRS, SMOL_WEIGHTS, find_pair
from stepspec.api.scope import FILE, PairScope, mean_logprob
from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.engines.torch_engine import TorchEngine
from stepspec.evaluation.generators import gsm_plain as plain
from stepspec.evaluation.generators.gsm_mini import load_split

NUM_PROMPTS, QUANTILE = 4_000, 0.0025
TOGETHER = 16
"""Number of prompts that are scored concurrently."""


def gsm_mini_questions(count: int = NUM_PROMPTS) -> tuple[list[str], str]:
    """Return the questions for the embedded pair, and a description of their origin."""
    problems = itertools.islice(load_split("calibration"), count)
    return [problem.question for problem in problems], "gsm-mini's calibration split"


def smol_questions(count: int = NUM_PROMPTS) -> tuple[list[str], str]:
    """Return the questions for the pair `smol`, and a description of their origin."""
    from stepspec.mini.smol import texts

    found = [each.question for each in itertools.islice(plain.load_split("calibration"), count // 2)]
    found += [problem.question for problem in itertools.islice(load_split("calibration"), count // 4)]
    found += [question for question, _ in texts.chats()]
    found += [question for question, _, _ in texts.load_gsm8k("train")[: max(0, count - len(found))]]
    return found, "the calibration splits of gsm-plain and gsm-mini, GSM8K's training split and general questions"


QUESTIONS = {"embedded": gsm_mini_questions, "smol": smol_questions}
STORED = {"embedded": EMBEDDED, "smol": SMOL_WEIGHTS}
"""The folder of each pair's description, before the pair is built."""


async def means(engine: TorchEngine, questions: list[str]) -> list[float]:
    """Return the mean log-probability of each question's prompt."""
    found: list[float | None] = []
    for start in range(0, len(questions), TOGETHER):
        asked = ([{"role": "user", "content": question}] for question in questions[start : start + TOGETHER])
        prompts = [encode_messages(engine.tokenizer, checked_messages(each)) for each in asked]
        found += await asyncio.gather(*(mean_logprob(engine, prompt) for prompt in prompts))
    return [mean for mean in found if mean is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="embedded", help="Set the bound of this pair.")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="Number of prompts.")
    arguments = parser.parse_args()
    questions, origin = QUESTIONS[arguments.pair](arguments.prompts)
    engine = TorchEngine.load(str(find_pair(arguments.pair) / "target"))
    bound = round(float(np.quantile(asyncio.run(means(engine, questions)), QUANTILE)), 3)
    asyncio.run(engine.aclose())
    measured = f"the {QUANTILE:.2%} quantile over {len(questions):,} prompts of {origin}"
    folder = STORED[arguments.pair]
    scope = PairScope.load(folder).model_copy(update={"least_logprob": bound, "measured": measured})
    (folder / FILE).write_text(json.dumps(scope.model_dump(), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
