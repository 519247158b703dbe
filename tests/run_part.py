"""Run one part of an evaluation with scripted systems, real files and real graders. Tests kill this process.

python run_part.py FOLDER PART NUM_PROBLEMS
"""

import asyncio
import sys
from pathlib import Path

from scripted_runs import POLICIES, make_result, make_run

from stepspec.engines.protocol import Sampling
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.run import EvalProblem, Keeping, Part, evaluate
from stepspec.loop.result import Result


class Expanding:
    """Answers `(x+N)^2` with its expansion, which only the symbolic grader accepts as equal."""

    async def generate(
        self, question: str, *, prompt: str = "bare", sampling: Sampling | None = None, max_tokens: int = 1024
    ) -> Result:
        """Answer like `StepSpec.generate`, after a hundredth of a second."""
        await asyncio.sleep(0.01)
        number = int("".join(filter(str.isdigit, question)) or 0)
        return make_result(rf"It is \boxed{{x^2+{2 * number}x+{number * number}}}.", 0.01)

    async def forget(self) -> None:
        """Do nothing: this system has no state."""


def make_expansions(n: int) -> list[EvalProblem]:
    """Return problems `p1`, `p2`, ... whose answers are squares of sums."""
    return [EvalProblem(f"p{index}", f"Expand number {index}.", f"(x+{index})^2") for index in range(1, n + 1)]


def main(folder: str, part: str, num_problems: str) -> None:
    """Run the unfinished rows of the part."""
    problems = make_expansions(int(num_problems))
    run = make_run(problems, concurrency=2, grader="math")
    with Grading("math") as grading:
        asyncio.run(
            evaluate(
                run,
                problems,
                {name: Expanding() for name in POLICIES},
                Keeping(Path(folder), Part.parse(part), traces=True),
                grading=grading,
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
