"""Generate gsm-plain problems: small problems in wordings that people type, with reference steps and an answer.

The templates are in `gsm_plain.toml`. A template is a question with slots and the steps of its solution. Each equation
in a step is also the program that computes it, so questions, steps and answers always agree. One fifth of the
templates, names and nouns occur only in the test split. The module does not depend on models or tokenizers.
"""

import hashlib
import itertools
import random
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path

from stepspec.evaluation.generators.gsm_mini import SPLIT_SIZES, Split, split_of

VERSION = 1
MAX_VALUE = 3000
"""Largest quantity in a problem."""

FEMALE = (
    *("Anna", "Emma", "Lily", "Maria", "Sarah", "Julia", "Nora", "Kim", "Grace", "Lucy", "Zoe", "Alice", "Mia", "Ruth"),
    *("Olivia", "Hannah", "Rosa", "Tina", "Amy", "Priya", "Ella", "Chloe", "Fatima", "Mrs. Brown", "Jane", "Susan"),
    *("Grandma", "Mom", "Aunt May", "Dr. Lee"),
)
MALE = (
    *("Tom", "Ben", "Jack", "Leo", "Sam", "Paul", "Max", "Noah", "Omar", "David", "Peter", "Luis", "Ryan", "Eric"),
    *("Adam", "John", "Kevin", "Ivan", "Hugo", "Carl", "Jim", "Mark", "Raj", "Mr. Green", "Henry", "Bob"),
    *("Grandpa", "Dad", "Uncle Joe", "Mr. Diaz"),
)
COLORS = ("red", "blue", "green", "yellow", "black", "brown", "purple", "orange", "gray", "pink")
WORDS: Mapping[str, tuple[str, ...]] = {
    "thing": (
        *(
            "apples",
            "marbles",
            "books",
            "pencils",
            "stickers",
            "cards",
            "balloons",
            "toys",
            "stamps",
            "coins",
            "shells",
        ),
        *(
            "cups",
            "shirts",
            "pens",
            "hats",
            "notebooks",
            "bottles",
            "candles",
            "magnets",
            "posters",
            "puzzles",
            "dolls",
        ),
        *(
            "oranges",
            "bananas",
            "erasers",
            "flowers",
            "rocks",
            "socks",
            "buttons",
            "crayons",
            "games",
            "plates",
            "bags",
        ),
    ),
    "food": (
        *(
            "apples",
            "cookies",
            "eggs",
            "oranges",
            "muffins",
            "candies",
            "pears",
            "donuts",
            "lemons",
            "bananas",
            "plums",
        ),
        *("cupcakes", "sandwiches", "bagels", "rolls", "peaches", "carrots", "pretzels", "tomatoes", "nuts", "melons"),
    ),
    "animal": ("cats", "dogs", "rabbits", "cows", "horses", "goats", "ducks", "sheep", "hamsters", "parrots", "pigs"),
    "box": ("boxes", "bags", "baskets", "jars", "packs", "crates", "drawers", "trays", "shelves", "bins"),
    "place": ("school", "park", "library", "office", "gym", "beach", "museum", "zoo", "station", "farm"),
    "shop": ("bakery", "store", "market", "bookstore", "toy store", "supermarket", "kiosk", "corner shop"),
    "far": ("miles", "meters", "kilometers", "feet", "yards"),
    "heavy": ("pounds", "kilograms", "grams", "ounces", "cups"),
    "wet": ("liters", "gallons", "cups", "pints", "quarts"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "job": ("nurse", "waiter", "teacher", "plumber", "cleaner", "driver", "gardener", "painter"),
    "vehicle": ("car", "train", "bus", "truck", "boat", "cyclist", "ship", "motorbike"),
    "relative": ("mother", "father", "sister", "brother", "friend", "aunt", "uncle", "cousin", "neighbor", "teacher"),
    "color": COLORS,
}
FRACTIONS = {2: "half", 3: "third", 4: "quarter", 5: "fifth", 6: "sixth"}
NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

_SLOT = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
_EQUATION_SLOTS = re.compile(r"((?:\{\w\}|\d+)(?: [-+*/] (?:\{\w\}|\d+))+) = \{(\w)\}")
_EQUATION = re.compile(r"(\d+(?:\.\d+)?(?: [-+*/] \d+(?:\.\d+)?)+) = (\d+(?:\.\d+)?)")
_OPERATOR = re.compile(r" *([-+*/=]) *")
_ARTICLE = re.compile(r"\b([Aa])( [aeio])")
_RANGE = re.compile(r"(\w) (\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?")
_LIMIT = re.compile(r"(\w) <= (\d+)")


@dataclass(frozen=True)
class Equation:
    """An equation: numbers with operators between them, and a result."""

    numbers: tuple[Fraction, ...]
    operators: tuple[str, ...]
    result: Fraction

    @property
    def value(self) -> Fraction | None:
        """The value of the left side; None for a division by zero. Products and quotients come before sums."""
        terms = [self.numbers[0]]
        for operator, number in zip(self.operators, self.numbers[1:], strict=True):
            if operator == "*":
                terms[-1] *= number
            elif operator == "/":
                if not number:
                    return None
                terms[-1] /= number
            else:
                terms.append(number if operator == "+" else -number)
        return sum(terms, Fraction(0))

    @property
    def text(self) -> str:
        """The equation in the format of the steps."""
        rest = (
            f" {operator} {show(number)}" for operator, number in zip(self.operators, self.numbers[1:], strict=True)
        )
        return f"{show(self.numbers[0])}{''.join(rest)} = {show(self.result)}"


def show(number: Fraction) -> str:
    """Return a number in the format of the problems: a whole number, or one with two decimal places."""
    return str(number.numerator) if number.denominator == 1 else f"{float(number):.2f}"


def equations(step: str) -> list[Equation]:
    """Return the equations in a step, right or wrong."""
    found: list[Equation] = []
    spaced = _OPERATOR.sub(r" \1 ", step.replace("$", ""))
    for left, right in _EQUATION.findall(spaced):
        numbers, operators = left.split(" ")[::2], left.split(" ")[1::2]
        found.append(Equation(tuple(map(Fraction, numbers)), tuple(operators), Fraction(right)))
    return found


@dataclass(frozen=True)
class PlainProblem:
    """One problem."""

    id: str
    template: str
    question: str
    steps: tuple[str, ...]
    answer: str
    people: tuple[str, ...] = field(repr=False)

    @property
    def level(self) -> int:
        """The number of steps."""
        return len(self.steps)

    @property
    def equations(self) -> list[Equation]:
        """The equations of all steps, in order."""
        return [equation for step in self.steps for equation in equations(step)]


class PlainOracle:
    """Judge of the steps of one problem, based on the equations of its solution. For tests, training and calibration.

    A step is right if each of its equations is in the solution and it names the same people as the solution's step. The
    order of terms and factors does not matter. A step without an equation is right if all its numbers are given or
    already computed.

        oracle = PlainOracle(problem)
        oracle.judge("Ben has 3 + 4 = 7 apples.")
    """

    def __init__(self, problem: PlainProblem) -> None:
        self._people = problem.people
        self._steps = {_key(each): step for step in problem.steps for each in equations(step)}
        # The question may spell out its numbers, so the given numbers come from the equations too.
        given = {number for each in problem.equations for number in each.numbers}
        self._known = given | set(map(Fraction, _NUMBER.findall(problem.question)))

    def judge(self, step: str) -> bool:
        """Return whether everything that the step computes is right. An empty step is wrong."""
        found = equations(step)
        if not found:
            return bool(step.strip()) and self._known.issuperset(map(Fraction, _NUMBER.findall(step)))
        return all(
            each.value == each.result
            and (solution := self._steps.get(_key(each))) is not None
            and self._named(step) == self._named(solution)
            for each in found
        )

    def observe(self, step: str) -> None:
        """Add the step to the observed text, so that later steps may use its results."""
        self._known |= {each.result for each in equations(step)}

    def _named(self, step: str) -> set[str]:
        return {name for name in self._people if name in step}


def same_content(problem: PlainProblem, first: str, second: str) -> bool:
    """Return whether two steps compute the same and name the same people; False for text without an equation."""
    contents = [
        ({_key(each) for each in equations(step)}, {name for name in problem.people if name in step})
        for step in (first, second)
    ]
    return bool(contents[0][0]) and contents[0] == contents[1]


def _key(equation: Equation) -> tuple[object, ...]:
    """Return a key that is equal for equations that differ only in the order of terms or factors."""
    numbers: Sequence[Fraction] = equation.numbers
    if {*equation.operators} in ({"+"}, {"*"}):
        numbers = sorted(numbers)
    return (*numbers, *equation.operators, equation.result)


@dataclass(frozen=True)
class Template:
    """An entry of `gsm_plain.toml`."""

    name: str
    ask: tuple[str, ...]
    steps: tuple[str, ...]
    where: str
    for_test: bool
    """Whether the template occurs only in the test split."""

    def fill(self, rng: random.Random, id: str, words: "Words") -> PlainProblem | None:
        """Return a problem with randomly filled slots; None if its numbers are not valid."""
        ask, _, variant = rng.choice(self.ask).partition("|")
        steps = [step for step in (_step_for(each, variant) for each in self.steps) if step is not None]
        texts = words.drawn(rng, " ".join([ask, *steps]))
        values = self._numbers(rng, ask + " ".join(steps))
        for step in steps:
            for left, slot in _EQUATION_SLOTS.findall(step):
                terms = left.split(" ")
                numbers = [values[term[1]] if term.startswith("{") else Fraction(term) for term in terms[::2]]
                value = Equation(tuple(numbers), tuple(terms[1::2]), Fraction(0)).value
                if value is None or not _is_fine(value, values.values()):
                    return None
                values[slot] = value
        if any(values.get(name, 0) > int(limit) for name, limit in _LIMIT.findall(self.where)):
            return None
        slots = texts | {name: show(value) for name, value in values.items()}
        slots |= {f"{name}_th": FRACTIONS.get(int(value), "") for name, value in values.items()}
        filled = tuple(_sentence(step.format(**slots)) for step in steps)
        people = tuple(slots[letter] for letter in "ABC" if letter in slots)
        return PlainProblem(
            id, self.name, _sentence(ask.format(**slots)), filled, show(equations(filled[-1])[-1].result), people
        )

    def _numbers(self, rng: random.Random, text: str) -> dict[str, Fraction]:
        """Return numbers for the slots that are used and not computed. Most slots get different numbers."""
        wanted = {name for name in _SLOT.findall(text) if len(name) == 1} | {
            name[0] for name in _SLOT.findall(text) if name.endswith("_th")
        }
        values: dict[str, Fraction] = {}
        for name, low, high, step in _RANGE.findall(self.where):
            width = Fraction(step or 1)
            first, last = int(Fraction(low) / width), int(Fraction(high) / width)
            # People ask more often about small numbers.
            last = rng.choice((last, last, max(first + 4, last // 2)))
            value = rng.randint(first, last) * width
            if name in wanted and value not in values.values():
                values[name] = value
            elif name in wanted:
                values[name] = (first + rng.randrange(max(1, last - first + 1))) * width
        return values


def _step_for(step: str, variant: str) -> str | None:
    """Return a step without its condition; None if the condition does not hold for the variant of the question."""
    match = re.match(r"((?:!?\w+,?)+): ", step)
    if match is None:
        return step
    conditions = match[1].split(",")
    holds = any(each == variant for each in conditions if not each.startswith("!"))
    holds = holds or (all(each[1:] != variant for each in conditions) and all(each[0] == "!" for each in conditions))
    return step[match.end() :] if holds else None


def _is_fine(value: Fraction, numbers: Iterable[Fraction]) -> bool:
    """Return whether a value is positive, at most `MAX_VALUE`, and whole.

    Halves are allowed if a given number is not whole.
    """
    broken = any(number.denominator != 1 for number in numbers)
    return 0 < value <= MAX_VALUE and value.denominator in ((1, 2) if broken else (1,))


def _sentence(text: str) -> str:
    text = _ARTICLE.sub(r"\1n\2", text)
    return text[0].upper() + text[1:]


def _for_test(word: str) -> bool:
    """Return whether a word occurs only in the test split: one word in five, independent of the other words."""
    return hashlib.sha256(word.encode()).digest()[0] % 5 == 0


def _singular(plural: str) -> str:
    if plural.endswith("ies"):
        return {"cookies": "cookie"}.get(plural, plural[:-3] + "y")
    if plural == "shelves":
        return "shelf"
    if plural.endswith(("boxes", "sandwiches", "peaches", "tomatoes")):
        return plural[:-2]
    return plural.removesuffix("s")


class Words:
    """The names and nouns of a split."""

    def __init__(self, *, with_test: bool) -> None:
        def allowed(words: Sequence[str]) -> list[str]:
            return [word for word in words if with_test or not _for_test(word)]

        self.people = [(name, "she") for name in allowed(FEMALE)] + [(name, "he") for name in allowed(MALE)]
        self.words = {kind: allowed(words) for kind, words in WORDS.items()}

    def drawn(self, rng: random.Random, text: str) -> dict[str, str]:
        """Sample the texts for the slots that are not numbers."""
        slots: dict[str, str] = {}
        for letter, (name, he) in zip("ABC", rng.sample(self.people, 3), strict=True):
            if f"{{{letter}" not in text:
                continue
            his, him = ("her", "her") if he == "she" else ("his", "him")
            slots |= {letter: name, f"{letter}_he": he, f"{letter}_his": his, f"{letter}_him": him}
            slots[f"{letter}_He"] = he.capitalize()
        for kind, words in self.words.items():
            first, second = rng.sample(words, 2) if len(words) > 1 else (words[0], words[0])
            slots |= {kind: first, f"{kind}_1": _singular(first)}
            slots |= {f"{kind}2": second, f"{kind}2_1": _singular(second)}
        return slots


@cache
def templates() -> tuple[Template, ...]:
    """Return all templates, in file order."""
    found = tomllib.loads(Path(__file__).with_name("gsm_plain.toml").read_text("utf-8"))
    return tuple(
        Template(name, tuple(entry["ask"]), tuple(entry["steps"]), entry["where"], entry.get("test", False))
        for name, entry in found.items()
    )


@cache
def _parts(split: Split) -> tuple[list[Template], Words]:
    test = split == "test"
    return [each for each in templates() if test or not each.for_test], Words(with_test=test)


def draw_problem(rng: random.Random, id: str, split: Split) -> PlainProblem:
    """Sample a problem of the split. Every random choice comes from `rng`."""
    chosen, words = _parts(split)
    template = rng.choice(chosen)
    for _ in range(10_000):
        problem = template.fill(rng, id, words)
        if problem is not None:
            return _as_typed(problem, rng)
    raise AssertionError(f"Template {template.name} gave no valid numbers in 10,000 attempts.")


def _as_typed(problem: PlainProblem, rng: random.Random) -> PlainProblem:
    """Return the problem as a person might type it: sometimes in lower case or with small numbers as words."""
    question = problem.question
    if rng.random() < 0.08:
        question = _NUMBER.sub(_in_words, question)
    if rng.random() < 0.1:
        question = question.lower()
    if rng.random() < 0.05:
        question = question.rstrip("?.")
    return PlainProblem(problem.id, problem.template, question, problem.steps, problem.answer, problem.people)


def _in_words(match: re.Match[str]) -> str:
    number = match[0]
    before = match.string[: match.start()][-1:]
    is_small = number.isdecimal() and 2 <= int(number) <= 12 and before != "$"
    return NUMBER_WORDS[int(number) - 2] if is_small and match.string[match.end() :][:1] != "%" else number


def load_split(split: Split, start: int = 0) -> Iterator[PlainProblem]:
    """Yield the problems of a split from number `start` on, the same in every call. `train` is infinite."""
    size = SPLIT_SIZES[split]
    for index in itertools.count(start) if size is None else range(start, size):
        yield problem_at(split, index)


def problem_at(split: Split, index: int) -> PlainProblem:
    """Return the problem of a number."""
    id = f"gsm-plain-{VERSION}/{split}/{index}"
    rng = random.Random(id)
    while True:
        problem = draw_problem(rng, id, split)
        if split_of(problem.question.lower()) == split:
            return problem


def corrupt_step(rng: random.Random, problem: PlainProblem, place: int) -> str:
    """Return the step at index `place` with one mistake: a wrong result, number or operator."""
    step = problem.steps[place]
    equation = equations(step)[-1]
    known = [number for each in problem.equations for number in each.numbers]
    right = {_key(each) for each in problem.equations}
    for _ in range(50):
        numbers, operators, result = list(equation.numbers), list(equation.operators), equation.result
        kind = rng.randrange(3)
        if kind == 0:
            result += rng.choice((-10, -2, -1, 1, 2, 10))
        elif kind == 1:
            numbers[rng.randrange(len(numbers))] = rng.choice(known)
        else:
            operators[rng.randrange(len(operators))] = rng.choice("+-*/")
        changed = Equation(tuple(numbers), tuple(operators), result)
        if kind:
            value = changed.value
            if value is None or value.denominator not in (1, 2):
                continue
            changed = Equation(changed.numbers, changed.operators, Fraction(value))
        if 0 <= changed.result <= MAX_VALUE and changed.result != equation.result and _key(changed) not in right:
            return step.replace(equation.text, changed.text)
    return step.replace(f"= {show(equation.result)}", f"= {show(equation.result + 1)}")
