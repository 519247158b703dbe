"""Has the target of the pair `smol` answer training questions: `python -m stepspec.mini.smol.samples --work FOLDER`.

The draft is trained on these texts besides the references, since it has to propose what the target would write. Greedy
and sampled texts take turns. A killed run goes on with the texts that are missing.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.engines.protocol import Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine import TorchEngine
from stepspec.mini.smol import texts

TEMPERATURES = (0.0, 0.6, 1.0)
MAX_TOKENS = 320
CONCURRENCY = 64
FILE = "samples.jsonl"


def question(number: int, gsm8k: Sequence[texts.Solved]) -> str:
    """The user's turn of the training problem of that number."""
    rng = random.Random(f"samples/{number}")
    while True:
        conversation = texts.draw(rng, gsm8k)
        if len(conversation.messages) == 1 and not conversation.tools:
            return conversation.messages[0]["content"]


async def answered(engine: TorchEngine, number: int, asked: str) -> dict[str, object]:
    """The target's own text for a question, thinking and answer in one."""
    ids = encode_messages(engine.tokenizer, checked_messages([{"role": "user", "content": asked}]))
    sampling = Sampling(TEMPERATURES[number % len(TEMPERATURES)], seed=number)
    chunk = await collect(engine.generate(TokenBuffer(ids), sampling, Stop(MAX_TOKENS)))
    written = engine.tokenizer.decode([id for id in chunk.ids if id not in engine.tokenizer.end_ids])
    return {"number": number, "question": asked, "text": written, "ended": chunk.end == "token"}


def load_samples(path: Path) -> list[dict[str, Any]]:
    """The rows of the file, if there is one."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


async def write_rows(path: Path, count: int, make: Callable[[int], Awaitable[Mapping[str, object]]]) -> None:
    """Makes the rows with the numbers below `count` that a file does not have, as many at a time as `CONCURRENCY`.

    Rows are written as they come, so in any order; a killed run goes on with those that are missing.
    """
    missing = iter(sorted({*range(count)} - {row["number"] for row in load_samples(path)}))
    with path.open("a", encoding="utf-8") as output:

        async def work() -> None:
            for number in missing:
                row = await make(number)
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
                output.flush()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


def write_samples(engine: TorchEngine, path: Path, count: int) -> None:
    """Writes the texts that are missing."""
    gsm8k = texts.load_gsm8k("train")
    asyncio.run(write_rows(path, count, lambda number: answered(engine, number, question(number, gsm8k))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="Folder for the texts.")
    parser.add_argument("--target", type=Path, required=True, help="Folder of the target.")
    parser.add_argument("--count", type=int, default=6_000, help="Texts in all.")
    arguments = parser.parse_args()
    engine = TorchEngine.load(str(arguments.target), dtype=torch.bfloat16)
    write_samples(engine, arguments.work / FILE, arguments.count)
    asyncio.run(engine.aclose())


if __name__ == "__main__":
    main()
