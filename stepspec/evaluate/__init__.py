"""Evaluation: a benchmark times policies gives rows, each on disk at once, and the rows give a summary.

name, benchmark = load_benchmark("gsm-mini")
problems = load_problems(benchmark, data_file=None, limit=100)
policies = load_policies(["target", "stepspec"])
run = conditions(name, benchmark, problems, policies, engines, pair.hash, Settings())
systems = {name: StepSpec(policy=policy, pair=pair) for name, (policy, _) in policies.items()}
summary = await evaluate(run, problems.problems, systems, Path("runs/mine"))
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
