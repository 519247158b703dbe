"""Integer answers are found and compared as a reader would, in linear time for any text."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepspec.errors import UsageError
from stepspec.evaluation.grade import MAX_ANSWER_CHARS, canonical_integer, extract_answer, grade_integer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"The answer is \boxed{42}.", "42"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1}, no, \boxed{2", "1"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"a { stray brace, \boxed{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ 8 } } }", "8"),
        (r"\boxed{}", ""),
        (r"\boxed 9", None),
        ("boxed{9}", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "box",
    [
        "1234",
        "1,234",
        "1{,}234",
        r"1\,234",
        "1234.0",
        "1,234.00",
        r"\$1234",
        "$1234$",
        " 1234 ",
        "+1234",
        "01234",
        "1234.",
    ],
)
def test_a_number_can_be_written_in_many_ways(box: str) -> None:
    assert grade_integer(rf"It is \boxed{{{box}}}.", "1234") == ("correct", "1234")


@pytest.mark.parametrize(("box", "gold"), [("-3", "-3"), ("\u22123", "-3"), ("-0", "0"), (r"-\$3", "-3")])
def test_signs_are_kept_and_zero_has_none(box: str, gold: str) -> None:
    assert grade_integer(rf"\boxed{{{box}}}", gold) == ("correct", gold)


@pytest.mark.parametrize(
    "box", ["3", "12.5", "1,2", "12e0", "x", r"\frac{12}{1}", "12 34", "--12", "twelve", "١٢", "12,0"]
)
def test_another_number_or_no_number_is_incorrect(box: str) -> None:
    status, answer = grade_integer(rf"\boxed{{{box}}}", "12")
    assert status == "incorrect"
    assert answer


@pytest.mark.parametrize("text", ["12", "The answer is 12.", r"\boxed{12", r"\boxed{}", r"\boxed{ }"])
def test_a_text_without_a_filled_box_has_no_answer(text: str) -> None:
    assert grade_integer(text, "12") == ("no_answer", None)


def test_a_gold_answer_that_is_not_an_integer_is_rejected() -> None:
    with pytest.raises(UsageError, match="twelve"):
        grade_integer(r"\boxed{12}", "twelve")


@given(st.integers(), st.integers())
def test_an_integer_is_correct_only_for_itself(answer: int, gold: int) -> None:
    status, _ = grade_integer(rf"\boxed{{{answer:,}}}", str(gold))
    assert (status == "correct") == (answer == gold)


@given(st.text(alphabet="\\boxed{} $,.-+0123456789"))
def test_integer_grading_never_raises(text: str) -> None:
    status, answer = grade_integer(text, "1")
    assert (status == "no_answer") == (answer is None)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 500_000,
        r"\boxed{" * 500_000 + "}" * 500_000,
        "{" * 3_000_000,
        "}" * 3_000_000,
        r"\boxed" + " " * 3_000_000,
        r"\boxed" * 500_000,
        r"\boxed{" + "9" * 3_000_000 + "}",
        r"\boxed{" + "1,111" * 600_000 + "}",
        r"\boxed{" + "0" * 3_000_000 + ".0x}",
        r"\boxed{" + "\\$ " * 1_000_000 + "}",
        r"\boxed{__import__('os').abort()}",
    ],
)
def test_megabytes_of_hostile_text_are_graded_in_seconds(text: str) -> None:
    start = time.process_time()
    status, answer = grade_integer(text, "1")
    assert status != "correct"
    assert answer is None or len(answer) <= MAX_ANSWER_CHARS
    # Each takes about a second; anything quadratic would take hours.
    assert time.process_time() - start < 20


def test_long_numbers_are_compared_digit_by_digit() -> None:
    digits = "7" * 200_000
    assert grade_integer(rf"\boxed{{{digits}}}", digits)[0] == "correct"
    assert grade_integer(rf"\boxed{{{digits}8}}", digits + "7")[0] == "incorrect"


def test_canonical_integers_are_canonical() -> None:
    assert [canonical_integer(text) for text in ("1,234.0", "-03", "007", "+5")] == ["1234", "-3", "7", "5"]
