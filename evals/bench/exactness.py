"""Whether policies that promise the target's own text keep the promise: greedy texts and sampled distributions."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import typer
from rich.table import Table

from evals.bench.problems import BENCHMARK, questions
from evals.bench.same_texts import parting
from evals.bench.speed import cells_table, with_interval
from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.cli.options import DraftOption, PairOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import Sampling
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Conditions, EngineRecord, Record
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.run.conditions import engine_records
from stepspec.evaluation.stats.ratios import ratio_of_sums
from stepspec.evaluation.stats.untyped import scipy_stats
from stepspec.loop.policy import Policy, load_policy

TIE = 1e-4
"""Largest difference of the log-probabilities of two tokens that rounding may decide, in nats."""
MAX_TIES = 3
"""Most texts that may part at such a place."""
MIN_P = 0.001
MAX_TOKENS = 640
SHORT = 5
"""Tokens of a sampled text."""
PERMUTATIONS = 10_000

Progress = Callable[[None, int, int], None]


class Parted(Record):
    """A greedy text that is not the target's."""

    problem: int
    after: str
    """What both texts have in common, its end."""
    difference: float | None
    """By how much the two next tokens differ in log-probability under the target, in nats; None if it is unknown."""


class Exactness(Record):
    """A policy beside the target."""

    policy: str
    parted: list[Parted]
    ratio: float
    """Seconds of the target over those of the policy, over all greedy problems."""
    ratio_ci: tuple[float, float] | None
    from_draft: float
    """Share of the greedy tokens that come from draft steps."""
    chi_square: float
    """Of the counts of short texts, sampled at temperature 1 under the policy and under the target."""
    p_value: float
    """Share of random divisions of these texts into two halves with such a chi-square or a higher one."""

    @property
    def holds(self) -> bool:
        """Whether the texts differ by rounding alone, and the distributions by chance alone."""
        ties = [each for each in self.parted if each.difference is not None and each.difference <= TIE]
        return len(ties) == len(self.parted) <= MAX_TIES and self.p_value >= MIN_P


class Exactnesses(Conditions):
    """The file that `python -m evals.bench exactness --json` writes."""

    version: Literal[1] = 1
    benchmark: str
    problems: int
    samples: int
    """Sampled texts under each policy."""
    different: int
    """Different texts among those of the target."""
    engines: dict[str, EngineRecord | None]
    results: list[Exactness]


def on_every_step(policy: Policy) -> Policy:
    """Return an exact policy that speculates on every step, whether that pays or not."""
    settings = policy.settings.model_copy(update={"max_overhead": None, "depth": 4})
    return policy.model_copy(update={policy.family: settings})


async def exactness(
    pair: Pair, policies: Mapping[str, Policy], questions: Sequence[str], samples: int, progress: Progress
) -> tuple[list[Exactness], int]:
    """Compare policies with the target. Return their figures, and the number of the target's different short texts.

    Args:
        pair: target and draft.
        policies: the policies by name. The first one is the target alone.
        questions: the questions, each asked greedily under every policy. The first one is also sampled.
        samples: sampled texts under each policy.
        progress: called with None, and the numbers of finished and of all requests.
    """
    specs = {name: StepSpec(policy=policy, pair=pair) for name, policy in policies.items()}
    names, total = [*specs], len(specs) * (len(questions) + samples)
    for spec in specs.values():
        await spec.generate(questions[0], max_tokens=16)  # the first request allocates
    texts = {name: list[str]() for name in names}
    seconds, tokens = np.zeros((len(questions), len(names))), np.zeros((2, len(names)))
    for number, question in enumerate(questions):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            since = time.perf_counter()
            found = await specs[name].generate(question, max_tokens=MAX_TOKENS, sampling=Sampling())
            seconds[number, names.index(name)] = time.perf_counter() - since
            tokens[:, names.index(name)] += found.counts.accepted, found.counts.committed
            texts[name].append(found.reasoning + found.answer)
        await specs[names[0]].forget()
        progress(None, (number + 1) * len(names), total)
    sampled: dict[str, list[str]] = {}
    for place, name in enumerate(names):
        sampled[name] = []
        for number in range(samples):
            sampling = Sampling(1.0, seed=place * samples + number)
            found = await specs[name].generate(questions[0], max_tokens=SHORT, sampling=sampling)
            sampled[name].append(found.reasoning + found.answer)
            progress(None, len(names) * len(questions) + place * samples + number + 1, total)
    results = list[Exactness]()
    for place, name in enumerate(names[1:], 1):
        ratio, interval = ratio_of_sums(seconds[:, 0], seconds[:, place], np.random.default_rng(0))
        chi_square, p_value = homogeneity(sampled[names[0]], sampled[name])
        pairs = zip(questions, texts[names[0]], texts[name], strict=True)
        results.append(
            Exactness(
                policy=name,
                parted=[await _parted(pair, number, *each) for number, each in enumerate(pairs) if each[1] != each[2]],
                ratio=ratio,
                ratio_ci=interval,
                from_draft=float(tokens[0, place] / tokens[1, place]),
                chi_square=chi_square,
                p_value=p_value,
            )
        )
    return results, len({*sampled[names[0]]})


def homogeneity(one: Sequence[str], other: Sequence[str]) -> tuple[float, float]:
    """Return the chi-square statistic of two samples of texts, and its p-value by random divisions of all texts.

    Texts that occur fewer than five times in both samples together count as one.
    """
    counts = Counter([*one, *other])
    kinds = [[text if counts[text] >= 5 else None for text in half] for half in (one, other)]
    table = [[half.count(kind) for kind in dict.fromkeys(kinds[0] + kinds[1])] for half in kinds]
    method = scipy_stats.MonteCarloMethod(PERMUTATIONS, rng=np.random.default_rng(0))
    found = scipy_stats.chi2_contingency(table, correction=False, method=method)
    return float(found.statistic), float(found.pvalue)


async def _parted(pair: Pair, number: int, question: str, own: str, other: str) -> Parted:
    """Return where two texts part, and how near the target's choice was."""
    ids, (difference,) = await parting([pair.target], question, own, other)
    after = pair.target.tokenizer.decode(ids)[-60:]
    return Parted(problem=number, after=after, difference=None if math.isnan(difference) else difference)


HEADS = ("policy", "problems", "other texts", "speedup", "from draft steps", "chi-square", "p")


def rows_of(found: Exactnesses) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.policy,
            f"{found.problems:,}",
            str(len(each.parted)),
            with_interval(each.ratio, each.ratio_ci),
            f"{each.from_draft:.0%}",
            f"{each.chi_square:.1f}",
            f"{each.p_value:.3f}",
        ]
        for each in found.results
    ]


def in_words(found: Exactnesses) -> str:
    """Return what was measured."""
    texts = f"{found.samples:,} sampled texts under each policy"
    return f"{found.benchmark}, {texts}; {models_in_words(found.engines)}"


def exactness_table(found: Exactnesses) -> Table:
    """Return a terminal table."""
    return cells_table(f"beside the target, {found.samples:,} sampled texts of {SHORT} tokens", HEADS, rows_of(found))


def main(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of greedy problems.")] = 1000,
    samples: Annotated[int, typer.Option(min=10, help="Number of texts to sample under each policy.")] = 1000,
    json_file: JsonOption = None,
) -> None:
    """Check that `token` and `exact` write the target's own texts, and compare their speed."""
    asked = questions(limit)
    policies = {name: load_policy(name)[0] for name in ("target", "token", "exact")}
    policies["exact on every step"] = on_every_step(policies["exact"])
    about, models = conditions(), load_pair(target, draft, pair=pair, notes=False)
    with asyncio.Runner() as runner, make_meter() as meter:
        meter.begin("requests")
        results, different = runner.run(exactness(models, policies, asked, samples, meter.show))
        engines = engine_records(models)
        runner.run(models.aclose())
    about |= {"benchmark": BENCHMARK, "problems": limit, "samples": samples, "different": different, "engines": engines}
    found = Exactnesses.model_validate({**about, "results": results})
    lines = [
        f"{each.policy}: problem {parted.problem + 1} parts after {parted.after!r}, where the two tokens differ by "
        + ("an unknown amount" if parted.difference is None else f"{parted.difference:.1e} nats")
        for each in results
        for parted in each.parted
    ]
    finish([exactness_table(found), *lines], found, json_file)
    if not all(each.holds for each in results):
        raise typer.Exit(1)
