"""`stepspec bench`: measure the speed of the torch engine, the controller, LangChain and the remote engine."""

import asyncio
import dataclasses
import importlib
import random
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from evals.bench import benching_service
from evals.bench.benching_agent import bench_agent
from evals.bench.speed import (
    ChatCosts,
    ContextCosts,
    ControllerCosts,
    EngineSpeeds,
    WireCost,
    WireCosts,
    chat_lines,
    controller_table,
    costs_table,
    speeds_table,
    wire_table,
)
from stepspec.api.loading import Pair, choose_models, load_pair
from stepspec.api.pairs import EMBEDDED_NAME, find_pair
from stepspec.api.session import StepSpec
from stepspec.base.extras import from_extra
from stepspec.cli.completing import names_of, one_of
from stepspec.cli.help import WholeHelp
from stepspec.cli.options import DraftOption, PairOption, SeedOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.cli.progress import make_meter
from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import CALL_DRAFTERS
from stepspec.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from evals.bench.engine import Subject
    from evals.bench.twins import TwinRuns

COSTS_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens of the passes that `bench costs` times."""
DTYPES = ("float32", "bfloat16", "float16")
RANDOM_CONTEXT = 8192
"""Context of random models on a GPU, where every text reserves its whole length, in tokens."""

app = typer.Typer(cls=WholeHelp, no_args_is_help=True, help="Measure how fast engines are.", rich_markup_mode=None)


app.command("agent")(bench_agent)
app.add_typer(benching_service.app, name="service")


@app.callback()
def _commands() -> None:
    """Measure how fast engines are."""


@app.command("engine")
def bench_engine(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1, 4 and 16.")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A drafter; repeat it for several. Default: all.",
            autocompletion=one_of(list(CALL_DRAFTERS)),
        ),
    ] = None,
    drafted: Annotated[
        int, typer.Option(min=1, max=64, help="Tokens drafted in each round by the fixed settings.")
    ] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="Maximum generated tokens for each prompt.")] = 200,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 elsewhere.",
            autocompletion=one_of(DTYPES),
        ),
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Number of timed repeats.")] = 3,
    shape: Annotated[
        str | None,
        typer.Option(metavar="TARGET[,DRAFT]", help="Use random models of these shapes, for example 8b,0.6b."),
    ] = None,
    synthetic_acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Accept drafted tokens at random with this probability.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare the speed of the torch engine with transformers' generation on the same prompts."""
    if shape is not None and synthetic_acceptance is None and "," in shape:
        raise UsageError("Random models never agree. Set their acceptance rate with --synthetic-acceptance.")
    known = list(CALL_DRAFTERS)
    for name in drafter or ():
        if name not in known:
            raise UsageError(unknown_name("drafter", name, known))
    subject = _load(target, draft, pair, shape, dtype, RANDOM_CONTEXT)
    names: list[Any] = drafter or subject.engine.drafters
    plan = _bench().Plan(names, batch or (1, 4, 16), drafted, tokens, turns, synthetic_acceptance)
    prompts = _prompts(subject, plan.num_prompts)
    conditions = _conditions()
    synthetic = subject.synthetic or synthetic_acceptance is not None
    results, done = asyncio.run(_measured(subject.engine, _bench().measure(subject, prompts, plan)))
    speeds = EngineSpeeds.model_validate(
        {
            **conditions,
            "engine": subject.engine.describe(),
            "draft": subject.draft,
            "synthetic": synthetic,
            "plan": dataclasses.asdict(plan),
            "memory_bytes": done.memory_bytes,
            "draft_overhead": done.draft_overhead,
            "results": results,
        }
    )
    finish([*(speeds_table(each, synthetic) for each in speeds.results), speeds.memory()], speeds, json_file)


@app.command("context")
def bench_context(
    target: TargetOption = None,
    shape: Annotated[
        str | None, typer.Option(metavar="TARGET", help="Use a random model of this shape, for example mini.")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of context. Default: 100, 1000 and 8000.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Number of steps at each length.")] = 20,
    json_file: JsonOption = None,
) -> None:
    """Time a step that is judged, rejected and regenerated, at several lengths of context."""
    if target is None and shape is None:
        shape = "mini"  # the context of the embedded pair is too short
    subject = _load(target, None, None, shape, None)
    conditions = _conditions()
    measurement = _bench().by_context(subject, length or (100, 1000, 8000), turns)
    results, _ = asyncio.run(_measured(subject.engine, measurement))
    described = {"engine": subject.engine.describe(), "synthetic": subject.synthetic, "turns": turns}
    costs = ContextCosts.model_validate({**conditions, **described, "results": results})
    finish([costs_table(costs)], costs, json_file)


@app.command("costs")
def bench_costs(
    target: TargetOption = None, draft: DraftOption = None, pair: PairOption = None, json_file: JsonOption = None
) -> None:
    """Time a token of both models and passes of the target, for 'stepspec replay --costs'."""
    from evals.training.gsm_mini import load_split
    from stepspec.chat.prompts import encode_request
    from stepspec.evaluation.advise.measuring import load_costs
    from stepspec.evaluation.replay import HardwareCosts
    from stepspec.evaluation.running.conditions import engine_record

    conditions, models = _conditions(), load_pair(target, draft, pair=pair, notes=False)
    tokenizer = models.target.tokenizer
    texts = [tokenizer.decode(encode_request(tokenizer, each.question)) for each in islice(load_split("test"), 12)]

    async def measured() -> Any:
        try:
            return await load_costs(models, texts, 1, COSTS_WIDTHS)
        finally:
            await models.aclose()

    found = asyncio.run(measured())
    assert found.draft is not None, "a pair has a draft"
    costs = HardwareCosts(
        **conditions,
        engines={"target": engine_record(models.target), "draft": engine_record(models.draft)},
        draft_token_s=found.draft.write_s,
        pass_s={width: ratio * found.target.write_s for width, ratio in found.target.pass_over_one.items()},
    )
    table = Table("seconds", "ms")
    table.add_row("token of the draft", f"{1000 * costs.draft_token_s:.3f}")
    for width, seconds in costs.pass_s.items():
        table.add_row(f"pass of the target over {width}", f"{1000 * seconds:.3f}")
    finish([table], costs, json_file)


@app.command("controller")
def bench_controller(
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens in the prompt. Default: 100, 1000, 8000 and 32000.")
    ] = None,
    concurrent: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1, 16 and 256.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time the controller with an engine that answers instantly, and separately the encoding of remote requests."""
    from evals.bench.controller import POLICY, controller_cost

    tokenizer, transport = _embedded_tokenizer(), _http_transport()
    conditions = _conditions()
    found = [
        asyncio.run(controller_cost(tokenizer, length, count, transport(tokenizer)))
        for length in context or (100, 1000, 8000, 32000)
        for count in concurrent or (1, 16, 256)
    ]
    costs = ControllerCosts.model_validate({**conditions, "policy": POLICY, "results": found})
    finish([controller_table(costs)], costs, json_file)


@app.command("ideal")
def bench_ideal(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")], json_file: JsonOption = None
) -> None:
    """Compare the speed of step-level policies with the best that the run's own costs and acceptance allow."""
    from evals.bench.ideal import ideals, ideals_table

    found = ideals(run)
    finish([ideals_table(found.policies)], found, json_file)


@app.command("langchain")
def bench_langchain(
    concurrent: Annotated[int, typer.Option(min=2, help="Concurrent calls.")] = 64,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    json_file: JsonOption = None,
) -> None:
    """Time the overhead of the LangChain chat model, and many concurrent calls on one engine."""
    from evals.training.gsm_mini import load_split

    overhead = importlib.import_module("evals.bench.langchain")
    question = next(iter(load_split("test"))).question
    conditions = _conditions()
    with asyncio.Runner() as runner:
        added = runner.run(overhead.chat_cost(_embedded_tokenizer()))
        models = load_pair(target, draft, pair=pair, notes=False)
        many = runner.run(overhead.many_chats(models, question, concurrent))
        names = {"target": models.target.name, "draft": models.draft.name if models.draft else ""}
        runner.run(models.aclose())
    about = {**conditions, **names, "policy": overhead.POLICY}
    costs = ChatCosts.model_validate({**about, "overhead": added, "many": many})
    finish(chat_lines(costs), costs, json_file)


@app.command("aa")
def bench_aa(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    limit: Annotated[int | None, typer.Option(min=10, help="Number of gsm-mini problems. Default: 60.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Run each policy twice under two names, and check that both runs are equally fast."""
    from evals.bench.twins import (
        NUM_PROBLEMS,
        SEED,
        TEMPERATURES,
        TwinRuns,
        TwinTest,
        policies_to_copy,
        simultaneous,
    )

    conditions, num_problems, results = _conditions(), limit or NUM_PROBLEMS, list[Any]()
    models = load_pair(target, draft, pair=pair, notes=False)
    tests = [
        TwinTest(models, policies_to_copy(models, fixed_too=temperature > 0), temperature, num_problems)
        for temperature in TEMPERATURES
    ]
    confidence = simultaneous(sum(len(test.policies) for test in tests))
    with asyncio.Runner() as runner, make_meter() as meter:
        for test in tests:
            meter.begin(f"temperature {test.temperature:g}")
            results += runner.run(test.run(confidence, meter.show))
        engines = {"target": models.target.name, "draft": models.draft.name if models.draft else None}
        runner.run(models.aclose())
    about = {**conditions, "benchmark": "gsm-mini", "num_problems": num_problems, "seed": SEED, "engines": engines}
    found = TwinRuns.model_validate({**about, "results": results})
    verdict = (
        "Every policy is as fast as its copy." if found.holds else "Some policies are not as fast as their copies."
    )
    finish([_twins_table(found), verdict], found, json_file)
    if not found.holds:
        raise typer.Exit(1)


def _twins_table(found: "TwinRuns") -> Table:
    table = Table(title=f"A/A test, {found.num_problems} problems, {found.confidence:.0%} simultaneous intervals")
    for name in ("temperature", "policy", "copy", "", "later over earlier", "", "holds"):
        table.add_column(name)
    for each in found.results:
        cells = [f"{each.copy_ratio:.3f}", _interval(each.copy_ci), f"{each.order_ratio:.3f}", _interval(each.order_ci)]
        table.add_row(f"{each.temperature:g}", each.policy, *cells, "yes" if each.holds else "no")
    return table


def _interval(found: tuple[float, float] | None) -> str:
    return f"[{found[0]:.3f}, {found[1]:.3f}]" if found else ""


@app.command("overhead")
def bench_overhead(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    policy: Annotated[str, typer.Option(help="A step-level policy.")] = "stepspec",
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What the draft does; repeat it for several. Default: all."),
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent requests. Default: 1 and 16.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 300,
    benchmark: Annotated[str, typer.Option(help="gsm-mini or gsm-plain.")] = "gsm-mini",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Measure what a policy costs with a draft that is of no use."""
    from evals.bench.overhead import KINDS, Kind, Overheads, overhead, overheads_table, own_target
    from stepspec.loop.policy import load_policy

    for name in kind or ():
        if name not in KINDS:
            raise UsageError(unknown_name("draft", name, KINDS))
    kinds: Sequence[Kind] = [each for each in KINDS if not kind or each in kind]
    loaded = load_policy(policy)[0]
    if not loaded.settings.judged:
        raise UsageError(f"{policy!r} does not speculate on steps. Name a policy that does, such as stepspec.")
    questions = [problem.question for problem in islice(_problems(benchmark), limit)]
    conditions, results = _conditions(), list[Any]()
    models = load_pair(target, draft, pair=pair, notes=False)
    ways = loaded, own_target(loaded)
    with asyncio.Runner() as runner, make_meter() as meter:
        for number, name in product(concurrency or (1, 16), kinds):
            meter.begin(f"{name}, concurrency {number}")
            results.append(runner.run(overhead(models, ways, name, questions, number, temperature, meter.show)))
        engines = _engines(models)
        runner.run(models.aclose())
    about = {"policy": policy, "benchmark": benchmark, "temperature": temperature, "engines": engines}
    found = Overheads.model_validate({**conditions, **about, "results": results})
    finish([overheads_table(found)], found, json_file)
    if not found.holds:
        raise typer.Exit(1)


@app.command("conversation")
def bench_conversation(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeat it for several. Default: target, token and stepspec.")
    ] = None,
    conversations: Annotated[int, typer.Option(min=1, help="Number of conversations.")] = 10,
    context: Annotated[int, typer.Option(min=1, help="Tokens after which a conversation ends.")] = 4000,
    benchmark: Annotated[str, typer.Option(help="gsm-mini or gsm-plain.")] = "gsm-plain",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    json_file: JsonOption = None,
) -> None:
    """Compare policies over long conversations of small problems, by the length of the context."""
    from evals.bench.conversation import Conversations, conversations_table, converse
    from stepspec.evaluation.grade import Grading

    problems = cycle((each.question, str(each.answer)) for each in _problems(benchmark))
    conditions, models = _conditions(), load_pair(target, draft, pair=pair, notes=False)
    longest = min(engine.max_context for engine in (models.target, models.draft) if engine is not None)
    if context >= longest:
        raise UsageError(f"--context {context:,} leaves no room in the models' context of {longest:,} tokens.")
    with asyncio.Runner() as runner, make_meter() as meter, Grading("number") as grading:
        specs = {
            Path(each).stem: StepSpec(policy=each, pair=models) for each in policy or ("target", "token", "stepspec")
        }
        meter.begin("conversations")

        def correct(text: str, answer: str) -> bool:
            return grading.grade(text, answer).status == "correct"

        results = runner.run(converse(specs, problems, conversations, context, temperature, correct, meter.show))
        engines = _engines(models)
        runner.run(models.aclose())
    found = Conversations.model_validate(
        {
            **conditions,
            "benchmark": benchmark,
            "temperature": temperature,
            "conversations": conversations,
            "context": context,
            "engines": engines,
            "results": results,
        }
    )
    finish([conversations_table(found)], found, json_file)


@app.command("exact")
def bench_exact(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of greedy problems.")] = 1000,
    samples: Annotated[int, typer.Option(min=10, help="Number of texts to sample under each policy.")] = 1000,
    benchmark: Annotated[str, typer.Option(help="gsm-mini or gsm-plain.")] = "gsm-mini",
    json_file: JsonOption = None,
) -> None:
    """Check that `token` and `exact` write the target's own texts, and compare their speed."""
    from evals.bench.exactness import Exactnesses, exactness, exactness_table, on_every_step
    from stepspec.loop.policy import load_policy

    questions = [problem.question for problem in islice(_problems(benchmark), limit)]
    policies = {name: load_policy(name)[0] for name in ("target", "token", "exact")}
    policies["exact on every step"] = on_every_step(policies["exact"])
    conditions, models = _conditions(), load_pair(target, draft, pair=pair, notes=False)
    with asyncio.Runner() as runner, make_meter() as meter:
        meter.begin("requests")
        results, different = runner.run(exactness(models, policies, questions, samples, meter.show))
        engines = _engines(models)
        runner.run(models.aclose())
    about = {"benchmark": benchmark, "problems": limit, "samples": samples, "different": different, "engines": engines}
    found = Exactnesses.model_validate({**conditions, **about, "results": results})
    lines = [
        f"{each.policy}: problem {parted.problem + 1} parts after {parted.after!r}, where the two tokens differ by "
        + ("an unknown amount" if parted.difference is None else f"{parted.difference:.1e} nats")
        for each in results
        for parted in each.parted
    ]
    finish([exactness_table(found), *lines], found, json_file)
    if not all(each.holds for each in results):
        raise typer.Exit(1)


@app.command("servers")
def bench_servers(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Servers as http://HOST:PORT/v1#NAME, or torch:FOLDER.")
    ],
    title: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Names of the rows, in order, for servers that tell none.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask servers what they can do, and measure what a judgment costs after short and long texts."""
    from evals.bench.servers import ServerRow, Servers, server_row, servers_table

    if title and len(title) != len(models):
        raise UsageError(f"There are {len(models)} models, but {len(title)} times --title. Give one for each, or none.")
    conditions, rows = _conditions(), list[ServerRow]()
    with asyncio.Runner() as runner:
        for model, name in zip(models, title or [None] * len(models), strict=True):
            pair = load_pair(model, needs_draft=False, notes=False)
            try:
                rows.append(runner.run(server_row(pair.target, name)))
            finally:
                runner.run(pair.aclose())
    found = Servers.model_validate({**conditions, "results": rows})
    finish([servers_table(found)], found, json_file)


@app.command("wire")
def bench_wire(
    target: Annotated[str, typer.Option(help="vLLM server of the target, as http://HOST:PORT/v1#NAME.")],
    draft: Annotated[str, typer.Option(help="vLLM server of the draft.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A policy; repeat it for several. Default: specreason.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems.")] = 50,
    benchmark: Annotated[str, typer.Option(help="gsm-mini or gsm-plain.")] = "gsm-mini",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum generated tokens for each problem.")] = 640,
    json_file: JsonOption = None,
) -> None:
    """Compare SpecReason's published procedure with policies on the same two vLLM servers."""
    problems = list(islice(_problems(benchmark), limit))
    with from_extra("remote", "stepspec bench wire"):
        published = importlib.import_module("evals.bench.published")
    conditions = _conditions()
    with asyncio.Runner() as runner, ExitStack() as clients:
        pair = load_pair(target, draft, notes=False)
        engines: list[Any] = [pair.target, pair.draft]
        if not all(hasattr(engine, "address") for engine in engines):
            raise UsageError("Both models must be on servers. Write http://HOST:PORT/v1#NAME.")
        servers: list[Any] = [engine.address for engine in engines]
        measured = published.Measured

        def published_one(name: str, *, answers: bool) -> Any:
            procedure = clients.enter_context(closing(published.PublishedProcedure(*servers, max_tokens, answers)))
            return measured(name, procedure.solve, procedure.forget, lambda: procedure.traffic, servers)

        def solve(spec: StepSpec, question: str) -> str:
            result = runner.run(spec.generate(question, max_tokens=max_tokens))
            return result.reasoning + result.answer

        def forget() -> None:
            runner.run(pair.forget())

        def traffic() -> Metrics:
            return engines[0].metrics() + engines[1].metrics()

        specs = {name: StepSpec(policy=name, pair=pair) for name in policy or ("specreason",)}
        contenders = [
            published_one("published procedure", answers=False),
            published_one("published procedure, with an answer", answers=True),
        ]
        for name, spec in specs.items():
            contenders.append(measured(Path(name).stem, partial(solve, spec), forget, traffic, servers))
        published.compare(contenders, [each.question for each in problems])
        used = _engines(pair)
        runner.run(pair.aclose())
    judges = [["rating"], ["rating"], *([judge.name for judge in spec.policy.judges] for spec in specs.values())]
    results = _wire_costs(contenders, judges, [str(each.answer) for each in problems])
    described = {"target": servers[0].base, "draft": servers[1].base, "benchmark": benchmark}
    found = {**conditions, **described, "problems": len(problems), "engines": used, "results": results}
    costs = WireCosts.model_validate(found)
    finish([wire_table(costs)], costs, json_file)


@app.command("distance")
def bench_distance(
    draft: Annotated[str, typer.Option(help="A server with the pair's draft, as http://HOST:PORT/v1#NAME.")],
    pair: PairOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy; repeat it for several. Default: token, specreason, stepspec and lookahead. The target is "
            "always included."
        ),
    ] = None,
    round_trip: Annotated[
        list[float] | None,
        typer.Option(
            min=0,
            max=10_000,
            metavar="MS",
            help="Milliseconds to the draft and back; repeat it for several. Default: 0, 1, 5 and 20.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of problems; an interval needs 10.")] = 50,
    benchmark: Annotated[str, typer.Option(help="A benchmark.", autocompletion=names_of("evals"))] = "gsm-mini",
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 0.0,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what a round trip to the draft costs each policy, with the draft's server behind a delaying relay."""
    from stepspec.evaluation.records import BASELINE

    with from_extra("eval", "stepspec bench distance"):
        from evals.bench.distance import (
            POLICIES,
            ROUND_TRIPS_MS,
            Distances,
            distances,
            distances_table,
            engines_of,
            places,
        )
        from stepspec.evaluation.running import Settings, load_benchmark, load_problems

    name, loaded = load_benchmark(benchmark)
    problems, conditions = load_problems(loaded, None, limit), _conditions()
    names = list(dict.fromkeys([BASELINE, *(policy or POLICIES)]))
    trips = list(dict.fromkeys(round_trip or ROUND_TRIPS_MS))
    settings = Settings(seed, temperature=temperature)
    with places(pair, draft, trips) as found, asyncio.Runner() as runner, make_meter() as meter:
        meter.begin("requests")
        run = distances(found, names, (name, loaded), problems, settings, meter.show)
        results, engines = runner.run(run), engines_of(found)
    about = {"benchmark": name, "temperature": temperature, "seed": seed, "engines": engines}
    measured = Distances.model_validate({**conditions, **about, "results": results})
    finish([distances_table(measured)], measured, json_file)


def _wire_costs(contenders: Sequence[Any], judges: Sequence[list[str]], answers: Sequence[str]) -> list[WireCost]:
    import numpy

    from stepspec.evaluation.grade import Grading
    from stepspec.evaluation.stats import ratio_of_sums

    count, results = len(answers), list[WireCost]()
    with Grading("number") as grading:
        correct = [
            sum(grading.grade(text, gold).status == "correct" for text, gold in zip(each.texts, answers, strict=True))
            for each in contenders
        ]
    for each, names, num_correct in zip(contenders, judges, correct, strict=True):
        (ratio, interval), (answered_ratio, answered_interval) = (
            ratio_of_sums(published.seconds, each.seconds, numpy.random.default_rng(0)) for published in contenders[:2]
        )
        results.append(
            WireCost(
                name=each.name,
                seconds=sum(each.seconds) / count,
                requests=sum(sent.requests for sent in each.sent) / count,
                bytes_sent=sum(sent.bytes_sent for sent in each.sent) / count,
                bytes_received=sum(sent.bytes_received for sent in each.sent) / count,
                prefix_hits=each.hits / each.looked_up if each.looked_up else 0.0,
                correct=num_correct / count,
                ratio=ratio,
                ratio_ci=interval,
                answered_ratio=answered_ratio,
                answered_ratio_ci=answered_interval,
                judges=names,
            )
        )
    return results


def _problems(benchmark: str) -> Iterator[Any]:
    """Return the test problems of a benchmark with a generator.

    Raises:
        UsageError: there is no such benchmark.
    """
    from evals.bench.same_texts import PROBLEMS

    if benchmark not in PROBLEMS:
        raise UsageError(unknown_name("benchmark", benchmark, [*PROBLEMS]))
    return PROBLEMS[benchmark]("test")


def _embedded_tokenizer() -> Any:
    with from_extra("torch", "The embedded tokenizer"):
        return importlib.import_module("stepspec.engines.hugging_face").load_tokenizer(
            str(find_pair(EMBEDDED_NAME) / "target")
        )


def _http_transport() -> Any:
    """Return a transport for each tokenizer that encodes requests like the remote engine."""
    conversation = importlib.import_module("stepspec.engines.remote.conversation").Conversation
    address = importlib.import_module("stepspec.engines.remote.address").Address("http://localhost/v1")

    def of(tokenizer: Any) -> Any:
        def begin(buffer: Any) -> Any:
            sent = conversation(address, tokenizer, buffer, as_ids=True)
            return lambda: len(sent.body(buffer, {}))

        return begin

    return of


def _bench() -> Any:
    """Return the benchmark module of the torch engine, imported by name because torch is an optional dependency."""
    with from_extra("torch", "stepspec bench engine"):
        return importlib.import_module("evals.bench.engine")


def _load(
    target: str | None,
    draft: str | None,
    pair: str | None,
    shape: str | None,
    dtype: str | None,
    random_context: int | None = None,
) -> "Subject":
    """Load the models of a benchmark. `random_context` limits the context of random models, in tokens."""
    if dtype not in (None, *DTYPES):
        raise UsageError(unknown_name("dtype", str(dtype), DTYPES))
    kind: type[Subject] = _bench().Subject
    if shape is not None:
        if any(each is not None for each in (target, draft, pair)):
            raise UsageError("--shape makes its own models. Remove --target, --draft and --pair.")
        names = [name.strip() for name in shape.split(",")]
        if len(names) > 2:
            raise UsageError(f"--shape {shape} names {len(names)} shapes. Give one, or two for a target and its draft.")
        return kind.random(*names, dtype=dtype, max_model_len=random_context)
    models = choose_models(target, draft, pair)
    draft_folder = _folder_of(models.draft) if models.draft is not None else None
    return kind.load(_folder_of(models.target), draft_folder, dtype, models.titles)


def _folder_of(model: str) -> str:
    kind, _, name = model.partition(":")
    if kind != "torch" or not name:
        raise UsageError(f"{model!r} is not a model of the torch engine. Write torch:FOLDER_OR_NAME.")
    return name


def _conditions() -> dict[str, Any]:
    """Return hardware, versions, commit and start time. Call it before measuring, as files can change meanwhile."""
    from stepspec.evaluation.machine import commit, hardware, versions

    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {"versions": versions(), "commit": commit(), "hardware": hardware(), "started": started}


def _engines(pair: Pair) -> dict[str, Any]:
    """Return what target and draft ran with. Call it after measuring, while they are open."""
    from stepspec.evaluation.running.conditions import engine_record

    return {"target": engine_record(pair.target), "draft": engine_record(pair.draft)}


async def _measured(engine: Any, measurement: Awaitable[Any]) -> tuple[Any, Metrics]:
    """Await a measurement and return its result with the engine's metrics. Frees the models."""
    try:
        return await measurement, engine.metrics()
    finally:
        await engine.aclose()


def _prompts(subject: "Subject", count: int) -> list[list[int]]:
    """Return prompts as token ids: gsm-mini problems, or random ids for a synthetic model."""
    from evals.training.gsm_mini import load_split
    from stepspec.chat.prompts import encode_request

    if subject.synthetic:
        rng = random.Random(0)
        return [[rng.randrange(1000) for _ in range(128)] for _ in range(count)]
    tokenizer = subject.engine.tokenizer
    return [encode_request(tokenizer, each.question) for each in islice(load_split("test"), count)]


if __name__ == "__main__":
    app()
