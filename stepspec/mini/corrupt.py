"""Wrong variants of reference steps, for training and testing judges: each has one mistake that a small model makes."""

import random
from collections.abc import Mapping
from dataclasses import replace

from stepspec.mini.problems import Kind, Problem, Relation, Voice, step_slots, word_step

OTHER_KINDS: Mapping[Kind, tuple[Kind, ...]] = {"more": ("fewer", "times"), "fewer": ("more",), "times": ("more",)}
SLIPS = (-10, -2, -1, 1, 2, 10)


def corrupt_step(problem: Problem, index: int, values: Mapping[str, int], rng: random.Random, voice: Voice) -> str:
    """Step `index` of the problem with one mistake in it, in the wording of a voice.

    The mistake is one of: the result is miscalculated, a quantity is misread or somebody else's, the amount is
    misread, the kind of relation is mistaken, or another person is referred to.
    """
    relation = problem.plan[index]
    right = step_slots(problem.scene, relation, values)
    while True:
        mistake = rng.choice(MISTAKES)
        wrong, slips = mistake(relation, values, rng)
        value = wrong.value({**values, **slips})
        if value is None or value < 0 or (wrong, slips) == (relation, {}):
            continue
        slots = step_slots(problem.scene, wrong, {**values, **slips})
        if mistake is _result:
            slots["c"] = str(max(0, value + rng.choice(SLIPS)))
        if slots["c"] != right["c"]:
            return word_step(wrong, slots, rng, voice)


_Mistake = tuple[Relation, dict[str, int]]  # the relation as written, and quantities misread in it


def _result(relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    return relation, {relation.subject: -1}  # the slip itself is made where the result is written


def _operand(relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    ref = rng.choice(relation.refs)
    others = [value for name, value in values.items() if name not in relation.refs]
    near = max(0, values[ref] + rng.choice(SLIPS))
    return relation, {ref: rng.choice([*others, near, near])}


def _amount(relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    return replace(relation, amount=max(2, relation.amount + rng.choice(SLIPS))), {}


def _kind(relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    return replace(relation, kind=rng.choice(OTHER_KINDS.get(relation.kind, (relation.kind,)))), {}


def _person(relation: Relation, values: Mapping[str, int], rng: random.Random) -> _Mistake:
    wrong = rng.choice(relation.refs)
    others = [name for name in values if name not in relation.refs and name != relation.subject] or [wrong]
    right = rng.choice(others)
    return replace(relation, refs=tuple(right if name == wrong else name for name in relation.refs)), {}


MISTAKES = (_result, _operand, _operand, _amount, _kind, _person)
