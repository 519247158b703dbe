"""`stepspec costs`: measure the costs that `stepspec replay --costs` and `stepspec size` read."""

import asyncio
import sys
from typing import Annotated

import typer
from rich.table import Table

from stepspec.api.models import choose_models, load_pair
from stepspec.capacity.costs import Costs, nearest_rank
from stepspec.chat.prompts import encode_request
from stepspec.cli.group import SETTINGS, WholeHelp
from stepspec.cli.options import DraftOption, PairOption, PolicyOption, TargetOption, numbers
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.errors import UsageError
from stepspec.evaluation.advise.measurements import load_costs
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.replay import HardwareCosts
from stepspec.evaluation.report.cells import percent, seconds
from stepspec.evaluation.run import load_benchmark, load_problems
from stepspec.evaluation.run.conditions import engine_records
from stepspec.loop.policy import load_policy

WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens of the timed passes of the target."""
NUM_PROMPTS = 12
BENCHMARK = "gsm-mini"
TIMED = ("target", "judge", "draft", "controller")
HEADS = ("concurrency", "requests/s", "p50", "p95", *TIMED, "accepted", "CPU", "bytes")

main = typer.Typer(cls=WholeHelp, help="Measure costs for replays and for sizing.", add_completion=False, **SETTINGS)


@main.command("models")
def model_costs(
    target: TargetOption = None, draft: DraftOption = None, pair: PairOption = None, json_file: JsonOption = None
) -> None:
    """Time a token of both models and passes of the target, for 'stepspec replay --costs'."""
    about, models = conditions(), load_pair(target, draft, pair=pair, notes=False)
    tokenizer = models.target.tokenizer
    texts = [tokenizer.decode(encode_request(tokenizer, question)) for question in _questions(NUM_PROMPTS)]
    with asyncio.Runner() as runner:
        try:
            found = runner.run(load_costs(models, texts, 1, WIDTHS))
            engines = engine_records(models)
        finally:
            runner.run(models.aclose())
    assert found.draft is not None, "a pair has a draft"
    pass_s = {width: ratio * found.target.write_s for width, ratio in found.target.pass_over_one.items()}
    costs = HardwareCosts(**about, engines=engines, draft_token_s=found.draft.write_s, pass_s=pass_s)
    table = Table("work", "ms")
    table.add_row("token of the draft", f"{1000 * costs.draft_token_s:.3f}")
    for width, each in costs.pass_s.items():
        table.add_row(f"pass of the target over {width}", f"{1000 * each:.3f}")
    c = costs.draft_token_s / found.target.write_s
    finish([table, f"A drafted token costs c = {c:.2f} passes of the target over one token."], costs, json_file)


@main.command("service")
def service_costs(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    policy: PolicyOption = "two-level",
    concurrency: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Concurrent requests; the least is 1.")
    ] = "1,2,4,8",
    requests: Annotated[int, typer.Option(min=10, help="Requests at each; at least 4 for each concurrent one.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Measure what requests to one service cost, for 'stepspec size'. It starts the service itself."""
    # These need the extra size, which the other command does not.
    from stepspec.capacity import measurement
    from stepspec.capacity.process import started

    loads = _loads(concurrency, requests, measurement.MIN_ROUNDS)
    # Unknown names are refused before a service starts. Models are loaded here only after the timed requests, so that
    # these have all the memory.
    choose_models(target, draft, pair)
    load_policy(policy)
    count = len(loads) * requests + sum(loads)  # no question twice, which would be in the prefix cache
    questions = _questions(count)
    if len(questions) < count:
        raise UsageError(
            f"{BENCHMARK} has {len(questions):,} questions, and these are {count:,}. Give fewer --requests."
        )
    about, models = conditions(), {"--target": target, "--draft": draft, "--pair": pair}
    given = [word for name, value in models.items() if value is not None for word in (name, value)]
    limits = ["--max-running", str(max(loads)), "--policy", policy, "--port", "0"]
    with started([sys.executable, "-m", "stepspec", "serve", *limits, *given]) as (url, pid), make_meter() as meter:
        meter.begin("numbers of concurrent requests")
        measured = measurement.service_costs(url, pid, questions, loads, requests, temperature, meter.show)
        results = asyncio.run(measured)
    loaded = load_pair(target, draft, pair=pair, needs_draft=False, notes=False)
    costs = Costs(
        **about,
        policy=policy,
        benchmark=BENCHMARK,
        temperature=temperature,
        max_running=max(loads),
        engines=engine_records(loaded),
        memory=measurement.memory_of(loaded),
        loads=results,
    )
    asyncio.run(loaded.aclose())
    finish([_service_table(costs)], costs, json_file)


def _loads(text: str, requests: int, rounds: int) -> list[int]:
    """Return the numbers of concurrent requests.

    Raises:
        UsageError: 1 is not among them, one is below it, or there are too few requests for the largest.
    """
    loads = sorted(numbers("--concurrency", text, int))
    if loads[0] != 1:
        raise UsageError(f"--concurrency must start with 1, got {text}.")
    if requests < rounds * loads[-1]:
        raise UsageError(f"--concurrency {loads[-1]} needs at least {rounds * loads[-1]} --requests, got {requests}.")
    return loads


def _service_table(found: Costs) -> Table:
    """Return a terminal table by concurrent requests. Seconds of the parts are for 1,000 committed tokens."""
    title = f"{found.policy} on {found.benchmark}: requests, seconds for 1,000 committed tokens, and a request's CPU"
    table = Table(*HEADS, title=title)
    for each in found.loads:
        table.add_row(
            str(each.concurrency),
            f"{each.requests_per_s:.2f}",
            *(seconds(nearest_rank(each.durations_s, share)) for share in (0.5, 0.95)),
            *(seconds(each.seconds_per_1000[part]) for part in TIMED),
            percent(each.step_acceptance),
            " + ".join(f"{spent:.1f} ms {part}" for part, spent in each.cpu_ms.items()),
            f"{each.request_bytes:,.0f} + {each.response_bytes:,.0f}",
        )
    return table


def _questions(number: int) -> list[str]:
    """Return the first questions of gsm-mini, at most `number`."""
    return [each.question for each in load_problems(load_benchmark(BENCHMARK)[1], None, number).problems]
