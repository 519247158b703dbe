"""Draws gsm-mini problems from a seed: a story in English, its reference steps and its whole-number answer.

A problem is a small graph. Every person has one quantity, given outright or by a relation to others, and the
question asks for one person's quantity or for a total. Each relation that the answer needs is one step. The module
knows nothing of models or tokenizers; `stepspec.mini.oracle` judges steps against the same graph.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

VERSION = 1
Split = Literal["train", "calibration", "test"]
SPLIT_SIZES: Mapping[Split, int | None] = {"train": None, "calibration": 10_000, "test": 10_000}
MAX_VALUE = 99
LEVELS = (2, 3, 4, 5, 6)
LEVEL_WEIGHTS = (30, 30, 20, 12, 8)

Kind = Literal["given", "more", "fewer", "times", "half", "sum", "total"]
Voice = Literal["target", "draft"]

NAMES = (
    *("Ann", "Ben", "Cara", "Dan", "Ella", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo"),
    *("Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Zoe"),
)


@dataclass(frozen=True)
class Scene:
    """What is counted, and the verb forms that go with it."""

    item: str
    verb: str  # with one person: "Ann has", "Ann picked"
    plural: str  # with several: "Ann and Ben have"
    asks_one: str  # "How many apples does Ann have?"
    asks_many: str


def _has(item: str) -> Scene:
    return Scene(item, "has", "have", "does {S} have", "do {names} have")


def _did(item: str, past: str, base: str) -> Scene:
    return Scene(item, past, past, f"did {{S}} {base}", f"did {{names}} {base}")


SCENES = (
    *(_has(item) for item in ("apples", "marbles", "stickers", "coins", "pencils", "books", "stamps", "balloons")),
    *(_did(item, "collected", "collect") for item in ("shells", "cans", "cards")),
    *(_did(item, "picked", "pick") for item in ("berries", "flowers", "lemons")),
    *(_did(item, "baked", "bake") for item in ("cookies", "muffins")),
)


@dataclass(frozen=True)
class Relation:
    """How the quantity of `subject` follows from those of `refs`; `subject` is empty for the total asked for."""

    kind: Kind
    subject: str
    refs: tuple[str, ...] = ()
    amount: int = 0

    def value(self, values: Mapping[str, int]) -> int | None:
        """The quantity, given those it refers to; None when it is not a whole number."""
        known = [values[name] for name in self.refs]
        match self.kind:
            case "given":
                return self.amount
            case "more":
                return known[0] + self.amount
            case "fewer":
                return known[0] - self.amount
            case "times":
                return known[0] * self.amount
            case "half":
                return known[0] // 2 if known[0] % 2 == 0 else None
            case "sum" | "total":
                return sum(known)


@dataclass(frozen=True)
class Problem:
    """One problem. `relations` has one entry per quantity that exists, needed for the answer or not."""

    id: str
    question: str
    answer: int
    steps: tuple[str, ...]
    scene: Scene
    relations: Mapping[str, Relation] = field(repr=False)
    plan: tuple[Relation, ...] = field(repr=False)

    @property
    def level(self) -> int:
        """The number of steps that the answer needs."""
        return len(self.plan)


STATEMENTS: Mapping[Kind, tuple[str, ...]] = {
    "given": ("{S} {has} {K} {item}.", "We know that {S} {has} {K} {item}."),
    "more": ("{S} {has} {K} more {item} than {R}.", "Compared with {R}, {S} {has} {K} more {item}."),
    "fewer": ("{S} {has} {K} fewer {item} than {R}.", "Compared with {R}, {S} {has} {K} fewer {item}."),
    "times": ("{S} {has} {K} times as many {item} as {R}.", "Compared with {R}, {S} {has} {K} times as many {item}."),
    "half": ("{S} {has} half as many {item} as {R}.", "Compared with {R}, {S} {has} half as many {item}."),
    "sum": ("{S} {has} as many {item} as {R} and {Q} together.", "{R} and {Q} together have what {S} {has}."),
}

# Four ways to say each step. The reason, then the computation; slots are read back by the oracle.
STEPS: Mapping[str, tuple[str, ...]] = {
    "more": (
        "{S} {has} {K} more {item} than {R}, so {S} {has} {a} + {K} = {c} {item}.",
        "{R} {has} {a} {item}, so {S} {has} {a} + {K} = {c}.",
        "To find what {S} {has}, add {K} to the {a} {item} of {R}: {a} + {K} = {c}.",
        "Next is {S}. It is {K} more than the {a} {item} of {R}, which makes {a} + {K} = {c}.",
    ),
    "fewer": (
        "{S} {has} {K} fewer {item} than {R}, so {S} {has} {a} - {K} = {c} {item}.",
        "{R} {has} {a} {item}, so {S} {has} {a} - {K} = {c}.",
        "To find what {S} {has}, take {K} from the {a} {item} of {R}: {a} - {K} = {c}.",
        "Next is {S}. It is {K} fewer than the {a} {item} of {R}, which makes {a} - {K} = {c}.",
    ),
    "times": (
        "{S} {has} {K} times as many {item} as {R}, so {S} {has} {K} * {a} = {c} {item}.",
        "{R} {has} {a} {item}, so {S} {has} {K} * {a} = {c}.",
        "To find what {S} {has}, multiply the {a} {item} of {R} by {K}: {K} * {a} = {c}.",
        "Next is {S}. It is {K} times the {a} {item} of {R}, which makes {K} * {a} = {c}.",
    ),
    "half": (
        "{S} {has} half as many {item} as {R}, so {S} {has} {a} / 2 = {c} {item}.",
        "{R} {has} {a} {item}, so {S} {has} {a} / 2 = {c}.",
        "To find what {S} {has}, halve the {a} {item} of {R}: {a} / 2 = {c}.",
        "Next is {S}. It is half of the {a} {item} of {R}, which makes {a} / 2 = {c}.",
    ),
    "sum": (
        "{S} {has} as many {item} as {R} and {Q} together, so {S} {has} {a} + {b} = {c} {item}.",
        "{R} {has} {a} and {Q} {has} {b}, so {S} {has} {a} + {b} = {c}.",
        "To find what {S} {has}, add the {item} of {R} and {Q}: {a} + {b} = {c}.",
        "Next is {S}. It is what {R} and {Q} {have}, which makes {a} + {b} = {c}.",
    ),
    "total2": (
        "Together {R} and {Q} {have} {a} + {b} = {c} {item}.",
        "{R} {has} {a} and {Q} {has} {b}, so together that is {a} + {b} = {c}.",
        "To find the total, add the {item} of {R} and {Q}: {a} + {b} = {c}.",
        "Last is the total. It is what {R} and {Q} {have}, which makes {a} + {b} = {c}.",
    ),
    "total3": (
        "Together {R}, {Q} and {P} {have} {a} + {b} + {d} = {c} {item}.",
        "{R} {has} {a}, {Q} {has} {b} and {P} {has} {d}, so together that is {a} + {b} + {d} = {c}.",
        "To find the total, add the {item} of {R}, {Q} and {P}: {a} + {b} + {d} = {c}.",
        "Last is the total. It is what {R}, {Q} and {P} {have}, which makes {a} + {b} + {d} = {c}.",
    ),
}

# How often each voice says a step in which way. The two models of a real family share habits but not all of them:
# here their favourite wording is the same for most kinds of step and another for "times" and "half".
WORDING: Mapping[Voice, Mapping[str, tuple[int, ...]]] = {
    "target": {
        "more": (6, 2, 1, 1),
        "fewer": (6, 1, 2, 1),
        "times": (6, 2, 1, 1),
        "half": (1, 6, 2, 1),
        "sum": (6, 2, 1, 1),
        "total2": (6, 2, 1, 1),
        "total3": (6, 1, 2, 1),
    },
    "draft": {
        "more": (6, 1, 2, 1),
        "fewer": (6, 2, 1, 1),
        "times": (2, 6, 1, 1),
        "half": (5, 2, 1, 2),
        "sum": (6, 1, 1, 2),
        "total2": (6, 1, 2, 1),
        "total3": (6, 2, 1, 1),
    },
}


def step_key(relation: Relation) -> str:
    """The entry of `STEPS` for a relation: its kind, and for totals how many are added."""
    return f"total{len(relation.refs)}" if relation.kind == "total" else relation.kind


def step_slots(scene: Scene, relation: Relation, values: Mapping[str, int]) -> dict[str, str]:
    """Slot names of the wordings in `STEPS` with what stands in them, for quantities as in `values`."""
    slots = {"S": relation.subject, "item": scene.item, "has": scene.verb, "have": scene.plural}
    slots |= {"K": str(relation.amount), "c": str(relation.value(values))}
    for slot, letter, name in zip("RQP", "abd", relation.refs, strict=False):
        slots |= {slot: name, letter: str(values[name])}
    return slots


def write_step(scene: Scene, relation: Relation, values: Mapping[str, int], rng: random.Random, voice: Voice) -> str:
    """One step in a wording drawn with the voice's frequencies."""
    return word_step(relation, step_slots(scene, relation, values), rng, voice)


def word_step(relation: Relation, slots: Mapping[str, str], rng: random.Random, voice: Voice) -> str:
    """A wording drawn with the voice's frequencies, with `slots` filled in."""
    key = step_key(relation)
    return rng.choices(STEPS[key], WORDING[voice][key])[0].format(**slots)


def write_solution(problem: Problem, rng: random.Random, voice: Voice) -> tuple[str, ...]:
    """All steps of a problem, worded anew."""
    values = true_values(problem)
    return tuple(write_step(problem.scene, relation, values, rng, voice) for relation in problem.plan)


def true_values(problem: Problem) -> dict[str, int]:
    """The quantity of every person in the problem."""
    values: dict[str, int] = {}
    pending = list(problem.relations.values())
    while pending:
        relation = pending.pop(0)
        if all(name in values for name in relation.refs):
            value = relation.value(values)
            assert value is not None
            values[relation.subject] = value
        else:
            pending.append(relation)
    return values


class _Story:
    """A graph in the making: people, their quantities, and the relations between them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = rng.sample(NAMES, len(NAMES))
        self.values: dict[str, int] = {}
        self.relations: dict[str, Relation] = {}

    def add(self, relation: Relation) -> Relation | None:
        """Adds a relation if its value is a whole number that the problem may hold."""
        value = relation.value(self.values)
        if value is None or not 2 <= value <= MAX_VALUE:
            return None
        self.values[relation.subject] = value
        self.relations[relation.subject] = relation
        return relation

    def give(self) -> str:
        """A new person with a quantity given outright."""
        name = self.names.pop()
        self.add(Relation("given", name, amount=self.rng.randint(2, 40)))
        return name

    def derive(self, ref: str) -> Relation:
        """A new person whose quantity follows from that of `ref`."""
        name = self.names.pop()
        while True:
            kind: Kind = self.rng.choices(("more", "fewer", "times", "half", "sum"), (3, 3, 2, 2, 2))[0]
            refs, amount = (ref,), 0
            if kind in ("more", "fewer"):
                amount = self.rng.randint(2, 20)
            elif kind == "times":
                amount = self.rng.randint(2, 5)
            elif kind == "sum":
                refs = (ref, self.other(ref))
            relation = self.add(Relation(kind, name, refs, amount))
            if relation is not None:
                return relation

    def other(self, *taken: str) -> str:
        """Somebody else: one of the story, or now and then a new person."""
        others = [name for name in self.values if name not in taken]
        return self.rng.choice(others) if others and self.rng.random() < 0.8 else self.give()

    def total(self, ref: str) -> Relation | None:
        """The total of `ref` and one or two others, if it is small enough."""
        refs = [ref]
        for _ in range(self.rng.choice((1, 1, 2))):
            refs.append(self.other(*refs))
        self.rng.shuffle(refs)
        relation = Relation("total", "", tuple(refs))
        return relation if (relation.value(self.values) or 0) <= MAX_VALUE else None


def _draw_plan(story: _Story, num_steps: int) -> tuple[Relation, ...] | None:
    last = story.give()
    plan: list[Relation] = []
    while len(plan) < num_steps:
        if len(plan) == num_steps - 1 and story.rng.random() < 0.4:
            total = story.total(last)
            if total is None:
                return None
            plan.append(total)
        else:
            plan.append(story.derive(last))
            last = plan[-1].subject
    return tuple(plan)


def _say(scene: Scene, relation: Relation, rng: random.Random) -> str:
    wordings = STATEMENTS[relation.kind]
    slots = {"S": relation.subject, "K": relation.amount, "item": scene.item, "has": scene.verb}
    slots |= dict(zip("RQ", relation.refs, strict=False))
    return rng.choices(wordings, (9, 1))[0].format(**slots)


def _irrelevant(story: _Story, scene: Scene, rng: random.Random) -> list[str]:
    """Statements that the answer does not need: an age, a price, or a person nobody asks about."""
    kind = rng.randrange(3)
    if kind == 0:
        return [f"{rng.choice(list(story.values))} is {rng.randint(6, 15)} years old."]
    if kind == 1:
        return [f"The {scene.item} cost {rng.randint(2, 30)} dollars."]
    known = set(story.relations)
    story.derive(rng.choice(list(story.values)))
    return [_say(scene, relation, rng) for name, relation in story.relations.items() if name not in known]


def _ask(scene: Scene, asked: Relation, rng: random.Random) -> str:
    if asked.kind != "total":
        return f"How many {scene.item} {scene.asks_one.format(S=asked.subject)}?"
    names = ", ".join(asked.refs[:-1]) + " and " + asked.refs[-1]
    together = rng.choice(("together", "in total"))
    return f"How many {scene.item} {scene.asks_many.format(names=names)} {together}?"


def draw_problem(rng: random.Random, id: str, num_steps: int) -> Problem:
    """A problem whose answer takes `num_steps` steps; every choice comes from `rng`."""
    plan = None
    while plan is None:
        story = _Story(rng)
        plan = _draw_plan(story, num_steps)
    scene = rng.choice(SCENES)
    statements = [_say(scene, relation, rng) for relation in story.relations.values()]
    for _ in range(rng.choices((0, 1), (4, 1))[0]):
        for statement in _irrelevant(story, scene, rng):
            statements.insert(rng.randint(0, len(statements)), statement)
    if rng.random() < 0.12:
        rng.shuffle(statements)
    question = " ".join([*statements, _ask(scene, plan[-1], rng)])
    answer = plan[-1].value(story.values)
    assert answer is not None
    steps = tuple(write_step(scene, relation, story.values, rng, "target") for relation in plan)
    return Problem(id, question, answer, steps, scene, story.relations, plan)


def split_of(question: str) -> Split:
    """The split that a question belongs to, by its hash: so no question can be in two."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % 10
    return "test" if bucket == 0 else "calibration" if bucket == 1 else "train"


def load_split(split: Split, start: int = 0) -> Iterator[Problem]:
    """The problems of a split from number `start` on, always the same ones; `train` has no end.

    Raises:
        ValueError: the split is not one of `train`, `calibration`, `test`.
    """
    if split not in get_args(Split):
        raise ValueError(f"gsm-mini has no split {split!r}; it has {', '.join(get_args(Split))}")
    size = SPLIT_SIZES[split]
    index = start
    while size is None or index < size:
        yield _problem_at(split, index)
        index += 1


def _problem_at(split: Split, index: int) -> Problem:
    id = f"gsm-mini-{VERSION}/{split}/{index}"
    rng = random.Random(id)
    while True:
        problem = draw_problem(rng, id, num_steps=rng.choices(LEVELS, LEVEL_WEIGHTS)[0])
        if split_of(problem.question) == split:
            return problem
