"""Ask the pair `smol` the questions of its model card: `python -m stepspec.mini.smol.answers`.

The answers are the target's, at temperature 0. They go to `answers.json`, from which `stepspec.mini.card` makes a list.
"""

import asyncio
import itertools
import json
from dataclasses import asdict, dataclass

from stepspec.api.pairs import SMOL
from stepspec.api.session import StepSpec
from stepspec.mini.smol.texts import load_gsm8k

APPLES = "Tom has 3 apples. Anna has 4 more apples than Tom. How many apples does Anna have?"
CAPITAL = "What is the capital of France?"
NUM_GSM8K, MAX_TOKENS = 10, 512


@dataclass(frozen=True)
class Question:
    """A question, its origin, and the right answer if there is one."""

    origin: str
    question: str
    right: str


def questions() -> list[Question]:
    """Return the questions of the card: a sum, a capital, twenty that a person would type, and ten of GSM8K."""
    lines = (SMOL / "card_questions.txt").read_text("utf-8").splitlines()
    typed = [line.partition("\t") for line in lines if line and not line.startswith("#")]
    tests = itertools.islice(load_gsm8k("test"), NUM_GSM8K)
    return [
        Question("first", APPLES, "7"),
        Question("first", CAPITAL, "Paris"),
        *(Question("typed", text, right) for text, _, right in typed),
        *(Question("GSM8K", text, right) for text, _, right in tests),
    ]


async def ask() -> list[dict[str, str]]:
    """Return the questions with the target's steps and answers."""
    asked = questions()
    async with StepSpec(pair="smol", policy="target") as spec:
        found = await spec.batch([each.question for each in asked], max_tokens=MAX_TOKENS)
    return [
        asdict(each) | {"steps": result.reasoning.strip(), "answer": result.answer.strip()}
        for each, result in zip(asked, found, strict=True)
    ]


def main() -> None:
    """Run the command."""
    text = json.dumps(asyncio.run(ask()), indent=1, ensure_ascii=False)
    (SMOL / "answers.json").write_text(f"{text}\n", "utf-8")


if __name__ == "__main__":
    main()
