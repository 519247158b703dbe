"""Training conversations of the pair `smol` as text: questions, thinking, answers and judgements.

`SHARES` holds the kinds and their shares. Every random choice comes from the generator that the caller passes.
"""

import gzip
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from stepspec.base.files import package_folder
from stepspec.chat.prompts import EQUIVALENCE_PROMPT, PROBLEM_PROMPTS, RATING_PROMPTS, YES_NO_PROMPT, JudgePrompt
from stepspec.evaluation.generators import gsm_plain as plain
from stepspec.evaluation.generators.gsm_mini import step_content, train_problem, true_values
from stepspec.mini.corrupt import corrupt_step
from stepspec.mini.oracle import same_content

SHARES: Mapping[str, float] = {
    "plain": 0.38,
    "drill": 0.26,
    "sums": 0.04,
    "mini": 0.1,
    "gsm8k": 0.11,
    "chat": 0.04,
    "tools": 0.06,
    "long": 0.01,
}
"""Share of each kind of conversation. The first adapter was trained without sums, and the second without drills; both
got sums wrong."""
SUMS = (4, 10)
"""Minimum and maximum number of sums in a conversation."""
DRILL = 32
"""Number of sums in a drill, of which only the results are learned."""
MINI_LEVELS = (3, 5, 10)
PROPOSED_SHARE = 0.12
"""Share of conversations that judge a model's steps (`proposals`), if there are any."""
JUDGED_SHARE = 0.2
"""Share of gsm-plain and gsm-mini problems with judgements of their steps."""
WAIT_SHARE = 0.12
"""Share of solutions in which a wrong step is corrected."""
PROMPT_SHARES = {"bare": 0.8, "boxed": 0.12, "steps": 0.04, "newlines": 0.04}
WAITS = (
    "Wait, that is not right.",
    "Wait, that is wrong.",
    "Wait, let me check that again.",
    "Wait, I made a mistake.",
)
ASKED = {"short": 0.52, "yes_no": 0.18, "equivalence": 0.18, "specreason": 0.12}
LONGEST_WORDS = 2300
"""Maximum number of words before a question, so that a conversation has at most about 4,000 tokens."""


Solved = tuple[str, tuple[str, ...], str]
"""A question, its steps and its answer."""


@dataclass(frozen=True)
class Piece:
    """A part of the model's text, and whether it is learned."""

    text: str
    learned: bool = True
    end: str = "\n\n"
    """What follows the text."""


@dataclass(frozen=True)
class Judgement:
    """A question about a step, on a branch of the conversation.

    Attributes:
        after: the number of thinking parts before the branch.
        step: the step that the branch starts with; empty if the last of those parts is judged.
        prompt: the judge prompt.
        answer: the answer token, which is learned.
    """

    after: int
    step: str
    prompt: JudgePrompt
    answer: str


@dataclass(frozen=True)
class Conversation:
    """A request and the model's response."""

    messages: Sequence[Mapping[str, Any]]
    thinking: Sequence[Piece]
    answer: str
    tools: Sequence[Mapping[str, Any]] = ()
    judgements: Sequence[Judgement] = field(default_factory=tuple)


class Proposed(NamedTuple):
    """A model's steps for a training problem: index, text, and whether the step is right."""

    kind: str
    """`plain` or `mini`."""
    number: int
    steps: tuple[tuple[int, str, bool], ...]


PROPOSALS_FILE = "proposals.jsonl"


def load_proposals(path: Path) -> list[Proposed]:
    """Load the file that `python -m stepspec.mini.smol.proposals` writes."""
    rows = sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda row: row["number"])
    return [Proposed(row["kind"], row["number"], tuple(map(tuple, row["steps"]))) for row in rows]


def problem_of(kind: str, number: int) -> Any:
    """Return a training problem of gsm-plain or gsm-mini."""
    if kind == "plain":
        return plain.problem_at("train", number)
    return train_problem(number, MINI_LEVELS[number % len(MINI_LEVELS)])


def draw(
    rng: random.Random,
    gsm8k: Sequence[Solved],
    proposals: Sequence[Proposed] = (),
    shares: Mapping[str, float] = SHARES,
) -> Conversation:
    """Sample a conversation. If there are proposals, some conversations judge them.

    Args:
        rng: the source of randomness.
        gsm8k: problems of GSM8K.
        proposals: steps of a model.
        shares: the share of each kind of conversation.
    """
    if proposals and rng.random() < PROPOSED_SHARE:
        return _from_proposals(rng, rng.choice(proposals))
    (kind,) = rng.choices([*shares], [*shares.values()])
    match kind:
        case "mini":
            return _from_mini(rng)
        case "gsm8k":
            question, steps, answer = rng.choice(gsm8k)
            return _reasoned(rng, question, steps, answer)
        case "chat":
            prompt, answer = rng.choice(chats())
            return Conversation([_user(prompt)], [], answer)
        case "sums":
            return _sums(rng)
        case "drill":
            return _drill(rng)
        case "tools":
            return _with_tool(rng)
        case "long":
            return _long(rng)
        case _:
            return _from_plain(rng)


def _user(text: str) -> Mapping[str, Any]:
    return {"role": "user", "content": text}


def _reasoned(
    rng: random.Random,
    question: str,
    steps: Sequence[str],
    answer: str,
    wrong: Mapping[int, str] | None = None,
    judgements: Sequence[Judgement] = (),
) -> Conversation:
    """Return a problem with its steps, some of them wrong at first, and the boxed answer."""
    (wording,) = rng.choices([*PROMPT_SHARES], [*PROMPT_SHARES.values()])
    parts: list[Piece] = []
    for place, step in enumerate(steps):
        if wrong and place in wrong:
            parts += [Piece(wrong[place], learned=False), Piece(f"{rng.choice(WAITS)} {step}")]
        else:
            parts.append(Piece(step))
    asked = PROBLEM_PROMPTS[wording].format(question=question)
    return Conversation([_user(asked)], parts, f"The answer is \\boxed{{{answer}}}.", judgements=judgements)


def _from_plain(rng: random.Random) -> Conversation:
    problem = plain.problem_at("train", rng.randrange(1 << 40))
    if rng.random() < JUDGED_SHARE:
        judgements = [_judged_plain(rng, problem, place) for place in range(len(problem.steps))]
        return _reasoned(rng, problem.question, problem.steps, problem.answer, judgements=judgements)
    wrong: dict[int, str] = {}
    if rng.random() < WAIT_SHARE:
        place = rng.randrange(len(problem.steps))
        wrong[place] = plain.corrupt_step(rng, problem, place)
    return _reasoned(rng, problem.question, problem.steps, problem.answer, wrong)


def _from_proposals(rng: random.Random, proposed: Proposed) -> Conversation:
    """Return a training problem with judgements of a model's steps."""
    problem = problem_of(proposed.kind, proposed.number)
    judgements: list[Judgement] = []
    for place, step, right in proposed.steps:
        asked, reference = _asked(rng), problem.steps[place]
        if asked == "equivalence":
            same = plain.same_content if proposed.kind == "plain" else same_content
            judgements.append(_compared(place, reference, step, same=same(problem, reference, step)))
        else:
            judgements.append(_rated(asked, place, step, right=right))
    return _reasoned(rng, problem.question, problem.steps, str(problem.answer), judgements=judgements)


def _judged_plain(rng: random.Random, problem: plain.PlainProblem, place: int) -> Judgement:
    step = problem.steps[place]
    return judgement(rng, place, step, _in_other_words(rng, step), plain.corrupt_step(rng, problem, place))


def _in_other_words(rng: random.Random, step: str) -> str:
    """Return an equivalent step, with swapped numbers or an added first word."""
    (equation,) = plain.equations(step)
    if {*equation.operators} in ({"+"}, {"*"}) and rng.random() < 0.7:
        swapped = plain.Equation(equation.numbers[::-1], equation.operators, equation.result)
        step = step.replace(equation.text, swapped.text)
    return rng.choice(("", "So, ", "Next, ", "Then: ", "We know: ")) + step


def judgement(rng: random.Random, place: int, right: str, again: str, wrong: str) -> Judgement:
    """Return a question about the step at index `place`: about its rating, or its equivalence with another step."""
    asked, good = _asked(rng), rng.random() < 0.5
    if asked == "equivalence":
        return _compared(place, *((right, again) if good else rng.choice([(right, wrong), (wrong, right)])), same=good)
    return _rated(asked, place, right if good else wrong, right=good)


def _asked(rng: random.Random) -> str:
    return rng.choices([*ASKED], [*ASKED.values()])[0]


def _compared(place: int, first: str, second: str, *, same: bool) -> Judgement:
    prompt = replace(EQUIVALENCE_PROMPT, user=EQUIVALENCE_PROMPT.user.format(first=first, second=second))
    return Judgement(place, "", prompt, " yes" if same else " no")


def _rated(asked: str, place: int, step: str, *, right: bool) -> Judgement:
    if asked == "yes_no":
        return Judgement(place, step, YES_NO_PROMPT, " yes" if right else " no")
    return Judgement(place, step, RATING_PROMPTS[asked], "9" if right else "0")


def _from_mini(rng: random.Random) -> Conversation:
    problem = train_problem(rng.randrange(1 << 40), rng.choice(MINI_LEVELS))
    values = true_values(problem)
    wordings = random.Random(rng.random())

    def worded(content: Any) -> str:
        return content.word(wordings, "target")

    steps = problem.steps
    if rng.random() < JUDGED_SHARE:
        judgements = [
            judgement(
                rng,
                place,
                worded(step_content(problem.scene, problem.plan[place], values)),
                worded(step_content(problem.scene, problem.plan[place], values)),
                worded(corrupt_step(problem, place, values, rng)),
            )
            for place in range(len(steps))
        ]
        return _reasoned(rng, problem.question, steps, str(problem.answer), judgements=judgements)
    wrong: dict[int, str] = {}
    if rng.random() < WAIT_SHARE:
        place = rng.randrange(len(steps))
        wrong[place] = worded(corrupt_step(problem, place, values, rng))
    return _reasoned(rng, problem.question, steps, str(problem.answer), wrong)


def _sums(rng: random.Random) -> Conversation:
    """Return a conversation with several sums, differences, products and quotients like those in problems."""
    found = [_equation(rng) for _ in range(rng.randint(*SUMS))]
    asked = ", ".join(each.text.partition(" = ")[0] for each in found)
    question = rng.choice(("Calculate {}.", "Work out {}.", "What is {}?", "{}")).format(asked)
    return _reasoned(rng, question, [f"{each.text}." for each in found], plain.show(found[-1].result))


def _drill(rng: random.Random) -> Conversation:
    """Return many sums in few tokens, since a sum in a problem takes several times as many."""
    parts: list[Piece] = []
    for _ in range(DRILL):
        asked, _, result = _equation(rng).text.rpartition(" ")
        parts += [Piece(asked, learned=False, end=""), Piece(f" {result}.")]
    return Conversation([_user("Practice arithmetic.")], parts, "Done.")


def _equation(rng: random.Random) -> plain.Equation:
    """Sample an equation of a training problem, or one with random numbers of one to three digits."""
    if rng.random() < 0.5:
        return rng.choice(plain.problem_at("train", rng.randrange(1 << 40)).equations)
    operator = rng.choice("+-*/")
    if operator in "*/":
        a, b = rng.randint(2, 99), rng.randint(2, 12)
    else:
        a, b = (rng.randint(2, 10 ** rng.choice((1, 2, 2, 2, 3)) - 1) for _ in range(2))
    if operator == "-":
        a, b = a + b, min(a, b)
    if operator == "/":
        a *= b
    numbers = (Fraction(a), Fraction(b))
    value = plain.Equation(numbers, (operator,), Fraction(0)).value
    assert value is not None
    return plain.Equation(numbers, (operator,), value)


def _long(rng: random.Random) -> Conversation:
    """Return a problem after many others, which make the context long."""
    turns: list[Mapping[str, Any]] = []
    num_words, wanted = 0, rng.randint(100, LONGEST_WORDS)
    while num_words < wanted:
        before = _from_plain(rng) if rng.random() < 0.7 else _from_mini(rng)
        turns += [*before.messages, {"role": "assistant", "content": before.answer}]
        num_words = sum(len(turn["content"].split()) for turn in turns)
    last = _from_plain(rng)
    return Conversation([*turns, *last.messages], last.thinking, last.answer, judgements=last.judgements)


def _with_tool(rng: random.Random) -> Conversation:
    """Return a question with tools: a tool call, an answer from a tool result, or a problem that needs no tool."""
    tools = [*TOOLS]
    rng.shuffle(tools)
    tools = tools[: rng.randint(1, len(tools))]
    names = {tool["function"]["name"] for tool in tools}
    if "calculator" in names and rng.random() < 0.5:
        a, b = rng.randint(12, 999), rng.randint(12, 999)
        operator, word = rng.choice((("*", "times"), ("+", "plus"), ("-", "minus")))
        value = str(int(plain.Equation((Fraction(a), Fraction(b)), (operator,), Fraction(0)).value or 0))
        question = rng.choice(
            (f"What is {a} {word} {b}?", f"Use the calculator: {a} {operator} {b}", f"{a} {operator} {b}")
        )
        return _called(
            rng, tools, question, "calculator", {"expression": f"{a} {operator} {b}"}, value, f"{a} {operator} {b}"
        )
    if "look_up" in names:
        title, question, fact = rng.choice(FACTS)
        return _called(rng, tools, question, "look_up", {"title": title}, fact, title)
    problem = plain.problem_at("train", rng.randrange(1 << 40))
    solved = _reasoned(rng, problem.question, problem.steps, problem.answer)
    return Conversation(solved.messages, solved.thinking, solved.answer, tools)


def _called(
    rng: random.Random,
    tools: Sequence[Mapping[str, Any]],
    question: str,
    name: str,
    arguments: Mapping[str, str],
    result: str,
    what: str,
) -> Conversation:
    """Return a conversation that ends with a tool call, or with the answer after its result."""
    asked = [_user(question)]
    if rng.random() < 0.5:
        call = json.dumps({"name": name, "arguments": arguments})
        thought = f"I need to calculate {what}." if name == "calculator" else f"I need to look up {what}."
        return Conversation(asked, [Piece(thought)], f"<tool_call>\n{call}\n</tool_call>", tools)
    turns = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
        },
        {"role": "tool", "name": name, "content": result},
    ]
    answer = f"The answer is \\boxed{{{result}}}." if name == "calculator" else result
    return Conversation([*asked, *turns], [Piece("The tool gave the answer.")], answer, tools)


def _tool(name: str, description: str, argument: str, about: str) -> Mapping[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": about}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _tool("calculator", "Calculates the value of an expression.", "expression", "Numbers and operators."),
    _tool("look_up", "Finds an article in an encyclopedia.", "title", "The title of the article."),
    _tool("weather", "Tells the weather in a city.", "city", "The name of the city."),
)
FACTS = tuple(
    (country, f"Look up the capital of {country}.", f"The capital of {country} is {capital}.")
    for country, capital in (
        *(("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Kenya", "Nairobi")),
        *(("Peru", "Lima"), ("Norway", "Oslo"), ("Egypt", "Cairo"), ("Cuba", "Havana"), ("Greece", "Athens")),
        *(("Austria", "Vienna"), ("Poland", "Warsaw"), ("Ghana", "Accra"), ("Chile", "Santiago")),
    )
)


@cache
def chats() -> Sequence[tuple[str, str]]:
    """Load general questions with the base model's short answers, from `python -m stepspec.mini.smol.chat`."""
    path = Path(__file__).parent / "chat.jsonl"
    return [(row["question"], row["answer"]) for row in map(json.loads, path.read_text("utf-8").splitlines())]


_MARK = re.compile(r"<<[^<>]*>>")
_SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z$(])")


def load_gsm8k(split: str) -> list[Solved]:
    """Load questions, steps and answers of a GSM8K split (arXiv:2110.14168), without calculator annotations."""
    path = package_folder().parent / "evals" / "data" / f"gsm8k-{split}.jsonl.gz"
    found: list[Solved] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            text, _, answer = row["answer"].rpartition("####")
            clean = _MARK.sub("", text).strip()
            steps = tuple(sentence.strip() for part in clean.splitlines() for sentence in _SENTENCE.split(part))
            found.append((row["question"].strip(), tuple(filter(None, steps)), answer.strip().replace(",", "")))
    return found
