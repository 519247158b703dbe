"""What requests to one replica cost, by the number of concurrent requests: the file that `stepspec size` reads."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from rich.table import Table

from evals.bench.service.client import Client, Exchange, chat_request
from evals.bench.service.concurrency import MAX_TOKENS, Progress
from evals.bench.service.load import closed_loop
from evals.bench.service.process import Service
from evals.bench.speed import cells_table
from stepspec.api.loading import Pair
from stepspec.errors import EngineError
from stepspec.evaluation.report.cells import percent, seconds
from stepspec.sizing.costs import MAX_FAILED, Costs, LoadCosts, ModelMemory, nearest_rank

MAX_DURATIONS = 300
MIN_ROUNDS = 4
"""Least requests for each concurrent one."""
PARTS: Sequence[str] = ("target", "draft", "judge", "controller", "busy_target", "busy_draft", "busy_judge")
"""Seconds that are recorded for 1,000 committed tokens."""
TIMEOUT_S = 600.0

CpuSeconds = Callable[[], Mapping[str, float]]
"""Returns the processor seconds of the service so far, by process."""


async def service_costs(
    service: Service,
    questions: Iterable[str],
    loads: Sequence[int],
    requests: int,
    temperature: float,
    progress: Progress,
) -> list[LoadCosts]:
    """Measure what requests to a service cost.

    Args:
        service: the service, in one process.
        questions: the questions, enough for all requests and those that warm up.
        loads: numbers of concurrent requests.
        requests: measured requests at each of them.
        temperature: sampling temperature.
        progress: called with None, and how many of the loads are measured, and their number.

    Raises:
        EngineError: more than 1% of the requests fail, or too few remain to measure.
    """
    found, rest = list[LoadCosts](), iter(questions)
    async with Client(service.address, TIMEOUT_S) as client:
        for number in loads:
            asked = [
                chat_request(question, seed=seed, temperature=temperature, max_tokens=MAX_TOKENS)
                for seed, question in enumerate(islice(rest, number + requests))
            ]
            found.append(await load_costs(client, asked, number, lambda: {"service": service.cpu_s}))
            progress(None, len(found), len(loads))
    return found


async def load_costs(client: Client, asked: Sequence[bytes], concurrency: int, cpu_s: CpuSeconds) -> LoadCosts:
    """Send requests, a number of them concurrently, and return what they cost. The first round warms up.

    Throughput counts from the first round of answers to the last, because fewer requests run at the end.

    Raises:
        EngineError: more than 1% of the requests fail, or too few remain to measure.
    """
    await closed_loop(client, asked[:concurrency], concurrency)
    requests, before = asked[concurrency:], cpu_s()
    found = await closed_loop(client, requests, concurrency)
    after = cpu_s()
    answered = [each for each in found if each.answered]
    num_failed = len(found) - len(answered)
    if num_failed > MAX_FAILED * len(found) or len(answered) < MIN_ROUNDS * concurrency:
        raise EngineError(
            f"{num_failed} of {len(found)} requests failed at concurrency {concurrency}. Read the log of the service."
        )
    ends = [each.ended for each in answered if each.ended is not None]
    first, last = ends[concurrency - 1], ends[-concurrency - 1]
    return LoadCosts(
        concurrency=concurrency,
        requests=len(found),
        failed=num_failed,
        requests_per_s=(len(ends) - 2 * concurrency) / (last - first),
        durations_s=thinned(sorted(each.seconds for each in answered), MAX_DURATIONS),
        cpu_ms={part: 1000 * (after[part] - before[part]) / len(found) for part in before},
        request_bytes=sum(map(len, requests)) / len(requests),
        response_bytes=sum(map(_response_bytes, answered)) / len(answered),
        **_of_answers([each.json() for each in answered]),
    )


def thinned(ordered: Sequence[float], most: int) -> list[float]:
    """Return at most so many of sorted values, evenly spread."""
    count = min(most, len(ordered))
    return [ordered[int((number + 0.5) * len(ordered) / count)] for number in range(count)]


def memory_of(pair: Pair) -> dict[str, ModelMemory]:
    """Return the memory of the models of a pair, by role, as far as their engines report it."""
    engines: Mapping[str, Any] = {"target": pair.target, "draft": pair.draft}
    found: dict[str, ModelMemory] = {}
    for role, engine in engines.items():
        if engine is None:
            continue
        per_pass: Callable[[float], float] | None = getattr(engine, "bytes_per_pass", None)
        found[role] = ModelMemory(
            weights_bytes=engine.metrics().memory_bytes.get("weights"),
            cache_bytes_per_token=None if per_pass is None else per_pass(1) - per_pass(0),
        )
    return found


def _response_bytes(found: Exchange) -> int:
    head = sum(len(name) + len(value) + 4 for name, value in found.headers.items())
    return head + len(found.body)


def _of_answers(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of `LoadCosts` that the answers report."""
    counts, times, usage = Counter[str](), Counter[str](), Counter[str]()
    for each in answers:
        reported = each["metrics"]["stepspec"]
        counts.update(reported["counts"])
        times.update({part: reported["times"][part] for part in PARTS})
        usage["prompt"] += each["usage"]["prompt_tokens"]
        usage["cached"] += each["usage"]["prompt_tokens_details"]["cached_tokens"]
    number, committed = len(answers), counts["committed"]
    return {
        "seconds_per_1000": {part: 1000 * times[part] / committed if committed else 0.0 for part in PARTS},
        "step_acceptance": counts["steps_accepted"] / counts["steps_judged"] if counts["steps_judged"] else None,
        "committed_tokens": committed / number,
        "rejected_tokens": counts["rejected"] / number,
        "prompt_tokens": usage["prompt"] / number,
        "cached_share": usage["cached"] / usage["prompt"] if usage["prompt"] else None,
    }


TIMED: Sequence[str] = ("target", "judge", "draft", "controller")
HEADS = ("concurrency", "requests/s", "p50", "p95", *TIMED, "accepted", "CPU", "bytes")


def rows_of(found: Costs) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            str(each.concurrency),
            f"{each.requests_per_s:.2f}",
            *(seconds(nearest_rank(each.durations_s, share)) for share in (0.5, 0.95)),
            *(seconds(each.seconds_per_1000[part]) for part in TIMED),
            percent(each.step_acceptance),
            " + ".join(f"{spent:.1f} ms {part}" for part, spent in each.cpu_ms.items()),
            f"{each.request_bytes:,.0f} + {each.response_bytes:,.0f}",
        ]
        for each in found.loads
    ]


def costs_table(found: Costs) -> Table:
    """Return a terminal table by concurrent requests. Seconds of the parts are for 1,000 committed tokens."""
    title = f"{found.policy} on {found.benchmark}: requests, seconds for 1,000 committed tokens, and a request's CPU"
    return cells_table(title, HEADS, rows_of(found))
