"""The oracle: right steps, wrong steps, steps that build on wrong ones, and text that is no step at all."""

import itertools
import random
import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepspec.mini.corrupt import corrupt_step
from stepspec.mini.oracle import Oracle, step_correctness
from stepspec.mini.problems import (
    NAMES,
    SCENES,
    STEPS,
    Problem,
    Relation,
    Voice,
    load_split,
    step_slots,
    true_values,
    word_step,
    write_solution,
    write_step,
)

VOICES: tuple[Voice, ...] = ("target", "draft")
APPLES = SCENES[0]

RELATIONS = (
    Relation("given", "Ann", amount=8),
    Relation("more", "Ben", ("Ann",), 4),
    Relation("half", "Cara", ("Ben",)),
    Relation("sum", "Dan", ("Ann", "Cara")),
    Relation("times", "Ella", ("Cara",), 3),
    Relation("fewer", "Finn", ("Ella",), 8),
    Relation("total", "", ("Dan", "Ben", "Finn")),
)
QUESTION = (
    "Ann has 8 apples. Ben has 4 more apples than Ann. Cara has half as many apples as Ben. "
    "Ann and Cara together have what Dan has. Compared with Cara, Ella has 3 times as many apples. "
    "Finn has 8 fewer apples than Ella. Ben is 9 years old. "
    "How many apples do Dan, Ben and Finn have in total?"
)
ORCHARD = Problem(
    id="orchard",
    question=QUESTION,
    answer=36,
    steps=(),
    scene=APPLES,
    relations={relation.subject: relation for relation in RELATIONS[:-1]},
    plan=RELATIONS[1:],
)


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(itertools.islice(load_split("train"), 2_000))


def all_wordings(problem: Problem) -> Iterator[str]:
    values = true_values(problem)
    for relation in problem.plan:
        key = f"total{len(relation.refs)}" if relation.kind == "total" else relation.kind
        for wording in STEPS[key]:
            yield wording.format(**step_slots(problem.scene, relation, values))


@pytest.mark.parametrize("voice", VOICES)
def test_every_reference_step_is_correct_in_context(problems: list[Problem], voice: Voice) -> None:
    rng = random.Random(0)
    for problem in problems:
        steps = write_solution(problem, rng, voice)
        assert all(step_correctness(problem, steps)), (problem.question, steps)


def test_every_wording_of_every_step_is_correct_even_without_the_steps_before() -> None:
    oracle = Oracle(ORCHARD)
    for step in all_wordings(ORCHARD):
        assert oracle.judge(step), step


@pytest.mark.parametrize("voice", VOICES)
def test_every_corrupt_step_is_incorrect(problems: list[Problem], voice: Voice) -> None:
    rng = random.Random(1)
    for problem in problems[:1_000]:
        values, oracle = true_values(problem), Oracle(problem)
        for index, step in enumerate(problem.steps):
            wrong = corrupt_step(problem, index, values, rng, voice)
            assert not oracle.judge(wrong), (problem.question, wrong)
            oracle.observe(step)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_another_number_anywhere_makes_a_right_step_incorrect(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from(list(all_wordings(ORCHARD))))
    number = data.draw(st.sampled_from(list(re.finditer(r"\d+", step))))
    other = data.draw(st.integers(0, 10**9).filter(lambda other: other != int(number[0])))
    assert not Oracle(ORCHARD).judge(f"{step[: number.start()]}{other}{step[number.end() :]}")


def misstate(problem: Problem, slip: int, rng: random.Random) -> tuple[str, dict[str, int]]:
    """The first step with a wrong result, and what everybody has for those who believe it."""
    first, values = problem.plan[0], true_values(problem)
    believed = values | {first.subject: values[first.subject] + slip}
    slots = step_slots(problem.scene, first, values) | {"c": str(believed[first.subject])}
    return word_step(first, slots, rng, "target"), believed


@pytest.mark.parametrize("slip", [-1, 2, 10])
def test_what_follows_from_a_wrong_step_is_correct_and_what_ignores_it_is_not(
    problems: list[Problem], slip: int
) -> None:
    rng = random.Random(2)
    for problem in problems[:500]:
        wrong, believed = misstate(problem, slip, rng)
        oracle = Oracle(problem)
        assert not oracle.judge(wrong)
        oracle.observe(wrong)
        second_as_if_right = write_step(problem.scene, problem.plan[1], true_values(problem), rng, "target")
        assert not oracle.judge(second_as_if_right), (problem.question, wrong, second_as_if_right)
        for relation in problem.plan[1:]:
            value = relation.value(believed)
            if value is None:  # half of an odd number: nothing follows
                break
            step = write_step(problem.scene, relation, believed, rng, "draft")
            assert oracle.judge(step), (problem.question, wrong, step)
            oracle.observe(step)
            believed[relation.subject] = value


def test_a_mistake_can_be_put_right_by_deriving_the_value_anew() -> None:
    right = "Ben has 4 more apples than Ann, so Ben has 8 + 4 = 12 apples."
    wrong = "Ben has 4 more apples than Ann, so Ben has 8 + 4 = 13 apples."
    steps = [wrong, "Ben has 13 apples.", wrong, "Ben has 12 apples.", right, "Ben has 12 apples."]
    assert step_correctness(ORCHARD, steps) == [False, True, False, False, True, True]
    assert step_correctness(ORCHARD, [wrong, f"{right} Ben has 12 apples, so Cara has 12 / 2 = 6."]) == [
        False,
        True,
    ]


def test_the_last_claim_counts_and_a_misread_quantity_is_a_claim_too() -> None:
    misread = "Ann has 9 apples, so Ben has 9 + 4 = 13."
    assert step_correctness(ORCHARD, [misread, "Ann has 9 apples.", "Ben has 13 apples."]) == [
        False,
        True,
        True,
    ]
    restated = ["Ann has 9 apples.", "Ann has 8 apples.", "Ann has 8 apples, so Ben has 8 + 4 = 12."]
    assert step_correctness(ORCHARD, restated) == [False, True, True]


def test_nothing_follows_from_half_of_an_odd_number() -> None:
    wrong = "Ann has 8 apples, so Ben has 8 + 4 = 13."
    for half in (6, 7):
        assert step_correctness(ORCHARD, [wrong, f"Ben has 13 apples, so Cara has 13 / 2 = {half}."])[1] is False
    assert step_correctness(ORCHARD, [wrong, "Cara has 6 apples, so Ella has 3 * 6 = 18."])[1] is False


def test_a_negative_number_can_follow_from_a_wrong_step() -> None:
    steps = ["Ella has 1 apples.", "Ella has 1 apples, so Finn has 1 - 8 = -7.", "Finn has -7 apples."]
    assert step_correctness(ORCHARD, steps) == [False, True, True]


def test_what_the_question_says_is_correct_sentence_by_sentence_and_as_a_whole(
    problems: list[Problem],
) -> None:
    for problem in problems[:500]:
        statements = problem.question.rpartition(". ")[0] + "."
        oracle = Oracle(problem)
        assert oracle.judge(statements), statements
        assert all(oracle.judge(statement) for statement in re.split(r"(?<=\.) ", statements))
        known = [
            f"{name} {problem.scene.verb} {value} {problem.scene.item}." for name, value in true_values(problem).items()
        ]
        assert all(oracle.judge(sentence) for sentence in known)
        assert oracle.judge("\n".join(known))


CORRECT = [
    "Ann has 8 apples.",
    "We know that Ann has 8 apples.",
    "Compared with Ann, Ben has 4 more apples.",
    "Dan has as many apples as Cara and Ann together.",
    "Cara and Ann together have what Dan has.",
    "Ann has 8 apples. Ben has 12 apples.",
    "Ann has 8 apples. Ben has 4 more apples than Ann, so Ben has 8 + 4 = 12 apples.",
    "Next is Ben. It is 4 more than the 8 apples of Ann, which makes 8 + 4 = 12. Ann has 8 apples.",
    "Ann has 8 apples, so Ben has 4 + 8 = 12.",
    "Cara has 6 apples, so Ella has 6 * 3 = 18.",
    "Cara has 6 and Ann has 8, so Dan has 8 + 6 = 14.",
    "Together Finn, Dan and Ben have 14 + 12 + 10 = 36 apples.",
    "  Ann has 8 apples, so Ben has 8 + 4 = 12.\n\n",
    "Ann has 8 apples, so Ben has 8 + 4 = 12.</think>",
    "Ann has 8 apples, so Ben has 8 + 4 = 12.\n</think>\n",
    "Ben is 9 years old.",
]


@pytest.mark.parametrize("step", CORRECT)
def test_a_step_that_says_what_follows_is_correct(step: str) -> None:
    assert Oracle(ORCHARD).judge(step)


INCORRECT = {
    "empty": ["", " \n\n", "</think>", "\n</think>\n"],
    "no step": ["Hmm.", "The answer is 36.", "Ann", "= 12", "Ann has 8 apples", "So Ann has 8 apples.", "12"],
    "a wrong number": [
        "Ann has 9 apples.",
        "Ben has 5 more apples than Ann.",
        "Ben is 8 years old.",
        "Ann has 9 apples. Ann has 9 apples.",
        "Ann has 8 apples. Ben has 13 apples.",
    ],
    "a wrong item": ["Ann has 8 pears.", "Ben has 4 more coins than Ann, so Ben has 8 + 4 = 12 coins."],
    "a wrong verb": ["Ann picked 8 apples.", "Ann picked 8 apples, so Ben has 8 + 4 = 12."],
    "somebody unknown": [
        "Zoe has 8 apples.",
        "Zoe has 8 apples, so Ben has 8 + 4 = 12.",
        "Zoe has 4 more apples than Ann, so Zoe has 8 + 4 = 12 apples.",
        "Together Ann and Zoe have 8 + 4 = 12 apples.",
    ],
    "somebody else": [
        "Cara has 4 more apples than Ann, so Cara has 8 + 4 = 12 apples.",
        "Ben has 4 more apples than Cara, so Ben has 6 + 4 = 10 apples.",
        "Ben has 12 and Ann has 8, so Dan has 12 + 8 = 20.",
        "Ann has 6 and Cara has 8, so Dan has 6 + 8 = 14.",
        "Ben has 4 more apples than Ann, so Cara has 8 + 4 = 12 apples.",
    ],
    "a wrong kind": [
        "Ben has 4 fewer apples than Ann, so Ben has 8 - 4 = 4 apples.",
        "Ben has 4 fewer apples than Ann, so Ben has 8 + 4 = 12 apples.",
        "Ben has 4 more apples than Ann, so Ben has 8 - 4 = 4 apples.",
        "Ella has half as many apples as Cara.",
        "Cara has 6 apples, so Ella has 6 + 12 = 18.",
        "Ella has 18 apples, so Finn has 8 - 18 = 10.",
    ],
    "false arithmetic": [
        "Ben has 4 more apples than Ann, so Ben has 8 + 4 = 13 apples.",
        "Ben has 4 more apples than Ann, so Ben has 9 + 3 = 12 apples.",
        "Ben has 4 more apples than Ann, so Ben has 8 + 4 + 0 = 12 apples.",
        "Ann has 8 apples, so Ben has 8 * 4 = 12.",
        "Cara has 6 apples, so Ella has 6 + 3 = 18.",
        "Together Dan, Ben and Finn have 14 + 12 + 10 = 35 apples.",
        "Together Dan, Ben and Finn have 26 + 10 = 36 apples.",
    ],
    "a total nobody asked for": [
        "Together Dan and Ben have 14 + 12 = 26 apples.",
        "Together Ann, Ben and Finn have 8 + 12 + 10 = 30 apples.",
        "Together Dan, Dan and Ben have 14 + 14 + 12 = 40 apples.",
    ],
    "the question": ["How many apples do Dan, Ben and Finn have in total?"],
    "more than can be read": ["Ann has 8 apples. Indeed.", "Ann has 8 apples.</think>The answer is 36."],
    "numbers that are none": ["Ann has ٨ apples.", f"Ann has {'8' * 5_000} apples.", "Ann has 8.0 apples."],
}


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, id=f"{why}-{i}") for why, steps in INCORRECT.items() for i, step in enumerate(steps)],
)
def test_a_step_that_says_anything_else_is_incorrect(step: str) -> None:
    assert not Oracle(ORCHARD).judge(step)


def test_no_total_is_correct_where_one_person_is_asked_for() -> None:
    one = Problem("one", QUESTION, 10, (), APPLES, ORCHARD.relations, ORCHARD.plan[:-1])
    assert not Oracle(one).judge("Together Dan, Ben and Finn have 14 + 12 + 10 = 36 apples.")


def test_judging_remembers_nothing() -> None:
    oracle = Oracle(ORCHARD)
    for _ in range(2):
        assert not oracle.judge("Ann has 9 apples, so Ben has 9 + 4 = 13.")
        assert oracle.judge("Ann has 8 apples, so Ben has 8 + 4 = 12.")


def test_text_that_cannot_be_read_and_strangers_leave_no_trace() -> None:
    oracle = Oracle(ORCHARD)
    for step in (
        "",
        "Hmm.",
        "Ann has 9 pears.",
        "Zoe has 3 apples.",
        "Zoe has 3 apples, so Uma has 3 + 4 = 7.",
    ):
        oracle.observe(step)
    assert oracle.judge("Ann has 8 apples.")
    assert not oracle.judge("Zoe has 3 apples.")


WORDS = sorted({word for wordings in STEPS.values() for wording in wordings for word in wording.split()})
PIECES = st.sampled_from([*NAMES, "has", "apples", "apples.", "8", "4", "12", "-", "= 0", "/ 0", *WORDS])


@given(steps=st.lists(st.text() | st.lists(PIECES, max_size=20).map(" ".join) | st.sampled_from(CORRECT), max_size=4))
@example(steps=["Ann has -0 apples.", "Ann has 000008 apples."])
@example(steps=["Cara has 0 apples, so Ella has 0 / 0 = 0.", "Next is Ben. It is ", "It is . It is "])
@settings(max_examples=300, deadline=None)
def test_no_text_whatever_makes_it_raise(steps: list[str]) -> None:
    assert len(step_correctness(ORCHARD, steps)) == len(steps)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_no_piece_of_a_right_step_is_correct_by_itself(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from(list(all_wordings(ORCHARD))))
    start, end = data.draw(st.integers(1, len(step))), data.draw(st.integers(0, len(step) - 1))
    assert not Oracle(ORCHARD).judge(step[start:])
    assert not Oracle(ORCHARD).judge(step[:end])


LONG = [
    "Ann " * 50_000,
    "Ann has " + "8" * 200_000,
    "Ann has 8" + " + 8" * 50_000,
    "Ann has 8 apples. " * 3_000,
    "Together " + "Ann, " * 50_000,
    ". It is " * 30_000,
    "." + " " * 200_000 + "It is ",
    "A" * 200_000,
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_no_long_text_takes_long(text: str) -> None:
    """Linear reading takes under 0.3 s of CPU here, quadratic reading minutes."""
    started = time.process_time()
    step_correctness(ORCHARD, [text])
    assert time.process_time() - started < 3
