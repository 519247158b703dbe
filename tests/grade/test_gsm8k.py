"""GSM8K's own solutions are right for their own answers, all 1,319 of them."""

import json
from pathlib import Path

import pytest

from stepspec.grade import Grading

DATA = next(
    (file for folder in Path(__file__).parents if (file := folder / "shared/data/gsm8k/test.jsonl").exists()),
    Path("shared/data/gsm8k/test.jsonl"),
)


def test_every_solution_of_gsm8k_is_right_for_its_own_answer() -> None:
    if not DATA.exists():
        pytest.skip("GSM8K is not here")
    solutions = [json.loads(line)["answer"] for line in DATA.read_text("utf-8").splitlines()]
    with Grading("number") as grading:
        wrong = [solution for solution in solutions if grading.grade(solution, solution).status != "correct"]
        assert wrong == []
        boxed = [rf"\boxed{{{solution.rpartition('#### ')[2]}}}" for solution in solutions]
        assert all(grading.grade(box, gold).status == "correct" for box, gold in zip(boxed, solutions, strict=True))
    assert len(solutions) == 1_319
