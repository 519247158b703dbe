"""Trains the embedded pair from the problem generator alone: `python -m stepspec.mini.train`.

Nothing but generated problems goes in. A sequence is a question in one of the prompts that people use, the reasoning
between `<think>` and `</think>`, and the boxed answer; only what the model writes itself is in the loss. In the later
part of training, half of the sequences also carry ratings: after a step of the trunk, or after a wrong variant of it
on a branch of its own, stands the judge's turn, and the digit that it ends with is learned. Branches see the trunk up
to where they leave it and themselves, as in the engine's `verify`, so one sequence holds a rating after every step.

The target does not begin anew: it begins as the draft, repeated in width and grown in depth, because what takes
longest, finding a person's number in the story, is learned several times faster by the smaller model. So the draft
comes first.

Hidden matrices are trained with Muon (https://kellerjordan.github.io/posts/muon/), the rest with AdamW; bfloat16
autocast, which is 1.5 times float32 on a CPU with AVX-512. Seeded and resumable: a killed run goes on from its
checkpoint, and every draw depends on the seed and the step alone.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stepspec.mini import WEIGHTS
from stepspec.mini.corrupt import corrupt_step
from stepspec.mini.problems import Problem, Voice, load_split, true_values, write_solution
from stepspec.mini.tokenizer import CONTEXT, VOCAB_SIZE, load_tokenizer
from stepspec.prompts import PROBLEM_PROMPTS, RATING_PROMPTS, RatingPrompt

PROMPT_SHARES = {"bare": 0.6, "boxed": 0.3, "steps": 0.1}
SYSTEM_SHARE = 0.05
SYSTEM_TURN = "You are a careful assistant who reasons step by step."
RATING_WEIGHT = 0.3
DIGIT_WEIGHT = 3.0
LONG_RATING_SHARE = 0.15  # sequences rated with the long published prompt, which costs four times the short one


@dataclass(frozen=True)
class Recipe:
    """Shape and training of one model."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    steps: int
    batch: int = 24
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    decay_from: float = 0.6  # share of the training after which the learning rate falls, linearly to zero
    ratings_from: float = 2.0  # share of the training after which ratings begin; 2 is never
    grown: bool = False  # whether it begins as the other model, grown, instead of anew


RECIPES: dict[Voice, Recipe] = {
    "target": Recipe(
        layers=6,
        width=192,
        feed_forward=512,
        heads=4,
        kv_heads=2,
        head_size=32,
        steps=2500,
        batch=16,
        matrix_lr=0.01,
        other_lr=1.5e-3,
        decay_from=0.05,
        ratings_from=0.65,
        grown=True,
    ),
    "draft": Recipe(layers=2, width=96, feed_forward=256, heads=4, kv_heads=2, head_size=32, steps=3000),
}


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A Llama of the recipe's width with fresh weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.width,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_size,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # on a CPU a quarter faster to train than the fused kernel's backward
    return model


@torch.no_grad()
def grow(small: Any, recipe: Recipe, tokenizer: Any) -> Any:
    """The same function with the recipe's width and depth, as in Net2Net (arXiv:1511.05641).

    Every hidden unit is repeated, and whoever reads it takes the mean; further feed-forward units and layers add
    nothing at first. `small` must have the recipe's heads, and its width must divide the recipe's.
    """
    big = build_model(recipe, tokenizer)
    times = recipe.width // small.config.hidden_size
    assert small.config.hidden_size * times == recipe.width
    big.model.embed_tokens.weight.copy_(small.model.embed_tokens.weight.repeat(1, times))
    big.model.norm.weight.copy_(small.model.norm.weight.repeat(times) / times)
    for index, layer in enumerate(big.model.layers):
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        if index < small.config.num_hidden_layers:
            _copy_layer(small.model.layers[index], layer, times)
    return big


def _copy_layer(small: Any, big: Any, times: int) -> None:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        getattr(big, norm).weight.copy_(getattr(small, norm).weight.repeat(times))
    for reader in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(small.self_attn, reader).weight
        getattr(big.self_attn, reader).weight.copy_(weight.repeat(1, times) / times)
    big.self_attn.o_proj.weight.copy_(small.self_attn.o_proj.weight.repeat(times, 1))
    units = small.mlp.gate_proj.weight.shape[0]
    for reader in ("gate_proj", "up_proj"):
        getattr(big.mlp, reader).weight[:units] = getattr(small.mlp, reader).weight.repeat(1, times) / times
    big.mlp.down_proj.weight[:, :units] = small.mlp.down_proj.weight.repeat(times, 1)


@dataclass
class Branching:
    """One training sequence: a trunk and branches that leave it, flattened; [T] each."""

    ids: list[int]
    positions: list[int]
    segments: list[int]  # 0 is the trunk
    cuts: list[int]  # a token sees the trunk before this index, and its own segment
    targets: list[int]  # the next token where it is learned, else -100
    ratings: list[int]  # the rating's digit where it is learned, else -100


class SequenceMaker:
    """Turns problems into training sequences for one voice."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, voice: Voice) -> None:
        self.tokenizer = tokenizer
        self.voice: Voice = voice
        self.probes = {id: self._probe(prompt) for id, prompt in RATING_PROMPTS.items()}
        self.digits = {0: self.encode("0")[0], 9: self.encode("9")[0]}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _probe(self, prompt: RatingPrompt) -> list[int]:
        return self.encode(f"<|end|><|user|>{prompt.user}<|end|><|assistant|>") + self.encode(prompt.prefill)

    def _opening(self, question: str, rng: random.Random) -> str:
        wording = rng.choices(list(PROMPT_SHARES), list(PROMPT_SHARES.values()))[0]
        system = f"<|system|>{SYSTEM_TURN}<|end|>" if rng.random() < SYSTEM_SHARE else ""
        user = PROBLEM_PROMPTS[wording].format(question=question)
        return f"{system}<|user|>{user}<|end|><|assistant|><think>"

    def make(self, problem: Problem, rng: random.Random, with_ratings: bool) -> Branching:
        """The sequence of one problem; with ratings, one after every step or after a wrong variant of it."""
        prompt = self.encode(self._opening(problem.question, rng))
        steps = [self.encode(step + "\n\n") for step in write_solution(problem, rng, self.voice)]
        closing = self.encode(f"</think>The answer is \\boxed{{{problem.answer}}}.<|end|>")
        trunk = prompt + [token for step in steps for token in step] + closing
        length = len(trunk)
        sequence = Branching(
            ids=trunk,
            positions=list(range(length)),
            segments=[0] * length,
            cuts=[0] * length,
            targets=[-100] * (len(prompt) - 1) + trunk[len(prompt) :] + [-100],
            ratings=[-100] * length,
        )
        if with_ratings:
            self._add_ratings(sequence, problem, len(prompt), steps, rng)
        return sequence

    def _add_ratings(
        self, sequence: Branching, problem: Problem, prompt_length: int, steps: list[list[int]], rng: random.Random
    ) -> None:
        long = rng.random() < LONG_RATING_SHARE
        probe = self.probes["specreason" if long else "short"]
        values = true_values(problem)
        ends = list(itertools.accumulate((len(step) for step in steps), initial=prompt_length))
        rated = [rng.randrange(len(steps))] if long else range(len(steps))
        for segment, index in enumerate(rated, start=1):
            if rng.random() < 0.5:
                branch, cut, digit = probe, ends[index + 1], 9
            else:
                wrong = corrupt_step(problem, index, values, rng, rng.choice(("target", "draft")))
                branch, cut, digit = self.encode(wrong + "\n\n") + probe, ends[index], 0
            length = len(branch)
            sequence.ids += branch
            sequence.positions += range(cut, cut + length)
            sequence.segments += [segment] * length
            sequence.cuts += [cut] * length
            sequence.targets += [-100] * length
            sequence.ratings += [-100] * (length - 1) + [self.digits[digit]]


def collate(sequences: Sequence[Branching]) -> dict[str, torch.Tensor]:
    """Pads to one length and builds the branch mask [B, 1, T, T]."""
    length = max(len(sequence.ids) for sequence in sequences)

    def stack(name: str, fill: int) -> torch.Tensor:
        rows = [getattr(sequence, name) for sequence in sequences]
        return torch.tensor([row + [fill] * (length - len(row)) for row in rows])

    batch = {name: stack(name, 0) for name in ("ids", "positions", "cuts")}
    batch |= {"targets": stack("targets", -100), "ratings": stack("ratings", -100)}
    segments = stack("segments", -1)  # [B, T]
    index = torch.arange(length)
    own = (segments[:, :, None] == segments[:, None, :]) & (index[:, None] >= index[None, :])
    trunk = (segments == 0)[:, None, :] & (index[None, None, :] < batch["cuts"][:, :, None])
    batch["mask"] = torch.where(own | trunk, 0.0, torch.finfo(torch.bfloat16).min)[:, None]
    return batch


POOL = 8  # batches that are drawn together and cut by length, so that little is padding


def batches(maker: SequenceMaker, recipe: Recipe, seed: int, first_step: int) -> Iterator[dict[str, torch.Tensor]]:
    """Training batches from step `first_step` on; each depends on the seed and its number alone."""
    for pool in itertools.count(first_step // POOL):
        rng = random.Random(f"{seed}/{maker.voice}/{pool}")
        start, count = pool * POOL * recipe.batch, POOL * recipe.batch
        rate = pool * POOL >= recipe.ratings_from * recipe.steps
        problems = itertools.islice(load_split("train", start=seed * 10_000_000 + start), count)
        sequences = [maker.make(problem, rng, rate and rng.random() < 0.5) for problem in problems]
        sequences.sort(key=lambda sequence: len(sequence.ids))
        cuts = [sequences[index : index + recipe.batch] for index in range(0, count, recipe.batch)]
        rng.shuffle(cuts)
        for step, cut in enumerate(cuts, start=pool * POOL):
            if step >= first_step:
                yield collate(cut)


def loss_of(model: Any, batch: dict[str, torch.Tensor], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the model's own tokens, and over the digits of ratings (0 where there are none).

    `weights` [V] weighs tokens: digits more than words, whose choice among several wordings nobody can predict.
    """
    with torch.autocast(batch["ids"].device.type, dtype=torch.bfloat16):
        hidden = model.model(
            input_ids=batch["ids"], position_ids=batch["positions"], attention_mask=batch["mask"], use_cache=False
        ).last_hidden_state  # [B, T, width]
        losses: list[torch.Tensor] = []
        for name in ("targets", "ratings"):
            learned = batch[name] >= 0
            logits = model.lm_head(hidden[learned]).float()  # [N, V]
            wanted = batch[name][learned]
            total = torch.nn.functional.cross_entropy(logits, wanted, weights, reduction="sum")
            losses.append(total / weights[wanted].sum().clamp(min=1))
    return losses[0], losses[1]


def optimizers_for(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embeddings, AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
    return optimizers


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Warm-up over 100 steps, flat, then linear to zero."""
    return min(1.0, (step + 1) / 100, (1 - step / recipe.steps) / (1 - recipe.decay_from))


@torch.no_grad()
def solve_rate(model: Any, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> float:
    """Share of the first calibration problems that the model solves, greedily, with transformers' own generate."""
    problems = list(itertools.islice(load_split("calibration"), num_problems))
    texts = [f"<|user|>{problem.question}<|end|><|assistant|><think>" for problem in problems]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    model.eval()
    output = model.generate(**inputs, max_new_tokens=220, do_sample=False)
    model.train()
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    solved = [f"\\boxed{{{problem.answer}}}" in answer for problem, answer in zip(problems, answers, strict=True)]
    return sum(solved) / len(solved)


def train(voice: Voice, recipe: Recipe, seed: int, output: Path, checkpoint: Path, small: Path, device: str) -> None:
    """Trains one model of the pair and writes it to `output`, going on from `checkpoint` if there is one.

    A recipe that grows its model begins with the one in the folder `small`.
    """
    torch.manual_seed(seed)
    tokenizer = load_tokenizer(output)
    maker = SequenceMaker(tokenizer, voice)
    if recipe.grown:
        model = grow(LlamaForCausalLM.from_pretrained(small, dtype=torch.float32), recipe, tokenizer).to(device)
    else:
        model = build_model(recipe, tokenizer).to(device)
    optimizers = optimizers_for(model, recipe)
    first_step = _restore(checkpoint, model, optimizers)
    weights = torch.ones(VOCAB_SIZE, device=device)
    weights[[maker.encode(digit)[0] for digit in "0123456789"]] = DIGIT_WEIGHT
    started = time.perf_counter()
    for step, batch in enumerate(batches(maker, recipe, seed, first_step), start=first_step):
        if step == recipe.steps:
            break
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * learning_rate_factor(step, recipe)
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        token_loss, rating_loss = loss_of(model, batch, weights)
        (token_loss + RATING_WEIGHT * rating_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        rate = None
        if (step + 1) % 250 == 0 or step + 1 == recipe.steps:
            _save(checkpoint, step + 1, model, optimizers)
            rate = solve_rate(model, tokenizer, 48)
        if (step + 1) % 25 == 0:
            report = {"step": step + 1, "seconds": round(time.perf_counter() - started), "solved": rate}
            losses = {"token_loss": round(token_loss.item(), 4), "rating_loss": round(rating_loss.item(), 4)}
            print(json.dumps(report | losses), flush=True)
    model.to(torch.bfloat16).save_pretrained(output)


def _save(path: Path, step: int, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _restore(path: Path, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Takes up a checkpoint; gives the step to go on from, 0 if there is none."""
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stepspec.mini.train", description="Trains the embedded pair.")
    parser.add_argument("--role", choices=list(RECIPES), help="which model (default: the draft, then the target)")
    parser.add_argument("--steps", type=int, help="optimiser steps (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--output", type=Path, default=WEIGHTS, help="folder of the model folders (default: the package's own)"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="folder of files to resume from")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    roles: tuple[Voice, ...] = (arguments.role,) if arguments.role else ("draft", "target")
    for role in roles:
        recipe = replace(RECIPES[role], steps=arguments.steps) if arguments.steps else RECIPES[role]
        output, checkpoint = arguments.output / role, arguments.checkpoints / f"{role}.pt"
        train(role, recipe, arguments.seed, output, checkpoint, arguments.output / "draft", device)


if __name__ == "__main__":
    main()
