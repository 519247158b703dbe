"""gsm-plain: steps solve their problems, splits share no question, and the oracle tells right steps from wrong ones."""

import itertools
import random
from fractions import Fraction

import pytest

from stepspec.evaluation.generators import gsm_plain as plain
from stepspec.evaluation.grade import Grading

CONSTANTS = set(map(Fraction, (1, 2, 3, 4, 7, 10, 12, 25, 60, 100)))


def problems_of(template: plain.Template, count: int = 20) -> list[plain.PlainProblem]:
    rng, words = random.Random(template.name), plain.Words(with_test=True)
    sampled = (template.fill(rng, "p", words) for _ in range(200 * count))
    return list(itertools.islice(filter(None, sampled), count))


def test_every_step_follows_from_the_question_and_the_steps_before() -> None:
    for template in plain.templates():
        found = problems_of(template)
        assert len(found) == 20, template.name
        for problem in found:
            assert "{" not in problem.question + "".join(problem.steps)
            words = {Fraction(number) for number, word in plain.FRACTIONS.items() if word in problem.question}
            known = CONSTANTS | words | {Fraction(number) for number in plain._NUMBER.findall(problem.question)}
            for step in problem.steps:
                (equation,) = plain.equations(step)
                assert equation.value == equation.result > 0
                assert known.issuperset(equation.numbers), problem
                known.add(equation.result)
            assert Fraction(problem.answer) == plain.equations(problem.steps[-1])[0].result


def test_the_splits_share_no_question_and_training_lacks_some_templates_and_words() -> None:
    by_split = {split: list(itertools.islice(plain.load_split(split), 1200)) for split in plain.SPLIT_SIZES}
    questions = {split: {problem.question.lower() for problem in each} for split, each in by_split.items()}
    assert not questions["train"] & questions["test"]
    assert not questions["train"] & questions["calibration"]
    assert len(questions["test"]) > 1150
    names = {split: {problem.template for problem in each} for split, each in by_split.items()}
    assert names["test"] == {template.name for template in plain.templates()}
    assert names["train"] == {template.name for template in plain.templates() if not template.for_test}
    assert 0.18 < 1 - len(names["train"]) / len(names["test"]) < 0.22
    people = {split: {name for problem in each for name in problem.people} for split, each in by_split.items()}
    assert people["train"] < people["test"]
    assert by_split["test"][:5] == list(itertools.islice(plain.load_split("test"), 5))


def test_the_oracle_accepts_solutions_and_rejects_corrupted_steps() -> None:
    rng = random.Random(0)
    for problem in itertools.islice(plain.load_split("calibration"), 400):
        oracle = plain.PlainOracle(problem)
        for index, step in enumerate(problem.steps):
            wrong = plain.corrupt_step(rng, problem, index)
            assert not oracle.judge(wrong), (problem, wrong)
            assert oracle.judge(step)
            oracle.observe(step)


@pytest.mark.parametrize(
    ("step", "right"),
    [
        ("Ben has 3 + 4 = 7 apples.", True),
        ("Ben has 4+3=7 apples.", True),
        ("So Ben owns $4 + $3 = $7.", True),
        ("Ann has 3 + 4 = 7 apples.", False),
        ("Ben has 3 + 4 = 8 apples.", False),
        ("Ben has 3 * 4 = 12 apples.", False),
        ("Ann has 3 apples.", True),
        ("Ben has 7 apples.", False),
        ("Let us see.", True),
        ("", False),
    ],
)
def test_the_oracle_reads_steps_in_different_wording(step: str, right: bool) -> None:
    problem = plain.PlainProblem(
        "p",
        "more-than",
        "Ann has 3 apples. Ben has 4 more than Ann. How many has Ben?",
        ("Ben has 3 + 4 = 7 apples.",),
        "7",
        ("Ann", "Ben"),
    )
    assert plain.PlainOracle(problem).judge(step) is right


def test_answers_in_cents_are_graded() -> None:
    assert plain.show(Fraction(11, 2)) == "5.50"
    with Grading("number") as grading:
        assert grading.grade("The answer is \\boxed{5.5}.", "5.50").status == "correct"
