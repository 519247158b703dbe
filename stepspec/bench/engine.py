"""Speed of the engine beside transformers' own generation, in one run: what `stepspec bench engine` measures.

Every contender continues the same prompts greedily to the same end, in turns, so that what disturbs the machine
disturbs them alike; figures are medians over turns, and a ratio is the median of the ratios of each turn. No turn has
the prompts of another, and nothing is remembered from one contender's turn to the next. Our engine takes a new prompt
in whenever a text ends; transformers' generation takes as many at once, and the next when all of them have ended. What
is compared with its assisted generation is the best setting of that, found before the turns begin, and its default.
"""

import asyncio
import copy
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from stepspec.bench.hooks import blind_engine, synthetic_acceptance
from stepspec.bench.shapes import random_network, without_text
from stepspec.engines.metrics import Metrics
from stepspec.engines.protocol import DrafterName, Drafting, Sampling, Stop, TokenBuffer, collect
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.evaluation.advise.formula import expected_tokens

ASSISTED_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of drafted tokens among which assisted generation's best is looked for."""

PLAIN, ALONE = "plain", "plain, 1 at once"

PROMPTS_PER_PLACE = 8
"""Prompts of a turn for each of the requests that are served at once."""

STEP_LENGTH = 24
"""Tokens of the steps by which costs are compared at different lengths of context."""

Work = Callable[[Sequence[list[int]], int], Awaitable[list[list[int]]]]
"""Continues prompts, so many at once; gives what was written after each."""


@dataclass
class Contender:
    """Something that continues prompts, and what it did turn by turn."""

    name: str
    work: Work
    drafting: Drafting | None = None
    """None: it is transformers, not us."""
    batch: int | None = None
    """How many requests it serves at once, if not as many as the others; of the prompts it then takes fewer."""
    tokens_per_s: list[float] = field(default_factory=list[float])
    differing: list[bool] = field(default_factory=list[bool])
    """Of each text, whether it is another than that of the first contender: near ties that rounding decides."""
    done: Metrics = field(default_factory=Metrics)
    """What our engine did in all turns."""

    @property
    def median(self) -> float:
        """Tokens a second."""
        return statistics.median(self.tokens_per_s)

    def ratio_to(self, other: "Contender") -> float:
        """How many times as fast as another, turn by turn."""
        return statistics.median(
            mine / yours for mine, yours in zip(self.tokens_per_s, other.tokens_per_s, strict=True)
        )


def ours(engine: TorchEngine, drafting: Drafting, max_tokens: int) -> Work:
    """Our engine with that drafting."""
    stop = Stop(max_tokens, token_ids=engine.tokenizer.end_ids)

    async def work(prompts: Sequence[list[int]], batch: int) -> list[list[int]]:
        places = asyncio.Semaphore(batch)

        async def answer(ids: list[int]) -> list[int]:
            async with places:
                return list((await collect(engine.generate(TokenBuffer(ids), Sampling(), stop, drafting))).ids)

        return await asyncio.gather(*map(answer, prompts))

    return work


def theirs(
    network: PreTrainedModel,
    end_ids: frozenset[int],
    max_tokens: int,
    assistant: PreTrainedModel | None = None,
    num_drafted: int | None = None,
) -> Work:
    """`transformers`' own generation, several prompts padded on the left.

    With an assistant it is assisted generation, which takes one prompt at a time; it drafts `num_drafted` tokens in
    every round, or by its own defaults.
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
    """Has the assistant draft by these settings; it notes in them what it changes as it goes."""
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
    """Every contender on the same prompts, one after the other, in each turn another one first."""
    per_turn = PROMPTS_PER_PLACE * batch
    for turn in range(-1, turns):  # the first one warms up
        chosen = prompts[(turn + 1) * per_turn :][:per_turn]
        first = turn % len(contenders)
        texts: dict[str, list[list[int]]] = {}
        for contender in [*contenders[first:], *contenders[:first]]:
            await engine.forget()
            before = engine.metrics()
            started = time.perf_counter()
            at_once = contender.batch or batch
            texts[contender.name] = await contender.work(chosen[: PROMPTS_PER_PLACE * at_once], at_once)
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
    """How many drafted tokens make assisted generation fastest on these prompts."""
    speeds: dict[int, float] = {}
    for count in ASSISTED_COUNTS:
        work = theirs(network, end_ids, max_tokens, assistant, count)
        await work(prompts[:1], 1)
        started = time.perf_counter()
        num_tokens = sum(map(len, await work(prompts, 1)))
        speeds[count] = num_tokens / (time.perf_counter() - started)
    return max(speeds, key=lambda count: speeds[count])


def share_of_ideal(contender: Contender, plain: Contender) -> dict[str, float]:
    """How much of the speedup that acceptance and costs allow is reached, see `stepspec.evaluation.advise.formula`.

    Costs are those of the passes alone, over a plain pass, on average over all rounds.
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
    """Bytes a second that a CUDA device reads and writes when it copies; None elsewhere."""
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
    """What is compared, and for how long."""

    drafters: Sequence[DrafterName]
    batches: Sequence[int] = (1, 4, 16)
    num_drafted: int = 4
    """Of the contenders that draft a fixed number of tokens."""
    max_tokens: int = 200
    turns: int = 3
    synthetic_acceptance: float | None = None
    """See `stepspec.bench.hooks`."""

    @property
    def num_prompts(self) -> int:
        """How many different prompts it takes."""
        return max(self.batches) * PROMPTS_PER_PLACE * (self.turns + 1)


@dataclass(frozen=True)
class Subject:
    """What is measured: our engine, and the same models for transformers' own generation, with its own attention."""

    engine: TorchEngine
    network: PreTrainedModel
    assistant: PreTrainedModel | None
    draft: dict[str, str | None] | None = None
    """What results say of the draft, as `TorchEngine.describe` does of the target."""
    synthetic: bool = False
    """Random weights: nothing that is written means anything."""

    @classmethod
    def load(
        cls,
        target: str,
        draft: str | None = None,
        dtype: str | None = None,
        titles: tuple[str | None, str | None] = (None, None),
    ) -> "Subject":
        """Models by folder or hub name; results call them by `titles`, else by their own names.

        Raises:
            ModelError: one cannot be loaded, or they do not share a vocabulary.
        """
        chosen = getattr(torch, dtype) if dtype else None
        engine = TorchEngine.load(target, dtype=chosen, title=titles[0])
        if draft is None:
            return cls(engine, *engine.networks())
        drafter = TorchEngine.load(draft, dtype=chosen, title=titles[1])
        engine = engine.drafted_by(drafter)
        return cls(engine, *engine.networks(), drafter.describe())

    @classmethod
    def random(cls, target: str, draft: str | None = None, dtype: str | None = None) -> "Subject":
        """Random models of real shapes, by the names in `shapes.SHAPES`.

        Raises:
            UsageError: no shape is called that.
        """
        model = CausalModel(random_network(target, dtype), f"random {target}")
        engine = TorchEngine(model, without_text())
        if draft is None:
            return cls(engine, *engine.networks(), synthetic=True)
        drafter = TorchEngine(CausalModel(random_network(draft, dtype), f"random {draft}"), without_text())
        engine = engine.drafted_by(drafter)
        return cls(engine, *engine.networks(), drafter.describe(), synthetic=True)


async def measure(subject: Subject, prompts: Sequence[list[int]], plan: Plan) -> list[dict[str, Any]]:
    """For every batch size the figures of every contender, as `stepspec bench engine --json` writes them."""
    with synthetic_acceptance(plan.synthetic_acceptance):
        return await _measure(subject, prompts, plan)


async def _measure(subject: Subject, prompts: Sequence[list[int]], plan: Plan) -> list[dict[str, Any]]:
    engine, network, assistant = subject.engine, subject.network, subject.assistant
    end_ids = engine.tokenizer.end_ids
    best = None
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
            contenders.insert(1, others["over_alone"])  # next to plain decoding, as a machine's speed drifts
        await take_turns(engine, contenders, prompts, batch, plan.turns)
        found = [figures(each, others) for each in contenders]
        if bandwidth is not None and batch == 1:
            length = sum(map(len, prompts)) / len(prompts) + plan.max_tokens / 2
            found[0]["bandwidth_share"] = contenders[0].median * engine.bytes_per_pass(length) / bandwidth
        results.append({"batch": batch, "contenders": found})
    return results


def our_contenders(engine: TorchEngine, plan: Plan) -> list[Contender]:
    """Plain decoding first, then every drafter with a number of tokens chosen online and with a fixed one."""
    draftings = {PLAIN: Drafting()}
    for name in plan.drafters:
        for label, count in ((name, None), (f"{name} ({plan.num_drafted} drafted)", plan.num_drafted)):
            draftings[label] = Drafting(name, count)
    return [Contender(name, ours(engine, each, plan.max_tokens), each) for name, each in draftings.items()]


def figures(contender: Contender, others: Mapping[str, Contender]) -> dict[str, Any]:
    """One contender's figures, and how many times as fast as others it is; what it has none of is left out."""
    differing = sum(contender.differing) / len(contender.differing)
    found: dict[str, Any] = {"name": contender.name, "tokens_per_s": contender.median, "differing": differing}
    found |= {name: contender.ratio_to(other) for name, other in others.items()}
    if contender.done.drafts:
        found["acceptance"] = contender.done.acceptance
        found["mean_acceptance_length"] = contender.done.mean_acceptance_length
        if contender.drafting is not None and contender.drafting.num_tokens is not None:
            found |= share_of_ideal(contender, others["over_plain"])
    return found


async def by_context(subject: Subject, lengths: Sequence[int], turns: int) -> list[dict[str, float]]:
    """What a step costs after so much text: proposed, judged by the target, refused, and written anew by it.

    `read_again` are the ids of the text that a step has the target read although it has read them before, and
    `rest_ms` is what the same steps take, turn by turn, of a model whose layers look at no other position.

    Raises:
        ContextError: a length exceeds the context.
    """
    engine, found = subject.engine, list[dict[str, float]]()
    async with aclosing(blind_engine(engine)) as blind:
        for length in lengths:
            rng = random.Random(length)
            ids = [rng.randrange(subject.network.config.vocab_size) for _ in range(length + turns * STEP_LENGTH)]
            texts = {each: TokenBuffer(ids[:length]) for each in (engine, blind)}
            for each, text in texts.items():
                await each.verify(text, ids[:STEP_LENGTH])  # reads the text
            milliseconds: dict[TorchEngine, list[float]] = {engine: [], blind: []}
            before = engine.metrics()
            for turn in range(turns):
                proposed = ids[length + turn * STEP_LENGTH :][:STEP_LENGTH]
                for each, text in texts.items():
                    started = time.perf_counter()
                    await each.verify(text, proposed)
                    chunk = await collect(each.generate(text, Sampling(), Stop(STEP_LENGTH)))
                    milliseconds[each].append((time.perf_counter() - started) * 1000)
                    text.append(chunk.ids)
            done = engine.metrics() - before
            again = (done.prompt_tokens - done.cached_tokens) / turns
            whole, rest = (statistics.median(milliseconds[each]) for each in (engine, blind))
            found.append({"context": length, "ms": whole, "rest_ms": rest, "read_again": again})
    return found
