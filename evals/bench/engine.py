"""Speed of the torch engine and of transformers' generation, measured in one run.

All contenders continue the same prompts greedily to the same end, in turns, so that disturbances of the machine affect
them equally. Figures are medians over turns, and a ratio is the median of the ratios of each turn. Every turn has new
prompts, and the engine's caches are cleared before each contender. Our engine starts a new prompt as soon as a text
ends. Transformers' generation starts the next batch when the whole batch has ended. Assisted generation is measured
with its default and with its best number of drafted tokens, which is searched before the turns begin.
"""

import asyncio
import copy
import dataclasses
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from evals.bench.hooks import own_networks, read_bytes, synthetic_acceptance
from evals.bench.problems import questions
from evals.bench.shapes import random_network, without_text
from evals.bench.speed import EngineSpeeds, speeds_table
from stepspec.api.models import choose_models
from stepspec.chat.prompts import encode_request
from stepspec.cli.completion import one_of
from stepspec.cli.options import DraftOption, PairOption, TargetOption
from stepspec.cli.output import JsonOption, finish
from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import (
    CALL_DRAFTERS,
    DrafterName,
    Drafting,
    Generate,
    Sampling,
    Stop,
    TokenBuffer,
    collect,
)
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.advise.formula import expected_tokens
from stepspec.evaluation.machine import conditions

ASSISTED_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of drafted tokens to try for assisted generation."""

PLAIN, ALONE = "plain", "plain, 1 at once"

DTYPES = ("float32", "bfloat16", "float16")
RANDOM_CONTEXT = 8192
"""Context of random models on a GPU, where every text reserves its whole length, in tokens."""

PROMPTS_PER_PLACE = 8
"""Prompts in a turn for each concurrent request."""

Work = Callable[[Sequence[list[int]], int], Awaitable[list[list[int]]]]
"""Continues prompts with a number of concurrent requests, and returns the generated token ids of each."""


@dataclass
class Contender:
    """One way to continue prompts, and its measurements for each turn."""

    name: str
    work: Work
    drafting: Drafting | None = None
    """How our engine drafts. None for transformers."""
    batch: int | None = None
    """Number of concurrent requests, if it differs from the others. A smaller number also means fewer prompts."""
    tokens_per_s: list[float] = field(default_factory=list[float])
    differing: list[bool] = field(default_factory=list[bool])
    """For each text, whether it differs from the first contender's, because rounding decides near ties."""
    done: EngineMetrics = field(default_factory=EngineMetrics)
    """Metrics of our engine over all turns."""

    @property
    def median(self) -> float:
        """Median tokens per second."""
        return statistics.median(self.tokens_per_s)

    def ratio_to(self, other: "Contender") -> float:
        """Return the median over turns of the speedup over another contender."""
        return statistics.median(
            mine / yours for mine, yours in zip(self.tokens_per_s, other.tokens_per_s, strict=True)
        )


def ours(engine: TorchEngine, drafting: Drafting, max_tokens: int) -> Work:
    """Return work for our engine with this drafting."""
    stop = Stop(max_tokens, token_ids=engine.tokenizer.end_ids)

    async def work(prompts: Sequence[list[int]], batch: int) -> list[list[int]]:
        slots = asyncio.Semaphore(batch)

        async def answer(ids: list[int]) -> list[int]:
            async with slots:
                return list(
                    (await collect(engine.generate(Generate(TokenBuffer(ids), Sampling(), stop, drafting)))).ids
                )

        return await asyncio.gather(*map(answer, prompts))

    return work


def theirs(
    network: PreTrainedModel,
    end_ids: frozenset[int],
    max_tokens: int,
    assistant: PreTrainedModel | None = None,
    num_drafted: int | None = None,
) -> Work:
    """Return work for transformers' generation, with prompts padded on the left.

    With an assistant this is assisted generation, which takes one prompt at a time. It drafts `num_drafted` tokens in
    each round, or uses its defaults if `num_drafted` is None.
    """
    settings = None
    if assistant is not None:
        settings = copy.deepcopy(assistant.generation_config)
        if num_drafted is not None:
            settings.num_assistant_tokens = num_drafted
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def answer(prompts: Sequence[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=network.device)
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=network.device)
        with _configured(assistant, settings):
            generate: Any = network.generate
            generated = generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=sorted(end_ids) or None,
                pad_token_id=0,
                **({"assistant_model": assistant} if assistant is not None else {}),
            )
        return [_until_end(row, end_ids) for row in generated[:, width:].tolist()]

    async def work(prompts: Sequence[list[int]], batch: int) -> list[list[int]]:
        return [text for first in range(0, len(prompts), batch) for text in answer(prompts[first : first + batch])]

    return work


@contextmanager
def _configured(assistant: PreTrainedModel | None, settings: Any) -> Generator[None]:
    """Apply the settings to the assistant, on a copy because generation modifies them."""
    if assistant is None:
        yield
        return
    before = assistant.generation_config
    assistant.generation_config = copy.deepcopy(settings)
    try:
        yield
    finally:
        assistant.generation_config = before


def _until_end(ids: list[int], end_ids: frozenset[int]) -> list[int]:
    end = next((index for index, token in enumerate(ids) if token in end_ids), len(ids) - 1)
    return ids[: end + 1]


async def take_turns(
    engine: TorchEngine, contenders: Sequence[Contender], prompts: Sequence[list[int]], batch: int, turns: int
) -> None:
    """Run all contenders on the same prompts, one after the other. Each turn starts with a different contender."""
    per_turn = PROMPTS_PER_PLACE * batch
    for turn in range(-1, turns):  # turn -1 warms up
        chosen = prompts[(turn + 1) * per_turn :][:per_turn]
        first = turn % len(contenders)
        texts: dict[str, list[list[int]]] = {}
        for contender in [*contenders[first:], *contenders[:first]]:
            await engine.forget()
            before = engine.metrics()
            started = time.perf_counter()
            size = contender.batch or batch
            texts[contender.name] = await contender.work(chosen[: PROMPTS_PER_PLACE * size], size)
            seconds = time.perf_counter() - started
            if turn >= 0:
                contender.tokens_per_s.append(sum(map(len, texts[contender.name])) / seconds)
                contender.done += engine.metrics() - before
        for contender in contenders if turn >= 0 else ():
            pairs = zip(texts[contender.name], texts[contenders[0].name], strict=False)
            contender.differing += [text != other for text, other in pairs]


async def best_assisted(
    network: PreTrainedModel,
    assistant: PreTrainedModel,
    end_ids: frozenset[int],
    max_tokens: int,
    prompts: Sequence[list[int]],
) -> int:
    """Return the number of drafted tokens that makes assisted generation fastest on these prompts."""
    speeds: dict[int, float] = {}
    for count in ASSISTED_COUNTS:
        work = theirs(network, end_ids, max_tokens, assistant, count)
        await work(prompts[:1], 1)
        started = time.perf_counter()
        num_tokens = sum(map(len, await work(prompts, 1)))
        speeds[count] = num_tokens / (time.perf_counter() - started)
    return max(speeds, key=lambda count: speeds[count])


def share_of_ideal(contender: Contender, plain: Contender) -> dict[str, float]:
    """Return the speedup that acceptance and costs allow, and the share of it that is reached.

    See `stepspec.evaluation.advise.formula`. Costs are those of the passes alone, in plain passes, averaged over all
    rounds. Return {} if no tokens were drafted.
    """
    done, alone = contender.done, plain.done
    if not done.drafts or done.acceptance is None:
        return {}
    plain_pass = alone.seconds["verify"] / alone.passes["verify"]
    drafting = done.seconds.get("draft", 0.0) / done.passes["verify"] / plain_pass
    verifying = done.seconds["verify"] / done.passes["verify"] / plain_pass
    tokens = expected_tokens(done.acceptance, round(done.drafted / done.drafts), coverage=done.drafts / done.rounds)
    ideal = tokens / (drafting + verifying)
    reached = contender.ratio_to(plain) / ideal
    return {"drafting_cost": drafting, "verifying_cost": verifying, "ideal": ideal, "share_of_ideal": reached}


def memory_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second that a CUDA device reads and writes in a copy, or None on other devices."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2 * source.nbytes / begin.elapsed_time(end) * 1000)
    return best


@dataclass(frozen=True)
class Plan:
    """Settings of a comparison."""

    drafters: Sequence[DrafterName]
    batches: Sequence[int] = (1, 4, 16)
    num_drafted: int = 4
    """Tokens drafted in each round by contenders with a fixed number."""
    max_tokens: int = 200
    turns: int = 3
    synthetic_acceptance: float | None = None
    """See `evals.bench.hooks`."""

    @property
    def num_prompts(self) -> int:
        """Number of different prompts that the plan needs."""
        return max(self.batches) * PROMPTS_PER_PLACE * (self.turns + 1)


@dataclass(frozen=True)
class Subject:
    """The models under test: our engine, and the same models for transformers' generation with its own attention."""

    engine: TorchEngine
    network: PreTrainedModel
    assistant: PreTrainedModel | None
    draft: Mapping[str, str | int | None] | None = None
    """Description of the draft for the results, from `TorchEngine.describe`."""
    synthetic: bool = False
    """Whether the weights are random, so that the text is meaningless."""

    @classmethod
    def load(
        cls,
        target: str,
        draft: str | None = None,
        dtype: str | None = None,
        titles: tuple[str | None, str | None] = (None, None),
    ) -> "Subject":
        """Load models by folder or hub name. Results use `titles` for their names if given.

        Raises:
            ModelError: a model cannot be loaded, or the models do not share a vocabulary.
        """
        chosen = getattr(torch, dtype) if dtype else None
        engine = TorchEngine.load(target, dtype=chosen, title=titles[0])
        if draft is None:
            return cls(engine, *own_networks(engine))
        drafter = TorchEngine.load(draft, dtype=chosen, title=titles[1])
        engine = engine.drafted_by(drafter)
        return cls(engine, *own_networks(engine), drafter.describe())

    @classmethod
    def random(
        cls, target: str, draft: str | None = None, dtype: str | None = None, max_model_len: int | None = None
    ) -> "Subject":
        """Create random models of real shapes, by their names in `shapes.SHAPES`. See `CausalModel.shorten`.

        Raises:
            UsageError: there is no shape with this name.
        """
        model = checked_model(random_network(target, dtype), f"random {target}")
        model.shorten(max_model_len)
        engine = TorchEngine(model, without_text())
        if draft is None:
            return cls(engine, *own_networks(engine), synthetic=True)
        drafter = TorchEngine(checked_model(random_network(draft, dtype), f"random {draft}"), without_text())
        engine = engine.drafted_by(drafter)
        return cls(engine, *own_networks(engine), drafter.describe(), synthetic=True)


async def measure(subject: Subject, prompts: Sequence[list[int]], plan: Plan) -> list[dict[str, Any]]:
    """Return the figures of every contender by batch size, in the format of `python -m evals.bench engine --json`."""
    with synthetic_acceptance(plan.synthetic_acceptance):
        return await _measure(subject, prompts, plan)


async def _measure(subject: Subject, prompts: Sequence[list[int]], plan: Plan) -> list[dict[str, Any]]:
    engine, network, assistant = subject.engine, subject.network, subject.assistant
    engine.capture()
    end_ids = engine.tokenizer.end_ids
    best = None
    if subject.synthetic:
        assistant = None  # it would accept nothing of a random draft
    if assistant is not None and 1 in plan.batches:
        best = await best_assisted(network, assistant, end_ids, plan.max_tokens, prompts[:PROMPTS_PER_PLACE])
    bandwidth = memory_bandwidth(network.device)
    results: list[dict[str, Any]] = []
    for batch in plan.batches:
        contenders = our_contenders(engine, plan)
        others = {"over_plain": contenders[0]}
        others["over_transformers"] = Contender("transformers", theirs(network, end_ids, plan.max_tokens))
        contenders.append(others["over_transformers"])
        if assistant is not None and batch == 1:
            counts = {f"{plan.num_drafted} drafted": plan.num_drafted, "defaults": None, f"best, {best} drafted": best}
            for label, count in counts.items():
                work = theirs(network, end_ids, plan.max_tokens, assistant, count)
                contenders.append(Contender(f"transformers assisted ({label})", work))
            others["over_assisted"] = contenders[-1]
        if batch > 1:
            others["over_alone"] = Contender(ALONE, ours(engine, Drafting(), plan.max_tokens), Drafting(), batch=1)
            contenders.insert(1, others["over_alone"])  # next to plain decoding, because the speed of a machine drifts
        await take_turns(engine, contenders, prompts, batch, plan.turns)
        found = [figures(each, others) for each in contenders]
        if bandwidth is not None and batch == 1:
            length = sum(map(len, prompts)) / len(prompts) + plan.max_tokens / 2
            bytes_per_pass = read_bytes(engine.model) + length * engine.position_bytes
            found[0]["bandwidth_share"] = contenders[0].median * bytes_per_pass / bandwidth
        results.append({"batch": batch, "contenders": found})
    return results


def our_contenders(engine: TorchEngine, plan: Plan) -> list[Contender]:
    """Return plain decoding, then every drafter with a number of tokens chosen online and with a fixed number."""
    draftings = {PLAIN: Drafting()}
    for name in plan.drafters:
        for label, count in ((name, None), (f"{name} ({plan.num_drafted} drafted)", plan.num_drafted)):
            draftings[label] = Drafting(name, count)
    return [Contender(name, ours(engine, each, plan.max_tokens), each) for name, each in draftings.items()]


def figures(contender: Contender, others: Mapping[str, Contender]) -> dict[str, Any]:
    """Return the figures of one contender, and its speedups over others. Unknown figures are omitted."""
    differing = sum(contender.differing) / len(contender.differing)
    found: dict[str, Any] = {"name": contender.name, "tokens_per_s": contender.median, "differing": differing}
    found |= {name: contender.ratio_to(other) for name, other in others.items()}
    if (done := contender.done).drafts:
        found["acceptance"] = done.acceptance
        found["mean_acceptance_length"] = 1 + done.accepted / done.drafts
        if contender.drafting is not None and contender.drafting.num_tokens is not None:
            found |= share_of_ideal(contender, others["over_plain"])
    return found


def draft_overhead(memory_bytes: Mapping[str, int]) -> float | None:
    """Return the memory of the draft's weights and cache relative to the target's; None without a draft."""
    drafts = sum(size for name, size in memory_bytes.items() if name.startswith("draft"))
    return drafts / (sum(memory_bytes.values()) - drafts) if drafts else None


def main(
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
    subject = load_subject(target, draft, pair, shape, dtype, RANDOM_CONTEXT)
    names: list[Any] = drafter or subject.engine.drafters
    plan = Plan(names, batch or (1, 4, 16), drafted, tokens, turns, synthetic_acceptance)
    prompts = _prompts(subject, plan.num_prompts)
    about = conditions()
    synthetic = subject.synthetic or synthetic_acceptance is not None
    results, done = asyncio.run(measured(subject.engine, measure(subject, prompts, plan)))
    speeds = EngineSpeeds.model_validate(
        {
            **about,
            "engine": subject.engine.describe(),
            "draft": subject.draft,
            "synthetic": synthetic,
            "plan": dataclasses.asdict(plan),
            "memory_bytes": done.memory_bytes,
            "draft_overhead": draft_overhead(done.memory_bytes),
            "results": results,
        }
    )
    finish([*(speeds_table(each, synthetic) for each in speeds.results), speeds.memory()], speeds, json_file)


def load_subject(
    target: str | None,
    draft: str | None,
    pair: str | None,
    shape: str | None,
    dtype: str | None,
    random_context: int | None = None,
) -> Subject:
    """Load the models of a benchmark. `random_context` limits the context of random models, in tokens."""
    if dtype not in (None, *DTYPES):
        raise UsageError(unknown_name("dtype", str(dtype), DTYPES))
    if shape is not None:
        if any(each is not None for each in (target, draft, pair)):
            raise UsageError("--shape makes its own models. Remove --target, --draft and --pair.")
        names = [name.strip() for name in shape.split(",")]
        if len(names) > 2:
            raise UsageError(f"--shape {shape} names {len(names)} shapes. Give one, or two for a target and its draft.")
        return Subject.random(*names, dtype=dtype, max_model_len=random_context)
    models = choose_models(target, draft, pair)
    draft_folder = _folder_of(models.draft) if models.draft is not None else None
    return Subject.load(_folder_of(models.target), draft_folder, dtype, models.titles)


def _folder_of(model: str) -> str:
    kind, _, name = model.partition(":")
    if kind != "torch" or not name:
        raise UsageError(f"{model!r} is not a model of the torch engine. Write torch:FOLDER_OR_NAME.")
    return name


async def measured(engine: Any, measurement: Awaitable[Any]) -> tuple[Any, EngineMetrics]:
    """Await a measurement and return its result with the engine's metrics. Frees the models."""
    try:
        return await measurement, engine.metrics()
    finally:
        await engine.aclose()


def _prompts(subject: Subject, count: int) -> list[list[int]]:
    """Return prompts as token ids: gsm-mini problems, or random ids for a synthetic model."""
    if subject.synthetic:
        rng = random.Random(0)
        return [[rng.randrange(1000) for _ in range(128)] for _ in range(count)]
    tokenizer = subject.engine.tokenizer
    return [encode_request(tokenizer, question) for question in questions(count)]
