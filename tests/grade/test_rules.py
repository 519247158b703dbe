"""The grader follows the rules in its docstring, and grades handwritten answers as a reader would."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepspec.errors import UsageError
from stepspec.evaluation.grade import GraderKind, Grading, extract_answer, grade_integer, grader
from stepspec.evaluation.grade.compare import compare
from stepspec.evaluation.grade.vocabulary import CANONICAL_UNIT, CHANGES_BEHIND, GLUED_UNITS, SHORT_UNITS

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
    assert len(rows) > 80
    for kind, gold, text, verdict in rows:
        assert verdict in ("correct", "refused")
        for each in KINDS if kind == "all" else (kind,):
            grade = graders[each].grade(text, gold)
            assert (grade.status == "correct") == (verdict == "correct"), (each, gold, text, grade)


ANSWERS = table((FOLDER / "answers.txt").read_text("utf-8"), 3)


def test_answers_are_graded_as_a_reader_would(graders: dict[str, Grading]) -> None:
    """Answers are graded in a box. Wrong ones are also graded after an answer phrase and in the last sentence."""
    assert len(ANSWERS) > 400
    for gold, answer, right in ANSWERS:
        boxed = rf"\boxed{{{answer}}}"
        assert (graders["math"].grade(boxed, gold).status == "correct") == (right == "yes"), (gold, answer)
        if right == "yes" or not gold.removeprefix("-").isdecimal():
            continue
        for text in (boxed, f"The answer is {answer}.", f"So it is {answer}.", f"Hence the value is ${answer}$."):
            assert graders["number"].grade(text, gold).status != "correct", (gold, text)
        assert grade_integer(boxed, gold)[0] != "correct", (gold, answer)


def test_texts_with_the_gold_answer_twelve_are_graded_as_a_reader_would(graders: dict[str, Grading]) -> None:
    rows = table((FOLDER / "texts.txt").read_text("utf-8"), 3)
    assert len(rows) > 250
    for where, line, right in rows:
        text = line.replace("⏎", "\n")
        for kind in KINDS if where == "box" else ("number", "math"):
            grade = graders[kind].grade(text, "12")
            assert (grade.status == "correct") == (right == "yes"), (kind, text, grade)
            assert (grade.why is None) == (grade.status == "correct")


@pytest.mark.parametrize("gold", sorted({row[0] for row in ANSWERS}))
def test_every_gold_answer_equals_itself(gold: str) -> None:
    assert compare(gold, gold).verdict == "same"


NUMBERS = st.integers(0, 10**6).map(str)
LETTERS = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=1, max_size=6)
AROUND = st.sampled_from(
    (r"\boxed{{{}}}", r"\boxed{{\text{{{}}}}}", "The answer is {}.", "So it is {}.", "#### {}", "{}")
)


def check_not_correct(around: str, answer: str, gold: str) -> None:
    """Assert that an answer is not correct. Omits computer algebra, which gives the same verdict more slowly."""
    with Grading("number") as number:
        assert number.grade(around.format(answer), gold).status != "correct", (around, answer, gold)
    assert grade_integer(around.format(answer), gold)[0] != "correct", (around, answer, gold)
    assert compare(gold, answer).verdict != "same", (answer, gold)


@settings(max_examples=40)
@given(NUMBERS, LETTERS, AROUND)
def test_a_number_with_letters_glued_to_it_is_not_that_number(number: str, letters: str, around: str) -> None:
    assume(letters not in GLUED_UNITS and letters.casefold() not in ("e", "st", "nd", "rd", "th"))
    check_not_correct(around, number + letters, number)


@settings(max_examples=40)
@given(NUMBERS.filter(lambda number: number != "0"), AROUND, st.sampled_from(("-", "\u2212", "minus ", "negative ")))
def test_a_number_with_a_sign_is_not_the_number_without_it(number: str, around: str, sign: str) -> None:
    check_not_correct(around, sign + number, number)
    check_not_correct(around, number, f"-{number}")


CHANGES = sorted(CHANGES_BEHIND - {"hundred", "thousand", "million", "billion", "trillion", "left-over"})


@settings(max_examples=40)
@given(NUMBERS.filter(lambda number: number != "0"), st.sampled_from(CHANGES), AROUND)
def test_a_word_that_changes_a_number_is_not_a_unit(number: str, word: str, around: str) -> None:
    check_not_correct(around, f"{number} {word}", number)
    check_not_correct(around, rf"{number}\text{{ {word}}}", number)


@settings(max_examples=40)
@given(
    NUMBERS, NUMBERS, AROUND, st.sampled_from((", ", " ", " or ", " and ", ";", ":", " to ", "/", r"\,", " - ", "x"))
)
def test_two_numbers_equal_neither_number_nor_their_joined_digits(
    one: str, other: str, around: str, between: str
) -> None:
    assume(int(one) != int(other) and len(other) != 3 and not (between == "/" and (one == "0" or int(other) < 2)))
    answer = f"{one}{between}{other}"
    for gold in (one, other, one + other):
        check_not_correct(around, answer, gold)


@settings(max_examples=40)
@given(st.lists(st.integers(-99, 99), min_size=2, max_size=4, unique=True))
def test_points_intervals_and_sets_of_the_same_numbers_differ(numbers: list[int]) -> None:
    parts = ",".join(map(str, numbers))
    shapes = [f"({parts})", rf"\{{{parts}\}}", f"[{parts}]", f"[{parts})"]
    for gold in shapes:
        for found in shapes:
            assert (compare(gold, found).verdict == "same") == (gold == found), (gold, found)
            assert compare(gold, found).verdict != "unknown"


@settings(max_examples=40)
# Alone behind a number, `a` may also be an unknown: it is among the short words for "3 dollars a day".
@given(NUMBERS, st.sampled_from(sorted(unit for unit in {*CANONICAL_UNIT, *SHORT_UNITS} - {"a"} if "." not in unit)))
def test_a_number_with_a_known_unit_is_that_number(number: str, unit: str) -> None:
    answer = rf"{number}\text{{ {unit}}}" if len(unit) == 1 else f"{number} {unit}"
    assert compare(number, answer).verdict == "same"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: r"\boxed{" * 1_400_000,
        lambda: "$" * 10_000_000,
        lambda: "9" * 10_000_000,
        lambda: " " * 10_000_000,
        lambda: r"\boxed{1} or " * 800_000,
        lambda: "<think>" * 1_400_000,
        lambda: r"\boxed{" + "(" * 5_000_000 + ")" * 5_000_000 + "}",
        lambda: r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
        lambda: r"\boxed{" + "1," * 490 + "1}",
        lambda: "it is 12, " * 1_000_000,
        lambda: "The answer is " + "1 " * 5_000_000,
    ],
    ids=(
        "boxes",
        "dollars",
        "digits",
        "spaces",
        "joined",
        "thinking",
        "parentheses",
        "braces",
        "list",
        "sentence",
        "answer",
    ),
)
def test_ten_megabytes_are_graded_in_a_second(kind: GraderKind, make: Callable[[], str]) -> None:
    text = make()
    start = time.process_time()
    with Grading(kind) as each:
        each.grade(text, "1")
    # Takes 0.05 s on an idle machine; anything quadratic takes hours.
    assert time.process_time() - start < 1


def test_hundreds_of_parts_are_compared_in_any_order(math: Grading) -> None:
    gold, answer = (",".join(str(index * step % 10) for index in range(490)) for step in (1, 7))
    named = (each.replace("3", "x") for each in (answer, gold))
    start = time.process_time()
    assert math.grade(rf"\boxed{{{answer}}}", gold).status == "correct"
    assert math.grade(rf"\boxed{{{answer}}}", gold[:-1] + "8").status == "incorrect"
    assert math.grade(rf"\boxed{{{next(named)}}}", next(named)).status == "correct"
    assert time.process_time() - start < 1


def test_a_box_inside_the_reasoning_is_not_an_answer() -> None:
    for text in (r"<think>\boxed{12}", r"<think>\boxed{12}</think>", "x" * 300_000 + r"</think>"):
        assert grade_integer(text, "12") == ("no_answer", None)
    # The opening tag is before the part of the text that is read.
    assert grade_integer("<think>" + "x" * 300_000 + r"\boxed{12}", "12") == ("no_answer", None)
    assert grade_integer("<think>" + "x" * 300_000 + r"</think>\boxed{12}", "12") == ("correct", "12")
    assert extract_answer(r"\boxed{12}") == "12"


def test_a_pair_is_not_a_gold_answer_for_a_number() -> None:
    for kind in ("integer", "number"):
        with Grading(kind) as each, pytest.raises(UsageError, match="gold answer"):
            each.check_gold("(1,200)")
