"""Has the target of the pair `smol` answer training questions: `python -m stepspec.mini.smol.samples --work FOLDER`.

The draft is trained on these texts besides the references, since it has to propose what the target would write. Greedy
and sampled texts take turns. A killed run goes on behind the last text that it wrote.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepspec.chat.prompts import checked_messages, encode_messages
from stepspec.engines.protocol import Drafting, Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine import TorchEngine
from stepspec.mini.smol import texts

TEMPERATURES = (0.0, 0.6, 1.0)
MAX_TOKENS = 320
CONCURRENCY = 32
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
    drafting = Drafting("prompt-lookup" if "prompt-lookup" in engine.drafters else "none")
    chunk = await collect(engine.generate(TokenBuffer(ids), sampling, Stop(MAX_TOKENS), drafting))
    written = engine.tokenizer.decode([id for id in chunk.ids if id not in engine.tokenizer.end_ids])
    return {"number": number, "question": asked, "text": written, "ended": chunk.end == "token"}


async def answered_all(engine: TorchEngine, asked: Mapping[int, str]) -> list[dict[str, object]]:
    """The same for several questions by their numbers, in passes that they share."""
    return await asyncio.gather(*(answered(engine, number, each) for number, each in asked.items()))


def write_samples(engine: TorchEngine, path: Path, count: int) -> None:
    """Writes texts until there are so many."""
    gsm8k = texts.load_gsm8k("train")
    first = len(path.read_bytes().splitlines()) if path.exists() else 0
    with path.open("a", encoding="utf-8") as output:
        for start in range(first, count, CONCURRENCY):
            asked = {number: question(number, gsm8k) for number in range(start, min(start + CONCURRENCY, count))}
            rows = asyncio.run(answered_all(engine, asked))
            output.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            output.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="Folder for the texts.")
    parser.add_argument("--target", type=Path, required=True, help="Folder of the target.")
    parser.add_argument("--count", type=int, default=6_000, help="Texts in all.")
    arguments = parser.parse_args()
    engine = TorchEngine.load(str(arguments.target))
    write_samples(engine, arguments.work / FILE, arguments.count)
    asyncio.run(engine.aclose())


if __name__ == "__main__":
    main()
