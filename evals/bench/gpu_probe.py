"""Where a pass of the torch engine spends its time on a GPU, in sections, the most telling first.

    python -m evals.bench gpu_probe --json probe.json
    python -m evals.bench gpu_probe --cpu                   # small random models, to check the program itself

The file is written after each section, so that a run that is cut off leaves what it measured. Models have random
weights: 8b as the target and 0.6b as the draft. Sections that need a CUDA device are empty with `--cpu`.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from evals.bench.engine import Subject
from evals.bench.hooks import read_bytes, synthetic_acceptance
from evals.bench.shapes import SHAPES, random_network
from stepspec.cli.output import JsonOption, write_results
from stepspec.engines.protocol import Drafting, Generate, Sampling, Stop, TokenBuffer, Verify, collect
from stepspec.engines.torch_engine import decode, sampling
from stepspec.engines.torch_engine.attention import SlotRows
from stepspec.engines.torch_engine.drafters.base import Draft
from stepspec.engines.torch_engine.drafters.draft_model import draft_loop
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.machine import conditions

Figures = dict[str, Any]
STEPS = (24, 64)
"""Tokens of a judged step."""
DRAFTED = (0, 4, 16)
PREDICTED: Mapping[str, Mapping[str, float]] = {
    "judging": {"context 1000, step 24, wall ms": 5.6, "context 8000, step 24, wall ms": 5.9},
    "rounds": {"context 1000, drafted 0, wall ms": 5.5, "context 1000, drafted 4, wall ms": 5.5},
    "drafting": {"token ms": 1.25},
    "engines": {"plain, tokens/s": 178, "judgment of 40 tokens, ms": 6.0},
}
"""What the counts say of an H200: bytes of weights, keys and values at 85% of 4.8 TB/s, and 2.7 microseconds for each
launch in a graph. A GPU has not measured them yet."""
ROOM, CHUNK = 600, 500
"""Tokens that are read beyond the longest context, and in a pass."""


@dataclass
class Probe:
    """What the sections share: shapes, contexts and models by name."""

    device: str
    target: str
    draft: str
    contexts: Sequence[int]
    models: dict[str, CausalModel] = field(default_factory=dict[str, CausalModel])

    @property
    def is_cuda(self) -> bool:
        """Whether it runs on a CUDA device."""
        return self.device == "cuda"

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def model(self, shape: str) -> CausalModel:
        """Return a random model that has read more than the longest context into its first slot."""
        if shape not in self.models:
            with torch.inference_mode(False):
                model = checked_model(random_network(shape), shape)
            for start in range(0, max(self.contexts) + ROOM, CHUNK):
                model.extend([0], [[id % 1000 for id in range(start, start + CHUNK)]], keep=[[]])
            if model.can_capture:
                model.capture(1)
            self.models[shape] = model
        return self.models[shape]

    def wall_ms(self, work: Callable[[], object], turns: int = 10, warm_up: int = 2) -> tuple[float, float]:
        """Return the median milliseconds of work until the device has finished, and until the host has."""
        whole, host = list[float](), list[float]()
        turns, warm_up = (turns, warm_up) if self.is_cuda else (1, 0)
        for _ in range(warm_up + turns):
            self.wait()
            since = time.perf_counter()
            work()
            host.append(1000 * (time.perf_counter() - since))
            self.wait()
            whole.append(1000 * (time.perf_counter() - since))
        return statistics.median(whole[warm_up:]), statistics.median(host[warm_up:])

    def device_ms(self, work: Callable[[], object], turns: int = 20) -> float:
        """Return the mean milliseconds of calls back to back."""
        if not self.is_cuda:
            return self.wall_ms(work, 3)[0]
        work()
        self.wait()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(turns):
            work()
        end.record()
        self.wait()
        return start.elapsed_time(end) / turns

    def kernels(self, work: Callable[[], object], most: int = 14) -> Figures:
        """Return the launches and microseconds of the kernels of a call, by name."""
        if not self.is_cuda:
            return {}
        work()
        self.wait()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            work()
            self.wait()
        spent, launches = Counter[str](), Counter[str]()
        events: Any = profiled.events()
        for event in events:
            if event.device_type.name == "CUDA" and "memcpy" not in event.name.lower():
                spent[event.name[:60]] += event.time_range.elapsed_us()
                launches[event.name[:60]] += 1
        top = [[name, launches[name], round(us)] for name, us in spent.most_common(most)]
        return {"launches": launches.total(), "device_us": round(spent.total()), "top": top}


def bandwidth(probe: Probe) -> Figures:
    """Bytes that the device copies and reads in a second."""
    source = torch.zeros(1 << (32 if probe.is_cuda else 20), dtype=torch.uint8, device=probe.device)
    copy, numbers = torch.empty_like(source), source.view(torch.float32)
    copied_ms, read_ms = probe.device_ms(lambda: copy.copy_(source), 10), probe.device_ms(numbers.sum, 10)
    return {"copy_tb_per_s": 2 * source.nbytes / copied_ms / 1e9, "read_tb_per_s": source.nbytes / read_ms / 1e9}


def attention_plans(probe: Probe) -> Figures:
    """The first and the second call of masked attention at new lengths: a backend may plan each length anew."""
    found: Figures = {}
    dtype = torch.bfloat16 if probe.is_cuda else torch.float32
    for name, allowed in (("default", True), ("without cuDNN", False)):
        torch.backends.cuda.enable_cudnn_sdp(allowed)
        times: list[list[float]] = [[], []]
        for length in range(1001, 1145, 24):
            query, keys = (torch.randn(1, 8, each, 128, device=probe.device, dtype=dtype) for each in (96, length))
            mask = torch.zeros(1, 1, 96, length, device=probe.device, dtype=dtype)
            for each in times:
                probe.wait()
                since = time.perf_counter()
                scaled_dot_product_attention(query, keys, keys, attn_mask=mask)
                probe.wait()
                each.append(1000 * (time.perf_counter() - since))
        found[name] = {"first_ms": times[0], "second_ms": times[1]}
    torch.backends.cuda.enable_cudnn_sdp(True)
    return found


def judging(probe: Probe) -> Figures:
    """A pass over a judged step, as `CausalModel.extend` makes it, by length of the step and of the context."""
    model, found = probe.model(probe.target), Figures()
    for context in probe.contexts:
        for width in STEPS:
            length = context

            def judge(width: int = width) -> None:
                nonlocal length
                length += 1  # a new length each time, as in use
                model.cache.lengths[0] = length
                model.extend([0], [range(5, 5 + width)])[0].float().log_softmax(-1).argmax(-1).cpu()

            found[f"context {context}, step {width}, wall and host ms"] = probe.wall_ms(judge, 6, 1)
    model.cache.lengths[0] = probe.contexts[0]
    found["kernels"] = probe.kernels(lambda: (model.rollback(0, probe.contexts[0]), model.extend([0], [range(5, 29)])))
    return found


def rounds(probe: Probe) -> Figures:
    """A round of token-level speculation as `Rounds.run` makes it, by drafted tokens and context."""
    model, found = probe.model(probe.target), Figures()
    how = sampling.samplers([Sampling()], model.vocab_size, model.device)
    for context in probe.contexts:
        for drafted in DRAFTED:
            draft = Draft(torch.zeros(1, drafted, dtype=torch.long, device=model.device), ())

            def play(drafted: int = drafted, context: int = context, draft: Draft = draft) -> None:
                positions, (last, counts) = model.pass_inputs([(0, context, 5, drafted)], drafted + 1)
                decode.verify_and_accept(model, positions, last, counts, draft, how, decode.decide, False).cpu()

            figures: Figures = {"wall_ms": probe.wall_ms(play)[0]}
            if context == probe.contexts[0]:
                figures["kernels"] = probe.kernels(play)
            found[f"context {context}, drafted {drafted}"] = figures
    return {**found, "weights_gb": read_bytes(model) / 1e9}


def drafting(probe: Probe) -> Figures:
    """The draft model: eight tokens in one loop, in milliseconds a token, and the kernels of the loop."""
    model, context = probe.model(probe.draft), probe.contexts[0]
    how = sampling.samplers([Sampling()], model.vocab_size, model.device)

    def eight() -> None:
        positions, (before, last) = model.pass_inputs([(0, context, 4, 5)], 9)
        draft_loop(model, positions, before, last, 8, how, model.vocab_size)[0].cpu()

    return {"token_ms": probe.wall_ms(eight)[0] / 8, "kernels": probe.kernels(eight)}


def engines(probe: Probe) -> Figures:
    """Tokens a second of a whole engine, plain and with drafts that are accepted at random, and a judgment."""
    return asyncio.run(_engines(probe))


async def _engines(probe: Probe) -> Figures:
    tokens, prompt, turns = (192, 600, 3) if probe.is_cuda else (4, 40, 1)
    with torch.inference_mode(False):
        engine = Subject.random(probe.target, probe.draft, max_model_len=4096 if probe.is_cuda else None).engine
        engine.capture()
    rng, found = random.Random(0), Figures()

    async def tokens_per_s(how: Drafting) -> float:
        best = 0.0
        for _ in range(turns):
            text, since = TokenBuffer([rng.randrange(1000) for _ in range(prompt)]), time.perf_counter()
            chunk = await collect(engine.generate(Generate(text, Sampling(), Stop(tokens), how)))
            best = max(best, len(chunk.ids) / (time.perf_counter() - since))
        return best

    found["plain, tokens/s"] = await tokens_per_s(Drafting())
    for probability in (0.8, 0.97):
        with synthetic_acceptance(probability):
            for count in (4, 8, 16):
                name = f"accepted {probability:g}, drafted {count}, tokens/s"
                found[name] = await tokens_per_s(Drafting("draft-model", count))
    text, times = TokenBuffer([rng.randrange(1000) for _ in range(prompt)]), list[float]()
    for _ in range(8):
        step, since = [rng.randrange(1000) for _ in range(40)], time.perf_counter()
        await engine.verify(Verify(text, step))
        times.append(1000 * (time.perf_counter() - since))
        text.append(step)
    found["judgment of 40 tokens, ms"] = statistics.median(times[2:])
    await engine.aclose()
    return found


def slot_attention(probe: Probe) -> Figures:
    """The kernel that attends in slots, and the bytes a second of keys and values that it reads."""
    if not probe.is_cuda:
        return {}
    from stepspec.engines.torch_engine.slot_attention import attend_in_slots  # needs Triton

    found, shape = Figures(), SHAPES[probe.target]
    for context in probe.contexts:
        size = 2, 2, shape.kv_heads, context + 64, shape.head_size
        store = torch.randn(*size, device=probe.device, dtype=torch.bfloat16)
        for width in (1, 5, 17, 64):
            query = torch.randn(width, shape.heads, shape.head_size, device=probe.device, dtype=torch.bfloat16)
            table = torch.tensor([[1], [context - 32], [0], [width]], device=probe.device, dtype=torch.int32)
            rows = SlotRows(table, table.new_zeros(3, width), width)
            ms = probe.device_ms(partial(attend_in_slots, query, store[0], store[1], rows))
            num_bytes = 2 * context * shape.kv_heads * shape.head_size * 2
            found[f"context {context}, ids {width}"] = {"us": 1000 * ms, "gb_per_s": num_bytes / ms / 1e6}
    return found


def products(probe: Probe) -> Figures:
    """The products of a layer in bfloat16 and in fp8 by rows, on weights beyond the device's cache."""
    shape, found = SHAPES[probe.target], Figures()
    width, heads, dtype = shape.width, shape.heads + 2 * shape.kv_heads, torch.bfloat16
    sizes = {
        "qkv": (width, heads * shape.head_size),
        "out": (shape.heads * shape.head_size, width),
        "gate_up": (width, 2 * shape.feed_forward),
        "down": (shape.feed_forward, width),
        "head": (width, shape.vocab_size),
    }
    for name, (columns, rows) in sizes.items():
        copies = max(1, 300_000_000 // (columns * rows)) if probe.is_cuda else 1
        weights = [torch.randn(rows, columns, device=probe.device, dtype=dtype) for _ in range(copies)]
        for count in (1, 4, 16, 64):
            x = torch.randn(count, columns, device=probe.device, dtype=dtype)
            kinds: Mapping[str, tuple[Callable[[], object], int]] = {"bfloat16": (partial(_all, x, weights), 2)}
            if probe.is_cuda:
                kinds = {**kinds, "fp8": (_fp8_products(x, weights), 1)}
            for kind, (work, item_bytes) in kinds.items():
                ms = probe.device_ms(work) / copies
                figures = {"us": 1000 * ms, "gb_per_s": rows * columns * item_bytes / ms / 1e6}
                found[f"{name}, rows {count}, {kind}"] = figures
    return found


def _all(x: Tensor, weights: Sequence[Tensor]) -> None:
    for weight in weights:
        torch.mm(x, weight.T)


def _fp8_products(x: Tensor, weights: Sequence[Tensor]) -> Callable[[], object]:
    small, scale = x.to(torch.float8_e4m3fn), torch.ones(len(x), 1, device=x.device)
    stored = [(each.to(torch.float8_e4m3fn), torch.ones(1, len(each), device=x.device)) for each in weights]
    product: Any = vars(torch)["_scaled_mm"]

    def work() -> None:
        for weight, scales in stored:
            product(small, weight.T, scale_a=scale, scale_b=scales, out_dtype=x.dtype)

    return work


SECTIONS: Mapping[str, Callable[[Probe], Figures]] = {
    each.__name__: each
    for each in (bandwidth, attention_plans, judging, rounds, drafting, products, slot_attention, engines)
}


def main(
    section: Annotated[list[str] | None, typer.Argument(help="Sections to run. Default: all.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run small models on the CPU.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Measure the parts of a pass of the torch engine on a GPU."""
    for name in section or ():
        if name not in SECTIONS:
            raise UsageError(unknown_name("section", name, [*SECTIONS]))
    if not cpu and not torch.cuda.is_available():
        raise UsageError("There is no CUDA device. Add --cpu to check the program on this machine.")
    if cpu:
        probe = Probe("cpu", "mini-draft", "mini-draft", (100,))
    else:
        probe = Probe("cuda", "8b", "0.6b", (1_000, 8_000, 30_000))
    found: Figures = conditions()
    for name in section or SECTIONS:
        since = time.perf_counter()
        try:
            with torch.inference_mode():
                figures = SECTIONS[name](probe)
        except RuntimeError as error:  # what one section cannot do, such as fp8, should not cost the others
            figures = {"error": str(error)[:300]}
        predicted = {"predicted": PREDICTED[name]} if probe.is_cuda and name in PREDICTED else {}
        found[name] = {"seconds": time.perf_counter() - since, **figures, **predicted}
        print(name, found[name], flush=True)
        write_results(found, json_file)
