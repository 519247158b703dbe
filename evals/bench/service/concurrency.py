"""Throughput of the default policy over that of the target alone, through the service, by concurrent requests.

Blocks of problems run under both policies, in alternating order. The second of the two finds the prompts in the prefix
cache. They are short beside the answers, and each policy is the second equally often.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from evals.bench.problems import BENCHMARK, questions
from evals.bench.service.client import Client, Exchange, chat_request, decoded
from evals.bench.service.load import closed_loop
from evals.bench.service.process import Service, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.speed import cells_table, with_interval
from stepspec.api.models import choose_models, load_pair
from stepspec.cli.options import PairOption
from stepspec.cli.output import JsonOption
from stepspec.cli.progress import make_meter
from stepspec.errors import EngineError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import BASELINE, EngineRecord, Record
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.run.conditions import engine_records
from stepspec.evaluation.stats.ratios import ratio_of_rates, ratio_of_sums

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
MAX_TOKENS = 640
MIN_SPEEDUP = 1.0
"""Least throughput over that of the target."""
SHARED, ALONE, MIN_SCALING = 16, 1, 3.0
"""At 16 concurrent requests, the throughput should be at least 3 times that of 1."""
MIN_BLOCK = 8
"""Least problems of a block."""
Progress = Callable[[None, int, int], None]


class AtConcurrency(Record):
    """Both policies at a number of concurrent requests, over the same blocks of problems."""

    concurrency: int
    blocks: int
    requests: int
    """Requests under each policy."""
    failed: int
    """Requests without an answer, under both."""
    requests_per_s: float
    target_requests_per_s: float
    tokens_per_s: float
    """Committed tokens a second."""
    target_tokens_per_s: float
    speedup: float
    """Requests a second over those under the target, which are the target's seconds over the policy's."""
    speedup_ci: tuple[float, float] | None
    """Its 95% interval over blocks; None if they are too few."""
    tokens_ratio: float
    """The same of tokens a second."""
    tokens_ratio_ci: tuple[float, float] | None


class Concurrency(Scenario):
    """The file that `python -m evals.bench service.concurrency --json` writes."""

    policy: str
    benchmark: str
    temperature: float
    min_speedup: float = MIN_SPEEDUP
    min_scaling: float = MIN_SCALING
    engines: dict[str, EngineRecord | None]
    results: list[AtConcurrency]

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        return f"{self.policy} on {self.benchmark} over HTTP, temperature {self.temperature:g}"

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`. Without both numbers of concurrent requests, there is no check of how it scales."""
        found = {each.concurrency: each for each in self.results}
        least = min(each.speedup for each in self.results)
        checks = [
            Check(name="requests without an answer", value=sum(each.failed for each in self.results), limit=0),
            Check(name="least speedup over the target", value=least, limit=self.min_speedup, bound="at least"),
        ]
        if SHARED in found and ALONE in found:
            scaling = found[SHARED].tokens_per_s / found[ALONE].tokens_per_s
            name = f"tokens/s at {SHARED} over {ALONE}"
            checks.append(Check(name=name, value=scaling, limit=self.min_scaling, bound="at least"))
            target = found[SHARED].target_tokens_per_s / found[ALONE].target_tokens_per_s
            checks.append(Check(name=f"{name}, target alone", value=target))
        return checks

    @property
    def details(self) -> tuple[Sequence[str], list[list[str]]]:
        """See `Scenario.details`."""
        return HEADS, rows_of(self)


async def models_of(service: Service) -> tuple[str, str, str]:
    """Return the default policy of a service, and the names of its model under that policy and under the target.

    Raises:
        EngineError: the service does not offer the target alone.
    """
    async with Client(service.address) as client:
        cards = decoded((await client.get("/v1/models")).encode())["data"]
    name, known = cards[0]["id"], [card["id"] for card in cards]
    if f"{name}@{BASELINE}" not in known:
        raise EngineError(f"The service has no model {name}@{BASELINE}. It has {', '.join(known)}.")
    return cards[0]["policy"], name, f"{name}@{BASELINE}"


async def at_concurrency(
    service: Service,
    models: tuple[str, str],
    questions: Sequence[str],
    concurrency: int,
    blocks: int,
    temperature: float,
    progress: Progress,
) -> AtConcurrency:
    """Run blocks of questions under two models.

    Args:
        service: the service.
        models: names of the model under the policy and under the target.
        questions: the questions, each used once. The number of blocks divides theirs.
        concurrency: requests beside each other.
        blocks: number of blocks.
        temperature: sampling temperature.
        progress: called with None, and the numbers of finished and of all questions.
    """
    size, measured, failed = len(questions) // blocks, np.zeros((blocks, 2, 2)), 0
    async with Client(service.address, timeout_s=600.0) as client:
        for number in range(blocks):
            block = range(number * size, (number + 1) * size)
            for way in (0, 1) if number % 2 else (1, 0):
                requests = [_request(models[way], questions[index], index, temperature) for index in block]
                since = time.perf_counter()
                found = await closed_loop(client, requests, concurrency)
                measured[number, way] = time.perf_counter() - since, sum(map(_num_tokens, found))
                failed += sum(not each.answered for each in found)
            progress(None, (number + 1) * size, len(questions))
    return _compared(measured, concurrency, len(questions), failed)


def _request(model: str, question: str, seed: int, temperature: float) -> bytes:
    return chat_request(question, model=model, seed=seed, temperature=temperature, max_tokens=MAX_TOKENS)


def _num_tokens(found: Exchange) -> int:
    return found.json()["usage"]["completion_tokens"] if found.answered else 0


def _compared(
    measured: "np.ndarray[tuple[int, int, int], np.dtype[np.float64]]", concurrency: int, requests: int, failed: int
) -> AtConcurrency:
    """Return the figures. `measured`: [blocks, policy and target, seconds and tokens]."""
    own, target = measured[:, 0], measured[:, 1]
    (own_s, own_tokens), (target_s, target_tokens) = own.sum(axis=0), target.sum(axis=0)
    speedup, interval = ratio_of_sums(target[:, 0], own[:, 0], np.random.default_rng(0))
    rates = (own[:, 1], own[:, 0]), (target[:, 1], target[:, 0])
    tokens_ratio, tokens_interval = ratio_of_rates(*rates, np.random.default_rng(0))
    return AtConcurrency(
        concurrency=concurrency,
        blocks=len(measured),
        requests=requests,
        failed=failed,
        requests_per_s=requests / own_s,
        target_requests_per_s=requests / target_s,
        tokens_per_s=own_tokens / own_s,
        target_tokens_per_s=target_tokens / target_s,
        speedup=speedup,
        speedup_ci=interval,
        tokens_ratio=tokens_ratio,
        tokens_ratio_ci=tokens_interval,
    )


HEADS = (
    "concurrency",
    "requests",
    "requests/s",
    "target's requests/s",
    "speedup",
    "tokens/s",
    "target's tokens/s",
    "over target",
)


def rows_of(found: Concurrency) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            str(each.concurrency),
            f"{each.requests:,}",
            f"{each.requests_per_s:.1f}",
            f"{each.target_requests_per_s:.1f}",
            with_interval(each.speedup, each.speedup_ci),
            f"{each.tokens_per_s:,.0f}",
            f"{each.target_tokens_per_s:,.0f}",
            with_interval(each.tokens_ratio, each.tokens_ratio_ci),
        ]
        for each in found.results
    ]


def in_words(found: Concurrency) -> str:
    """Return what was measured."""
    return f"{found.title}; {models_in_words(found.engines)}"


def concurrency_table(found: Concurrency) -> Table:
    """Return a terminal table by concurrent requests."""
    return cells_table(f"throughput of {found.policy} over that of the target alone", *found.details)


def main(
    pair: PairOption = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1, 2, 4, 8, 16, 32 and 64.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of problems; an interval needs 10.")] = 12,
    rounds: Annotated[
        int, typer.Option(min=1, help="Problems of a block for each concurrent request. A block has at least 8.")
    ] = 2,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Compare the throughput of the default policy with that of the target alone."""
    choose_models(None, None, pair)  # refuses an unknown name before a service starts
    about, results = conditions(), list[AtConcurrency]()
    command = [sys.executable, "-m", "stepspec", "serve", "--port", "0", *(["--pair", pair] if pair else [])]
    with started(command) as service, asyncio.Runner() as runner, make_meter() as meter:
        policy, *models = runner.run(models_of(service))
        for number in concurrency or CONCURRENCIES:
            meter.begin(f"concurrency {number}")
            count = blocks * max(rounds * number, MIN_BLOCK)
            asked = questions(count)
            run = at_concurrency(service, (models[0], models[1]), asked, number, blocks, temperature, meter.show)
            results.append(runner.run(run))
    used = load_pair(pair=pair, notes=False)
    about |= {"policy": policy, "benchmark": BENCHMARK, "temperature": temperature, "engines": engine_records(used)}
    asyncio.run(used.aclose())
    found = Concurrency.model_validate({**about, "results": results})
    finish_scenario([concurrency_table(found), scenario_table(found)], found, json_file)
