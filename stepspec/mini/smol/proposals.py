"""Generate a model's steps for training problems (`--work FOLDER --model FOLDER`).

Each step continues the reference steps before it, and the problem's oracle decides whether it is right. The target
learns to judge these steps in addition to corrupted ones. Greedy and sampled steps alternate. A killed run resumes with
the missing problems.
"""

import argparse
import asyncio
from pathlib import Path

from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import Generate, Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine import TorchEngine
from stepspec.mini.forward import COMPUTE_DTYPE
from stepspec.mini.measure import SOURCES
from stepspec.mini.smol.samples import write_rows
from stepspec.mini.smol.texts import PROPOSALS_FILE, Proposed, problem_of

TEMPERATURES = (0.0, 0.8)
MINI_EVERY = 4
"""One problem in `MINI_EVERY` is from gsm-mini, the others are from gsm-plain."""

MAX_STEP_TOKENS = 80


async def proposed(engine: TorchEngine, number: int) -> Proposed:
    """Return the model's step at every position of a training problem."""
    kind = "plain" if number % MINI_EVERY else "mini"
    problem, temperature = problem_of(kind, number), TEMPERATURES[number // MINI_EVERY % len(TEMPERATURES)]
    tags = engine.tokenizer.thinking
    assert tags is not None
    ends = {tags.end, *engine.tokenizer.end_ids}
    stop = Stop(MAX_STEP_TOKENS, ("\n\n",), frozenset({tags.end}))
    transcript, oracle = (
        TokenBuffer(encode_request(engine.tokenizer, problem.question)),
        SOURCES[f"gsm-{kind}"].oracle(problem),
    )
    found: list[tuple[int, str, bool]] = []
    for place, reference in enumerate(problem.steps):
        chunk = await collect(engine.generate(Generate(transcript, Sampling(temperature, seed=number + place), stop)))
        step = engine.tokenizer.decode([id for id in chunk.ids if id not in ends]).strip()
        if step:
            found.append((place, step, oracle.judge(step)))
        oracle.observe(reference)
        transcript.append(engine.tokenizer.encode(f"{reference}\n\n"))
    return Proposed(kind, number, tuple(found))


def write_proposals(engine: TorchEngine, path: Path, count: int) -> None:
    """Write the model's steps for the missing problems."""

    async def row(number: int) -> dict[str, object]:
        return (await proposed(engine, number))._asdict()

    asyncio.run(write_rows(path, count, row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="Write the steps to this folder.")
    parser.add_argument("--model", type=Path, required=True, help="Load the model from this folder.")
    parser.add_argument("--count", type=int, default=800, help="Total number of problems.")
    arguments = parser.parse_args()
    engine = TorchEngine.load(str(arguments.model), dtype=COMPUTE_DTYPE)
    write_proposals(engine, arguments.work / PROPOSALS_FILE, arguments.count)
    asyncio.run(engine.aclose())


if __name__ == "__main__":
    main()
