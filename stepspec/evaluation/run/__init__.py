"""Runs a benchmark under several policies, stores each row as soon as it finishes, and summarizes the rows.

name, benchmark = load_benchmark("gsm-mini")
problems = load_problems(benchmark, data_file=None, limit=100)
policies = load_policies(["target", "two-level"])
run = conditions(name, benchmark, problems, policies, Settings(), pair)
systems = {name: StepSpec(policy=policy, pair=pair) for name, (policy, _) in policies.items()}
with Grading(benchmark.grader) as grading:
    summary = await evaluate(run, problems.problems, systems, Keeping(Path("runs/mine")), grading=grading)
"""

from stepspec.base.extras import from_extra

with from_extra("eval", "An evaluation"):
    from stepspec.evaluation.run.conditions import RunSettings, conditions, prompt_logprobs
    from stepspec.evaluation.run.evaluation import Keeping, evaluate
    from stepspec.evaluation.run.executor import Evaluation, Executor, Grader, Local
    from stepspec.evaluation.run.folder import RunFolder
    from stepspec.evaluation.run.gauges import Gauges
    from stepspec.evaluation.run.merged_run import merge
    from stepspec.evaluation.run.policies import LoadedPolicy, fit_policies, load_named, load_policies, token_policy
    from stepspec.evaluation.run.problems import EvalProblem, ProblemSet, load_benchmark, load_problems
    from stepspec.evaluation.run.runner import System
    from stepspec.evaluation.run.schedule import Part
    from stepspec.evaluation.run.summary import summarise, summary_of
    from stepspec.evaluation.run.variants import calibrated_settings

__all__ = [
    "EvalProblem",
    "Evaluation",
    "Executor",
    "Gauges",
    "Grader",
    "Keeping",
    "LoadedPolicy",
    "Local",
    "Part",
    "ProblemSet",
    "RunFolder",
    "RunSettings",
    "System",
    "calibrated_settings",
    "conditions",
    "evaluate",
    "fit_policies",
    "load_benchmark",
    "load_named",
    "load_policies",
    "load_problems",
    "merge",
    "prompt_logprobs",
    "summarise",
    "summary_of",
    "token_policy",
]
