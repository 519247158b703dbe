"""Numbers are equal if their values are equal in any notation. `number` grading finds them in model output."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepspec.errors import UsageError
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.grade.number import read_number

NOTATIONS = {
    "1234.5": [
        *(
            "1234.5",
            "1,234.5",
            "1{,}234.5",
            r"1\,234.5",
            r"1,\!234.50",
            "1 234.5",
            "1\u2009234.5",
            "+1234.5",
            "01234.500",
        ),
        *(
            r"\$1,234.50",
            "$1234.5$",
            "€1,234.50",
            "£1234.5",
            "1234.5.",
            "**1234.5**",
            r"\textbf{1234.5}",
            r"\(1234.5\)",
        ),
        *(
            "1234.5 dollars",
            r"1234.5\text{ cm}",
            r"1234.5 \mathrm{cm}^2",
            "1234.5 cm^2",
            "1234.5 square meters",
            "1234.5cm",
        ),
        *(
            "1.2345e3",
            r"1.2345 \times 10^3",
            r"1.2345 \cdot 10^{3}",
            "1234.5^{\\circ}",
            "1234.5°",
            "x = 1234.5",
            "(1234.5)",
        ),
        *(
            r"\frac{2469}{2}",
            r"\dfrac{2469}{2}",
            "2469/2",
            r"1234\frac{1}{2}",
            "1234 1/2",
            "1234 and 1/2",
            "$1{,}234.50$ per day",
        ),
        *("1234.5 people left", r"\mathbf{1234.5}", "12345e-1", "US$1,234.50", r"\boxed{1234.5}"),
    ],
    "-3": ["-3", "\u22123", "-3.0", r"-\$3", r"\$-3", "- 3", r"-\frac{6}{2}", r"\frac{-6}{2}", "-3 degrees", "–3"],
    "1/2": [
        "1/2",
        r"\frac12",
        r"\frac{1}{2}",
        r"\tfrac 12",
        r"\frac1{2}",
        "0.5",
        ".5",
        "0.50",
        "50%",
        r"50\%",
        "½",
        "50 percent",
    ],
    "42": ["42", "042", "42.", "42.00", "42nd", "42 %", r"\text{42}", "4.2e1", "42_{10}", "52_8", "222_4"],
    "2000000": ["2 million", "2 million dollars", "2,000,000", r"2 \times 10^6", "2e6", "2 000 000"],
    "300": ["3 hundred", r"3\text{ hundred}", r"3\text{ hundred dollars}", "0.3 thousand", "300 meters squared"],
    "1000000": ["10^6", "10^{6}", "1e6"],
    "1234_5": ["1234_5", "1234_{5}", r"1234_{\text{5}}", "1234", "194"],
}


@pytest.mark.parametrize(
    ("gold", "notation"), [(gold, each) for gold, notations in NOTATIONS.items() for each in notations]
)
def test_a_number_can_be_written_in_many_ways(gold: str, notation: str) -> None:
    with Grading("number") as grading:
        assert grading.grade(rf"So it is \boxed{{{notation}}}.", gold).status == "correct"


@pytest.mark.parametrize(
    "answer",
    [
        "12 or 13",
        "12, 13",
        "12 - 3",
        "2x",
        r"2\pi",
        "3!",
        "x",
        "1.2.3",
        "--5",
        "1e401",
        "5/0",
        r"\frac{1}{0}",
        "12!",
        "",
        "0x1F",
        "5 dozen",
        r"5\text{ dozen eggs}",
        "2 hundred thousand",
        "12 squared",
        r"12\text{ cubed}",
        "5 more apples",
        "5 degrees less than 7",
        "100 percent of 7",
        "3 times",
        "5 m 2",
    ],
)
def test_text_that_is_not_a_number_is_not_read_as_one(answer: str) -> None:
    assert read_number(answer) is None


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("50%", "49%"),
        ("12", "12.000001"),
        ("1/3", "0.333333"),
        ("0.5%", "50%"),
        ("11_2", "11_3"),
        ("1A_{16}", "7"),
        ("12", "-12"),
        ("10", "1,0"),
    ],
)
def test_numbers_that_differ_are_not_equal(gold: str, answer: str) -> None:
    with Grading("number") as grading:
        assert grading.grade(rf"\boxed{{{answer}}}", gold).status != "correct"


NUMBERS = st.one_of(
    st.integers(-(10**30), 10**30).map(Fraction),
    st.decimals(-(10**9), 10**9, allow_nan=False, allow_infinity=False, places=4).map(Fraction),
    st.fractions(-(10**6), 10**6, max_denominator=10**6),
)


def decimal_places(value: Fraction) -> int | None:
    return next((places for places in range(8) if (value * 10**places).denominator == 1), None)


def notations_of(value: Fraction) -> st.SearchStrategy[str]:
    """Return a strategy of notations for a number, built from its value without the code under test."""
    above, below = abs(value.numerator), value.denominator
    sign = "-" if value < 0 else ""
    notations = [
        f"{sign}{above}/{below}",
        rf"{sign}\frac{{{above}}}{{{below}}}",
        rf"\dfrac{{{sign}{above}}}{{{below}}}",
    ]
    if above > below > 1:
        notations.append(rf"{sign}{above // below}\frac{{{above % below}}}{{{below}}}")
    places = decimal_places(value)
    if places is not None:
        digits = f"{above * 10**places // below:0{places + 1}d}"
        integer, fraction = digits[: len(digits) - places], digits[len(digits) - places :]
        point = f".{fraction}" if fraction else ""
        notations += [
            f"{sign}{integer}{point}",
            f"{sign}{int(integer):,}{point}",
            f"{sign}00{integer}{point or '.'}",
            f"{sign}{digits}e-{places}",
        ]
        notations += [
            rf"{sign}\${int(integer):,}{point}",
            f"{sign}{integer}{point} apples",
            rf"{sign}{integer}{point}\text{{ cm}}^2",
        ]
    return st.sampled_from(notations)


@given(st.data(), NUMBERS, NUMBERS)
def test_a_number_equals_itself_in_every_notation_and_no_other_number(
    data: st.DataObject, a: Fraction, b: Fraction
) -> None:
    one, other = read_number(data.draw(notations_of(a))), read_number(data.draw(notations_of(b)))
    assert one is not None
    assert other is not None
    assert one.value == a
    assert one.equals(other) == (a == b)


@pytest.mark.parametrize(
    ("text", "found", "by"),
    [
        (r"\boxed{3} no \boxed{18}", "correct", "box"),
        (r"\boxed{18} and \boxed{}", "correct", "box"),
        ("so 18\n#### 18", "correct", "hashes"),
        ("#### Step 3: add\nThe answer is 18.", "correct", "phrase"),
        ("####18", "correct", "hashes"),
        ("The answer is 18.", "correct", "phrase"),
        ("**Final Answer:** **18**", "correct", "phrase"),
        ("ANSWER: $18", "correct", "phrase"),
        ("Answer = 18 because 9 + 9 is 18", "correct", "phrase"),
        ("The answer is $18 and he has $3 left.", "correct", "phrase"),
        ("The answer is 9 + 9 = 18 dollars.", "correct", "phrase"),
        ("### Final Answer\n\n18", "correct", "phrase"),
        ("the answer is 17. No: the final answer is $18$. I hope it is correct.", "correct", "phrase"),
        ("The answer to this question is 18.", "correct", "phrase"),
        ("He has 20 - 2 = 18 eggs.", "correct", "last number"),
        (r"\boxed{\text{She makes } \$18 \text{ a day}}", "correct", "box"),
        (r"\boxed{9 + 9 = 18}", "correct", "box"),
        (r"\boxed{17}. The answer is 18.", "parse_error", "box"),
        (r"\boxed{\text{none}}", "incorrect", "box"),
        (r"\boxed{2 \cdot 9}", "parse_error", "box"),
        ("The answer is unknown.", "incorrect", "phrase"),
        ("The answer is 18^{2}.", "parse_error", "phrase"),
        ("The answer is 18 + 3.", "parse_error", "phrase"),
        ("The answer is 18 or 19.", "parse_error", "phrase"),
        ("The answer is 18x.", "parse_error", "phrase"),
        ("The answer is not 18, but 19.", "parse_error", "phrase"),
        ("The answer is 18 and a half.", "parse_error", "phrase"),
        ("The answer isn't 18.", "parse_error", "phrase"),
        (r"\boxed{\text{not } 18}", "parse_error", "box"),
        (r"\boxed{x \neq 18}", "parse_error", "box"),
        ("The answers are 18 apples and 3 pears.", "parse_error", "phrase"),
        ("The answer is 18 apples, or perhaps 19.", "parse_error", "phrase"),
        ("The answer is 18, 19.", "parse_error", "phrase"),
        ("The answer is 18 less than 20.", "parse_error", "phrase"),
        ("The answer is 18 degrees less than 20.", "parse_error", "phrase"),
        ("The answer is 18 percent of 7.", "parse_error", "phrase"),
        ("The answer is 18 dozen eggs.", "parse_error", "phrase"),
        ("The answer is 18 cups of flour for 3 cakes.", "correct", "phrase"),
        ("The answer is 18 dollars. And 3 were left.", "correct", "phrase"),
        ("The answer is 18 because 2 and 9 are its factors.", "correct", "phrase"),
        (r"\boxed{18 (not 19)}", "correct", "box"),
        ("I do not know.", "no_answer", None),
        ("", "no_answer", None),
    ],
)
def test_the_answer_is_found_in_boxes_phrases_and_last_numbers(text: str, found: str, by: str | None) -> None:
    with Grading("number") as grading:
        grade = grading.grade(text, "18")
    assert (grade.status, grade.found_by) == (found, by)
    assert (grade.why is None) == (grade.status == "correct")


@pytest.mark.parametrize("text", ["He has 18", "The answer is 18", "so\n#### 18", "The answer is $18", r"\boxed{18"])
def test_the_end_of_a_truncated_text_is_not_an_answer(text: str) -> None:
    with Grading("number") as grading:
        assert grading.grade(text, "18", cut_short=True).status == "no_answer"


@pytest.mark.parametrize("text", [r"\boxed{18} and so", "The answer is 18. But wait, is", "#### 18\nHuman:"])
def test_a_complete_answer_counts_in_a_truncated_text(text: str) -> None:
    with Grading("number") as grading:
        assert grading.grade(text, "18", cut_short=True).status == "correct"


def test_the_last_number_counts_only_if_enabled() -> None:
    with Grading("number", last_number=False) as grading:
        assert grading.grade("He has 18.", "18").status == "no_answer"


@pytest.mark.parametrize(
    ("gold", "canonical"),
    [("She has 9 + 9 = <<9+9=18>>18.\n#### 18", "18"), ("1,234.50", "1234.5"), (r"\frac{1}{3}", "1/3"), ("50%", "50%")],
)
def test_gold_answers_are_normalized(gold: str, canonical: str) -> None:
    with Grading("number") as grading:
        assert grading.check_gold(gold) == canonical
        assert grading.check_gold(canonical) == canonical


@pytest.mark.parametrize("gold", ["twelve", "", "#### ", "x+1", "9" * 2_000])
def test_a_gold_answer_that_is_not_a_number_is_rejected(gold: str) -> None:
    with Grading("number") as grading, pytest.raises(UsageError, match="gold answer"):
        grading.check_gold(gold)


def test_an_incorrect_grade_has_a_reason() -> None:
    with Grading("number") as grading:
        assert grading.grade(r"\boxed{12}", "13").why == "The answer is 12, the gold answer 13."


def test_integer_grading_reads_only_boxes() -> None:
    with Grading("integer") as grading:
        assert grading.grade(r"\boxed{1,234.0}", "1234").status == "correct"
        assert grading.grade("The answer is 1234.", "1234").status == "no_answer"
        assert grading.grade(r"\boxed{12.5}", "12").status == "incorrect"
        with pytest.raises(UsageError, match="whole number"):
            grading.check_gold("12.5")
