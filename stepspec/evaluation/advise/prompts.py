"""Reads the user's own prompts: questions, prompts or conversations, with or without right answers."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from stepspec.api.models import Pair
from stepspec.chat.prompts import encode_request
from stepspec.errors import UsageError
from stepspec.evaluation.advise.findings import PromptCounts
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.run import EvalProblem, Executor, ProblemSet
from stepspec.evaluation.run.data import DataRow, content_line, read_rows, text_of, text_or_number_of

GOLD_KEYS = ("answer", "gold")

MIN_ROOM = 64
"""Minimum number of context tokens that a prompt must leave for its answer."""


@dataclass(frozen=True)
class UserPrompt:
    """A prompt of the user. `gold` is its right answer, if it has one that can be compared."""

    id: str
    question: str
    gold: str | None
    why_no_gold: str | None
    shortened: bool
    """Whether other messages of the conversation were dropped."""


@dataclass(frozen=True)
class Prompts:
    """The prompts to run, and counts of those that were left out."""

    problems: tuple[EvalProblem, ...]
    asked: PromptCounts

    @property
    def sha256(self) -> str:
        """Content hash of questions and right answers."""
        lines = (content_line(each.id, each.question, each.gold) for each in self.problems)
        return hashlib.sha256(b"".join(lines)).hexdigest()

    def with_golds(self, golds: dict[str, str]) -> ProblemSet:
        """Return the problems with the right answers or references to compare with."""
        problems = tuple(replace(each, gold=golds.get(each.id, each.gold)) for each in self.problems)
        return ProblemSet(problems, self.sha256)


def read_prompts(path: Path) -> Iterator[UserPrompt]:
    """Yield the prompts of a jsonl, csv or parquet file, read lazily.

    Raises:
        UsageError: the file cannot be read, or a row has no prompt.
    """
    with Grading("math") as grading:
        for number, row in enumerate(read_rows(path), 1):
            question, shortened = _question(row)
            gold, why_no_gold = _gold(row, grading)
            yield UserPrompt(f"row-{number}", question, gold, why_no_gold, shortened)


async def choose_prompts(path: Path, executor: Executor, limit: int) -> Prompts:
    """Return the first prompts that fit the models' contexts, at most `limit`.

    Raises:
        UsageError: the file cannot be read, has no prompt, or none that fits.
    """
    longest = await executor.call(_longest)
    chosen: list[UserPrompt] = []
    num_rows, prompts = 0, read_prompts(path)
    while found := list(islice(prompts, limit - len(chosen))):
        lengths = await executor.call(partial(_lengths, [prompt.question for prompt in found]))
        chosen += [prompt for prompt, length in zip(found, lengths, strict=True) if length <= longest]
        num_rows += len(found)
    num_too_long = num_rows - len(chosen)
    if not num_rows:
        raise no_prompts(path)
    if not chosen:
        raise UsageError(
            f"Each of the {num_rows:,} prompts in {path} is longer than the {longest:,} tokens that the models take. "
            "Shorten them or choose models with a longer context."
        )
    return _prompts(chosen, num_rows, num_too_long)


def _longest(pair: Pair) -> int:
    """Return the number of tokens of the longest prompt that leaves room for an answer."""
    engines = [pair.target, *([pair.draft] if pair.draft and pair.one_vocabulary else [])]
    return min(engine.max_context for engine in engines) - MIN_ROOM


def _lengths(questions: Sequence[str], pair: Pair) -> list[int]:
    """Return the number of tokens of each question as the target is asked."""
    return [len(encode_request(pair.target.tokenizer, question)) for question in questions]


def no_prompts(path: Path) -> UsageError:
    """Return the error for a file without prompts."""
    return UsageError(f'{path} has no prompts; it needs rows like {{"question": "..."}} or {{"messages": [...]}}.')


def _prompts(chosen: list[UserPrompt], num_rows: int, num_too_long: int) -> Prompts:
    why = _why_not_graded(chosen)
    return Prompts(
        tuple(EvalProblem(each.id, each.question, each.gold or "" if why is None else "") for each in chosen),
        PromptCounts(
            num_rows=num_rows,
            num_asked=len(chosen),
            num_too_long=num_too_long,
            num_shortened=sum(each.shortened for each in chosen),
            graded=why is None,
            why_not_graded=why,
        ),
    )


def _why_not_graded(chosen: list[UserPrompt]) -> str | None:
    """Return why answers are not graded; None if all prompts have a right answer.

    With only some right answers none is used, because shares over two kinds of comparison would be meaningless.
    """
    missing = [each for each in chosen if each.gold is None]
    if not missing:
        return None
    if len(missing) == len(chosen) and not any(each.why_no_gold for each in chosen):
        return "The prompts come without right answers."
    first = next((each for each in missing if each.why_no_gold), missing[0])
    why = first.why_no_gold or "There is none."
    return f"{len(missing):,} of {len(chosen):,} prompts have no right answer to compare with ({first.id}: {why})"


def _question(row: DataRow) -> tuple[str, bool]:
    if "question" in row.fields:
        return text_of(row, "question"), False
    for key in ("prompt", "messages"):
        if isinstance(row.fields.get(key), list):
            return _last_of_user(row, key)
    if "prompt" in row.fields:
        return text_of(row, "prompt"), False
    raise UsageError(f"{row.where}: there is no key 'question', 'prompt' or 'messages'.")


def _last_of_user(row: DataRow, key: str) -> tuple[str, bool]:
    messages = [cast(dict[str, Any], each) for each in row.fields[key] if isinstance(each, dict)]
    contents = [each.get("content") for each in messages if each.get("role") == "user"]
    if not contents:
        raise UsageError(f"{row.where}: key {key!r} holds no message of the user.")
    return text_of(DataRow(row.where, {key: _as_text(contents[-1])}), key), len(messages) > 1


def _as_text(content: Any) -> Any:
    """Return the text of a message whose content may be a list of parts."""
    if not isinstance(content, list):
        return content
    parts = [cast(dict[str, Any], part) for part in cast(list[Any], content) if isinstance(part, dict)]
    return "\n".join(str(part["text"]) for part in parts if part.get("type") == "text" and "text" in part)


def _gold(row: DataRow, grading: Grading) -> tuple[str | None, str | None]:
    """Return the right answer, or else the reason why the value is not valid; both are None without a value."""
    for key in GOLD_KEYS:
        if row.fields.get(key) not in (None, ""):
            try:
                return grading.check_gold(text_or_number_of(row, key)), None
            except UsageError as error:
                return None, str(error)
    return None, None
