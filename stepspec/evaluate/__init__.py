"""Evaluation: a benchmark times policies gives rows, and rows give a summary; every row is on disk as soon as it exists.

    name, benchmark = load_benchmark("gsm-mini")
    problems = load_problems(benchmark, data_file=None, limit=100)
    run = conditions(name, benchmark, problems, load_policies(["target", "stepspec"]), pair, settings)
    summary = await evaluate(run, problems, systems, Path("runs/mine"))
"""

from stepspec.evaluate.conditions import Settings, conditions, load_policies
from stepspec.evaluate.folder import RunFolder
from stepspec.evaluate.problems import EvalProblem, ProblemSet, load_benchmark, load_problems
from stepspec.evaluate.running import System, evaluate
from stepspec.evaluate.summary import summarise

__all__ = [
    "EvalProblem",
    "ProblemSet",
    "RunFolder",
    "Settings",
    "System",
    "conditions",
    "evaluate",
    "load_benchmark",
    "load_policies",
    "load_problems",
    "summarise",
]
