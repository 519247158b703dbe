"""A shared formula grader for all tests that do not kill it: loading its libraries takes a second."""

from collections.abc import Iterator

import pytest

from stepspec.evaluation.grade import Grading


@pytest.fixture(scope="session")
def math() -> Iterator[Grading]:
    with Grading("math") as grading:
        yield grading
