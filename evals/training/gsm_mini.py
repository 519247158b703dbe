"""Generate gsm-mini problems from a seed: a story in English, reference steps and a whole-number answer.

A problem is a small graph. Each person has one quantity, which is given directly or by a relation to others. The
question asks for one person's quantity or for a derived value: a total, a difference, an equal share or a price. Each
relation that the answer needs is one step. The module does not depend on models or tokenizers.
`evals.training.wording` has the phrasings. `evals.training.oracle` judges steps against the same graph.

`python -m evals.training.gsm_mini` writes the splits that ship with stepspec to `evals/data`, and prints their hashes.
"""

import gzip
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from evals.training.wording import FRACTIONS, STATEMENTS, Voice, draw_wording, unmarked

VERSION = 2
Split = Literal["train", "calibration", "test"]
SPLIT_SIZES: Mapping[Split, int | None] = {"train": None, "calibration": 10_000, "test": 10_000}
NUM_SHIPPED: Mapping[Split, int] = {"train": 1_000, "calibration": 10_000, "test": 10_000}
"""Number of problems in the file of a split. Training takes its problems from here, and not from the file."""
DATA = Path(__file__).parents[1] / "data"
MAX_VALUE = 99
LEVEL_WEIGHTS: Mapping[int, int] = {3: 30, 4: 26, 5: 18, 6: 11, 7: 6, 8: 4, 9: 3, 10: 2}
# Training also has shorter problems, because people try a model with them.
TRAINING_LEVEL_WEIGHTS: Mapping[int, int] = {1: 4, 2: 8, **LEVEL_WEIGHTS}

Own = Literal["given", "rate", "boxes"]
Derived = Literal["more", "fewer", "times", "part", "percent", "sum"]
Asked = Literal["total", "gap", "share", "price"]
Kind = Literal[Own, Derived, Asked]
"""A quantity that depends on nobody else, on one or two others, or a final value that belongs to nobody."""

NAMES = (
    *("Ann", "Ben", "Cara", "Dan", "Ella", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo"),
    *("Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uma", "Vera", "Will", "Zoe"),
)
OPENINGS = (
    *("Some friends met.", "This happened at school.", "It was a sunny day.", "Here is a small puzzle."),
    *("This is about a few neighbors.", "Listen to this."),
)


@dataclass(frozen=True)
class Scene:
    """The items that are counted, and the words for them."""

    item: str
    verb: str  # with one person: "Ann has", "Ann picked"
    plural: str  # with several: "Ann and Ben have"
    base: str  # "How many lemons did Ann pick?"; empty where the verb is "has"
    box: str  # "Ann picked 3 baskets of 4 lemons each"

    def ask(self, names: str) -> str:
        """Return the end of a question about one person or several."""
        if self.base:
            return f"did {names} {self.base}"
        return f"do {names} have" if " and " in names else f"does {names} have"


SCENES = (
    *(
        Scene(item, "has", "have", "", "boxes")
        for item in ("apples", "marbles", "stickers", "coins", "pencils", "books", "stamps", "balloons")
    ),
    *(Scene(item, "collected", "collected", "collect", "bags") for item in ("shells", "cans", "cards")),
    *(Scene(item, "picked", "picked", "pick", "baskets") for item in ("berries", "flowers", "lemons")),
    *(Scene(item, "baked", "baked", "bake", "trays") for item in ("cookies", "muffins")),
)


@dataclass(frozen=True)
class Relation:
    """How the quantity of `subject` follows from those of `refs`. `subject` is empty for the final value."""

    kind: Kind
    subject: str
    refs: tuple[str, ...] = ()
    amount: int = 0
    count: int = 0  # days, boxes, or the divisor of a part

    def value(self, values: Mapping[str, int]) -> int | None:
        """Return the quantity, given those of `refs`; None if it is not a whole number."""
        known = [values[name] for name in self.refs]
        match self.kind:
            case "given":
                return self.amount
            case "rate" | "boxes":
                return self.amount * self.count
            case "more":
                return known[0] + self.amount
            case "fewer":
                return known[0] - self.amount
            case "times" | "price":
                return known[0] * self.amount
            case "part":
                return _divide(known[0], self.count)
            case "share":
                return _divide(known[0], self.amount)
            case "percent":
                return _divide(known[0] * self.amount, 100)
            case "sum" | "total":
                return sum(known)
            case "gap":
                return known[0] - known[1]


def _divide(dividend: int, divisor: int) -> int | None:
    return dividend // divisor if dividend % divisor == 0 else None


@dataclass(frozen=True)
class Problem:
    """One problem. `relations` has one entry per person, including those that the answer does not need."""

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


def step_slots(scene: Scene, relation: Relation, values: Mapping[str, int]) -> dict[str, str]:
    """Return the texts for the slots of the wordings, by slot name, for the quantities in `values`."""
    slots = {"S": relation.subject, "item": scene.item, "has": scene.verb, "have": scene.plural, "box": scene.box}
    slots |= {"K": str(relation.amount), "N": str(relation.count), "fraction": FRACTIONS.get(relation.count, "")}
    for slot, name in zip("RQ", relation.refs, strict=False):
        slots[slot] = name
    if all(name in values for name in relation.refs):
        slots["c"] = str(relation.value(values))
        slots |= {letter: str(values[name]) for letter, name in zip("ab", relation.refs, strict=False)}
    return slots


@dataclass(frozen=True)
class Content:
    """The content of a step, independent of its wording."""

    key: str
    slots: Mapping[str, str]

    def word(self, rng: random.Random, voice: Voice) -> str:
        """Return the step in a wording sampled with the voice's frequencies. The same seed gives the same wording."""
        return unmarked(self.marked(rng, voice))

    def marked(self, rng: random.Random, voice: Voice) -> str:
        """Return the worded step with marks around each text that is one of several phrasings."""
        return draw_wording(self.key, rng, voice).format(**self.slots)


def step_content(scene: Scene, relation: Relation, values: Mapping[str, int]) -> Content:
    """Return the content of the step for a relation, for the quantities in `values`."""
    return Content(relation.kind, step_slots(scene, relation, values))


def write_solution(problem: Problem, rng: random.Random, voice: Voice) -> tuple[str, ...]:
    """Return all steps of a problem in newly sampled wordings."""
    values = true_values(problem)
    return tuple(step_content(problem.scene, relation, values).word(rng, voice) for relation in problem.plan)


def true_values(problem: Problem) -> dict[str, int]:
    """Return the quantity of every person in the problem."""
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
    """A graph under construction: people, their quantities, and the relations between them."""

    def __init__(self, rng: random.Random, scene: Scene) -> None:
        self.rng = rng
        self.scene = scene
        self.names = rng.sample(NAMES, len(NAMES))
        self.values: dict[str, int] = {}
        self.relations: dict[str, Relation] = {}

    def add(self, relation: Relation) -> bool:
        """Add a relation if its value is a whole number from 2 to `MAX_VALUE`. Return whether it was added."""
        value = relation.value(self.values)
        if value is None or not 2 <= value <= MAX_VALUE:
            return False
        self.values[relation.subject] = value
        self.relations[relation.subject] = relation
        return True

    def give(self) -> str:
        """Add a person with a given quantity, sometimes as boxes or as a rate per day. Return the name."""
        name = self.names.pop()
        relation = Relation("given", name, amount=self.rng.randint(2, 40))
        if self.rng.random() < 0.3:
            kind: Kind = "rate" if self.scene.base and self.rng.random() < 0.7 else "boxes"
            relation = Relation(kind, name, amount=self.rng.randint(2, 12), count=self.rng.randint(2, 8))
        self.add(relation)
        return name

    def derive(self, ref: str) -> str:
        """Add a person whose quantity follows from that of `ref`. Return the name."""
        name = self.names.pop()
        while not self.add(self._sample_relation(name, ref)):
            pass
        return name

    def _sample_relation(self, name: str, ref: str) -> Relation:
        rng = self.rng
        kind: Kind = rng.choices(("more", "fewer", "times", "part", "percent", "sum"), (6, 6, 4, 4, 4, 3))[0]
        match kind:
            case "more" | "fewer":
                return Relation(kind, name, (ref,), amount=rng.randint(2, 20))
            case "times":
                return Relation(kind, name, (ref,), amount=rng.randint(2, 5))
            case "part":
                return Relation(kind, name, (ref,), count=rng.choice(list(FRACTIONS)))
            case "percent":
                return Relation(kind, name, (ref,), amount=rng.choice((10, 20, 25, 50, 75)))
            case _:
                return Relation(kind, name, (ref, self.other(ref)))

    def other(self, *taken: str) -> str:
        """Return another person: one in the story, or sometimes a new person."""
        others = [name for name in self.values if name not in taken]
        return self.rng.choice(others) if others and self.rng.random() < 0.8 else self.give()

    def needed(self, names: Iterable[str]) -> set[str]:
        """Return the given people and everybody that their quantities depend on."""
        return set(names).union(*(self.needed(self.relations[name].refs) for name in names))

    def finish(self, ref: str) -> Relation | None:
        """Return the relation of the final value, for `ref` and perhaps others; None if its value is not valid."""
        rng = self.rng
        kind: Kind = rng.choices(("total", "gap", "share", "price"), (5, 3, 2, 2))[0]
        match kind:
            case "total":
                refs = [ref, self.other(ref)]
                rng.shuffle(refs)
                relation = Relation(kind, "", tuple(refs))
            case "gap":
                relation = Relation(
                    kind, "", tuple(sorted((ref, self.other(ref)), key=lambda name: -self.values[name]))
                )
            case "share":
                friends = [count for count in range(2, 10) if self.values[ref] % count == 0]
                relation = Relation(kind, "", (ref,), amount=rng.choice(friends or [2]))
            case _:
                relation = Relation(kind, "", (ref,), amount=rng.randint(2, 5))
        value = relation.value(self.values)
        return relation if value is not None and 1 <= value <= MAX_VALUE else None


def _sample_story(rng: random.Random, scene: Scene, num_steps: int) -> tuple[_Story, tuple[Relation, ...]] | None:
    """Return a story and the relations that its answer needs; None if their number is not `num_steps`."""
    story = _Story(rng, scene)
    last = story.give()
    end = None
    has_end = rng.random() < 0.5
    while _num_steps(story) < num_steps - has_end:
        last = story.derive(last)
    if has_end:
        end = story.finish(last)
        if end is None:
            return None
    needed = story.needed(end.refs if end else (last,))
    plan = [relation for name, relation in story.relations.items() if relation.kind != "given" and name in needed]
    plan += [end] if end else []
    return (story, tuple(plan)) if len(plan) == num_steps else None


def _num_steps(story: _Story) -> int:
    return sum(relation.kind != "given" for relation in story.relations.values())


def _statement(scene: Scene, relation: Relation, rng: random.Random) -> str:
    wordings = STATEMENTS[relation.kind]
    wording = wordings[0] if len(wordings) == 1 or rng.random() < 0.95 else wordings[1]
    return wording.format(**step_slots(scene, relation, {}))


def _irrelevant(story: _Story, rng: random.Random) -> list[str]:
    """Return statements that the answer does not need: an age, a ticket price, or an unrelated person."""
    kind = rng.randrange(3)
    if kind == 0:
        return [f"{rng.choice(list(story.values))} is {rng.randint(6, 15)} years old."]
    if kind == 1:
        return [f"A ticket cost {rng.randint(2, 30)} dollars."]
    known = set(story.relations)
    story.derive(rng.choice(list(story.values)))
    return [_statement(story.scene, relation, rng) for name, relation in story.relations.items() if name not in known]


def _question(scene: Scene, asked: Relation, rng: random.Random) -> str:
    names = " and ".join(asked.refs)
    match asked.kind:
        case "total":
            return f"How many {scene.item} {scene.ask(names)} {rng.choice(('together', 'in total'))}?"
        case "gap":
            return f"How many more {scene.item} {scene.ask(asked.refs[0])} than {asked.refs[1]}?"
        case "share":
            return f"How many {scene.item} does each friend get?"
        case "price":
            return f"How many dollars do the {scene.item} of {names} cost?"
        case _:
            return f"How many {scene.item} {scene.ask(asked.subject)}?"


def draw_problem(rng: random.Random, id: str, num_steps: int) -> Problem:
    """Sample a problem whose answer takes `num_steps` steps. Every random choice comes from `rng`."""
    scene = rng.choice(SCENES)
    sampled = None
    while sampled is None:
        sampled = _sample_story(rng, scene, num_steps)
    story, plan = sampled
    # Given quantities come first, so that a reader can compute the others in the order of the statements.
    ordered = sorted(story.relations.values(), key=lambda relation: relation.kind != "given")
    statements = [_statement(scene, relation, rng) for relation in ordered]
    if rng.random() < 0.15:
        for statement in _irrelevant(story, rng):
            statements.insert(rng.randint(0, len(statements)), statement)
    asked = plan[-1]
    if asked.kind in ("share", "price"):
        statements.append(_statement(scene, asked, rng))
    question = " ".join([rng.choice(OPENINGS), *statements, _question(scene, asked, rng)])
    answer = asked.value(story.values)
    assert answer is not None
    steps = tuple(step_content(scene, relation, story.values).word(rng, "target") for relation in plan)
    return Problem(id, question, answer, steps, scene, story.relations, plan)


def split_of(question: str) -> Split:
    """Return the split of a question. It depends on the hash of the question, so no question is in two splits."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4], "big") % 10
    return "test" if bucket == 0 else "calibration" if bucket == 1 else "train"


def load_split(split: Split, start: int = 0) -> Iterator[Problem]:
    """Yield the problems of a split from number `start` on, the same in every call. `train` is infinite.

    Raises:
        ValueError: the split is not one of `train`, `calibration`, `test`.
    """
    if split not in get_args(Split):
        raise ValueError(f"gsm-mini has no split {split!r}. Choose one of {', '.join(get_args(Split))}.")
    size = SPLIT_SIZES[split]
    index = start
    while size is None or index < size:
        yield _problem_at(split, index)
        index += 1


def train_problem(number: int, max_level: int = max(LEVEL_WEIGHTS)) -> Problem:
    """Return the training problem of a number, with at most `max_level` steps. Early training uses easier problems."""
    return _problem_at("train", number, max_level)


def _problem_at(split: Split, index: int, max_level: int = max(LEVEL_WEIGHTS)) -> Problem:
    id = f"gsm-mini-{VERSION}/{split}/{index}"
    rng = random.Random(id)
    weights = TRAINING_LEVEL_WEIGHTS if split == "train" else LEVEL_WEIGHTS
    levels = [level for level in weights if level <= max_level]
    while True:
        problem = draw_problem(rng, id, rng.choices(levels, [weights[level] for level in levels])[0])
        if split_of(problem.question) == split:
            return problem


def shipped_row(problem: Problem) -> dict[str, str | int]:
    """Return what a file of a split has of a problem."""
    return {"id": problem.id, "question": problem.question, "answer": str(problem.answer), "level": problem.level}


def main() -> None:
    """Write the files, in the same bytes at every time."""
    for split, size in NUM_SHIPPED.items():
        problems = itertools.islice(load_split(split), size)
        lines = "".join(json.dumps(shipped_row(problem)) + "\n" for problem in problems)
        path = DATA / f"gsm-mini-{split}.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
        print(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
