"""`stepspec advise`: measures on your prompts and hardware whether speculation pays, and which policy is best.

prompts = await choose_prompts(Path("prompts.jsonl"), Local(pair), limit=20)
findings = await advise(Local(pair), prompts, Plan(), Path("runs/mine"), Watcher(print, lambda row, done, total: None))
print(findings.advice.policy, *findings.advice.sentences, sep="\n")
"""

from stepspec.base.extras import from_extra

with from_extra("eval", "Advice"):
    from stepspec.evaluation.advise.experiment import Watcher, advise
    from stepspec.evaluation.advise.findings import Findings
    from stepspec.evaluation.advise.measurements_file import AdvicePlan, refuse_strangers
    from stepspec.evaluation.advise.prompts import Prompts, choose_prompts, no_prompts, read_prompts

__all__ = [
    "Findings",
    "AdvicePlan",
    "Prompts",
    "Watcher",
    "advise",
    "choose_prompts",
    "no_prompts",
    "read_prompts",
    "refuse_strangers",
]
