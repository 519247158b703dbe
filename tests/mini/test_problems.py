"""The problem generator: seeds, splits, levels, and questions that state every needed fact."""

import gzip
import hashlib
import itertools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evals.training.gsm_mini import (
    DATA,
    MAX_VALUE,
    NUM_SHIPPED,
    SPLIT_SIZES,
    VERSION,
    Problem,
    Split,
    draw_problem,
    load_split,
    shipped_row,
    split_of,
    train_problem,
    true_values,
    write_solution,
)
from evals.training.wording import (
    CHECK_LEADS,
    COMPUTATIONS,
    CONCLUSIONS,
    EQUATIONS,
    JOINS,
    LEADS,
    REASONS,
    UNITS,
    Voice,
)

SIZED: tuple[Split, ...] = ("calibration", "test")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    """Problems of the training split, which is eight times as fast to generate as the others."""
    return list(itertools.islice(load_split("train"), 2_000))


Fact = tuple[str, tuple[str, ...], int, int]  # the kind of relation, the people it refers to, and two numbers

NOT_ABOUT_QUANTITIES = re.compile(r"\w+ is \d+ years old|A ticket cost \d+ dollars")
FRACTIONS = {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}


def read_fact(sentence: str) -> tuple[str, Fact] | None:
    """Parse a statement of the question without the generator's code. Return None for an age or a ticket price."""
    turned = re.fullmatch(r"Compared with (\w+), (.*)", sentence)
    sentence = f"{turned[2]} than {turned[1]}" if turned else sentence.removeprefix("We know that ")
    if match := re.fullmatch(r"(\w+) \w+ as many \w+ as (\w+) and (\w+) together", sentence):
        return match[1], ("sum", (match[2], match[3]), 0, 0)
    if match := re.fullmatch(r"(\w+) \w+ (half|a \w+) as many \w+ (?:as|than) (\w+)", sentence):
        return match[1], ("part", (match[3],), FRACTIONS[match[2]], 0)
    if match := re.fullmatch(r"(\w+) \w+ (\d+)% as many \w+ (?:as|than) (\w+)", sentence):
        return match[1], ("percent", (match[3],), int(match[2]), 0)
    if match := re.fullmatch(r"(\w+) \w+ (\d+) (more|fewer|times)(?: as many)? \w+ (?:as|than) (\w+)", sentence):
        return match[1], (match[3], (match[4],), int(match[2]), 0)
    if match := re.fullmatch(r"(\w+) \w+ (\d+) \w+ a day for (\d+) days", sentence):
        return match[1], ("product", (), int(match[2]), int(match[3]))
    if match := re.fullmatch(r"(\w+) \w+ (\d+) \w+ of (\d+) \w+ each", sentence):
        return match[1], ("product", (), int(match[2]), int(match[3]))
    if match := re.fullmatch(r"(\w+) shares the \w+ equally among (\d+) friends", sentence):
        return "share", ("part", (match[1],), int(match[2]), 0)
    if match := re.fullmatch(r"The \w+ cost (\d+) dollars each", sentence):
        return "price", ("times", (), int(match[1]), 0)
    if match := re.fullmatch(r"(\w+) \w+ (\d+) \w+", sentence):
        return match[1], ("given", (), int(match[2]), 0)
    assert NOT_ABOUT_QUANTITIES.fullmatch(sentence), f"cannot parse this sentence: {sentence}"
    return None


def read_question(question: str) -> tuple[dict[str, Fact], Fact]:
    """Return the facts in the order of the text, and the question as another fact."""
    _, *statements, goal = re.split(r"(?<=\.) ", question)
    facts = [fact for statement in statements if (fact := read_fact(statement.removesuffix(".")))]
    assert len(dict(facts)) == len(facts), f"a quantity is stated twice: {question}"
    return dict(facts), read_goal(goal, dict(facts))


def read_goal(goal: str, facts: Mapping[str, Fact]) -> Fact:
    if re.fullmatch(r"How many \w+ does each friend get\?", goal):
        return facts["share"]
    if match := re.fullmatch(r"How many dollars do the \w+ of (\w+) cost\?", goal):
        return "times", (match[1],), facts["price"][2], 0
    if match := re.fullmatch(r"How many more \w+ (?:does|did) (\w+) \w+ than (\w+)\?", goal):
        return "difference", (match[1], match[2]), 0, 0
    match = re.fullmatch(r"How many \w+ (?:do|does|did) (.+?) \w+(?: together| in total)?\?", goal)
    assert match, f"cannot parse this question: {goal}"
    return "sum", tuple(match[1].split(" and ")), 0, 0


def solve(facts: Mapping[str, Fact], fact: Fact) -> float:
    kind, refs, number, other = fact
    known = [solve(facts, facts[ref]) for ref in refs]
    match kind:
        case "given":
            return number
        case "product":
            return number * other
        case "more":
            return known[0] + number
        case "fewer":
            return known[0] - number
        case "times":
            return known[0] * number
        case "part":
            return known[0] / number
        case "percent":
            return known[0] * number / 100
        case "difference":
            return known[0] - known[1]
        case _:
            return sum(known)


def needed(facts: Mapping[str, Fact], fact: Fact) -> set[str]:
    return set(fact[1]).union(*(needed(facts, facts[name]) for name in fact[1]))


def people(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {name: fact for name, fact in facts.items() if name not in ("share", "price")}


@given(seed=st.integers(), num_steps=st.integers(1, 10))
@settings(max_examples=50)
def test_the_same_seed_gives_the_same_problem(seed: int, num_steps: int) -> None:
    once, again = (draw_problem(random.Random(seed), "id", num_steps) for _ in range(2))
    assert once == again
    assert once.level == num_steps


@pytest.mark.parametrize("split", SPLIT_SIZES)
def test_a_split_can_start_at_any_problem(split: Split) -> None:
    from_the_start = list(itertools.islice(load_split(split), 30))
    assert list(itertools.islice(load_split(split, start=20), 10)) == from_the_start[20:]


def test_the_problems_have_not_changed_since_the_pair_was_trained() -> None:
    """The weights and all published figures depend on these texts. A change of the texts needs a new `VERSION`."""
    digest = hashlib.sha256()
    for split in SPLIT_SIZES:
        for problem in itertools.islice(load_split(split), 100):
            digest.update("\n".join((problem.id, problem.question, *problem.steps, "")).encode())
    assert digest.hexdigest() == "585bcf727d20384db9da1ef00824670822a1ae24eda34a39c3173710034fef48"


def test_the_number_of_steps_is_the_level_and_all_levels_occur(problems: list[Problem]) -> None:
    assert all(problem.level == len(problem.steps) == len(problem.plan) for problem in problems)
    assert {problem.level for problem in problems} == set(range(1, 11))
    assert {problem.level for problem in itertools.islice(load_split("test"), 500)} == set(range(3, 11))


def test_the_answer_is_an_integer_within_range_and_the_result_of_the_last_step(
    problems: list[Problem],
) -> None:
    for problem in problems:
        assert type(problem.answer) is int
        assert 1 <= problem.answer <= MAX_VALUE
        assert all(2 <= value <= MAX_VALUE for value in true_values(problem).values())
        assert str(problem.answer) in re.findall(r"= (\d+)", problem.steps[-1])


def test_the_question_alone_determines_the_answer(problems: list[Problem]) -> None:
    for problem in problems:
        facts, goal = read_question(problem.question)
        assert solve(facts, goal) == problem.answer, problem
        assert {name: solve(facts, fact) for name, fact in people(facts).items()} == true_values(problem)


def test_every_step_derives_a_value_that_the_answer_needs(problems: list[Problem]) -> None:
    for problem in problems:
        facts, goal = read_question(problem.question)
        derived = {name for name in needed(facts, goal) if facts[name][0] != "given"}
        assert derived == {relation.subject for relation in problem.plan} - {""}
        assert (goal[0] == "sum" and len(goal[1]) == 1) == bool(problem.plan[-1].subject)


def test_some_problems_state_unneeded_facts(problems: list[Problem]) -> None:
    assert any("years old" in problem.question for problem in problems)
    assert any("ticket" in problem.question for problem in problems)
    questions = [read_question(problem.question) for problem in problems]
    assert any(needed(facts, goal) < people(facts).keys() for facts, goal in questions)


def test_needed_facts_are_stated_in_the_order_of_derivation(problems: list[Problem]) -> None:
    for problem in problems:
        facts, goal = read_question(problem.question)
        stated: set[str] = set()
        for name in [name for name in facts if name in needed(facts, goal)]:
            assert stated.issuperset(facts[name][1]), problem.question
            stated.add(name)


def test_every_kind_of_step_occurs_and_has_a_wording(problems: list[Problem]) -> None:
    assert {relation.kind for problem in problems for relation in problem.plan} == REASONS.keys()
    assert REASONS.keys() == EQUATIONS.keys()


@pytest.mark.parametrize("voice", ["target", "draft"])
def test_a_voice_uses_every_phrasing_and_rarely_repeats_a_solution(problems: list[Problem], voice: Voice) -> None:
    rng = random.Random(0)
    steps = [step for problem in problems[:500] for step in write_solution(problem, rng, voice)]
    for table in (LEADS, JOINS, COMPUTATIONS, CONCLUSIONS, CHECK_LEADS):
        for text, *_ in table:
            assert any(text.partition("{do}")[0] in step for step in steps), text
    problem = problems[0]
    assert len({write_solution(problem, rng, voice) for _ in range(100)}) > 95


def test_the_voices_share_all_phrasings_and_prefer_different_ones() -> None:
    for table in (LEADS, JOINS, COMPUTATIONS, CONCLUSIONS, UNITS):
        assert all(target > 0 and draft > 0 for _, target, draft in table)
        assert max(table, key=lambda each: each[1]) != max(table, key=lambda each: each[2])


def test_easier_training_problems_also_belong_to_the_training_split() -> None:
    for number in range(200):
        easy, usual = train_problem(number, max_level=4), train_problem(number)
        assert easy.level <= 4
        assert split_of(easy.question) == split_of(usual.question) == "train"
    assert train_problem(7) == next(load_split("train", start=7))


@pytest.mark.parametrize("split", SIZED)
def test_a_split_has_the_promised_size(split: Split) -> None:
    size = SPLIT_SIZES[split]
    assert size == 10_000
    assert [problem.id for problem in load_split(split, start=size - 2)] == [
        f"gsm-mini-{VERSION}/{split}/9998",
        f"gsm-mini-{VERSION}/{split}/9999",
    ]
    assert list(load_split(split, start=size)) == []


def test_the_training_split_has_no_end() -> None:
    assert next(load_split("train", start=10**12)).id == f"gsm-mini-{VERSION}/train/1000000000000"


def test_an_unknown_split_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no split 'validation'\. Choose one of train, calibration, test\."):
        next(load_split("validation"))  # pyright: ignore[reportArgumentType]


def shipped(split: Split) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"gsm-mini-{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("every", [100, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("split", SPLIT_SIZES)
def test_the_generator_makes_the_problems_that_ship(split: Split, every: int) -> None:
    rows = shipped(split)
    assert len(rows) == NUM_SHIPPED[split]
    for number in range(0, len(rows), every):
        assert shipped_row(next(load_split(split, start=number))) == rows[number]


def test_no_question_that_ships_is_in_two_splits_or_twice_in_a_benchmark() -> None:
    """The hash of a question decides its split."""
    questions: dict[Split, list[str]] = {split: [row["question"] for row in shipped(split)] for split in SPLIT_SIZES}
    assert all(split_of(question) == split for split, found in questions.items() for question in found)
    for split in SIZED:
        assert len({*questions[split]}) == len(questions[split])
