"""Oracle that judges steps: a step is correct if it follows from the problem and the preceding steps.

The oracle uses the problem's graph, so it is only for tests, training and calibration. A judge that used it at run time
would know the answer. The oracle parses a step as a sequence of clauses of `evals.training.wording`, in any order. A
true sentence in other words counts as incorrect.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import get_args

from evals.training.gsm_mini import Kind, Problem, Relation, Scene, true_values
from evals.training.wording import FRACTIONS, REASONS, RESULT_OF_SUBJECT, RESULTS, phrasings

_NAME = "[A-Z][a-z]{0,20}"
_NUMBER = "[0-9]{1,6}"
_SLOTS = dict.fromkeys("SRQP", _NAME) | dict.fromkeys("KNc", _NUMBER) | {"fraction": "|".join(FRACTIONS.values())}
_EQUATION = f"(?P<left>{_NUMBER}(?: [-+*/] {_NUMBER}){{1,2}}|{_NUMBER}% of {_NUMBER}) = (?P<result>{_NUMBER})"
_EQUATION_PARTS = re.compile(f"{_NUMBER}|[-+*/]|% of")
_STORY = "story:"
_PUNCTUATION = re.compile(r"[ ,.:\n]*")
_DIVISORS = {name: divisor for divisor, name in FRACTIONS.items()}
_OPERATORS: Mapping[Kind, str] = {
    **dict.fromkeys(("rate", "boxes", "times", "price"), "*"),
    **dict.fromkeys(("more", "sum", "total"), "+"),
    **dict.fromkeys(("fewer", "gap"), "-"),
    **dict.fromkeys(("part", "share"), "/"),
    "percent": "% of",
}


Equation = tuple[tuple[str, ...], int]
"""The left side, with numbers and operators alternating, and the result."""


@dataclass
class _Reading:
    """The parsed clauses of a step."""

    stated: list[Relation] = field(default_factory=list)  # relations quoted from the story
    known: list[tuple[str, int]] = field(default_factory=list)  # (person, quantity) before the equations
    equations: list[Equation] = field(default_factory=list)
    results: list[tuple[str, int]] = field(default_factory=list)  # (person or kind, quantity) after the equations


class Oracle:
    """Judge of the steps of one problem, each in the context of the observed steps.

    A person's quantity is the last one that the text stated, right or wrong, else the one of the problem's relation.
    So a step that builds on an earlier mistake is correct, and a step that ignores the mistake is not. A step may
    correct the mistake by deriving the quantity again.

        oracle = Oracle(problem)
        oracle.judge("Next, Ann has 3 more than Ben, and Ben has 4. So 4 + 3 = 7, so Ann has 7.")
    """

    def __init__(self, problem: Problem) -> None:
        self._scene = problem.scene
        self._relations = dict(problem.relations)
        self._order = tuple(true_values(problem))  # each person after the people they refer to
        asked = problem.plan[-1]
        if not asked.subject:
            self._relations[asked.kind] = asked
        self._claims: dict[str, int] = {}

    def judge(self, step: str) -> bool:
        """Return whether every claim of the step holds. An empty step is incorrect. The state does not change."""
        reading = _read(self._scene, _strip(step))
        return reading is not None and self._holds(reading)

    def observe(self, step: str) -> None:
        """Add the step to the observed text, and store the quantities that it states, right or wrong."""
        for match in _clauses(self._scene)["holding"].finditer(_strip(step)):
            if match["S"] in self._order:
                self._claims[match["S"]] = int(match["c"])

    def _values(self) -> dict[str, int]:
        """Return each person's quantity, without people whose relation gives no whole number."""
        values: dict[str, int] = {}
        for name in self._order:
            relation = self._relations[name]
            value = self._claims.get(name)
            if value is None and all(ref in values for ref in relation.refs):
                value = relation.value(values)
            if value is not None:
                values[name] = value
        return values

    def _given(self, name: str) -> int | None:
        """Return a quantity that the story gives directly, which a step may always state; None if it gives none."""
        relation = self._relations.get(name)
        return relation.amount if relation is not None and relation.kind == "given" else None

    def _holds(self, reading: _Reading) -> bool:
        values = self._values()
        if not all(_same(stated, self._relations.get(stated.subject or stated.kind)) for stated in reading.stated):
            return False
        if not all(value in (values.get(name), self._given(name)) for name, value in reading.known):
            return False
        if not reading.equations:
            return not reading.results
        return self._computes(reading, values)

    def _computes(self, reading: _Reading, values: Mapping[str, int]) -> bool:
        """Return whether the first equation matches the relation of the stated result, and all checks are true."""
        (written, result), *checks = reading.equations
        if len(reading.results) != 1 or reading.results[0][1] != result:
            return False
        about = self._relations.get(reading.results[0][0])
        if about is None or any(stated.subject != about.subject for stated in reading.stated):
            return False
        if any(ref not in values for ref in about.refs) or about.value(values) != result:
            return False
        expected = _operands(about, values)
        if written[1::2] != (_OPERATORS[about.kind],) * (len(expected) - 1):
            return False
        numbers = [int(number) for number in written[::2]]
        any_order = _OPERATORS[about.kind] in "+*"
        if (sorted(numbers) != sorted(expected)) if any_order else (numbers != expected):
            return False
        seen = {*numbers, result}
        return all(_is_true(left, right) and {*map(int, left[::2]), right} <= seen for left, right in checks)


def step_correctness(oracle: Oracle, steps: Sequence[str]) -> list[bool]:
    """Return whether each step is correct in the context of the steps before it, which may be wrong."""
    verdicts: list[bool] = []
    for step in steps:
        verdicts.append(oracle.judge(step))
        oracle.observe(step)
    return verdicts


def same_content(problem: Problem, first: str, second: str) -> bool:
    """Return whether two steps compute the same for the same person from the same numbers; False if unreadable."""
    readings = [_read(problem.scene, _strip(step)) for step in (first, second)]
    contents = [(reading.results, _unordered(reading.equations[:1])) for reading in readings if reading is not None]
    return len(contents) == len(readings) and contents[0] == contents[1]


def _unordered(equations: Sequence[Equation]) -> list[tuple[list[str], int]]:
    """Return equations with sorted parts, so that `4 + 8` equals `8 + 4`."""
    return [(sorted(left), result) for left, result in equations]


def _same(stated: Relation, relation: Relation | None) -> bool:
    """Return whether a stated relation is in the story. The order of a sum does not matter."""
    return (
        relation is not None
        and (stated.kind, stated.amount, stated.count) == (relation.kind, relation.amount, relation.count)
        and (stated.kind == "price" or sorted(stated.refs) == sorted(relation.refs))
    )


def _operands(relation: Relation, values: Mapping[str, int]) -> list[int]:
    known = [values[ref] for ref in relation.refs]
    match relation.kind:
        case "rate" | "boxes":
            return [relation.amount, relation.count]
        case "part":
            return [*known, relation.count]
        case "percent":
            return [relation.amount, *known]
        case "sum" | "total" | "gap":
            return known
        case _:
            return [*known, relation.amount]


def _is_true(left: tuple[str, ...], result: int) -> bool:
    """Return whether an equation with two numbers on the left is true. Checks have two numbers."""
    if len(left) != 3:
        return False
    first, second = int(left[0]), int(left[2])
    match left[1]:
        case "+":
            return first + second == result
        case "-":
            return first - second == result
        case "*":
            return first * second == result
        case "/":
            return second * result == first
        case _:
            return first * second == 100 * result


def _strip(step: str) -> str:
    return step.strip().removesuffix("</think>").strip()


def _read(scene: Scene, text: str) -> _Reading | None:
    """Parse the clauses of a step, ignoring punctuation; None for any other text, or if there is no statement."""
    reading = _Reading()
    position = _after_punctuation(text, 0)
    while position < len(text):
        name, end, slots = "", position, {}
        for each, pattern in _clauses(scene).items():
            match = pattern.match(text, position)
            if match is not None and match.end() > end:
                name, end, slots = each, match.end(), match.groupdict()
        if not name:
            return None
        _add_clause(reading, name, slots)
        position = _after_punctuation(text, end)
    return reading if reading.stated or reading.known or reading.equations else None


def _after_punctuation(text: str, position: int) -> int:
    match = _PUNCTUATION.match(text, position)
    return match.end() if match else position


def _add_clause(reading: _Reading, name: str, slots: Mapping[str, str]) -> None:
    if name == "equation":
        reading.equations.append((tuple(_EQUATION_PARTS.findall(slots["left"])), int(slots["result"])))
    elif name == "holding":
        (reading.results if reading.equations else reading.known).append((slots["S"], int(slots["c"])))
    elif name in RESULTS:
        reading.results.append((name.rstrip("23"), int(slots["c"])))
    elif name.startswith(_STORY):
        reading.stated.append(_relation(name.removeprefix(_STORY), slots))


def _relation(kind: str, slots: Mapping[str, str]) -> Relation:
    return Relation(
        kind=kind,  # pyright: ignore[reportArgumentType]
        subject=slots.get("S", ""),
        refs=tuple(slots[slot] for slot in "RQP" if slot in slots),
        amount=int(slots.get("K", 0)),
        count=_DIVISORS[slots["fraction"]] if "fraction" in slots else int(slots.get("N", 0)),
    )


@cache
def _clauses(scene: Scene) -> Mapping[str, re.Pattern[str]]:
    """Return the pattern of every clause by name: "story:" plus a kind, a kind of result, or another clause name."""
    fillers = {text.strip(" ,.:") for text in phrasings()}
    clauses = {"filler": "|".join(rf"{filler}\b" for filler in fillers if filler), "equation": _EQUATION}
    clauses["holding"] = _pattern(RESULT_OF_SUBJECT, scene) + _ends(scene)
    for kind in get_args(Kind):
        for part in REASONS.get(kind, "").split("{join}"):
            if part and not re.search(r"\{[abd]\}", part):
                clauses[_STORY + kind] = _pattern(part, scene)
    clauses |= {key: _pattern(wording, scene) + _ends(scene) for key, wording in RESULTS.items()}
    return {name: re.compile(pattern) for name, pattern in clauses.items()}


def _ends(scene: Scene) -> str:
    """Return the pattern after a quantity, so that "Ann has 3" does not match in "Ann has 3 more than Ben"."""
    return rf"(?: {scene.item})?(?=[,.]|\s+and\b|$)"


def _pattern(wording: str, scene: Scene) -> str:
    """Return the pattern of a wording, with a group for each slot."""
    words = {"item": scene.item, "has": scene.verb, "have": scene.plural, "box": scene.box}
    pattern = ""
    for part in re.split(r"(\{\w+\})", wording):
        slot = part.strip("{}")
        pattern += f"(?P<{slot}>{_SLOTS[slot]})" if slot in _SLOTS else re.escape(words.get(slot, part))
    return pattern
