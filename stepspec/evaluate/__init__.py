"""Evaluation: a benchmark times policies gives rows, each on disk at once, and the rows give a summary.

name, benchmark = load_benchmark("gsm-mini")
problems = load_problems(benchmark, data_file=None, limit=100)
policies = load_policies(["target", "stepspec"])
run = conditions(name, benchmark, problems, policies, engines, pair.hash, Settings())
systems = {name: StepSpec(policy=policy, pair=pair) for name, (policy, _) in policies.items()}
with Grading(benchmark.grader) as grading:
    summary = await evaluate(run, problems.problems, systems, Keeping(Path("runs/mine")), grading=grading)
"""

from stepspec.extras import from_extra

with from_extra("eval", "An evaluation"):
    from stepspec.evaluate.conditions import Settings, conditions
    from stepspec.evaluate.folder import RunFolder
    from stepspec.evaluate.gauges import Gauges
    from stepspec.evaluate.merging import merge
    from stepspec.evaluate.policies import LoadedPolicy, fit_policies, load_policies, token_policy
    from stepspec.evaluate.problems import EvalProblem, ProblemSet, load_benchmark, load_problems
    from stepspec.evaluate.running import Keeping, System, evaluate
    from stepspec.evaluate.schedule import Part
    from stepspec.evaluate.summary import summarise

__all__ = [
    "EvalProblem",
    "Gauges",
    "Keeping",
    "LoadedPolicy",
    "Part",
    "ProblemSet",
    "RunFolder",
    "Settings",
    "System",
    "conditions",
    "evaluate",
    "fit_policies",
    "load_benchmark",
    "load_policies",
    "load_problems",
    "merge",
    "summarise",
    "token_policy",
]
