"""What depends on whether a model marks its thinking: two implementations of everything that differs.

A model that marks its thinking thinks in steps, and then answers. For one that does not, the steps are the answer: of
what gives the answer, only what the target would have written itself is kept.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

from stepspec.engines.thinking import ThinkingTags
from stepspec.loop.step import Step, StepEnd

ANSWER = re.compile(r"\\boxed|\\fbox|####|\banswer\s*(?:is(?![^\W\d])|:|=)|\bfinal answer\b|</?answer>", re.IGNORECASE)
"""Marks of an answer in the text of a model that does not mark its thinking."""

MARK_CHARACTERS = 16
"""Most characters of such a mark."""


def marks_answer(text: str, before: str) -> bool:
    """Return whether an answer is marked in a text. The mark may begin in the text before it."""
    before = before[-MARK_CHARACTERS:]
    return any(mark.end() > len(before) for mark in ANSWER.finditer(before + text))


class ThinkingBoundary(ABC):
    """What separates the thinking of one request from its answer.

    Attributes:
        steps_are_answer: whether the steps are the answer, so that each of them may belong to it.
        text: the ending of the thinking if that is text to the model; else empty.
        end: the token that ends the thinking; None if there is none.
        ending: ids of the whole ending.
        implicit_ends: tokens that end the thinking and belong to the answer.
        header_end: the token that ends the header of a message; None without headers.
        thinking_header: text that only headers of thinking have.
    """

    steps_are_answer: bool
    text: str = ""
    end: int | None = None
    ending: Sequence[int] = ()
    implicit_ends: frozenset[int] = frozenset()
    header_end: int | None = None
    thinking_header: str = ""

    @abstractmethod
    def step_ends(self, ends: frozenset[int], stop_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that end a step, from those that end the text and the caller's own."""

    @abstractmethod
    def end_of(self, id: int) -> StepEnd:
        """Return what a token ends that ends a step."""

    @abstractmethod
    def committed_text(self, steps: Sequence[Step], open_text: str, answer: str) -> str:
        """Return the text that the caller has, after a failure."""

    @abstractmethod
    def close(self, text: str, before: str) -> None:
        """Note that a step was committed after one with the text `before`."""

    @abstractmethod
    def answers(self, texts: Sequence[str], *, before: str = "", ends: bool) -> bool:
        """Return whether the last of these texts, or one before it, belongs to the answer.

        Args:
            texts: texts of steps that follow each other and are not committed.
            before: text of the last committed step.
            ends: whether a model ends the text after it.
        """


class MarkedThinking(ThinkingBoundary):
    """The model marks where its thinking ends. What is before that is no answer."""

    steps_are_answer = False

    def __init__(self, tags: ThinkingTags) -> None:
        self.text, self.end, self.ending = tags.text, tags.end, tags.ending
        self.implicit_ends, self.header_end = tags.implicit_ends, tags.header_end
        self.thinking_header = tags.format.thinking_header
        self._ends = tags.ends

    def step_ends(self, ends: frozenset[int], stop_ids: frozenset[int]) -> frozenset[int]:
        return ends | self._ends

    def end_of(self, id: int) -> StepEnd:
        return "thinking" if id in self._ends else "text"

    def committed_text(self, steps: Sequence[Step], open_text: str, answer: str) -> str:
        return "".join(step.text for step in steps) + open_text + answer

    def close(self, text: str, before: str) -> None:
        pass

    def answers(self, texts: Sequence[str], *, before: str = "", ends: bool) -> bool:
        return False


class PlainThinking(ThinkingBoundary):
    """The model does not mark its thinking, so the steps are its answer. An answer is marked in words, as by a box."""

    steps_are_answer = True

    def __init__(self) -> None:
        self._has_answered = False

    def step_ends(self, ends: frozenset[int], stop_ids: frozenset[int]) -> frozenset[int]:
        return ends | stop_ids

    def end_of(self, id: int) -> StepEnd:
        return "text"

    def committed_text(self, steps: Sequence[Step], open_text: str, answer: str) -> str:
        return "".join(step.text for step in steps) + open_text

    def close(self, text: str, before: str) -> None:
        self._has_answered |= marks_answer(text, before)

    def answers(self, texts: Sequence[str], *, before: str = "", ends: bool) -> bool:
        pairs = pairwise([before, *texts])
        return ends or self._has_answered or any(marks_answer(text, last) for last, text in pairs)


def thinking_of(tags: ThinkingTags | None) -> ThinkingBoundary:
    """Return what separates the thinking of a request from its answer. `tags`: None if it is not marked."""
    return PlainThinking() if tags is None else MarkedThinking(tags)
