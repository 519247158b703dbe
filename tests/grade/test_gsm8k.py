"""Each of the 1,319 GSM8K solutions is graded as correct against its own answer."""

import gzip
import json
from pathlib import Path

from stepspec.evaluation.grade import Grading

DATA = Path(__file__).parents[2] / "evals" / "data" / "gsm8k-test.jsonl.gz"


def test_every_gsm8k_solution_is_correct_for_its_own_answer() -> None:
    with gzip.open(DATA, "rt", encoding="utf-8") as lines:
        solutions = [json.loads(line)["answer"] for line in lines]
    with Grading("number") as grading:
        wrong = [solution for solution in solutions if grading.grade(solution, solution).status != "correct"]
        assert wrong == []
        boxed = [rf"\boxed{{{solution.rpartition('#### ')[2]}}}" for solution in solutions]
        assert all(grading.grade(box, gold).status == "correct" for box, gold in zip(boxed, solutions, strict=True))
    assert len(solutions) == 1_319
