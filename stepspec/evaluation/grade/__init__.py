"""Grades answers: finds the answer in what a model wrote and compares it with the gold answer.

Knows nothing of models. Texts come from models and may be hostile: what happens in this process is linear in the
text, what a computer algebra system does with an answer happens in a process that can be killed, and nothing in a
text is ever executed.
"""

from stepspec.evaluation.grade.grading import Grading
from stepspec.evaluation.grade.integer import canonical_integer, extract_answer, grade_integer
from stepspec.evaluation.grade.words import MAX_ANSWER_CHARS, Grade, GraderKind, Limits, Status

__all__ = [
    "Grade",
    "GraderKind",
    "Grading",
    "Limits",
    "Status",
    "MAX_ANSWER_CHARS",
    "canonical_integer",
    "extract_answer",
    "grade_integer",
]
