"""Answer grading: find the answer in a model's text and compare it with the gold answer.

This package does not depend on the models. Texts come from models and may be hostile. Work in this process is linear in
the text length. Computer algebra runs in a worker process that can be killed. Nothing in a text is ever executed.
"""

from stepspec.evaluation.grade.grader import MAX_ANSWER_CHARS, Grade, GraderKind, Grading, Status

__all__ = ["Grade", "GraderKind", "Grading", "MAX_ANSWER_CHARS", "Status"]
