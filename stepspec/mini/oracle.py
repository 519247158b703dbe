"""Says whether a step is correct: whether all that it says follows from the problem and the text before.

It knows the problem's graph, so it is for tests, training and calibration only: a judge that asked it at run
time would be told the answer. It reads the problem's own sentences and the wordings of
`stepspec.mini.problems`; a true sentence in other words counts as incorrect.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

from stepspec.mini.problems import STATEMENTS, STEPS, Kind, Problem, Relation, Scene, true_values

_NAME = "[A-Z][a-z]{0,20}"
_NUMBER = "-?[0-9]{1,6}"
_SLOTS = dict.fromkeys("SRQP", _NAME) | dict.fromkeys("Kabdc", _NUMBER)
_EQUATION = re.compile(r"\{\w\}( [-+*/] (\{\w\}|2))+(?= = \{c\})")
_COMPUTATION = f"(?P<equation>{_NUMBER}(?: [-+*/] {_NUMBER}){{1,2}})"
# Some wordings are two sentences, of which the second begins with "It is".
_BETWEEN_SENTENCES = re.compile(r"(?<=\.)\s+(?!It is )")
_OPERATORS: Mapping[Kind, str] = {
    "more": "+",
    "fewer": "-",
    "times": "*",
    "half": "/",
    "sum": "+",
    "total": "+",
}


@dataclass(frozen=True)
class _Reading:
    """What a sentence says, if it is meant as one of the kinds; None where it leaves something unsaid."""

    kind: Kind
    subject: str  # empty for the total
    refs: tuple[str, ...]
    amount: int | None
    stated: Mapping[str, int]  # whom it says to have how many, in passing
    equation: tuple[str, ...] | None  # numbers and operators in turn
    result: int | None

    @property
    def claims(self) -> Iterator[tuple[str, int]]:
        """Whom the sentence says to have how many, the subject included."""
        yield from self.stated.items()
        value = self.amount if self.kind == "given" else self.result
        if value is not None:
            yield self.subject, value


class Oracle:
    """Judges the steps of one problem, each in the context of those observed before it.

    A person has what the text last said, right or wrong, and otherwise what the problem's relation gives. So
    a step that builds on an earlier mistake is correct and one that ignores it is not, but the mistake itself
    may be put right by deriving it anew. A step may be several sentences: each must hold after those before.

        oracle = Oracle(problem)
        oracle.judge("Ann has 3 more apples than Ben, so Ann has 4 + 3 = 7 apples.")
    """

    def __init__(self, problem: Problem) -> None:
        self._scene = problem.scene
        self._question = frozenset(_sentences(problem.question)[:-1])  # but for what it asks
        self._relations = dict(problem.relations)
        self._order = tuple(true_values(problem))  # everybody after those they refer to
        if problem.plan[-1].kind == "total":
            self._relations[""] = problem.plan[-1]
        self._claims: dict[str, int] = {}

    def judge(self, step: str) -> bool:
        """Whether all that the step says holds. An empty step is incorrect. Nothing is remembered."""
        claims = dict(self._claims)
        sentences = _sentences(step)
        for sentence in sentences:
            if not self._follows(sentence, self._values(claims)):
                return False
            claims |= self._claims_in(sentence)
        return bool(sentences)

    def observe(self, step: str) -> None:
        """The step becomes text before: what it says that anybody has is remembered, be it right or wrong."""
        for sentence in _sentences(step):
            self._claims |= self._claims_in(sentence)

    def _claims_in(self, sentence: str) -> dict[str, int]:
        """What the sentence says that people of the problem have; all readings of it say the same."""
        readings = _readings(self._scene, sentence)
        return {name: value for reading in readings for name, value in reading.claims if name in self._order}

    def _values(self, claims: Mapping[str, int]) -> dict[str, int]:
        """What everybody has; those are missing whose relation gives no whole number."""
        values: dict[str, int] = {}
        for name in self._order:
            relation = self._relations[name]
            value = claims.get(name)
            if value is None and all(ref in values for ref in relation.refs):
                value = relation.value(values)
            if value is not None:
                values[name] = value
        return values

    def _follows(self, sentence: str, values: Mapping[str, int]) -> bool:
        readings = _readings(self._scene, sentence)
        return sentence in self._question or any(self._holds(reading, values) for reading in readings)

    def _holds(self, reading: _Reading, values: Mapping[str, int]) -> bool:
        relation = self._relations.get(reading.subject)
        if relation is None:
            return False
        if reading.kind == "given" and values.get(reading.subject) == reading.amount:
            return True
        return (
            reading.kind == relation.kind
            and sorted(reading.refs) == sorted(relation.refs)
            and reading.amount in (None, relation.amount)
            and all(values.get(name) == value for name, value in reading.stated.items())
            and (reading.equation is None or _computes(reading, relation, values))
        )


def step_correctness(problem: Problem, steps: Sequence[str]) -> list[bool]:
    """Whether each step is correct in the context of those before it, which may be wrong."""
    oracle = Oracle(problem)
    verdicts: list[bool] = []
    for step in steps:
        verdicts.append(oracle.judge(step))
        oracle.observe(step)
    return verdicts


def _computes(reading: _Reading, relation: Relation, values: Mapping[str, int]) -> bool:
    """Whether the equation is what the relation asks for; where order is no matter, it may be any."""
    if reading.equation is None or any(name not in values for name in relation.refs):
        return False
    known = [values[name] for name in relation.refs]
    if relation.kind not in ("sum", "total"):
        known.append(2 if relation.kind == "half" else relation.amount)
    written = [int(number) for number in reading.equation[::2]]
    operator = _OPERATORS[relation.kind]
    if operator in "+*":
        known, written = sorted(known), sorted(written)
    same = written == known and set(reading.equation[1::2]) == {operator}
    return same and reading.result == relation.value(values)


def _sentences(step: str) -> list[str]:
    text = step.strip().removesuffix("</think>").strip()
    return _BETWEEN_SENTENCES.split(text) if text else []


def _readings(scene: Scene, sentence: str) -> Iterator[_Reading]:
    for kind, pattern in _patterns(scene):
        match = pattern.fullmatch(sentence)
        if match is not None:
            yield _reading(kind, match.groupdict())


def _reading(kind: Kind, slots: Mapping[str, str]) -> _Reading:
    refs = {slot: slots[slot] for slot in "RQP" if slot in slots}
    stated = {refs[slot]: int(slots[letter]) for slot, letter in zip("RQP", "abd", strict=True) if letter in slots}
    return _Reading(
        kind=kind,
        subject=slots.get("S", ""),
        refs=tuple(refs.values()),
        amount=int(slots["K"]) if "K" in slots else None,
        stated=stated,
        equation=tuple(slots["equation"].split(" ")) if "equation" in slots else None,
        result=int(slots["c"]) if "c" in slots else None,
    )


@cache
def _patterns(scene: Scene) -> tuple[tuple[Kind, re.Pattern[str]], ...]:
    """Every wording of statements and steps as a pattern, with the kind of relation that it is about."""
    statements: list[tuple[Kind, str]] = [
        (kind, wording) for kind, wordings in STATEMENTS.items() for wording in wordings
    ]
    steps: list[tuple[Kind, str]] = [
        (_kind_of(key), wording) for key, wordings in STEPS.items() for wording in wordings
    ]
    return tuple((kind, re.compile(_pattern(wording, scene))) for kind, wording in statements + steps)


def _kind_of(step_key: str) -> Kind:
    return next(kind for kind in get_args(Kind) if step_key.startswith(kind))


def _pattern(wording: str, scene: Scene) -> str:
    """A wording with a group for every slot; the computation is one group, whatever stands in it."""
    words = {"item": scene.item, "has": scene.verb, "have": scene.plural}
    pattern = ""
    seen: set[str] = set()
    for part in re.split(r"(\{\w+\})", _EQUATION.sub("{equation}", wording)):
        slot = part[1:-1] if part.startswith("{") else None
        if slot is None or slot in words:
            pattern += re.escape(words[slot] if slot else part)
        elif slot == "equation":
            pattern += _COMPUTATION
        else:
            pattern += f"(?P={slot})" if slot in seen else f"(?P<{slot}>{_SLOTS[slot]})"
            seen.add(slot)
    return pattern
