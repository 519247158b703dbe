"""The oracle: right steps, wrong steps, steps that build on wrong ones, and text that is not a step."""

import itertools
import random
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evals.training.corrupt import corrupt_step
from evals.training.gsm_mini import (
    NAMES,
    SCENES,
    Content,
    Problem,
    Relation,
    load_split,
    step_content,
    true_values,
    write_solution,
)
from evals.training.oracle import Oracle, step_correctness
from evals.training.wording import COMPUTATIONS, CONCLUSIONS, JOINS, LEADS, REASONS, Voice

VOICES: tuple[Voice, ...] = ("target", "draft")
APPLES = SCENES[0]

RELATIONS = (
    Relation("given", "Ann", amount=8),
    Relation("more", "Ben", ("Ann",), 4),
    Relation("part", "Cara", ("Ben",), count=2),
    Relation("sum", "Dan", ("Ann", "Cara")),
    Relation("times", "Ella", ("Cara",), 3),
    Relation("fewer", "Finn", ("Ella",), 8),
    Relation("boxes", "Gina", amount=5, count=4),
    Relation("percent", "Hugo", ("Gina",), 25),
    Relation("total", "", ("Dan", "Ben", "Finn")),
)
QUESTION = (
    "Some friends met. Ann has 8 apples. Ben has 4 more apples than Ann. Cara has half as many apples as Ben. "
    "Dan has as many apples as Ann and Cara together. Compared with Cara, Ella has 3 times as many apples. "
    "Finn has 8 fewer apples than Ella. Gina has 4 boxes of 5 apples each. Hugo has 25% as many apples as Gina. "
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


def orchard_with(goal: Relation) -> Problem:
    """Return the orchard problem with another question."""
    return Problem("orchard", QUESTION, 0, (), APPLES, ORCHARD.relations, (*ORCHARD.plan[:-1], goal))


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return list(itertools.islice(load_split("train"), 1_000))


@pytest.mark.parametrize("voice", VOICES)
def test_every_reference_step_is_correct_in_context_and_without_it(problems: list[Problem], voice: Voice) -> None:
    rng = random.Random(0)
    for problem in problems:
        steps = write_solution(problem, rng, voice)
        assert all(step_correctness(Oracle(problem), steps)), (problem.question, steps)
        assert all(Oracle(problem).judge(step) for step in steps)


def test_every_corrupt_step_is_incorrect(problems: list[Problem]) -> None:
    rng = random.Random(1)
    for problem in problems:
        values, oracle = true_values(problem), Oracle(problem)
        for index, step in enumerate(problem.steps):
            wrong = corrupt_step(problem, index, values, rng).word(rng, rng.choice(VOICES))
            assert not oracle.judge(wrong), (problem.question, wrong)
            oracle.observe(step)


RIGHT_STEPS = [
    step for seed in range(8) for voice in VOICES for step in write_solution(ORCHARD, random.Random(seed), voice)
]


@given(data=st.data())
@settings(max_examples=300)
def test_changing_any_number_makes_a_right_step_incorrect(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from(RIGHT_STEPS))
    number = data.draw(st.sampled_from(list(re.finditer(r"\d+", step))))
    other = data.draw(st.integers(0, 10**9).filter(lambda other: other != int(number[0])))
    assert not Oracle(ORCHARD).judge(f"{step[: number.start()]}{other}{step[number.end() :]}")


@given(data=st.data())
@settings(max_examples=300)
def test_changing_any_person_makes_a_right_step_incorrect(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from(RIGHT_STEPS))
    name = data.draw(st.sampled_from([found for found in re.finditer(r"\w+", step) if found[0] in NAMES]))
    other = data.draw(st.sampled_from([each for each in NAMES if each != name[0]]))
    assert not Oracle(ORCHARD).judge(f"{step[: name.start()]}{other}{step[name.end() :]}")


@pytest.mark.parametrize("slip", [-1, 2, 10])
def test_a_step_that_follows_from_a_wrong_one_is_correct_and_one_that_ignores_it_is_not(
    problems: list[Problem], slip: int
) -> None:
    rng = random.Random(2)
    checked = 0
    for problem in problems[:500]:
        first, values = problem.plan[0], true_values(problem)
        if not first.subject:
            continue
        believed = values | {first.subject: values[first.subject] + slip}
        right = step_content(problem.scene, first, values)
        wrong = Content(right.key, {**right.slots, "c": str(believed[first.subject])}).word(rng, "target")
        oracle = Oracle(problem)
        assert not oracle.judge(wrong)
        oracle.observe(wrong)
        for relation in problem.plan[1:]:
            value = relation.value(believed)
            if value is None or value < 0:  # half of an odd number: no step can follow
                break
            if first.subject in relation.refs:
                assert not oracle.judge(step_content(problem.scene, relation, values).word(rng, "draft"))
                checked += 1
            step = step_content(problem.scene, relation, believed).word(rng, "draft")
            assert oracle.judge(step), (problem.question, wrong, step)
            oracle.observe(step)
            believed[relation.subject] = value
    assert checked > 200


RIGHT = "Next, Ben has 4 more than Ann, and Ann has 8. So 8 + 4 = 12, so Ben has 12."
WRONG = "Next, Ben has 4 more than Ann, and Ann has 8. So 8 + 4 = 13, so Ben has 13."


def test_deriving_a_value_again_corrects_a_mistake() -> None:
    steps = [WRONG, "Ben has 13.", WRONG, "Ben has 12.", RIGHT, "Ben has 12."]
    assert step_correctness(Oracle(ORCHARD), steps) == [False, True, False, False, True, True]


def test_the_last_claim_counts_even_if_it_misreads_a_quantity() -> None:
    misread = "Next, Ben has 4 more than Ann, and Ann has 9. So 9 + 4 = 13, so Ben has 13."
    assert step_correctness(Oracle(ORCHARD), [misread, "Ann has 9.", "Ben has 13."]) == [False, True, True]
    assert step_correctness(Oracle(ORCHARD), ["Ann has 9.", "Ann has 8.", RIGHT]) == [False, True, True]


def test_nothing_follows_from_half_of_an_odd_number() -> None:
    for half in (6, 7):
        step = f"Next, Cara has half as many as Ben, and Ben has 13. So 13 / 2 = {half}, so Cara has {half}."
        assert step_correctness(Oracle(ORCHARD), [WRONG, step])[1] is False


CORRECT = [
    RIGHT,
    f"  {RIGHT}\n\n",
    f"{RIGHT}</think>",
    f"{RIGHT}\n</think>\n",
    "Ann has 8.",
    "Ann has 8 apples.",
    "It says Ben has 4 more than Ann.",
    "Look: Dan has the sum of Cara and Ann.",
    "Now, Ann has 8. Then 8 + 4 = 12, so Ben has 12.",
    "Now, Ann has 8. We add: 4 + 8 = 12. Hence Ben has 12 apples. Check: 12 - 4 = 8.",
    "We read Gina has 4 boxes of 5 apples each. That is 4 * 5 = 20. Thus Gina has 20. Indeed, 20 / 4 = 5.",
    "We read Gina has 20, where Hugo has 25% as many as Gina. So 25% of 20 = 5. We find Hugo has 5.",
    "Look: Finn has 10, Dan has 14, while Ben has 12. So 10 + 14 + 12 = 36. Hence together they have 36 apples.",
]


@pytest.mark.parametrize("step", CORRECT)
def test_a_valid_step_is_correct(step: str) -> None:
    assert Oracle(ORCHARD).judge(step)


INCORRECT = {
    "empty": ["", " \n\n", "</think>", "\n</think>\n", "So.", "Next, and, so"],
    "no step": ["Hmm.", "The answer is 36.", "Ann", "= 12", "8 + 4 = 12.", "12", "So 8 + 4 = 12."],
    "a wrong number": [
        "Ann has 9.",
        "Next, Ben has 5 more than Ann.",
        "Ann has 8. Ben has 13.",
        "Gina has 5 boxes of 4 apples each.",
    ],
    "a wrong item": ["Ann has 8 pears.", "Gina has 4 boxes of 5 coins each."],
    "a wrong verb": ["Ann picked 8.", "Next, Ann picked 8. So 8 + 4 = 12, so Ben has 12."],
    "an unknown person": [
        "Zoe has 8.",
        "Next, Zoe has 4 more than Ann, and Ann has 8. So 8 + 4 = 12, so Zoe has 12.",
        "Next, Zoe has 8. So 8 + 4 = 12, so Ben has 12.",
    ],
    "another person": [
        "Next, Cara has 4 more than Ann, and Ann has 8. So 8 + 4 = 12, so Cara has 12.",
        "Next, Ben has 4 more than Cara, and Cara has 6. So 6 + 4 = 10, so Ben has 10.",
        "Next, Dan has the sum of Ann and Ben, and Ann has 8 and Ben has 12. So 8 + 12 = 20, so Dan has 20.",
        "Next, Ben has 4 more than Ann, and Ann has 8. So 8 + 4 = 12, so Cara has 12.",
    ],
    "a wrong kind": [
        "Next, Ben has 4 fewer than Ann, and Ann has 8. So 8 - 4 = 4, so Ben has 4.",
        "Next, Ben has 4 fewer than Ann, and Ann has 8. So 8 + 4 = 12, so Ben has 12.",
        "Next, Ben has 4 more than Ann, and Ann has 8. So 8 - 4 = 4, so Ben has 4.",
        "Ella has half as many as Cara.",
    ],
    "false arithmetic": [
        WRONG,
        "Next, Ann has 8. So 9 + 3 = 12, so Ben has 12.",
        "Next, Ann has 8. So 8 + 4 + 0 = 12, so Ben has 12.",
        "Next, Ann has 8. So 8 * 4 = 12, so Ben has 12.",
        "Next, Ann has 8. So 8 + 4 = 12, so Ben has 13.",
        "Next, Ella has 18. So 8 - 18 = 10, so Finn has 10.",
    ],
    "a false check": [f"{RIGHT} Check: 12 - 4 = 9.", f"{RIGHT} Check: 12 - 5 = 7.", f"{RIGHT} Check: 12 - 8 = 5."],
    "a total nobody asked for": [
        "Next, Dan has 14, and Ben has 12. So 14 + 12 = 26, so together they have 26.",
        "Next, Ann has 8, Ben has 12, and Finn has 10. So 8 + 12 + 10 = 30, so together they have 30.",
        "Next, Dan has 14, and Ben has 12. So 14 - 12 = 2, so the difference is 2.",
    ],
    "two steps in one": [f"{RIGHT} {RIGHT}"],
    "more than can be read": ["Ann has 8. Really.", f"{RIGHT}</think>The answer is 36."],
    "numbers that are none": ["Ann has \u0668.", f"Ann has {'8' * 5_000}.", "Ann has 8.0.", "Ann has -8."],
}


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, id=f"{why}-{i}") for why, steps in INCORRECT.items() for i, step in enumerate(steps)],
)
def test_any_other_step_is_incorrect(step: str) -> None:
    assert not Oracle(ORCHARD).judge(step)


ENDS = {
    "gap": (
        Relation("gap", "", ("Dan", "Ben")),
        "Now, Dan has 14, and Ben has 12. So 14 - 12 = 2, so the difference is 2.",
    ),
    "share": (
        Relation("share", "", ("Ella",), 6),
        "Now, Ella has 18, and Ella shares the apples among 6 friends. So 18 / 6 = 3, so each friend gets 3.",
    ),
    "price": (
        Relation("price", "", ("Finn",), 3),
        "Now, Finn has 10, and the apples cost 3 dollars each. So 10 * 3 = 30, so the price is 30 dollars.",
    ),
}


@pytest.mark.parametrize("kind", ENDS)
def test_only_the_final_question_can_be_answered(kind: str) -> None:
    goal, step = ENDS[kind]
    assert Oracle(orchard_with(goal)).judge(step)
    assert not Oracle(ORCHARD).judge(step)
    assert not Oracle(orchard_with(goal)).judge(
        re.sub(r"(\d+)([^\d]*)$", lambda found: f"{int(found[1]) + 1}{found[2]}", step)
    )


def test_judging_does_not_change_the_oracle() -> None:
    oracle = Oracle(ORCHARD)
    for _ in range(2):
        assert not oracle.judge("Next, Ann has 9. So 9 + 4 = 13, so Ben has 13.")
        assert oracle.judge(RIGHT)


def test_unreadable_text_and_unknown_people_do_not_change_the_oracle() -> None:
    oracle = Oracle(ORCHARD)
    for step in ("", "Hmm.", "Ann has 9 pears.", "Zoe has 3.", "Zoe has 3. So 3 + 4 = 7, so Uma has 7."):
        oracle.observe(step)
    assert oracle.judge("Ann has 8.")
    assert not oracle.judge("Zoe has 3.")


TEXTS = [text for table in (LEADS, JOINS, COMPUTATIONS, CONCLUSIONS) for text, _, _ in table]
WORDS = sorted({word for text in (*TEXTS, *REASONS.values()) for word in text.split()})
FRAGMENTS = st.sampled_from([*NAMES, "has", "apples", "apples.", "8", "4", "12", "-", "= 0", "/ 0", *WORDS])


@given(
    steps=st.lists(st.text() | st.lists(FRAGMENTS, max_size=20).map(" ".join) | st.sampled_from(CORRECT), max_size=4)
)
@example(steps=["Ann has 0.", "Ann has 000008 apples."])
@example(steps=["Now, Cara has 0. So 0 / 0 = 0, so Ella has 0. Check: 0 / 0 = 0."])
@settings(max_examples=300)
def test_the_oracle_never_raises(steps: list[str]) -> None:
    assert len(step_correctness(Oracle(ORCHARD), steps)) == len(steps)


LONG = [
    "Ann " * 50_000,
    "Ann has " + "8" * 200_000,
    "Ann has 8" + " + 8" * 50_000,
    "Ann has 8 apples. " * 3_000,
    "So, " * 50_000,
    "." + " " * 200_000 + "It is ",
    "A" * 200_000,
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_texts_are_judged_in_linear_time(text: str) -> None:
    """Linear parsing takes less than a second of CPU time, quadratic parsing takes minutes."""
    started = time.process_time()
    step_correctness(Oracle(ORCHARD), [text])
    assert time.process_time() - started < 5
