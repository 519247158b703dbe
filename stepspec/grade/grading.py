"""Grades texts: find the answer, compare it exactly, and ask computer algebra only where reading is not enough."""

import re
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Self, get_args

from stepspec.errors import UsageError, unknown_name
from stepspec.grade.boxes import last_boxes
from stepspec.grade.caps import refusal
from stepspec.grade.compare import Comparison, Question, compare
from stepspec.grade.finding import Found, find_answer
from stepspec.grade.integer import canonical_integer, grade_integer
from stepspec.grade.latex import cleaned
from stepspec.grade.number import Number, has_digit, number_of, read_number
from stepspec.grade.sentence import number_named
from stepspec.grade.structure import structure_of
from stepspec.grade.thinking import without_thinking
from stepspec.grade.vocabulary import DENIES, changes_number
from stepspec.grade.words import MAX_ANSWER_CHARS, DecidedBy, Grade, GraderKind, Limits, Status, shortened
from stepspec.grade.workers import Reply, WorkerPool


class Grading:
    r"""Grades answers of one kind; a context manager, and safe to use from several threads.

    - `integer`: a whole number in the last closed `\boxed{}` (the benchmark gsm-mini);
    - `number`: a number, compared exactly as a fraction;
    - `math`: anything that MATH asks for. Numbers first, then texts in one way of writing, then the parts of tuples,
      intervals, sets and matrices, and at last symbolic equality by math-verify, in processes that can be killed.

    Answers are found in the last box, behind the last `####`, behind an answer phrase, or as the last number, in this
    order. Units and currencies are not compared; `50\%` is equal to `50` and to `0.5` (see `stepspec.grade.number`).

    >>> with Grading("number") as grading:
    ...     grading.grade("So she pays $18 a day. The answer is $18.", "18").status
    'correct'

    Args:
        kind: what the gold answers are.
        last_number: whether the last number of a text that gives no sign of an answer is taken for it.
        num_workers: processes that compare formulas at once; they are started when they are needed.
        limits: what one answer may cost.
    """

    def __init__(
        self, kind: GraderKind, *, last_number: bool = True, num_workers: int = 1, limits: Limits | None = None
    ) -> None:
        if kind not in get_args(GraderKind):
            raise UsageError(unknown_name("grader", kind, get_args(GraderKind)))
        self._kind: GraderKind = kind
        self._last_number = last_number
        self._limits = limits or Limits()
        self._workers = WorkerPool(num_workers, self._limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers."""
        self._workers.close()

    def worker_ids(self) -> list[int]:
        """The process ids of the workers that have started."""
        return self._workers.worker_ids()

    def check_gold(self, gold: str) -> str:
        r"""The gold answer as it is compared: of a solution, what stands in its last box or behind its `####`.

        Raises:
            UsageError: it cannot be a gold answer of this kind.
        """
        return _checked_gold(gold, self._kind, self._limits.max_chars)

    def grade(self, text: str, gold: str, *, cut_short: bool = False) -> Grade:
        """The grade of a text. Whatever a model wrote, this raises nothing and takes a few seconds at most.

        Args:
            text: what the model wrote, of any length.
            gold: the right answer.
            cut_short: the text ends because its budget did; what stands last in it is then no answer.

        Raises:
            UsageError: the gold answer cannot be one of this kind.
            StepSpecError: no worker can be started, or grading was closed meanwhile.
        """
        gold = self.check_gold(gold)
        if self._kind == "integer":
            return _grade_integer(text, gold)
        text = without_thinking(text, self._limits.max_text_chars)
        wants_number = self._kind == "number" or read_number(gold) is not None
        found = find_answer(text, last_number=self._last_number and wants_number, cut_short=cut_short)
        if found is None:
            return Grade("no_answer", why="The text was cut short before an answer." if cut_short else _NO_ANSWER)
        if found.boxes and found.boxes.changed:
            return _grade("parse_error", found, None, _CHANGED_OUTSIDE)
        found = _with_all_boxes(found, gold, self._limits.max_chars)
        if len(found.text) > self._limits.max_chars:
            why = f"The answer is {len(found.text):,} characters long; at most {self._limits.max_chars:,} are read."
            return _grade("parse_error", found, None, why)
        return self._grade_number(found, gold) if self._kind == "number" else self._grade_math(found, gold)

    def _grade_number(self, found: Found, gold: str) -> Grade:
        number, expected = _number_in(found), read_number(gold)
        assert expected is not None
        if number is None:
            read = shortened(found.text)
            if has_digit(found.text):
                return _grade(
                    "parse_error", found, None, f"The answer {read!r} has digits, but cannot be read as a number."
                )
            return _grade("incorrect", found, "number", f"The answer {read!r} is not a number.")
        if expected.equals(number):
            return _grade("correct", found, "number")
        return _grade("incorrect", found, "number", _differs(str(number), str(expected)))

    def _grade_math(self, found: Found, gold: str) -> Grade:
        comparison = compare(gold, found.text)
        if comparison.verdict != "same" and comparison.by == "text":
            comparison = _worded(comparison, found, gold)
        if comparison.question is None:
            status: Status = "correct" if comparison.verdict == "same" else "incorrect"
            return _grade(status, found, comparison.by, _differs(found.text, gold) if status == "incorrect" else None)
        return self._grade_symbolically(found, gold, comparison.question)

    def _grade_symbolically(self, found: Found, gold: str, question: Question) -> Grade:
        for whose, formulas in (("answer", question.found), ("gold answer", question.gold)):
            why = next(filter(None, (refusal(formula, self._limits) for formula in formulas)), None)
            if why:
                return _grade("parse_error", found, None, f"The {whose} was not compared as a formula: {why}")
        if any(DENIES.search(each) or (changes_number(" ".join(_WORDS.findall(each)))) for each in question.found):
            return _grade("parse_error", found, None, _CHANGED_BY_WORDS)
        return _grade_by_reply(self._workers.ask(question), found, gold, self._limits)


# Not the names of commands, and no unknowns.
_WORDS = re.compile(r"\\text\{([^{}]*)\}|(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_CHANGED_BY_WORDS = "The answer has words that change what its formula says, and cannot be compared."
_CHANGED_OUTSIDE = "What stands beside the last box denies it, or makes another answer of it."
_NO_ANSWER = "The text has no box, no answer phrase and no number that could be its answer."


def _grade(status: Status, found: Found, by: DecidedBy | None, why: str | None = None) -> Grade:
    return Grade(status, found.text[:MAX_ANSWER_CHARS], found.by, by, why)


def _differs(found: str, gold: str) -> str:
    return f"The answer is {shortened(found, 80)}, the gold answer {shortened(gold, 80)}."


def _grade_integer(text: str, gold: str) -> Grade:
    status, answer = grade_integer(text, gold)
    if status == "no_answer":
        return Grade("no_answer", why="The text has no closed box with something in it.")
    why = None if status == "correct" else _differs(answer or "", gold)
    return Grade(status, answer, "box", "number", why)


def _grade_by_reply(reply: Reply, found: Found, gold: str, limits: Limits) -> Grade:
    """What a worker said, in our words."""
    if reply.verdict == "same":
        return _grade("correct", found, "symbolic")
    if reply.verdict == "different":
        return _grade("incorrect", found, "symbolic", _differs(found.text, gold))
    if reply.verdict == "timeout":
        return _grade("timeout", found, None, f"Comparing the answer took more than {limits.seconds:g} s.")
    reasons = {
        "gold unreadable": f"The gold answer {shortened(gold, 80)!r} cannot be read as a formula, and reads otherwise.",
        "answer unreadable": "The answer cannot be read as a formula.",
        "memory": f"Comparing the answer took more than its share of {limits.memory_bytes / 2**20:,.0f} MiB.",
        "died": "The process that compares formulas ended again and again.",
    }
    return _grade(
        "parse_error", found, None, reasons.get(reply.verdict, f"The formulas could not be compared ({reply.verdict}).")
    )


def _number_in(found: Found) -> Number | None:
    """The number an answer is, or the one that it names in words."""
    number = read_number(found.text)
    if number is not None:
        return number
    named = number_named(cleaned(found.text))
    return read_number(named) if named else None


def _with_all_boxes(found: Found, gold: str, max_chars: int) -> Found:
    """Several boxes are one answer where the gold answer has as many parts; else those are that are said at once."""
    boxes = found.boxes
    if boxes is None or max(len(boxes.contents), boxes.num_joined) < 2:
        return found
    wanted = len(_parts(gold))
    all_boxes = boxes.contents[-wanted:] if wanted > 1 else boxes.joined
    joined = ", ".join(all_boxes)
    if len(all_boxes) > 1 and len(joined) > max_chars:
        return Found(joined, found.by)
    if wanted > 1:
        last_is_all = len(_parts(found.text)) >= wanted
    else:
        last_is_all = all(compare(each, found.text).verdict == "same" for each in all_boxes[:-1])
    return found if last_is_all else Found(joined, found.by)


def _parts(answer: str) -> Sequence[str]:
    structure = structure_of(cleaned(answer))
    return structure.parts if structure.shape in ("list", "set") else (answer,)


def _worded(comparison: Comparison, found: Found, gold: str) -> Comparison:
    """Words that name one number answer a question for a number."""
    expected = read_number(gold)
    clean = cleaned(found.text)
    named = number_named(clean) if expected and number_of(clean) is None else None
    return compare(gold, named) if named else comparison


@lru_cache(maxsize=4096)
def _checked_gold(gold: str, kind: GraderKind, max_chars: int) -> str:
    _, mark, behind = gold.rpartition("####")
    boxes = last_boxes(gold)
    answer = (", ".join(boxes.contents) if boxes else behind if mark else gold).strip()
    shown = repr(shortened(answer, 80))
    if not answer:
        raise UsageError("The gold answer is empty.")
    if len(answer) > max_chars:
        raise UsageError(f"The gold answer {shown} is {len(answer):,} characters long; at most {max_chars:,} are read.")
    if kind == "integer":
        whole = canonical_integer(answer)
        if whole is None:
            raise UsageError(f"The gold answer {shown} is not a whole number.")
        return whole
    if kind == "number":
        number = read_number(answer)
        if number is None:
            raise UsageError(f"The gold answer {shown} is not a number.")
        return answer if number.mark == "base" else str(number)
    if not cleaned(answer):
        raise UsageError(f"The gold answer {shown} says nothing.")
    return answer
