"""Training sequences: the reasoning of a problem in one voice, with judgments on branches after its steps."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerFast

from evals.training.corrupt import corrupt_step
from evals.training.gsm_mini import (
    Content,
    Problem,
    step_content,
    step_slots,
    train_problem,
    true_values,
)
from evals.training.selection import SELECTION_NAMES, SELECTION_NONE, SELECTION_PROMPT, selection_line
from evals.training.tokenizer import PROMPT_SHARES, SYSTEM_TURNS, opening
from evals.training.wording import CHOICE, CHOSEN, EQUATIONS, LEADS, RATINGS, REASONS, Voice
from stepspec.chat.prompts import (
    EQUIVALENCE_PROMPT,
    PROBLEM_PROMPTS,
    YES_NO_PROMPT,
    JudgePrompt,
)

SYSTEM_SHARE = 0.1
PROPOSED_SHARE = 0.6  # share of judged problems that have steps from the draft
# Judge questions and their shares. The published rating prompt is four times as long as the short one.
JUDGEMENT_SHARES = {"short": 0.4, "yes_no": 0.25, "equivalence": 0.22, "specreason": 0.06, "selection": 0.07}
DRILLED, SUMS = 5, 6  # maximum people, or minimum equations, of a drill
LONG_ENOUGH = 550  # tokens; longer sequences get no more judgments, because attention is quadratic
VOICES: tuple[Voice, Voice] = ("target", "draft")
NOT_LEARNED = -100

Proposals = Mapping[int, Sequence[tuple[int, str, bool]]]
"""The draft's steps by number of the training problem: step index, text, and whether the step is right."""


@dataclass
class Tokens:
    """Tokens with the training labels of each, or `NOT_LEARNED`."""

    ids: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)  # the next token, if the model writes it
    free: list[int] = field(default_factory=list)  # 1 if the target token belongs to one of several phrasings
    verdicts: list[int] = field(default_factory=list)  # the judge's answer, a single token
    flaws: list[int] = field(default_factory=list)  # in a step: whether it is wrong by this token
    differences: list[int] = field(default_factory=list)  # in a step: whether it differs from another by this token

    def add(self, ids: Sequence[int], flaws: Sequence[int] = (), differences: Sequence[int] = ()) -> None:
        """Append tokens with the given labels, or without labels."""
        self.ids += ids
        nothing = [NOT_LEARNED] * len(ids)
        self.targets += nothing
        self.free += [0] * len(ids)
        self.verdicts += nothing
        self.flaws += flaws or nothing
        self.differences += differences or nothing


@dataclass
class TreeSequence(Tokens):
    """A flattened tree of a trunk and branches."""

    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)  # 0 is the trunk
    cuts: list[int] = field(default_factory=list)  # a token sees its own segment and the trunk before this index

    def branch(self, cut: int, tokens: Tokens) -> None:
        """Append a segment that branches off after `cut` tokens of the trunk. The first segment is the trunk itself."""
        length = len(tokens.ids)
        for name in vars(tokens):
            getattr(self, name).extend(getattr(tokens, name))
        self.positions += range(cut, cut + length)
        self.segments += [self.segments[-1] + 1 if self.segments else 0] * length
        self.cuts += [cut] * length


@dataclass(frozen=True)
class Variant:
    """A candidate step of a solution."""

    ids: list[int]
    flaws: list[int]


class SequenceMaker:
    """A sampler of training problems that turns them into sequences for one voice."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, voice: Voice, proposals: Proposals | None = None) -> None:
        self.tokenizer = tokenizer
        self.voice: Voice = voice
        self.proposals = proposals or {}
        self._proposed = list(self.proposals)
        self.answers = {text: self._only(f" {text}") for text in ("yes", "no", *SELECTION_NAMES, SELECTION_NONE)}
        self.answers |= {digit: self._only(digit) for digit in "09"}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _only(self, text: str) -> int:
        (id,) = self.encode(text)
        return id

    def encode_marked(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a marked step, and for each whether it belongs to one of several phrasings.

        The first token of a phrasing does not count. Required content, such as another digit or the end of the
        thinking, could take its place, and the model would then prefer the tokens with the larger weight.
        """
        plain, chosen = "", set[int]()
        for part in text.split(CHOSEN):
            fixed, _, choice = part.partition(CHOICE)
            plain += fixed + choice
            chosen.update(range(len(plain) - len(choice.lstrip(" ")) + 1, len(plain)))
        encoded = self.tokenizer(plain, add_special_tokens=False, return_offsets_mapping=True)
        firsts = [end - len(plain[start:end].lstrip(" ")) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], [int(first in chosen) for first in firsts]

    def draw(
        self, rng: random.Random, max_level: int, mixed: bool, judged: bool, drills: int = 0, candidates: int = 1
    ) -> TreeSequence:
        """Return the sequence of a sampled training problem.

        Args:
            rng: the source of random choices.
            max_level: the maximum number of steps of a problem.
            mixed: whether to mix in steps of the other voice, which are not learned.
            judged: whether to add judgments of its steps, in any order.
            drills: the number of branches that practice rare skills: facts about people in any order, and long sums.
            candidates: the number of sampled problems, of which the hardest is used.
        """
        known = judged and self._proposed and rng.random() < PROPOSED_SHARE
        numbers = [rng.choice(self._proposed) if known else rng.getrandbits(48) for _ in range(candidates)]
        problems = {number: train_problem(number, max_level) for number in numbers}
        number = max(problems, key=lambda number: _difficulty(problems[number]))
        return self.make(problems[number], rng, mixed, judged, drills, self.proposals.get(number, ()))

    def make(
        self,
        problem: Problem,
        rng: random.Random,
        mixed: bool = False,
        judged: bool = False,
        drills: int = 0,
        proposals: Sequence[tuple[int, str, bool]] = (),
    ) -> TreeSequence:
        """Return the sequence of one problem."""
        values = true_values(problem)
        trunk = Tokens()
        trunk.add(self.encode(self._opening(problem.question, rng)))
        ends = [len(trunk.ids)]
        for relation in problem.plan:
            voice = rng.choice(VOICES) if mixed else self.voice
            ids, free = self.encode_marked(step_content(problem.scene, relation, values).marked(rng, voice) + "\n\n")
            trunk.add(ids, flaws=[0] * len(ids))
            if voice == self.voice:
                trunk.targets[ends[-1] - 1 : -1], trunk.free[ends[-1] - 1 : -1] = ids, free
            ends.append(len(trunk.ids))
        closing = self.encode(f"</think>The answer is \\boxed{{{problem.answer}}}.<|end|>")
        trunk.add(closing)
        trunk.targets[ends[-1] - 1 : -1] = closing
        sequence = TreeSequence()
        sequence.branch(0, trunk)
        for _ in range(drills):
            place = rng.randrange(len(ends))
            drill = self._sums(rng) if rng.random() < 0.4 else self._facts(problem, place, values, rng)
            sequence.branch(ends[place], drill)
        if judged:
            asker = Asker(self, problem, values, rng, proposals)
            places = list(enumerate(itertools.pairwise(ends)))
            rng.shuffle(places)
            for index, (start, end) in places:
                if len(sequence.ids) < LONG_ENOUGH:
                    asker.ask(sequence, index, start, end)
        return sequence

    def _facts(self, problem: Problem, place: int, values: Mapping[str, int], rng: random.Random) -> Tokens:
        """Return a drill that states facts known before step `place`, about people in any order.

        A fact is a known number or a relation from the story. Steps look up few numbers, and mostly the last result. A
        drill looks up many at a time, like the steps that need several: `Next, Ann has 12, Ben has 3 more than Cara`.
        """
        found = {relation.subject for relation in problem.plan[:place]}
        drill = Tokens()
        drill.add(self.encode(rng.choice(LEADS)[0].rstrip()))
        people = rng.sample(list(problem.relations), min(DRILLED, len(problem.relations)))
        for name in people:
            relation = problem.relations[name]
            known = relation.kind == "given" or name in found
            text = f"{{S}} {{has}} {values[name]}" if known else REASONS[relation.kind].partition("{join}")[0]
            fact = text.format(**step_slots(problem.scene, relation, {})).removeprefix(name)
            ids = self.encode(fact)
            drill.add([*self.encode(f" {name}"), *ids, *self.encode(",")])
            drill.targets[-2 - len(ids) : -2] = ids
        return drill

    def _sums(self, rng: random.Random) -> Tokens:
        """Return a drill of equations of other problems, such as `12 + 31 = 43`. Only the results are learned."""
        equations: list[str] = []
        while len(equations) < SUMS:
            other = train_problem(rng.getrandbits(48))
            values = true_values(other)
            equations += [EQUATIONS[each.kind].format(**step_slots(other.scene, each, values)) for each in other.plan]
        drill = Tokens()
        drill.add(self.encode(f"So {', '.join(equations)}."))
        equals, digits = self.encode(" = 1")[0], {self._only(digit) for digit in "0123456789"}
        in_result = False
        for index, (id, following) in enumerate(itertools.pairwise(drill.ids)):
            in_result = following in digits and (in_result or id == equals)
            if in_result:
                drill.targets[index] = following
        return drill

    def _opening(self, question: str, rng: random.Random) -> str:
        wording = rng.choices(list(PROMPT_SHARES), list(PROMPT_SHARES.values()))[0]
        system = rng.choice(SYSTEM_TURNS) if rng.random() < SYSTEM_SHARE else ""
        return opening(PROBLEM_PROMPTS[wording].format(question=question), system)


def _difficulty(problem: Problem) -> float:
    """Score how often steps need more than the previous result, and whether the story is out of order or has extras."""
    lookups = sum(len(relation.refs) for relation in problem.plan if len(relation.refs) > 1) / len(problem.plan)
    offsets = [problem.question.find(f"{relation.subject} {problem.scene.verb}") for relation in problem.plan]
    offsets = [offset for offset, relation in zip(offsets, problem.plan, strict=True) if relation.subject]
    needed = {relation.subject for relation in problem.plan}
    idle = any(relation.kind != "given" and name not in needed for name, relation in problem.relations.items())
    return lookups + (offsets != sorted(offsets)) + idle


class Asker:
    """A generator of judge questions about the steps of one problem."""

    def __init__(
        self,
        maker: SequenceMaker,
        problem: Problem,
        values: Mapping[str, int],
        rng: random.Random,
        proposals: Sequence[tuple[int, str, bool]],
    ) -> None:
        self.maker = maker
        self.problem = problem
        self.values = values
        self.rng = rng
        self.proposals = proposals

    def ask(self, sequence: TreeSequence, index: int, start: int, end: int) -> None:
        """Add a question about step `index`, which is `start:end` of the trunk, or about another step in its place."""
        asked = self.rng.choices(list(JUDGEMENT_SHARES), list(JUDGEMENT_SHARES.values()))[0]
        if asked == "equivalence":
            sequence.branch(start, self._equivalence(index))
        elif asked == "selection":
            sequence.branch(start, self._selection(index))
        else:
            right = self.rng.random() < 0.5
            about_trunk = right and self.rng.random() < 0.4
            sequence.branch(end if about_trunk else start, self._rating(index, asked, right, about_trunk))

    def _rating(self, index: int, asked: str, right: bool, about_trunk: bool) -> Tokens:
        branch = Tokens()
        if not about_trunk:
            variant = self._variant(index, right)
            branch.add(variant.ids, flaws=variant.flaws)
        prompt = YES_NO_PROMPT if asked == "yes_no" else RATINGS[asked]
        answer = ("yes" if right else "no") if asked == "yes_no" else ("9" if right else "0")
        branch.add(self.maker.encode(f"<|end|><|user|>{prompt.user}<|end|><|assistant|>"))
        return self._answered(branch, prompt, answer)

    def _equivalence(self, index: int) -> Tokens:
        """Return a question about two steps, right or wrong, that have the same or different content.

        If the content is the same, the second step is also learned as text, so that the model expects the repetition.
        """
        same = self.rng.random() < 0.5
        first, second = self._contents(index, same)
        seed, voice = self.rng.random(), self._voice()
        ids = self._encode_content(first, seed, voice, " ", "")
        differences = [0] * len(ids)
        if not same:
            ids, differences = self._compared(second, first, seed, voice, " ", "")
        before, after = EQUIVALENCE_PROMPT.user.split(" {second}")
        branch = Tokens()
        before = before.format(first=first.word(random.Random(self.rng.random()), self._voice()))
        branch.add(self.maker.encode(f"<|end|><|user|>{before}"))
        branch.add(ids, differences=differences)
        if same:
            branch.targets[-len(ids) - 1 : -1] = ids
        branch.add(self.maker.encode(f"{after}<|end|><|assistant|>"))
        return self._answered(branch, EQUIVALENCE_PROMPT, "yes" if same else "no")

    def _contents(self, index: int, same: bool) -> tuple[Content, Content]:
        right, wrong = self._right(index), self._wrong(index)
        if same:
            return (right, right) if self.rng.random() < 0.6 else (wrong, wrong)
        other = self._right(self.rng.randrange(len(self.problem.plan)))
        pair = [right, wrong] if self.rng.random() < 0.7 or other == right else [right, other]
        self.rng.shuffle(pair)
        return pair[0], pair[1]

    def _selection(self, index: int) -> Tokens:
        """Return a question about two to four candidates, of which at most one is right."""
        count = self.rng.randint(2, len(SELECTION_NAMES))
        best = self.rng.choice([*range(count), None])
        branch = Tokens()
        before, after = SELECTION_PROMPT.user.split("{candidates}")
        branch.add(self.maker.encode(f"<|end|><|user|>{before}"))
        for position in range(count):
            variant = self._variant(index, right=position == best, before=" ", after="")
            line = selection_line(SELECTION_NAMES[position], "")
            branch.add(self.maker.encode(("\n" if position else "") + line.rstrip()))
            branch.add(variant.ids, flaws=variant.flaws)
        branch.add(self.maker.encode(f"{after}<|end|><|assistant|>"))
        answer = SELECTION_NONE if best is None else SELECTION_NAMES[best]
        return self._answered(branch, SELECTION_PROMPT, answer)

    def _answered(self, branch: Tokens, prompt: JudgePrompt, answer: str) -> Tokens:
        branch.add(self.maker.encode(prompt.prefill))
        branch.verdicts[-1] = self.maker.answers[answer]
        return branch

    def _variant(self, index: int, right: bool, before: str = "", after: str = "\n\n") -> Variant:
        """Return a right or wrong step for an index: one of the draft's, if there is one, or a generated one."""
        proposed = [text for place, text, good in self.proposals if place == index and good == right]
        if proposed and self.rng.random() < 0.5:
            ids = self.maker.encode(before + self.rng.choice(proposed) + after)
            return Variant(ids, [0] * len(ids) if right else [NOT_LEARNED] * (len(ids) - 1) + [1])
        seed, voice = self.rng.random(), self._voice()
        content = self._right(index)
        if right:
            ids = self._encode_content(content, seed, voice, before, after)
            return Variant(ids, [0] * len(ids))
        return Variant(*self._compared(self._wrong(index), content, seed, voice, before, after))

    def _right(self, index: int) -> Content:
        return step_content(self.problem.scene, self.problem.plan[index], self.values)

    def _wrong(self, index: int) -> Content:
        return corrupt_step(self.problem, index, self.values, self.rng)

    def _voice(self) -> Voice:
        return self.rng.choice(VOICES)

    def _encode_content(self, content: Content, seed: float, voice: Voice, before: str, after: str) -> list[int]:
        return self.maker.encode(before + content.word(random.Random(seed), voice) + after)

    def _compared(
        self, content: Content, other: Content, seed: float, voice: Voice, before: str, after: str
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a step, and a 1 for each id from the first difference to `other` in the same wording."""
        ids, others = (self._encode_content(each, seed, voice, before, after) for each in (content, other))
        shared = next((i for i, (id, other_id) in enumerate(zip(ids, others, strict=False)) if id != other_id), 0)
        return ids, [0] * shared + [1] * (len(ids) - shared)
