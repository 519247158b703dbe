"""The problem generator: its seeds, splits and levels, and questions that state all they need to."""

import hashlib
import itertools
import random
import re
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepspec.mini.problems import (
    MAX_VALUE,
    SPLIT_SIZES,
    STEPS,
    WORDING,
    Problem,
    Split,
    draw_problem,
    load_split,
    split_of,
    step_key,
    true_values,
    write_solution,
)

SIZED: tuple[Split, ...] = ("calibration", "test")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    """From the training split, where drawing is eight times as fast as in the others."""
    return list(itertools.islice(load_split("train"), 2_000))


Fact = tuple[str, tuple[str, ...], int]  # kind of relation, people referred to, number

NOT_ABOUT_QUANTITIES = re.compile(r"\w+ is \d+ years old|The \w+ cost \d+ dollars")


def read_fact(sentence: str) -> tuple[str, Fact] | None:
    """A statement of the question, read without the generator's help; None for an age or a price."""
    turned = re.fullmatch(r"Compared with (\w+), (.*)", sentence)
    sentence = f"{turned[2]} than {turned[1]}" if turned else sentence.removeprefix("We know that ")
    if match := re.fullmatch(r"(\w+) and (\w+) together have what (\w+) \w+", sentence):
        return match[3], ("sum", (match[1], match[2]), 0)
    if match := re.fullmatch(r"(\w+) \w+ as many \w+ as (\w+) and (\w+) together", sentence):
        return match[1], ("sum", (match[2], match[3]), 0)
    if match := re.fullmatch(r"(\w+) \w+ half as many \w+ (?:as|than) (\w+)", sentence):
        return match[1], ("half", (match[2],), 0)
    if match := re.fullmatch(r"(\w+) \w+ (\d+) (more|fewer|times)(?: as many)? \w+ (?:as|than) (\w+)", sentence):
        return match[1], (match[3], (match[4],), int(match[2]))
    if match := re.fullmatch(r"(\w+) \w+ (\d+) \w+", sentence):
        return match[1], ("given", (), int(match[2]))
    assert NOT_ABOUT_QUANTITIES.fullmatch(sentence), f"a sentence that nobody can read: {sentence}"
    return None


def read_question(question: str) -> tuple[dict[str, Fact], list[str]]:
    """The facts in the order of the text, and the people who are asked for."""
    *statements, asked = re.split(r"(?<=\.) ", question)
    facts = [fact for statement in statements if (fact := read_fact(statement.removesuffix(".")))]
    assert len(dict(facts)) == len(facts), f"somebody's quantity is stated twice: {question}"
    names = re.fullmatch(r"How many \w+ (?:do|does|did) (.+?) \w+(?: together| in total)?\?", asked)
    assert names, f"a question that nobody can read: {asked}"
    return dict(facts), re.split(", | and ", names[1])


def solve(facts: Mapping[str, Fact], name: str) -> float:
    kind, refs, number = facts[name]
    known = [solve(facts, ref) for ref in refs]
    match kind:
        case "given":
            return number
        case "more":
            return known[0] + number
        case "fewer":
            return known[0] - number
        case "times":
            return known[0] * number
        case "half":
            return known[0] / 2
        case _:
            return sum(known)


def needed(facts: Mapping[str, Fact], asked: list[str]) -> set[str]:
    return set(asked).union(*(needed(facts, list(facts[name][1])) for name in asked))


@given(seed=st.integers(), num_steps=st.integers(2, 6))
@settings(max_examples=50)
def test_the_same_seed_gives_the_same_problem(seed: int, num_steps: int) -> None:
    once, again = (draw_problem(random.Random(seed), "id", num_steps) for _ in range(2))
    assert once == again
    assert once.level == num_steps


@pytest.mark.parametrize("split", SPLIT_SIZES)
def test_a_split_can_be_entered_anywhere(split: Split) -> None:
    from_the_start = list(itertools.islice(load_split(split), 30))
    assert list(itertools.islice(load_split(split, start=20), 10)) == from_the_start[20:]


def test_the_problems_are_those_that_the_pair_was_trained_on() -> None:
    """The weights and every published figure belong to this text: what changes it needs a new `VERSION`."""
    digest = hashlib.sha256()
    for split in SPLIT_SIZES:
        for problem in itertools.islice(load_split(split), 100):
            digest.update("\n".join((problem.id, problem.question, *problem.steps, "")).encode())
    assert digest.hexdigest() == "5c7ed54a37940ee94673f1e4fb11892d45604ba3157c7183046ca6399b6a10e9"


def test_the_number_of_steps_is_the_level_and_levels_2_to_6_all_occur(problems: list[Problem]) -> None:
    assert all(problem.level == len(problem.steps) == len(problem.plan) for problem in problems)
    assert {problem.level for problem in problems[:1_000]} == {2, 3, 4, 5, 6}


def test_the_answer_is_a_whole_number_within_range_and_is_where_the_steps_end(
    problems: list[Problem],
) -> None:
    for problem in problems:
        assert type(problem.answer) is int
        assert all(2 <= value <= MAX_VALUE for value in (problem.answer, *true_values(problem).values()))
        assert re.search(r"= (\d+)[^=]*$", problem.steps[-1])[1] == str(problem.answer)  # pyright: ignore


def test_the_question_alone_determines_the_answer(problems: list[Problem]) -> None:
    for problem in problems:
        facts, asked = read_question(problem.question)
        assert sum(solve(facts, name) for name in asked) == problem.answer, problem
        assert {name: solve(facts, name) for name in facts} == true_values(problem)


def test_every_step_derives_something_that_the_answer_needs(problems: list[Problem]) -> None:
    for problem in problems:
        facts, asked = read_question(problem.question)
        derived = {name for name in needed(facts, asked) if facts[name][0] != "given"}
        assert derived == {relation.subject for relation in problem.plan} - {""}
        assert (len(asked) > 1) == (problem.plan[-1].kind == "total")


def test_some_problems_state_what_nobody_needs(problems: list[Problem]) -> None:
    assert any("years old" in problem.question for problem in problems)
    assert any("dollars" in problem.question for problem in problems)
    questions = [read_question(problem.question) for problem in problems]
    assert any(needed(facts, asked) < facts.keys() for facts, asked in questions)


def test_some_problems_state_a_relation_before_what_it_refers_to(problems: list[Problem]) -> None:
    def in_order(facts: Mapping[str, Fact]) -> bool:
        told: set[str] = set()
        for name, (_, refs, _) in facts.items():
            if not told.issuperset(refs):
                return False
            told.add(name)
        return True

    num_in_order = sum(in_order(read_question(problem.question)[0]) for problem in problems)
    assert 0.5 * len(problems) < num_in_order < 0.9 * len(problems)


def test_both_voices_use_every_wording_and_prefer_different_ones(problems: list[Problem]) -> None:
    assert all(weights.keys() == STEPS.keys() for weights in WORDING.values())
    assert all(len(row) == len(STEPS[key]) for weights in WORDING.values() for key, row in weights.items())
    rng = random.Random(0)
    for problem in problems[:100]:
        assert len(write_solution(problem, rng, "draft")) == problem.level
    assert {step_key(relation) for problem in problems for relation in problem.plan} == STEPS.keys()


@pytest.mark.parametrize("split", SIZED)
def test_a_split_has_the_promised_size(split: Split) -> None:
    size = SPLIT_SIZES[split]
    assert size == 10_000
    assert [problem.id for problem in load_split(split, start=size - 2)] == [
        f"gsm-mini-1/{split}/9998",
        f"gsm-mini-1/{split}/9999",
    ]
    assert list(load_split(split, start=size)) == []


def test_the_training_split_has_no_end() -> None:
    assert next(load_split("train", start=10**12)).id == "gsm-mini-1/train/1000000000000"


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no split 'validation'; it has train, calibration, test"):
        next(load_split("validation"))  # pyright: ignore[reportArgumentType]


def check_splits(num_problems: int) -> None:
    """A question's hash decides its split, so splits cannot share one; and benchmarks ask nothing twice."""
    questions: dict[Split, list[str]] = {}
    for split in SPLIT_SIZES:
        questions[split] = [problem.question for problem in itertools.islice(load_split(split), num_problems)]
        assert all(split_of(question) == split for question in questions[split])
    for one, other in itertools.combinations(questions.values(), 2):
        assert not set(one) & set(other)
    for split in SIZED:
        assert len(set(questions[split])) == len(questions[split]) == min(num_problems, 10_000)


def test_no_question_is_in_two_splits_or_twice_in_a_benchmark() -> None:
    check_splits(num_problems=1_000)


@pytest.mark.soak
def test_no_question_is_in_two_whole_splits_or_twice_in_a_whole_benchmark() -> None:
    check_splits(num_problems=20_000)
