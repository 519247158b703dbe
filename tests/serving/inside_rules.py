"""Run the plugin's rules inside a real vLLM on tiny models and write what was found as JSON.

`test_plugin.py` runs this script with the Python of `.venv-vllm`.
"""

import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "torch_engine"))

import torch
from distributions import conditional_distributions, joint_distribution, p_value
from hostile_engines import RELAXED, Hostile, try_policies
from tiny_models import llama_config, make_network, make_tokenizer, noisy_copy, slow_greedy
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from stepspec.engines.protocol import Acceptance, Drafting, Generate, Sampling, Stop, TokenBuffer, TokenChunk, collect
from stepspec.engines.torch_engine.decode import decide
from stepspec.engines.torch_engine.drafters.base import Draft
from stepspec.engines.torch_engine.relaxation import CONTROL, DIGIT, PLAIN, relaxation_of, relaxed
from stepspec.engines.torch_engine.sampling import distributions as distributions_of
from stepspec.engines.torch_engine.sampling import residual, samplers
from stepspec.engines.vllm_engine import VllmEngine, expands
from stepspec.engines.vllm_plugin.fields import PREFIX, fields_of
from stepspec.engines.vllm_plugin.rounds import RelaxedRound
from stepspec.errors import StepSpecError

DEPTH, SIZE, NUM_TEXTS = 3, 8, 1500
CPU = torch.device("cpu")
PROMPT = [1, 4, 2, 1, 1, 4, 2] * 11
OPTIONS = (
    "dtype=float32&max_model_len=256&max_num_seqs=8&enforce_eager=true&block_size=32&max_num_batched_tokens=40"
    "&enable_chunked_prefill=true"
)
RATIO = Acceptance("ratio", 0.4)
"""Keeps some of the drafted tokens that the exact rule rejects."""


# The rules on vLLM's own sampler, without a model


def sampled(
    logits: list[list[list[float]]],
    drafted: list[list[int]],
    q: list[list[list[float]]] | None,
    samplings: list[Sampling],
    rules: list[Acceptance],
    seed: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of a round of vLLM's sampler by request, and the places of the relaxed ones.

    Args:
        logits: for each request, those of its drafted positions and one beyond.
        drafted: its drafted tokens.
        q: the distributions of those; None if they were not sampled.
        samplings: its settings, of which temperature, top-k and top-p are used.
        rules: its rule.
        seed: of the random numbers.
    """
    torch.manual_seed(seed)
    metadata = SpecDecodeMetadata.make_dummy(drafted, CPU)
    ends = torch.tensor([len(each) + 1 for each in drafted]).cumsum(0)
    metadata.bonus_logits_indices = (ends - 1).int()
    metadata.target_logits_indices = torch.tensor(
        [place for place in range(int(ends[-1])) if place not in set((ends - 1).tolist())], dtype=torch.int32
    )
    temperature = torch.tensor([each.temperature for each in samplings])
    all_greedy, all_random = bool((temperature == 0).all()), bool((temperature > 0).all())
    none = torch.zeros(len(samplings))
    vocab_size = len(KINDS)
    settings = SamplingMetadata(
        temperature=None if all_greedy else temperature,
        all_greedy=all_greedy,
        all_random=all_random,
        top_p=torch.tensor([each.top_p for each in samplings]),
        top_k=torch.tensor([each.top_k or vocab_size for each in samplings], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none + 1,
        output_token_ids=[[] for _ in samplings],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    rows = torch.tensor([row for each in logits for row in each])
    flat_q = None if q is None else torch.tensor([row for each in q for row in each])
    sampler = rejection_sampler.RejectionSampler(Sampler())
    places: list[list[int]] = [[] for _ in drafted]
    if all(rule.is_exact for rule in rules):
        output = sampler(metadata, flat_q, rows, settings)
    else:
        with RelaxedRound(rules, torch.tensor(KINDS, dtype=torch.int8)) as current:
            output = sampler(metadata, flat_q, rows, settings)
        places = current.relaxed_places()
    ids, _ = rejection_sampler.RejectionSampler.parse_output(output.sampled_token_ids, vocab_size)
    return ids, places


KINDS = [PLAIN, PLAIN, CONTROL, PLAIN, DIGIT, PLAIN]
RULES = [
    Acceptance(),
    Acceptance("ratio", 0.3),
    Acceptance("typical", 0.15, exact_digits=True),
    Acceptance("fly", window=2, entropy=0.8),
]
SAMPLINGS = [Sampling(1.0), Sampling(0.7), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.7)]


def greedy_rounds() -> list[Any]:
    """Return what vLLM's sampler decides of ragged greedy requests under all rules, beside the torch engine."""
    numbers = random.Random(0)
    rules = [RULES[row % 4] for row in range(200)]
    counts = [numbers.randrange(6) for _ in rules]
    logits = [[[numbers.gauss(0, 1) for _ in KINDS] for _ in range(count + 1)] for count in counts]
    order = [[sorted(range(6), key=lambda token, row=row: -row[token]) for row in each[:-1]] for each in logits]
    drafted = [[each[numbers.choice([0, 0, 0, 1, 2])] for each in rows] for rows in order]
    found = sampled(logits, drafted, None, [Sampling()] * 200, rules, 0)
    padded = torch.tensor([[*rows, *[[0.0] * 6] * (6 - len(rows))] for rows in logits])
    tokens = torch.tensor([[*ids, *[0] * (5 - len(ids))] for ids in drafted])
    how = samplers([Sampling()] * 200, 6, CPU, rules, torch.tensor(KINDS, dtype=torch.int8))
    own = decide(padded, Draft(tokens, counts, None), torch.tensor(counts), torch.zeros(200).long(), how)
    assert own.relaxed is not None
    kept = own.num_kept.tolist()
    texts = [[*ids[:count], int(last)] for ids, count, last in zip(drafted, kept, own.following, strict=True)]
    relaxed = [row[:count].nonzero()[:, 0].tolist() for row, count in zip(own.relaxed, kept, strict=True)]
    return [list(found), [texts, relaxed]]


def sampled_rounds(count: int = 3000) -> dict[str, float]:
    """Return p-values of the first token of sampled requests, which share rounds with greedy ones, by rule.

    The distribution differs from the target's by the relaxed tokens alone, see `relaxation`.
    """
    target, draft = [9.0, 5.0, 4.0, 2.0, 1.0, 0.2], torch.tensor([1.0, 7.0, 4.0, 6.0, 3.0, 1.0])
    q, sure = (draft / draft.sum()).double(), [1e-9, 1.0, 1e-9, 1e-9, 1e-9, 1e-9]
    logits, p_values = torch.tensor([target, sure, sure, sure]).log(), dict[str, float]()
    for number, (rule, sampling) in enumerate(product(RULES, SAMPLINGS)):
        generator = torch.Generator().manual_seed(number)
        first = q.multinomial(count, replacement=True, generator=generator).tolist()
        # Every third request is a greedy one without a rule, with another number of drafted tokens.
        rows = [logits.tolist() if row % 3 else logits[1:].tolist() for row in range(count)]
        drafted = [[first[row], 1, 1] if row % 3 else [1, 1] for row in range(count)]
        chances = [[q.tolist(), sure, sure] if row % 3 else [sure, sure] for row in range(count)]
        settings = [sampling if row % 3 else Sampling() for row in range(count)]
        rules = [rule if row % 3 else Acceptance() for row in range(count)]
        texts, _ = sampled(rows, drafted, chances, settings, rules, number)
        assert all(texts[row] == [1, 1, 1] for row in range(0, count, 3))
        p = distributions_of(logits[None, :1], samplers([sampling], 6, CPU))[0, 0].double()
        loose = torch.zeros(6, dtype=torch.bool)
        if not rule.is_exact:
            how = relaxation_of([rule] * 6, torch.tensor(KINDS, dtype=torch.int8))
            tokens = torch.tensor([[token, 1, 1] for token in range(6)])
            assert how is not None
            exact = torch.tensor([[False, True, True]] * 6)
            loose = relaxed(how, logits[None, :3].expand(6, -1, -1), tokens, exact)[:, 0] & (p > 0)
            assert loose.any()
        excess = (q - p).clamp(min=0)
        expected = torch.minimum(p, q) + excess * loose + (excess * ~loose).sum() * residual(p, q)
        written = torch.tensor([texts[row][:1] for row in range(count) if row % 3])
        p_values[f"{rule.rule}, {number % 4}"] = p_value(written, expected)
        p_values[f"wrong: {rule.rule}, {number % 4}"] = p_value(written, q)
    return p_values


# The rules inside an engine


def save(network: PreTrainedModel, folder: Path) -> Path:
    """Store a network as a model that vLLM can load."""
    network.save_pretrained(folder)
    make_tokenizer(network.config.vocab_size).own.save_pretrained(folder)
    return folder


def relaxed_distribution(
    target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int], sampling: Sampling, rule: Acceptance
) -> Tensor:
    """Return the joint distribution of a text where a drafted token stands that the rule keeps.

    The draft drafts its most likely token at each place but the first, which the pass over the prompt writes.
    """
    conditionals = conditional_distributions(target, prompt, DEPTH, sampling)
    plain = conditional_distributions(target, prompt, DEPTH, Sampling(1.0))
    drafted = conditional_distributions(draft, prompt, DEPTH, Sampling(1.0))
    for place in range(1, DEPTH) if not rule.is_exact else ():
        tokens = drafted[place].argmax(-1, keepdim=True)
        assert rule.threshold is not None
        near = plain[place].gather(-1, tokens) >= rule.threshold * plain[place].max(-1, keepdim=True).values
        possible = conditionals[place].gather(-1, tokens) > 0
        sure = torch.zeros_like(conditionals[place]).scatter(-1, tokens, 1.0)
        conditionals[place] = torch.where(near & possible, sure, conditionals[place])
    return joint_distribution(conditionals)


async def texts(engine: VllmEngine, sampling: Sampling, rule: Acceptance, count: int, width: int) -> list[TokenChunk]:
    """Return texts of `count` seeds, `width` of them concurrently."""
    waiting = asyncio.Semaphore(width)

    async def write(seed: int) -> TokenChunk:
        async with waiting:
            call = Generate(
                TokenBuffer(PROMPT), replace(sampling, seed=seed), Stop(DEPTH), Drafting("engine", None, rule)
            )
            return await collect(engine.generate(call))

    return await asyncio.gather(*(write(seed) for seed in range(count)))


@contextmanager
def engine_of(target: str, draft: str, num_tokens: int, options: str) -> Iterator[VllmEngine]:
    drafting = {"method": "draft_model", "model": draft, "num_speculative_tokens": num_tokens}
    engine = VllmEngine.load(f"{target}?{options}&speculative_config={quote(json.dumps(drafting))}")
    try:
        yield engine
    finally:
        asyncio.run(engine.aclose())


async def tiny(engine: VllmEngine, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, Any]:
    """Return p-values, greedy texts and relaxed tokens of the tiny models."""
    found: dict[str, Any] = {"abilities": sorted(engine.abilities), "p": {}}
    cases = {
        "exact": (Sampling(1.0), Acceptance()),
        "exact, top-k": (Sampling(0.7, top_k=3), Acceptance()),
        "ratio": (Sampling(1.0), RATIO),
        "ratio, top-k": (Sampling(1.3, top_k=2), RATIO),
    }
    for name, (sampling, rule) in cases.items():
        expected = relaxed_distribution(target, draft, PROMPT, sampling, rule)
        exact = relaxed_distribution(target, draft, PROMPT, sampling, Acceptance())
        for width in (8, 1) if name in ("exact", "ratio") else (8,):
            chunks = await texts(engine, sampling, rule, NUM_TEXTS if width > 1 else NUM_TEXTS // 3, width)
            written = torch.tensor([each.ids for each in chunks])
            num_relaxed = sum(len(each.relaxed or ()) for each in chunks)
            found["p"][f"{name}, {width}"] = [p_value(written, expected), p_value(written, exact), num_relaxed]
    found["cached"] = max(each.cached for each in chunks)
    return found


async def greedy(engine: VllmEngine, target: PreTrainedModel) -> list[Any]:
    """Return greedy texts under the exact rule and a relaxed one, together, beside those of transformers."""
    prompts = [[*PROMPT[: 40 + 3 * number], number % SIZE] for number in range(8)]

    async def write(prompt: list[int], rule: Acceptance) -> TokenChunk:
        call = Generate(TokenBuffer(prompt), Sampling(), Stop(48), Drafting("engine", None, rule))
        return await collect(engine.generate(call))

    both = [write(prompt, rule) for prompt in prompts for rule in (Acceptance(), RATIO)]
    together = await asyncio.gather(*both)
    alone = [await write(prompt, rule) for prompt in prompts for rule in (Acceptance(), RATIO)]
    own = [slow_greedy(target, prompt, 48) for prompt in prompts]

    def steps(prompt: list[int], chunk: TokenChunk) -> list[int]:
        """Return the places where a text is not what the target would write."""
        ids = [*prompt, *chunk.ids]
        with torch.inference_mode():
            best = target(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()
        return [place for place in range(len(chunk.ids)) if ids[len(prompt) + place] != best[len(prompt) + place - 1]]

    return [
        {
            "own": own[number],
            "exact": [texts[2 * number].ids for texts in (together, alone)],
            "loose": [texts[2 * number + 1].ids for texts in (together, alone)],
            "relaxed": together[2 * number + 1].relaxed,
            "differing": steps(prompts[number], together[2 * number + 1]),
        }
        for number in range(8)
    ]


async def guard(engine: VllmEngine) -> list[str]:
    """Return how an engine without the plugin answers a sampled call on a CPU build that loses its temperature."""
    found, engine._samples = [], False
    for temperature in (0.0, 1.0):
        try:
            await collect(engine.generate(Generate(TokenBuffer(PROMPT), Sampling(temperature), Stop(2))))
            found.append("")
        except StepSpecError as error:
            found.append(str(error))
    return found


async def refusals(engine: VllmEngine) -> list[str]:
    """Return how vLLM answers invalid rules."""
    wrong: list[dict[str, Any]] = [
        {"acceptance": "?"}, {"acceptance": "ratio"}, {"acceptance": "ratio", "threshold": 2}, {"threshhold": 1},
        {"acceptance": "fly", "window": 6, "entropy": 0.3}, {"acceptance": ["ratio"]},
    ]  # fmt: skip
    found = []
    for fields in wrong:
        params = SamplingParams(max_tokens=2, extra_args={PREFIX + name: value for name, value in fields.items()})
        try:
            async for _ in engine._outputs(PROMPT, None, params):
                pass
            found.append("")
        except StepSpecError as error:
            found.append(str(error))
    params = SamplingParams(max_tokens=2, extra_args=fields_of(RATIO) | {"other": 1})
    async for _ in engine._outputs(PROMPT, None, params):
        pass
    return found


def report(request: dict[str, Any]) -> dict[str, Any]:
    shape = {"vocab_size": SIZE, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_network(llama_config(**shape, initializer_range=0.15), seed=5)
    draft = noisy_copy(target, share=0.4)
    load_general_plugins()
    current_platform.register_triton_kernel_overrides()
    found: dict[str, Any] = {"greedy rounds": greedy_rounds(), "sampled rounds": sampled_rounds()}
    with tempfile.TemporaryDirectory() as folder:
        paths = [save(each, Path(folder) / name) for each, name in ((target, "target"), (draft, "draft"))]
        with engine_of(str(paths[0]), str(paths[1]), 2, OPTIONS) as engine:
            found["tiny"] = asyncio.run(tiny(engine, target, draft))
            found["greedy"] = asyncio.run(greedy(engine, target))
            found["refusals"] = asyncio.run(refusals(engine))
            found["guard"] = [expands(), *asyncio.run(guard(engine))]
    weights = Path(request["weights"])
    options = "dtype=float32&max_model_len=1024&max_num_seqs=16&enforce_eager=true"
    with tempfile.TemporaryDirectory() as folder:
        noisy = noisy_copy(AutoModelForCausalLM.from_pretrained(weights / "draft", dtype=torch.float32), share=0.25)
        shutil.copytree(weights / "draft", folder, dirs_exist_ok=True)
        noisy.save_pretrained(folder)
        with engine_of(str(weights / "target"), folder, 3, options) as engine:
            asyncio.run(try_policies(engine, Hostile(engine, 0), request["questions"], RELAXED))
    return found


if __name__ == "__main__":
    request_file, answer_file = map(Path, sys.argv[1:])
    answer_file.write_text(json.dumps(report(json.loads(request_file.read_text()))))
