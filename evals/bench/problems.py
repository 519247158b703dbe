"""The problems of the measurements: those of gsm-mini's test split, in order."""

from itertools import islice

from evals.training.gsm_mini import Problem, load_split

BENCHMARK = "gsm-mini"


def problems(number: int) -> list[Problem]:
    """Return the first problems of the test split, at most `number`."""
    return list(islice(load_split("test"), number))


def questions(number: int) -> list[str]:
    """Return the questions of the first problems."""
    return [each.question for each in problems(number)]
