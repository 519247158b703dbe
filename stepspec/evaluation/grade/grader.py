r"""Text grading: find the answer, compare it exactly, and use computer algebra only where that is not enough.

Rules and examples: grader (`all` is each), gold answer, text, and whether it is correct or refused, which is any other
status; the tests are made from this table. The *strict* reading takes an answer in a box, behind ####, in <answer> or
stated ("the answer is"), the *flexible* one else the last number of the text.
    all    :: 18 :: It is \boxed{17}. No, it is \boxed{18}. Then 19 is next. :: correct
    number :: 18 :: #### **18** cups :: correct
    number :: 18 :: He sold 2 eggs, so he has **18** eggs left. :: correct
Boxes with nothing but separators between them are one answer. What a formula does to its box belongs to the answer.
    math   :: 12, 13 :: \boxed{12} and \boxed{13} :: correct
    all    :: -6 :: So $x = -\boxed{6}$. :: correct
    all    :: 6 :: $\boxed{6}\pi$ :: refused
    all    :: 6 :: $2x = 5 + 1 = \boxed{6}$ :: correct
What is denied is what the text says plainly. Words behind a number are its unit, unless they make another number of it.
    all    :: 6 :: at least \boxed{6} more than Ann, in $\text{cm}^2$ :: correct
    all    :: 6 :: \boxed{6} dozen :: refused
    all    :: 6 :: \boxed{6}. But that is wrong; it is 7. :: refused
    all    :: 6 :: \boxed{6}. This is wrong if prices change. It is not necessary to simplify. :: correct
    all    :: 7 :: \boxed{7 xyz} :: refused
Styles, currencies and degrees are left out. Digits are one number only with marks of grouping between them.
    all    :: 1200 :: \boxed{\textbf{(\$1{,}200.00)}^\circ} :: correct
A sentence answers with its number if it names one and does nothing to it; an equation, if it is solved.
    all    :: 74 :: \boxed{\angle APC = 70 + 4 = 74^\circ} :: correct
Values are compared exactly, a percentage also as its number. The grader `integer` takes digits in a box alone.
    number :: \frac{1}{3} :: \boxed{0.333333} :: refused
    math   :: \frac{1}{100!} :: \boxed{\frac{1}{101!}} :: refused
    number :: 12 :: \boxed{1200\%} :: refused
Points, intervals and sets are three things; a list may be a set, and an inequality is an interval.
    math   :: \{-3,3\} :: \boxed{(-3,3)} :: refused
    math   :: \pm 3 :: \boxed{x = 3 \text{ or } x = -3} :: correct
Of choices one is named. Words are compared as words, and a time has its half of the day if the gold answer has it.
    math   :: (A) :: \boxed{(A) and (B)} :: refused
    math   :: 5:30\text{ p.m.} :: \boxed{5:30\text{ a.m.}} :: refused
"""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Literal, get_args

from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.grade.answer import MAX_CHARS, Found, FoundBy, find_answer, without_thinking
from stepspec.evaluation.grade.compare import DecidedBy, compare, value_of
from stepspec.evaluation.grade.latex import cleaned
from stepspec.evaluation.grade.number import read_number
from stepspec.evaluation.grade.prose import number_in
from stepspec.evaluation.grade.workers import WorkerPool

Status = Literal["correct", "incorrect", "no_answer", "parse_error", "timeout"]
GraderKind = Literal["integer", "number", "math"]
MAX_ANSWER_CHARS = 200  # of a stored answer; the full answer is graded
MAX_TEXT_CHARS = 250_000  # longer texts are read from their end only, about 60,000 tokens
MAX_FORMULA_CHARS = 400  # in a symbolic comparison


@dataclass(frozen=True)
class Grade:
    """The answer found in a text and its verdict."""

    status: Status
    answer: str | None = None
    found_by: FoundBy | None = None
    decided_by: DecidedBy | None = None
    why: str | None = None  # as one sentence; None if the status is "correct"


class Grading(AbstractContextManager["Grading"]):
    r"""A grader for one kind of answer. It is a context manager and safe to use from several threads.

    `integer` takes a whole number in the last closed `\boxed{}`, `number` any number, and `math` any answer to a MATH
    problem. math-verify compares formulas in processes that can be killed.

    >>> with Grading("number") as grading:
    ...     grading.grade("So she pays $18 a day. The answer is $18.", "18").status
    'correct'

    Args:
        last_number: whether to use the last number of a text that has no box, `####` or answer phrase.
        num_workers: the number of processes that compare formulas concurrently. They start on first use.
        seconds: processor seconds for a symbolic comparison. All of an answer take at most 1.5 times as long.
    """

    def __init__(
        self, kind: GraderKind, *, last_number: bool = True, num_workers: int = 1, seconds: float = 2.0
    ) -> None:
        if kind not in get_args(GraderKind):
            raise UsageError(unknown_name("grader", kind, get_args(GraderKind)))
        self._kind: GraderKind = kind
        self._last_number, self._seconds = last_number, seconds
        self._workers = WorkerPool(num_workers, seconds)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker processes."""
        self._workers.close()

    def worker_ids(self) -> list[int]:
        """Return the process ids of the started workers."""
        return self._workers.worker_ids()

    def check_gold(self, gold: str) -> str:
        r"""Return the gold answer as the grader compares it: of a solution, what is in its last box or behind `####`.

        Raises:
            UsageError: the text is not a gold answer of this kind.
        """
        answer = gold.rpartition("####")[2].strip()
        if (r"\boxed" in gold or r"\fbox" in gold) and (found := find_answer(gold, numbers=False, cut_short=False)):
            answer = ", ".join((*found.others, found.text))
        shown = repr(answer[:80])
        if not cleaned(answer):
            raise UsageError("The gold answer is empty.")
        if len(answer) > MAX_CHARS:
            raise UsageError(
                f"The gold answer {shown} is {len(answer):,} characters long; at most {MAX_CHARS:,} are read."
            )
        number = read_number(cleaned(answer))
        if number is None and self._kind == "number":
            raise UsageError(f"The gold answer {shown} is not a number.")
        if self._kind != "integer":
            return answer
        if number is None or not number.whole:
            raise UsageError(f"The gold answer {shown} is not a whole number.")
        return str(number.value)

    def grade(self, text: str, gold: str, *, cut_short: bool = False) -> Grade:
        """Grade a text. The model's text never causes an exception, and grading takes at most a few seconds.

        Args:
            text: the model's text, of any length.
            gold: the gold answer.
            cut_short: whether the text ends because its token budget ran out. Its last words are then not an answer.

        Raises:
            UsageError: `gold` is not a gold answer of this kind.
            StepSpecError: no worker can start, or grading was closed during the call.
        """
        gold = self.check_gold(gold)
        text = without_thinking(text, MAX_TEXT_CHARS)
        numbers = self._last_number and (self._kind == "number" or read_number(cleaned(gold)) is not None)
        found = find_answer(text, numbers=numbers, cut_short=cut_short)
        if found is None or (self._kind == "integer" and found.by != "box"):
            return Grade("no_answer", why="The text was cut short before an answer." if cut_short else _NO_ANSWER)
        answer = ", ".join((*found.others, found.text))[:MAX_ANSWER_CHARS]
        try:
            right, by = self._decide(found, gold)
        except _Undecided as undecided:
            status, why = undecided.args
            return Grade(status, answer, found.by, why=why)
        if right:
            return Grade("correct", answer, found.by, by)
        why = f"The answer is {found.text:.80}, the gold answer {gold:.80}."
        return Grade("incorrect", answer, found.by, by, _DENIED if found.denied else why)

    def _decide(self, found: Found, gold: str) -> tuple[bool, DecidedBy]:
        answers = (*found.others, found.text)
        if sum(map(len, answers)) > MAX_CHARS:
            raise _Undecided("parse_error", f"The answer is longer than {MAX_CHARS:,} characters.")
        if found.denied:
            return False, "text"
        if self._kind == "integer":
            numbers = [number_in(value_of(cleaned(answer))) for answer in answers]
            return all(number and number.whole and str(number.value) == gold for number in numbers), "number"
        algebra = partial(self._same_formulas, monotonic() + 1.5 * self._seconds)
        right, by = compare(gold, ", ".join(answers), algebra)
        # Joined boxes are one answer, unless they all say the same.
        return right or (len(answers) > 1 and all(compare(gold, each, algebra)[0] for each in answers)), by

    def _same_formulas(self, deadline: float, gold: str, found: str) -> bool:
        if max(len(gold), len(found)) > MAX_FORMULA_CHARS:
            raise _Undecided("parse_error", f"The formula is longer than {MAX_FORMULA_CHARS:,} characters.")
        if _HUGE.search(gold) or _HUGE.search(found):
            raise _Undecided("parse_error", "A value of the formula is too large to be compared.")
        verdict = self._workers.ask(gold, found, max(0.001, deadline - monotonic()))
        if verdict in ("same", "different"):
            return verdict == "same"
        if verdict == "timeout":
            raise _Undecided("timeout", "Comparing the answer took too long.")
        raise _Undecided("parse_error", verdict)


class _Undecided(Exception):
    """Two answers could not be compared. It has the status and the reason."""


# Each would take the whole time of a worker. Powers and factorials within reason are read.
_HUGE = re.compile(
    r"\d{4,}\s*!|[!)]\s*!\s*[!)]|\^\s*\{?\s*\d{5,}|(?:\^[^\^]*){3,}!|(?:\^\s*\{?\s*[\d({]*){3,}|\d{101,}"
)
_DENIED = "The text says that this is not the answer, or gives a second one."
_NO_ANSWER = "The text has no box, no answer phrase and no number that could be its answer."
