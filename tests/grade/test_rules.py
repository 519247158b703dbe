"""The grader follows the rules in its docstring, and grades handwritten answers as a reader would."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepspec.errors import UsageError
from stepspec.evaluation.grade import GraderKind, Grading, grader
from stepspec.evaluation.grade.number import CHANGES, SHORT

KINDS: tuple[GraderKind, ...] = get_args(GraderKind)
FOLDER = Path(__file__).parent


def table(text: str, num_columns: int) -> list[list[str]]:
    rows = (line.strip().split(" :: ") for line in text.splitlines() if " :: " in line and not line.startswith("#"))
    found = [[cell.strip() for cell in row] for row in rows]
    assert all(len(row) == num_columns for row in found)
    return found


@pytest.fixture(scope="module")
def graders(math: Grading) -> Iterator[dict[str, Grading]]:
    with Grading("integer") as integer, Grading("number") as number:
        yield {"integer": integer, "number": number, "math": math}


def test_every_rule_in_the_docstring_holds(graders: dict[str, Grading]) -> None:
    rows = table(grader.__doc__ or "", 4)
    assert len(rows) > 20
    for kind, gold, text, verdict in rows:
        assert verdict in ("correct", "refused")
        for each in KINDS if kind == "all" else (kind,):
            grade = graders[each].grade(text, gold)
            assert (grade.status == "correct") == (verdict == "correct"), (each, gold, text, grade)
            assert (grade.why is None) == (grade.status == "correct")


def test_answers_are_graded_as_a_reader_would(graders: dict[str, Grading]) -> None:
    for gold, answer, right in table((FOLDER / "answers.txt").read_text("utf-8"), 3):
        grade = graders["math"].grade(rf"\boxed{{{answer}}}", gold)
        assert (grade.status == "correct") == (right == "yes"), (gold, answer, grade)
        assert graders["math"].grade(rf"\boxed{{{gold}}}", gold).status == "correct"


def test_texts_with_the_gold_answer_twelve_are_graded_as_a_reader_would(graders: dict[str, Grading]) -> None:
    for where, line, right in table((FOLDER / "texts.txt").read_text("utf-8"), 3):
        text = line.replace("⏎", "\n")
        for kind in KINDS if where == "box" else ("number", "math"):
            grade = graders[kind].grade(text, "12")
            assert (grade.status == "correct") == (right == "yes"), (kind, text, grade)


NUMBERS = st.integers(1, 10**6).map(str)
STATED = (r"\boxed{{{}}}", r"\boxed{{\text{{{}}}}}", "The answer is {}.", "#### {}")
AROUND = st.sampled_from((*STATED, "So it is {}."))


def check_not_correct(graders: dict[str, Grading], around: str, answer: str, gold: str) -> None:
    for each in graders.values():
        assert each.grade(around.format(answer), gold).status != "correct", (around, answer, gold)


@settings(max_examples=40)
@given(NUMBERS, st.text("bcdfghjlnpqrtvwxyzABCDEFGHIJLNOPQ", min_size=1, max_size=6), AROUND)
def test_a_number_with_letters_glued_to_it_is_not_that_number(
    graders: dict[str, Grading], number: str, letters: str, around: str
) -> None:
    assume(letters not in SHORT and letters.casefold() not in ("e", "st", "nd", "rd", "th"))
    check_not_correct(graders, around, number + letters, number)


@settings(max_examples=40)
@given(NUMBERS, AROUND, st.sampled_from(("-", "\u2212", "minus ", "negative ")))
def test_a_number_with_a_sign_is_not_the_number_without_it(
    graders: dict[str, Grading], number: str, around: str, sign: str
) -> None:
    check_not_correct(graders, around, sign + number, number)
    check_not_correct(graders, around, number, f"-{number}")


@settings(max_examples=40)
@given(NUMBERS, st.sampled_from(CHANGES), AROUND)
def test_a_word_that_changes_a_number_is_not_a_unit(
    graders: dict[str, Grading], number: str, word: str, around: str
) -> None:
    check_not_correct(graders, around, rf"{number}\text{{ {word}}}", number)


@settings(max_examples=40)
@given(
    NUMBERS,
    NUMBERS,
    st.sampled_from(STATED),
    st.sampled_from((", ", " ", " or ", " and ", ";", " to ", "/", r"\,", " - ", "x")),
)
def test_two_numbers_equal_neither_number_nor_their_joined_digits(
    graders: dict[str, Grading], one: str, other: str, around: str, between: str
) -> None:
    assume(int(one) != int(other) and len(other) != 3 and not (between == "/" and int(other) < 2))
    for gold in (one, other, one + other):
        check_not_correct(graders, around, f"{one}{between}{other}", gold)


@settings(max_examples=20)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=4, unique=True))
def test_points_intervals_and_sets_of_the_same_numbers_differ(math: Grading, numbers: list[int]) -> None:
    parts = ",".join(map(str, numbers))
    shapes = [f"({parts})", rf"\{{{parts}\}}", f"[{parts}]", f"[{parts})"]
    for gold in shapes:
        for found in shapes:
            assert (math.grade(rf"\boxed{{{found}}}", gold).status == "correct") == (gold == found), (gold, found)


@settings(max_examples=40)
@given(NUMBERS, st.sampled_from(SHORT))
def test_a_number_with_a_known_unit_is_that_number(math: Grading, number: str, unit: str) -> None:
    assert math.grade(rf"\boxed{{{number}\text{{ {unit}}}}}", number).status == "correct"


def test_only_the_end_of_a_very_long_text_is_read() -> None:
    with Grading("number") as grading:
        assert grading.grade("so " * 1_000_000 + r"\boxed{18}", "18").status == "correct"
        assert grading.grade(r"\boxed{18}" + "so " * 1_000_000, "18").status == "no_answer"
        assert grading.grade("<think>" + "x" * 300_000 + r"\boxed{12}", "12").status == "no_answer"
        assert grading.grade("<think>" + "x" * 300_000 + r"</think>\boxed{12}", "12").status == "correct"


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("gold", ["(1,200)", "", "a", "x" * 2_000])
def test_what_is_no_gold_answer_is_refused(kind: GraderKind, gold: str) -> None:
    with Grading(kind) as each, pytest.raises(UsageError, match="gold answer"):
        each.check_gold(gold)
