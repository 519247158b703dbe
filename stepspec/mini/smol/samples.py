"""Generate the target's answers to training questions: `python -m stepspec.mini.smol.samples --work FOLDER`.

The draft of the pair `smol` trains on these texts and on the references, because it must predict the target's text.
Greedy and sampled texts alternate. A killed run resumes with the missing texts.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine import TorchEngine
from stepspec.mini.forward import COMPUTE_DTYPE
from stepspec.mini.smol import texts

SHARES = {"gsm8k": 0.7, "chat": 0.15, "plain": 0.15}
"""Share of each kind of question. On the other kinds the target writes what the references say."""

TEMPERATURES = (0.0, 0.6, 1.0)
MAX_TOKENS = 320
CONCURRENCY = 64
FILE = "samples.jsonl"


def question(number: int, gsm8k: Sequence[texts.Solved]) -> str:
    """Return the user turn of a training problem by its number."""
    return texts.draw(random.Random(f"samples/{number}"), gsm8k, shares=SHARES).messages[0]["content"]


async def answered(engine: TorchEngine, number: int, asked: str) -> dict[str, object]:
    """Return the target's text for a question, with thinking and answer in one string."""
    ids = encode_messages(engine.tokenizer, checked_messages([{"role": "user", "content": asked}]))
    sampling = Sampling(TEMPERATURES[number % len(TEMPERATURES)], seed=number)
    chunk = await collect(engine.generate(Generate(TokenBuffer(ids), sampling, Stop(MAX_TOKENS))))
    written = engine.tokenizer.decode([id for id in chunk.ids if id not in engine.tokenizer.end_ids])
    return {"number": number, "question": asked, "text": written, "ended": chunk.end == "token"}


def load_samples(path: Path) -> list[dict[str, Any]]:
    """Load the rows of a file in the order of their numbers; an empty list if it does not exist."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return sorted(map(json.loads, lines), key=lambda row: row["number"])


def _drop_partial_line(path: Path) -> None:
    """Remove the part of a line that a killed run may have left at the end of a file."""
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])


async def write_rows(path: Path, count: int, make: Callable[[int], Awaitable[Mapping[str, object]]]) -> None:
    """Append the missing rows with numbers below `count` to a file, at most `CONCURRENCY` at a time.

    Each row is written as soon as it is ready, so the order varies. A killed run resumes with the missing rows.

    Args:
        path: the file, with one JSON row per line.
        count: the total number of rows.
        make: returns the row of a number.
    """
    _drop_partial_line(path)
    missing = iter(sorted({*range(count)} - {row["number"] for row in load_samples(path)}))
    with path.open("a", encoding="utf-8") as output:

        async def work() -> None:
            for number in missing:
                row = await make(number)
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
                output.flush()

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))


def write_samples(engine: TorchEngine, path: Path, count: int) -> None:
    """Write the missing texts."""
    gsm8k = texts.load_gsm8k("train")
    asyncio.run(write_rows(path, count, lambda number: answered(engine, number, question(number, gsm8k))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="Write the texts to this folder.")
    parser.add_argument("--target", type=Path, required=True, help="Load the target from this folder.")
    parser.add_argument("--count", type=int, default=552, help="Total number of texts.")
    arguments = parser.parse_args()
    engine = TorchEngine.load(str(arguments.target), dtype=COMPUTE_DTYPE)
    write_samples(engine, arguments.work / FILE, arguments.count)
    asyncio.run(engine.aclose())


if __name__ == "__main__":
    main()
