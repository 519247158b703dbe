"""Answers in the style of MATH: compared as text where that is enough, otherwise by computer algebra."""

import pytest

from stepspec.errors import UsageError
from stepspec.evaluation.grade import GraderKind, Grading
from stepspec.evaluation.grade.compare import compare

READ: list[tuple[str, str]] = [
    (r"\frac{3}{4}", "0.75"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}2)"),
    (r"x \in [1,2)", "[1, 2)"),
    (r"[1,2)", r"x\in\left[1,2\right)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"\left(-\infty,2\right)\cup\left(3,\infty\right)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(3,\infty) \cup (-\infty,2)"),
    (r"\{1, 2, 3\}", r"\left\{ 3, 1, 2 \right\}"),
    ("1, 2, 3", "3, 2 and 1"),
    ("1,-2", r"-2,\,1"),
    ("10,100", "100, 10"),
    ("(1000, 2000)", "(1,000, 2,000)"),
    (r"1 \pm \sqrt{19}", r"1 + \sqrt{19}, 1 - \sqrt{19}"),
    (r"-3, 3", r"\pm 3"),
    (r"x = \pm 2", "x = 2 or x = -2"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & -4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&-4.0\end{bmatrix}"),
    (r"\begin{pmatrix} \frac12 \\ 7 \end{pmatrix}", r"\left[\begin{array}{c} 1/2 \\ 7 \end{array}\right]"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"),
    (r"10\sqrt{3} \text{ cm}", r"10\sqrt3"),
    (r"36\pi \text{ square units}", r"36 \pi"),
    (r"\$12.50", "12.5"),
    (r"25\%", "25"),
    (r"25\%", "0.25"),
    ("1234_5", r"1234_{5}"),
    ("1234_5", "1234"),
    (r"\text{Monday}", "monday."),
    (r"\text{(C)}", "C"),
    ("(C)", r"\textbf{(C) } 12 \text{ cm}"),
    (r"\text{even}", "even"),
    (r"\text{Anna, Ben}", "Ben and Anna"),
    ("y = 2x + 3", "2x+3"),
    ("2x+3", "y=2x+3"),
    ("x=5", "5"),
    (r"\dfrac{x}{2}", r"\frac x2"),
    (r"2 \times 3^4", r"2\cdot 3^{4}"),
    (r"x \le 4", r"x\leq 4"),
    (r"\sqrt{2}", "sqrt(2)"),
    (r"f(x) = x^2", "x^{2}"),
    (r"3{,}000", "3000"),
    ("11,\\! 111", "11111"),
    (r"\emptyset", r"\varnothing"),
    (r"3\!:\!00", "3:00"),
    (r"\{2,5\}", "5, 2"),
]


@pytest.mark.parametrize(("gold", "answer"), READ)
def test_equal_readings_are_correct_without_computer_algebra(gold: str, answer: str) -> None:
    assert compare(gold, answer).verdict == "same"


@pytest.mark.parametrize("answer", [pair[0] for pair in READ])
def test_every_answer_equals_itself(answer: str) -> None:
    assert compare(answer, answer).verdict == "same"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("12", "13"),
        ("(1,2)", "(2,1)"),
        ("[1,2)", "[1,3)"),
        ("1, 2", "1, 3"),
        ("1, 2", "1, 2, 3"),
        (r"\text{even}", "odd"),
        (r"\text{even}", "12"),
        ("x^2", "no solution"),
        ("C", "(D) 12"),
        ("11_2", "11_3"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
        ("[0, 1)", "0, 1"),
        ("(2,5]", "2,5"),
        ("(2,5)", "2, 5"),
        ("2,5", "(2, 5)"),
        ("2, 5", "[2, 5]"),
    ],
)
def test_clear_differences_are_found_without_computer_algebra(gold: str, answer: str) -> None:
    assert compare(gold, answer).verdict == "different"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+2x+1", "(x+1)^2"),
        (r"\frac{\sqrt{6}}{3}", r"\sqrt{\frac{2}{3}}"),
        ("1024", "2^{10}"),
        ("120", "5!"),
        ("10", r"\binom{5}{2}"),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3, \pi/2)"),
        (r"\{\sqrt{2}, \pi/2\}", r"\{\frac{\pi}{2}, \frac{2}{\sqrt{2}}\}"),
        ("[1,2)", r"1 \le x < 2"),
        (r"x \geq 2", r"[2, \infty)"),
        (r"\sin 2x", r"2 \sin x \cos x"),
        (r"\log_2 8", "3"),
        ("p - q", "-q + p"),
        (r"\frac{1}{x}", "x^{-1}"),
        (r"\begin{pmatrix} \frac{\pi}{2} \\ 1 \end{pmatrix}", r"\begin{pmatrix} \pi/2 \\ 1 \end{pmatrix}"),
        (r"12\pi \text{ cm}^2", r"2 \cdot 6\pi"),
        ("y = 2x + 3", "y - 3 = 2x"),
        (r"1 - 2i", "-2i + 1"),
    ],
)
def test_equal_formulas_are_correct_by_computer_algebra(math: Grading, gold: str, answer: str) -> None:
    grade = math.grade(rf"So it is \boxed{{{answer}}}.", gold)
    assert (grade.status, grade.decided_by) == ("correct", "symbolic"), grade.why


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x^2+2x+1", "(x-1)^2"),
        (r"2\pi", "6.28"),
        ("[1,2)", r"1 < x < 2"),
        ("x = 5", "y = 5"),
        (r"\sqrt{2}", r"\sqrt{3}"),
        ("(-\\infty, 2) \\cup (3, \\infty)", r"(-\infty, 2] \cup (3, \infty)"),
        (r"\frac{\pi}{2}, \pi", r"\frac{\pi}{3}, \pi"),
    ],
)
def test_different_formulas_are_incorrect_with_a_reason(math: Grading, gold: str, answer: str) -> None:
    grade = math.grade(rf"So it is \boxed{{{answer}}}.", gold)
    assert grade.status == "incorrect"
    assert grade.why is not None
    assert grade.why.startswith("The answer is")


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"so $x = \boxed{2}$ or $x = \boxed{3}$.", "2, 3"),
        (r"$\boxed{3}$ and $\boxed{2}$", r"\{2, 3\}"),
        (r"first \boxed{7}, later \boxed{2}, \boxed{3}", "2,3"),
        (r"\boxed{2} is wrong, it is \boxed{3}", "3"),
        (r"\boxed{2, 3}", "3, 2"),
        (r"\boxed{2}, \boxed{2, 3}", "2, 3"),
    ],
)
def test_boxes_are_combined_if_the_gold_answer_has_several_parts(math: Grading, text: str, gold: str) -> None:
    assert math.grade(text, gold).status == "correct"


@pytest.mark.parametrize(
    "text",
    [
        r"so $x=\boxed{2}$ or $x=\boxed{3}$",
        r"\boxed{2} and \boxed{3}",
        r"\boxed{2}, \boxed{3}",
        r"\boxed{3} or \boxed{2}",
    ],
)
@pytest.mark.parametrize("kind", ["number", "math"])
def test_joined_boxes_do_not_answer_a_question_with_one_answer(kind: GraderKind, text: str) -> None:
    with Grading(kind) as grading:
        assert grading.grade(text, "3").status == {"number": "parse_error", "math": "incorrect"}[kind]


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{2} is wrong, so \boxed{3}",
        r"\boxed{2}. \boxed{3}",
        r"\boxed{3}, or \boxed{3.0}",
        r"\boxed{2}. $x = \boxed{3}$, $\boxed{3}$",
    ],
)
@pytest.mark.parametrize("kind", ["number", "math"])
def test_a_box_that_corrects_or_repeats_an_earlier_one_counts_alone(kind: GraderKind, text: str) -> None:
    with Grading(kind) as grading:
        assert grading.grade(text, "3").status == "correct"


def test_boxes_that_are_too_long_in_total_are_a_parse_error() -> None:
    with Grading("math") as grading:
        assert grading.grade(rf"\boxed{{{'(' * 100_000}}}, \boxed{{3}}", "2, 3").status == "parse_error"


@pytest.mark.parametrize(
    "answer", [r"5\text{ dozen}", "5 more", "5 more apples", r"5\text{ times as many}", r"5 \text{ squared}", "5 dozen"]
)
def test_words_that_change_a_number_are_not_read_as_units(math: Grading, answer: str) -> None:
    assert math.grade(rf"\boxed{{{answer}}}", "5").status in ("parse_error", "incorrect")


@pytest.mark.parametrize(
    "answer", ["x + (", r"\frac{1}{", r"\foo{2}", "3 ++* 4", r"\int_0^1 x", "x+" * 300 + "x", "x_{1_{2_{3}}}"]
)
def test_an_unreadable_answer_is_a_parse_error_with_a_reason(math: Grading, answer: str) -> None:
    grade = math.grade(f"The answer is ${answer}$.", "x+1")
    assert grade.status == "parse_error", grade
    assert grade.why


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("The answer is $x+1$.", "1+x"),
        ("The final answer is \\( \\frac{1}{2} \\).", "0.5"),
        ("**Answer:** \\[ x^2 \\]", "x^2"),
        ("#### x+1", "1+x"),
        ("The answer is 18 apples because he had 20.", "18"),
    ],
)
def test_formulas_are_found_without_a_box(math: Grading, text: str, gold: str) -> None:
    assert math.grade(text, gold).status == "correct"


def test_a_number_in_passing_does_not_answer_a_question_about_a_formula(math: Grading) -> None:
    assert math.grade("We try x = 3.", r"\sqrt{2}").status == "no_answer"


@pytest.mark.parametrize(
    ("gold", "checked"), [(r"We find $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"), (r"x = \boxed{2} or \boxed{3}", "2, 3")]
)
def test_the_gold_answer_can_be_a_whole_solution(math: Grading, gold: str, checked: str) -> None:
    assert math.check_gold(gold) == checked


@pytest.mark.parametrize("gold", ["", " ", "$$", "x" * 2_000])
def test_an_unreadable_gold_answer_is_rejected(math: Grading, gold: str) -> None:
    with pytest.raises(UsageError, match="gold answer"):
        math.check_gold(gold)


def test_an_unknown_grader_is_rejected() -> None:
    with pytest.raises(UsageError, match="Known: integer, math, number"):
        Grading("maths")  # pyright: ignore[reportArgumentType]
