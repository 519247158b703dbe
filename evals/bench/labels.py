"""Label the steps of a pair's own solutions by how often the target comes to the right answer after each of them.

Both models solve each problem greedily. After each step the target goes on several times (`--rollouts`), and the share
of right answers is the step's label (arXiv:2312.08935, section 3.3, with soft labels). A solution is labelled up to the
first step after which no answer is right. Rollouts of several solutions share passes.

A label can say what a step has changed only where the target has a chance: problems that it solves in less than half
of the rollouts from the question alone are left out.

    python -m evals.bench labels steps.jsonl --pair qwen --data evals/data/gsm8k-train.jsonl.gz
    stepspec judge-bench steps.jsonl --pair qwen

The file is appended to as solutions are finished, and a second call continues what was interrupted.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from evals.bench.rows import stored_rows
from stepspec.api.models import Pair, load_pair
from stepspec.chat.prompts import encode_request
from stepspec.cli.options import PairOption
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import (
    Engine,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    TokenChunk,
    Tokenizer,
    Verify,
    collect,
    side_by_side,
)
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import FileData, asked
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.judge_bench import LabelledSolution
from stepspec.evaluation.run import EvalProblem, load_benchmark, load_problems

TEMPERATURE = 0.7
"""Of the rollouts."""
MIN_SOLVED = 0.5
"""Share of right answers from the question alone from which on a problem is used."""


def steps_of(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ids of each step of a text, up to the first special token. A step ends with a blank line."""
    step: list[int] = []
    for id in ids:
        if tokenizer.is_special(id):
            break
        step.append(id)
        if "\n\n" in tokenizer.decode(step).lstrip():
            yield step
            step = []
    if tokenizer.decode(step).strip():
        yield step


@dataclass(frozen=True)
class Labeller:
    """Writes solutions with both models of a pair, and labels their steps."""

    pair: Pair
    grading: Grading
    num_rollouts: int
    max_tokens: int

    async def is_solvable(self, question: str, problem: EvalProblem) -> bool:
        """Return whether the target solves a problem often enough for labels."""
        return await self._share_of_right(question, (), problem, "question") >= MIN_SOLVED

    async def label(self, question: str, problem: EvalProblem, source: str) -> LabelledSolution | None:
        """Return the labelled solution of one model, the `target` or the `draft`; None if it has no step."""
        target, writer = self.pair.target, self.pair.draft if source == "draft" else self.pair.target
        assert writer is not None
        prompt = encode_request(writer.tokenizer, question)
        chunk = await self._written(writer, TokenBuffer(prompt), Sampling())
        ids = [*steps_of(writer.tokenizer, chunk.ids)]
        texts = [writer.tokenizer.decode(step) for step in ids]
        own_ids = ids if self.pair.one_vocabulary else [*map(target.tokenizer.encode_text, texts)]
        labels: list[float] = []
        for index in range(len(ids)):
            if index == len(ids) - 1 and writer.tokenizer.thinking is None and chunk.end == "token":
                labels.append(await self._is_right("".join(texts), problem, chunk))  # nothing is left to write
            else:
                before = [id for step in own_ids[: index + 1] for id in step]
                labels.append(await self._share_of_right(question, before, problem, f"{source} {index}"))
            if not labels[-1]:
                break
        if not labels:
            return None
        return LabelledSolution(
            question=question,
            steps=texts,
            labels=labels,
            source=source,
            ids=ids if source == "draft" else None,
        )

    async def _share_of_right(self, question: str, before: Sequence[int], problem: EvalProblem, place: str) -> float:
        """Return the share of right answers after ids of a solution."""
        target = self.pair.target
        prompt = TokenBuffer([*encode_request(target.tokenizer, question), *before])
        await target.verify(Verify(prompt, (), scores=False))  # the rollouts share what was read

        async def rollout(number: int) -> float:
            seed = hashlib.blake2b(f"{problem.id} {place} {number}".encode(), digest_size=6).digest()
            sampling = Sampling(TEMPERATURE, seed=int.from_bytes(seed))
            chunk = await self._written(target, prompt, sampling, len(before))
            return await self._is_right(target.tokenizer.decode([*before, *chunk.written]), problem, chunk)

        return sum(await side_by_side(*map(rollout, range(self.num_rollouts)))) / self.num_rollouts

    async def _written(
        self, engine: Engine, prompt: TokenBuffer, sampling: Sampling, num_before: int = 0
    ) -> TokenChunk:
        stop = Stop(max(1, self.max_tokens - num_before), token_ids=engine.tokenizer.end_ids)
        return await collect(engine.generate(Generate(prompt, sampling, stop)))

    async def _is_right(self, text: str, problem: EvalProblem, chunk: TokenChunk) -> float:
        cut = chunk.end == "length"
        grade = await asyncio.to_thread(self.grading.grade, text, problem.gold, cut_short=cut)
        return float(grade.status == "correct")


async def label_all(
    labeller: Labeller,
    problems: Sequence[tuple[str, EvalProblem]],
    stored: Collection[tuple[str, str]],
    output: TextIO,
    num_problems: int,
    show: Callable[[str | None, int, int], None],
) -> None:
    """Write the labelled solutions of all problems, as they are finished.

    Args:
        labeller: labels them.
        problems: each with the question as the models are asked.
        stored: questions and sources of the solutions that are not needed.
        output: the file.
        num_problems: problems at the same time.
        show: is called with the number of finished problems and of all.
    """
    waiting, done = iter(problems), 0

    async def solve(question: str, problem: EvalProblem, source: str) -> None:
        found = await labeller.label(question, problem, source)
        if found is not None:
            output.write(found.model_dump_json(exclude_none=True) + "\n")
            output.flush()

    async def work() -> None:
        nonlocal done
        for question, problem in waiting:
            sources = [source for source in ("draft", "target") if (question, source) not in stored]
            if sources and await labeller.is_solvable(question, problem):
                await side_by_side(*(solve(question, problem, source) for source in sources))
            done += 1
            show(None, done, len(problems))

    await side_by_side(*(work() for _ in range(num_problems)))


def main(
    file: Annotated[Path, typer.Argument(help="File of labelled steps, which a run continues.")],
    pair: PairOption = None,
    benchmark: Annotated[str, typer.Option(help="A benchmark, for wording and grading.")] = "gsm8k",
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Other problems in the benchmark's form.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 100,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts after each step.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Most texts at the same time; the engine has 64.")] = 64,
    max_tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens of a solution.")] = 448,
) -> None:
    """Label the steps of both models' solutions by rollouts of the target."""
    if not file.name.endswith(".jsonl"):
        raise UsageError(f"Labelled steps are in .jsonl files, got {file}.")
    loaded = load_benchmark(benchmark)[1]
    if data is not None:
        loaded = loaded.model_copy(update={"data": FileData(kind="file", answer_from="hashes")})
    problems = load_problems(loaded, data, limit).problems
    questions = [(asked(loaded, each.question), each) for each in problems]
    stored = {(each.question, each.source) for each in stored_rows(file, LabelledSolution)}
    models, together = load_pair(pair=pair, notes=False), max(1, batch // (2 * rollouts))
    with (
        Grading(loaded.grader, last_number=loaded.last_number) as grading,
        file.open("a", encoding="utf-8") as output,
        make_meter() as meter,
    ):
        meter.begin("problems")
        labeller = Labeller(models, grading, rollouts, max_tokens)
        asyncio.run(label_all(labeller, questions, stored, output, together, meter.show))
