"""Wrong variants of reference steps, to train and test judges. Each has one mistake typical of a small model."""

import random
from collections.abc import Mapping
from dataclasses import replace

from evals.training.gsm_mini import Content, Kind, Problem, Relation, step_content
from evals.training.wording import FRACTIONS

OTHER_KINDS: Mapping[Kind, tuple[Kind, ...]] = {"more": ("fewer", "times"), "fewer": ("more",), "times": ("more",)}
SLIPS = (-10, -2, -1, 1, 2, 10)


def corrupt_step(problem: Problem, index: int, values: Mapping[str, int], rng: random.Random) -> Content:
    """Return the content of step `index` of the problem with one mistake.

    The mistake is one of: a wrong result, a misread quantity, another person's quantity, a misread number of the story,
    the wrong kind of relation, a reference to the wrong person, or another person's relation.
    """
    relation = problem.plan[index]
    right = step_content(problem.scene, relation, values)
    while True:
        mistake = rng.choice(MISTAKES)
        wrong, slips = mistake(problem, relation, values, rng)
        if (wrong, slips) == (relation, {}):
            continue
        value = wrong.value({**values, **slips})
        if value is None or value < 0:
            continue
        content = step_content(problem.scene, wrong, {**values, **slips})
        if mistake is _result:
            content = replace(content, slots={**content.slots, "c": str(max(0, value + rng.choice(SLIPS)))})
        if content.slots["c"] != right.slots["c"]:
            return content


_Mistake = tuple[Relation, dict[str, int]]  # the relation to write, and the misread quantities


def _result(problem: Problem, relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    return relation, {relation.subject: -1}  # `corrupt_step` changes the result itself


def _operand(problem: Problem, relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    if not relation.refs:
        return _number(problem, relation, values, rng)
    ref = rng.choice(relation.refs)
    others = [value for name, value in values.items() if name not in relation.refs]
    near = max(0, values[ref] + rng.choice(SLIPS))
    return relation, {ref: rng.choice([*others, near, near])}


def _number(problem: Problem, relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    if relation.kind == "part":
        return replace(relation, count=rng.choice(list(FRACTIONS))), {}
    others = [each.amount for each in problem.relations.values() if each.amount]
    amount = rng.choice([*others, max(2, relation.amount + rng.choice(SLIPS))])
    return replace(relation, amount=amount), {}


def _kind(problem: Problem, relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    return replace(relation, kind=rng.choice(OTHER_KINDS.get(relation.kind, (relation.kind,)))), {}


def _person(problem: Problem, relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    if not relation.refs:
        return _subject(problem, relation, values, rng)
    wrong = rng.choice(relation.refs)
    others = [name for name in values if name not in relation.refs and name != relation.subject] or [wrong]
    right = rng.choice(others)
    return replace(relation, refs=tuple(right if name == wrong else name for name in relation.refs)), {}


def _subject(problem: Problem, relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    other = rng.choice(list(problem.relations.values()))
    if not relation.subject or other.kind == "given" or relation.subject in other.refs:
        return relation, {}
    return replace(other, subject=relation.subject), {}


MISTAKES = (_result, _operand, _operand, _number, _kind, _person, _subject)
