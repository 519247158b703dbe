"""How well the embedded target judges the embedded draft's own steps: `python -m stepspec.mini.measure`.

The draft solves calibration problems greedily. The target verifies each of its steps, up to and including the first
wrong one, in one pass that also reads both rating prompts; the oracle says which steps are right. Printed as JSON: how
many steps there were and were right, for each score the area under the ROC curve (1 tells right from wrong without
fail, 0.5 is a coin), and which shares of right and of wrong steps pass a likelihood threshold.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence

import torch

from stepspec.engine import Probe, Sampling, Stop, TokenBuffer, collect
from stepspec.mini import WEIGHTS
from stepspec.mini.oracle import Oracle
from stepspec.mini.problems import Problem, load_split
from stepspec.prompts import RATING_PROMPTS, encode_request, render_probe, think_end_id
from stepspec.torch_engine import TorchEngine

THRESHOLDS = (-1.0, -2.0, -2.5, -3.0, -3.5, -4.0, -5.0, -6.0, -8.0)
MAX_STEPS = 12
Scored = tuple[bool, dict[str, float]]
"""Whether a step is right, and its scores by name."""


async def scored_steps(target: TorchEngine, draft: TorchEngine, problem: Problem) -> AsyncIterator[Scored]:
    """The draft's steps of one problem, up to the first wrong one."""
    tokenizer = target.tokenizer
    labels = tuple(tokenizer.encode(str(digit))[-1] for digit in range(10))
    probes = [Probe(tuple(tokenizer.encode(render_probe(tokenizer, each))), labels) for each in RATING_PROMPTS.values()]
    think_end = think_end_id(tokenizer)
    assert think_end is not None
    transcript, oracle = TokenBuffer(encode_request(tokenizer, problem.question)), Oracle(problem)
    for _ in range(MAX_STEPS):
        stop = Stop(128, ("\n\n",), frozenset({think_end}))
        ids = (await collect(draft.generate(transcript, Sampling(), stop))).ids
        if ids[-1] == think_end or ids[-1] in tokenizer.end_ids:
            return
        seen = await target.verify(transcript, ids, probes)
        scores = {"likelihood.min": min(seen.logprobs), "likelihood.mean": sum(seen.logprobs) / len(seen.logprobs)}
        for name, law in zip(RATING_PROMPTS, seen.probe_logprobs, strict=True):
            weights = torch.tensor(law).softmax(0)
            scores[f"rating.{name}"] = float(weights @ torch.arange(10.0))
        step = tokenizer.decode(ids)
        right = oracle.judge(step)
        yield right, scores
        if not right:
            return
        oracle.observe(step)
        transcript.append(ids)


def roc_area(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """Probability that a right step scores higher than a wrong one, ties counted half (Mann and Whitney, 1947)."""
    if not right or not wrong:
        return None
    ordered = sorted(wrong)
    ranks = torch.searchsorted(torch.tensor(ordered), torch.tensor(list(right)), right=False)
    ties = torch.searchsorted(torch.tensor(ordered), torch.tensor(list(right)), right=True)
    return float((ranks + ties).double().mean() / (2 * len(ordered)))


def report(steps: Sequence[Scored]) -> Mapping[str, object]:
    """The figures, from all steps."""
    right = [scores for correct, scores in steps if correct]
    wrong = [scores for correct, scores in steps if not correct]
    names = list(steps[0][1]) if steps else []
    areas = {name: roc_area([each[name] for each in right], [each[name] for each in wrong]) for name in names}
    passed = {
        str(threshold): [
            sum(each["likelihood.min"] >= threshold for each in group) / max(1, len(group)) for group in (right, wrong)
        ]
        for threshold in THRESHOLDS
    }
    return {"steps": len(steps), "right": len(right), "roc_area": areas, "pass_right_and_wrong": passed}


async def measure(num_problems: int) -> Mapping[str, object]:
    """Loads the pair and measures it on the first calibration problems."""
    target, draft = TorchEngine.load(str(WEIGHTS / "target")), TorchEngine.load(str(WEIGHTS / "draft"))
    problems = itertools.islice(load_split("calibration"), num_problems)
    steps = [scored for problem in problems async for scored in scored_steps(target, draft, problem)]
    await target.aclose()
    await draft.aclose()
    return report(steps)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m stepspec.mini.measure", description="Measures the embedded pair.")
    parser.add_argument("--problems", type=int, default=300, help="how many calibration problems")
    print(json.dumps(asyncio.run(measure(parser.parse_args().problems)), indent=1))


if __name__ == "__main__":
    main()
