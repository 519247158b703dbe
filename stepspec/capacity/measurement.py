"""What requests to one replica cost, by the number of concurrent requests: measures what `stepspec size` reads."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from stepspec.api.models import Pair
from stepspec.base.extras import from_extra
from stepspec.capacity.costs import MAX_FAILED, LoadCosts, ModelMemory
from stepspec.capacity.process import cpu_s
from stepspec.errors import EngineError

with from_extra("size", "stepspec costs service"):
    import httpx

CHAT = "/v1/chat/completions"
MAX_TOKENS = 640
MAX_DURATIONS = 300
MIN_ROUNDS = 4
"""Least requests for each concurrent one."""
PARTS: Sequence[str] = ("target", "draft", "judge", "controller", "busy_target", "busy_draft", "busy_judge")
"""Seconds that are recorded for 1,000 committed tokens."""
TIMEOUT_S = 600.0
IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. uvicorn closes it after 5 s."""

Body = Mapping[str, Any]
"""Fields of a request for a chat completion."""
CpuSeconds = Callable[[], Mapping[str, float]]
"""Returns the processor seconds of the service so far, by process."""


@dataclass(frozen=True)
class TimedAnswer:
    """A complete answer. `ended` is a time of `time.perf_counter`."""

    response: httpx.Response
    seconds: float
    ended: float


def make_client(url: str) -> httpx.AsyncClient:
    """Return a client of a service on this machine, without a limit of connections."""
    limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False)


async def service_costs(
    url: str,
    pid: int,
    questions: Iterable[str],
    loads: Sequence[int],
    requests: int,
    temperature: float,
    progress: Callable[[None, int, int], None],
) -> list[LoadCosts]:
    """Measure what requests to a service cost.

    Args:
        url: the service's URL, without a path.
        pid: id of the one process of the service.
        questions: the questions, enough for all requests and those that warm up.
        loads: numbers of concurrent requests.
        requests: measured requests at each of them.
        temperature: sampling temperature.
        progress: called with None, and how many of the loads are measured, and their number.

    Raises:
        EngineError: more than 1% of the requests fail, or too few remain to measure.
    """
    found, rest = list[LoadCosts](), iter(questions)
    about: Body = {"temperature": temperature, "max_tokens": MAX_TOKENS}
    async with make_client(url) as client:
        for number in loads:
            asked = [chat_body(text, seed=seed, **about) for seed, text in enumerate(islice(rest, number + requests))]
            found.append(await load_costs(client, asked, number, lambda: {"service": cpu_s(pid)}))
            progress(None, len(found), len(loads))
    return found


def chat_body(question: str, **fields: Any) -> Body:
    """Return the fields of a request that asks a question."""
    return {"messages": [{"role": "user", "content": question}], **fields}


async def load_costs(
    client: httpx.AsyncClient, asked: Sequence[Body], concurrency: int, cpu_s: CpuSeconds
) -> LoadCosts:
    """Send requests, a number of them concurrently, and return what they cost. The first round warms up.

    Throughput counts from the first round of answers to the last, because fewer requests run at the end.

    Raises:
        EngineError: more than 1% of the requests fail, or too few remain to measure.
    """
    await _closed_loop(client, asked[:concurrency], concurrency)
    requests, before = asked[concurrency:], cpu_s()
    answers = await _closed_loop(client, requests, concurrency)
    after = cpu_s()
    num_failed = len(requests) - len(answers)
    if num_failed > MAX_FAILED * len(requests) or len(answers) < MIN_ROUNDS * concurrency:
        raise EngineError(
            f"{num_failed} of {len(requests)} requests failed at concurrency {concurrency}. Read the log of the "
            "service."
        )
    first, last = answers[concurrency - 1].ended, answers[-concurrency - 1].ended
    responses = [each.response for each in answers]
    return LoadCosts(
        concurrency=concurrency,
        requests=len(requests),
        failed=num_failed,
        requests_per_s=(len(answers) - 2 * concurrency) / (last - first),
        durations_s=thinned(sorted(each.seconds for each in answers), MAX_DURATIONS),
        cpu_ms={part: 1000 * (after[part] - before[part]) / len(requests) for part in before},
        request_bytes=sum(_num_bytes(each.request) for each in responses) / len(responses),
        response_bytes=sum(map(_num_bytes, responses)) / len(responses),
        **_of_answers([each.json() for each in responses]),
    )


async def _closed_loop(client: httpx.AsyncClient, asked: Iterable[Body], concurrency: int) -> list[TimedAnswer]:
    """Send all requests, a number of them concurrently, and return the complete answers in the order of their ends."""
    waiting, found = iter(asked), list[TimedAnswer]()

    async def work() -> None:
        for body in waiting:
            since = time.perf_counter()
            try:
                response = await client.post(CHAT, json=body)
            except httpx.TransportError:
                continue
            ended = time.perf_counter()
            if response.is_success and response.json().get("choices"):
                found.append(TimedAnswer(response, ended - since, ended))

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return found


def _num_bytes(message: httpx.Request | httpx.Response) -> int:
    return sum(len(name) + len(value) + 4 for name, value in message.headers.raw) + len(message.content)


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
        found[role] = ModelMemory(
            weights_bytes=engine.metrics().memory_bytes.get("weights"),
            cache_bytes_per_token=getattr(engine, "position_bytes", None),
        )
    return found


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
