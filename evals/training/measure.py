"""Measure the figures of a pair's model card: `python -m evals.training.measure PART`.

- `solutions`: the share of problems that each model solves, the share of right steps, and the step length;
- `judging`: how well each score of the target separates right and wrong steps of the draft;
- `acceptance`: the share of draft tokens that token-level speculation accepts;
- `cost`: the time per decoded token for each model, and the time to read several tokens in one pass;
- `passes`: the time of the target's passes over 1 to 128 tokens, for one request and for 16 concurrent requests;
- `probes`: passes and time of the target to judge a step, with no, one and three questions after it.

The problems' oracle decides which steps are right. Each part prints JSON. With `--save`, it also stores the figures in
`figures.json` beside the pair's model card. `evals.training.card` builds the card's tables from that file. The default
problems are the test split of gsm-mini. Thresholds are chosen on `--split calibration`.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import torch

from evals.training.corrupt import corrupt_step
from evals.training.gsm_mini import Problem, Split, load_split, true_values
from evals.training.oracle import Oracle, same_content, step_correctness
from evals.training.selection import SELECTION_NAMES, SELECTION_NONE, SELECTION_PROMPT, selection_line
from evals.training.wording import RATINGS
from stepspec.chat.prompts import (
    EQUIVALENCE_PROMPT,
    YES_NO_PROMPT,
    JudgePrompt,
    encode_request,
    render_probe,
)
from stepspec.engines.protocol import (
    Drafting,
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Verify,
    collect,
)
from stepspec.engines.torch_engine import TorchEngine
from stepspec.evaluation.stats import wilson
from stepspec.evaluation.stats.untyped import scipy_stats
from stepspec.mini import WEIGHTS

Figures = dict[str, Any]
Result = TypeVar("Result")
TOGETHER = 16  # problems that run concurrently
MAX_STEPS = 16
BATCHES, PASS_TOKENS = (1, 16), (1, 2, 4, 8, 16, 32, 64, 128)
NUM_PROBES, STEP_TOKENS = (0, 1, 3), 24  # questions after a step, and its length
RIGHT_SHARES = (0.85, 0.9, 0.95, 0.98)  # shares of accepted right steps; `operating_point` is reported for each


@dataclass
class Judged:
    """One step of the draft with the target's scores."""

    right: bool
    scores: dict[str, float]
    equivalent: bool | None = None  # whether the target's own step has the same content
    equivalence: float = 0.0
    selected: bool | None = None  # whether the target picked the best of several candidates


class Models(NamedTuple):
    """The models of a pair."""

    target: TorchEngine
    draft: TorchEngine


class Judge:
    """A judge that asks the target about steps of the draft, with the prompts that it was trained on."""

    def __init__(self, models: Models) -> None:
        self.target, self.draft = models
        self.encode = self.target.tokenizer.encode
        tags = self.target.tokenizer.thinking
        assert tags is not None
        assert tags.end is not None
        self.think_end = tags.end
        self.stop = Stop(128, ("\n\n",), frozenset({tags.end}))
        digits = tuple(self.encode(str(digit))[-1] for digit in range(10))
        self.ratings = {f"rating.{id}": self._probe(prompt, digits) for id, prompt in RATINGS.items()}
        self.yes_no_labels = tuple(self.encode(f" {answer}")[-1] for answer in ("yes", "no"))
        self.yes_no = self._probe(YES_NO_PROMPT, self.yes_no_labels)
        names = (*SELECTION_NAMES, SELECTION_NONE)
        self.selection_labels = tuple(self.encode(f" {name}")[-1] for name in names)

    def _probe(self, prompt: JudgePrompt, labels: tuple[int, ...]) -> Probe:
        return Probe(tuple(self.encode(render_probe(self.target.tokenizer, prompt))), labels)

    async def steps(self, problem: Problem, rng: random.Random, compare: bool) -> AsyncIterator[Judged]:
        """Yield the judged steps of the draft for one problem, up to the first wrong step.

        Args:
            problem: the problem.
            rng: the source of random choices.
            compare: whether to judge equivalence and selection too, which needs a step of the target.
        """
        transcript, oracle = TokenBuffer(encode_request(self.target.tokenizer, problem.question)), Oracle(problem)
        for index in range(MAX_STEPS):
            ids = (await collect(self.draft.generate(Generate(transcript, Sampling(), self.stop)))).ids
            if ids[-1] == self.think_end or ids[-1] in self.target.tokenizer.end_ids:
                return
            step = self.target.tokenizer.decode(ids)
            judged = Judged(oracle.judge(step), await self._scores(transcript, ids))
            if compare:
                await self._compare(problem, transcript, step, judged)
                await self._select(problem, transcript, index, step, judged, rng)
            yield judged
            if not judged.right:
                return
            oracle.observe(step)
            transcript.append(ids)

    async def _scores(self, transcript: TokenBuffer, ids: Sequence[int]) -> dict[str, float]:
        seen = await self.target.verify(Verify(transcript, ids, [*self.ratings.values(), self.yes_no]))
        assert seen.logprobs is not None
        scores = {"likelihood.min": min(seen.logprobs), "likelihood.mean": statistics.fmean(seen.logprobs)}
        *ratings, yes_no = seen.probe_logprobs
        for name, logprobs in zip(self.ratings, ratings, strict=True):
            weights = [math.exp(logprob) for logprob in logprobs]
            scores[name] = sum(digit * weight for digit, weight in enumerate(weights)) / sum(weights)
        return scores | {"yes_no": yes_no[0] - yes_no[1]}

    async def _compare(self, problem: Problem, transcript: TokenBuffer, step: str, judged: Judged) -> None:
        own = await collect(self.target.generate(Generate(transcript, Sampling(), self.stop)))
        second = self.target.tokenizer.decode(own.ids)
        if own.ids[-1] == self.think_end:
            return
        user = EQUIVALENCE_PROMPT.user.format(first=second.strip(), second=step.strip())
        probe = self._probe(replace(EQUIVALENCE_PROMPT, user=user), self.yes_no_labels)
        (logprobs,) = (await self.target.verify(Verify(transcript, (), [probe]))).probe_logprobs
        judged.equivalent = same_content(problem, second, step)
        judged.equivalence = logprobs[0] - logprobs[1]

    async def _select(
        self, problem: Problem, transcript: TokenBuffer, index: int, step: str, judged: Judged, rng: random.Random
    ) -> None:
        """Select among the draft's step and two wrong variants of the reference step, if there is a reference step."""
        if index >= len(problem.plan):
            return
        values = true_values(problem)
        candidates = [corrupt_step(problem, index, values, rng).word(rng, "draft") for _ in range(2)]
        place = rng.randint(0, len(candidates))
        candidates.insert(place, step.strip())
        lines = "\n".join(selection_line(name, each) for name, each in zip(SELECTION_NAMES, candidates, strict=False))
        user = SELECTION_PROMPT.user.format(candidates=lines)
        probe = self._probe(replace(SELECTION_PROMPT, user=user), self.selection_labels)
        (logprobs,) = (await self.target.verify(Verify(transcript, (), [probe]))).probe_logprobs
        chosen = max(range(len(logprobs)), key=logprobs.__getitem__)
        judged.selected = chosen == (place if judged.right else len(SELECTION_NAMES))


def roc_area(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """Return the ROC area: the probability that a right step scores higher than a wrong one.

    Ties count half (Mann and Whitney, 1947).
    """
    if not right or not wrong:
        return None
    pairs_won = scipy_stats.mannwhitneyu(right, wrong, method="asymptotic").statistic
    return float(pairs_won) / (len(right) * len(wrong))


def operating_point(right: Sequence[float], wrong: Sequence[float], right_share: float) -> Figures | None:
    """Return the highest threshold that accepts `right_share` of right steps, and its share of accepted wrong steps."""
    if not right or not wrong:
        return None
    count = math.ceil(right_share * len(right) - 1e-9)
    threshold = sorted(right, reverse=True)[count - 1]
    return {"threshold": threshold, "wrong_accepted": sum(score >= threshold for score in wrong) / len(wrong)}


def judging_figures(steps: Sequence[Judged]) -> Figures:
    """Return the ROC area and operating points of each score, and the figures of equivalence and selection."""
    right, wrong = ([each for each in steps if each.right == kind] for kind in (True, False))
    scores: Figures = {}
    for name in steps[0].scores if steps else ():
        sides = [each.scores[name] for each in right], [each.scores[name] for each in wrong]
        points = {f"{share:.0%}": operating_point(*sides, share) for share in RIGHT_SHARES}
        scores[name] = {"area": roc_area(*sides), "right_accepted": points}
    pairs = [each for each in steps if each.equivalent is not None]
    same, different = ([each.equivalence for each in pairs if each.equivalent == kind] for kind in (True, False))
    selected = [each.selected for each in steps if each.selected is not None]
    return {
        "steps": len(steps),
        "right": len(right),
        "scores": scores,
        "equivalence": {"pairs": len(pairs), "same": len(same), "area": roc_area(same, different)},
        "selection": {"n": len(selected), **_share(sum(selected), len(selected))},
    }


def _share(count: int, n: int) -> Figures:
    """Return a share with Wilson's 95% interval."""
    return {"share": count / n, "interval": [round(each, 4) for each in wilson(count, n)]} if n else {"share": None}


async def measure_judging(models: Models, problems: Sequence[Problem]) -> Figures:
    """Measure how well the target's scores separate right and wrong steps of the draft."""
    judge = Judge(models)

    async def one(number: int, problem: Problem) -> list[Judged]:
        compare = number % 4 == 0  # only a quarter, because each comparison needs a step of the target
        return [judged async for judged in judge.steps(problem, random.Random(problem.id), compare)]

    found = await _all(problems, one)
    return {"problems": len(problems), **judging_figures([judged for steps in found for judged in steps])}


async def measure_solutions(models: Models, problems: Sequence[Problem]) -> Figures:
    """Measure the solved problems, right steps and step lengths of both models."""
    figures: Figures = {"problems": len(problems)}
    for role, engine in (("target", models.target), ("draft", models.draft)):

        async def one(
            number: int, problem: Problem, engine: TorchEngine = engine
        ) -> tuple[bool, list[bool], list[int]]:
            prompt = TokenBuffer(encode_request(engine.tokenizer, problem.question))
            ids = (await collect(engine.generate(Generate(prompt, Sampling(), Stop(700))))).ids
            text = engine.tokenizer.decode(ids)
            steps = [step for step in text.partition("</think>")[0].split("\n\n") if step]
            lengths = [len(engine.tokenizer.encode(step + "\n\n")) for step in steps]
            return f"\\boxed{{{problem.answer}}}" in text, step_correctness(Oracle(problem), steps), lengths

        found = await _all(problems, one)
        verdicts = [verdict for _, each, _ in found for verdict in each]
        lengths = sorted(length for _, _, each in found for length in each)
        figures[role] = {
            "solved": _share(sum(solved for solved, _, _ in found), len(found)),
            "steps": len(verdicts),
            "right_steps": _share(sum(verdicts), len(verdicts)),
            "mean_step_tokens": statistics.fmean(lengths),
            "step_tokens_5_to_95_percent": [lengths[len(lengths) // 20], lengths[-1 - len(lengths) // 20]],
        }
    return figures


async def measure_acceptance(models: Models, problems: Sequence[Problem]) -> Figures:
    """Measure the share of draft tokens that token-level speculation accepts."""
    figures: Figures = {"problems": len(problems)}
    engine = models.target.drafted_by(models.draft)
    for temperature, num_tokens in itertools.product((0.0, 0.6, 1.0), (1, 4)):
        drafting = Drafting("draft-model", num_tokens)

        async def one(
            number: int, problem: Problem, at: float = temperature, by: Drafting = drafting
        ) -> tuple[int, int]:
            prompt = TokenBuffer(encode_request(engine.tokenizer, problem.question))
            chunk = await collect(engine.generate(Generate(prompt, Sampling(at, seed=number), Stop(700), by)))
            return chunk.accepted, chunk.drafted

        counts = await _all(problems, one)
        share = _share(sum(accepted for accepted, _ in counts), sum(drafted for _, drafted in counts))
        figures[f"temperature {temperature}, {num_tokens} drafted"] = share | {"drafted": sum(d for _, d in counts)}
    await engine.aclose()
    return figures


async def measure_cost(models: Models, problems: Sequence[Problem]) -> Figures:
    """Measure median milliseconds per decoded token, and per pass over several tokens, for both models."""
    times: dict[str, list[float]] = {}
    for problem in problems:
        for role, engine in (("target", models.target), ("draft", models.draft)):
            prompt = TokenBuffer(encode_request(engine.tokenizer, problem.question))
            await collect(engine.generate(Generate(prompt, Sampling(), Stop(1))))
            started = time.perf_counter()
            chunk = await collect(engine.generate(Generate(prompt, Sampling(), Stop(33))))
            times.setdefault(f"{role} token", []).append((time.perf_counter() - started) / len(chunk.ids))
            for length in (5, 32):
                started = time.perf_counter()
                await engine.verify(Verify(prompt, chunk.ids[:length]))
                times.setdefault(f"{role} reads {length}", []).append(time.perf_counter() - started)
    medians = {name: round(1000 * statistics.median(each), 3) for name, each in times.items()}
    ratio = statistics.median(d / t for d, t in zip(times["draft token"], times["target token"], strict=True))
    return {"problems": len(problems), "threads": torch.get_num_threads(), "ms": medians, "draft_over_target": ratio}


async def measure_passes(models: Models, problems: Sequence[Problem]) -> Figures:
    """Measure median milliseconds of the target's passes over several tokens, for one and for concurrent requests."""
    target = models.target
    prompts = [TokenBuffer(encode_request(target.tokenizer, problem.question)) for problem in problems[: max(BATCHES)]]
    rng, num_turns, times = random.Random(0), math.ceil(len(problems) / len(prompts)), dict[str, list[float]]()
    for _, batch, length in itertools.product(range(num_turns + 1), BATCHES, PASS_TOKENS):
        # New random tokens each time, because the engine caches tokens that it has read.
        ids = [[rng.randrange(target.tokenizer.num_ids) for _ in range(length)] for _ in range(batch)]
        started = time.perf_counter()
        await asyncio.gather(*(target.verify(Verify(prompt, each)) for prompt, each in zip(prompts, ids, strict=False)))
        times.setdefault(f"{batch} x {length}", []).append(time.perf_counter() - started)
    medians = {
        name: round(1000 * statistics.median(each[1:]), 3) for name, each in times.items()
    }  # the first turn is a warm-up
    return {"turns": num_turns, "threads": torch.get_num_threads(), "ms": medians}


async def measure_probes(models: Models, problems: Sequence[Problem]) -> Figures:
    """Measure passes and median milliseconds of the target to judge a step, with different numbers of questions."""
    target, judge, rng = models.target, Judge(models), random.Random(0)
    probes, found = [*judge.ratings.values(), judge.yes_no], dict[int, list[tuple[int, float]]]()
    for problem, count in itertools.product(problems, NUM_PROBES):
        prompt = TokenBuffer(encode_request(target.tokenizer, problem.question))
        await target.verify(Verify(prompt, ()))
        step = [rng.randrange(target.tokenizer.num_ids) for _ in range(STEP_TOKENS)]
        started = time.perf_counter()
        seen = await target.verify(Verify(prompt, step, probes[:count]))
        found.setdefault(count, []).append((seen.passes, time.perf_counter() - started))
    return {
        "problems": len(problems),
        "threads": torch.get_num_threads(),
        "step_tokens": STEP_TOKENS,
        "question_tokens": [len(probe.ids) for probe in probes[: max(NUM_PROBES)]],
        "passes": {str(count): statistics.fmean(passes for passes, _ in each) for count, each in found.items()},
        "ms": {str(count): round(1000 * statistics.median(s for _, s in each), 3) for count, each in found.items()},
    }


async def _all(problems: Sequence[Problem], one: Callable[[int, Problem], Awaitable[Result]]) -> list[Result]:
    """Return one result per problem. At most `TOGETHER` problems run concurrently."""
    slots = asyncio.Semaphore(TOGETHER)

    async def limited(number: int, problem: Problem) -> Result:
        async with slots:
            return await one(number, problem)

    return await asyncio.gather(*(limited(number, problem) for number, problem in enumerate(problems)))


PARTS = {
    "solutions": (measure_solutions, 1100),
    "judging": (measure_judging, 1400),
    "acceptance": (measure_acceptance, 200),
    "cost": (measure_cost, 30),
    "passes": (measure_passes, 320),
    "probes": (measure_probes, 60),
}
"""The function and the default number of problems of each part."""


@asynccontextmanager
async def loaded_models(folder: Path = WEIGHTS) -> AsyncIterator[Models]:
    """Load a pair's models, and close them on exit."""
    target, draft = (TorchEngine.load(str(folder / role)) for role in ("target", "draft"))
    try:
        yield Models(target, draft)
    finally:
        await target.aclose()
        await draft.aclose()


async def measure(part: str, num_problems: int | None = None, folder: Path = WEIGHTS, split: Split = "test") -> Figures:
    """Return the figures of one part.

    Args:
        part: a name in `PARTS`.
        num_problems: the number of problems, from the start of the split (default: the part's own number).
        folder: the folder of the pair.
        split: the split of the problems.
    """
    function, default = PARTS[part]
    problems = list(itertools.islice(load_split(split), num_problems or default))
    async with loaded_models(folder) as models:
        return await function(models, problems)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m evals.training.measure", description="Measure a pair.")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--problems", type=int, help="number of problems (default: the part's own number)")
    parser.add_argument("--split", choices=get_args(Split), default="test", help="split of the problems (test)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--save", action="store_true", help="store the figures for the pair's model card")
    arguments = parser.parse_args()
    if arguments.problems is not None and arguments.problems < 1:
        parser.error(f"--problems must be at least 1, got {arguments.problems}")
    if arguments.save and arguments.split != "test":
        parser.error("--save works only for the test split; remove --split")
    torch.set_num_threads(1)
    figures = asyncio.run(measure(arguments.part, arguments.problems, split=arguments.split))
    print(json.dumps(figures, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"split": arguments.split, **figures}, indent=1) + "\n")
    if arguments.save:
        path = WEIGHTS / "figures.json"
        known: Figures = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {arguments.part: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
