"""Trains the embedded pair from the problem generator alone: `python -m stepspec.mini.train`.

Nothing but generated problems goes in. A sequence is a question in one of the prompts that people use, the reasoning
between `<think>` and `</think>`, and the boxed answer; only what the model writes itself is in the loss.

A model is trained in stages. The target's first has few layers and short problems, because what takes longest, finding
a person's number in the story, is learned several times faster by a shallow model; each later stage puts layers on
top that add nothing at first. In the last stage sequences also carry judgements: after a step of the trunk, or after
another variant of it on a branch of its own, stands the judge's turn, and its answer is learned. Branches see the
trunk up to where they leave it and themselves, as in the engine's `verify`, so one sequence holds a judgement after
most of its steps. What judging needs is taught at every token as well: a linear head, thrown away afterwards, says from
each token of a step whether the step is wrong by then.

The draft is trained first. Its own steps on training problems, labelled by the oracle, are among those that the
target learns to judge.

Hidden matrices are trained with Muon (https://kellerjordan.github.io/posts/muon/), the rest with AdamW; bfloat16
autocast. Seeded and resumable: a killed run goes on from its checkpoint, and every draw depends on the seed, the stage
and the step alone.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stepspec.mini import WEIGHTS
from stepspec.mini.forward import forward_hidden
from stepspec.mini.problems import NAMES, load_split
from stepspec.mini.proposals import load_proposals
from stepspec.mini.sequences import SequenceMaker, TreeSequence
from stepspec.mini.tokenizer import CONTEXT, VOCAB_SIZE, load_tokenizer
from stepspec.mini.wording import Voice

LOG_EVERY, SAVE_EVERY = 25, 250
NUM_PROPOSED = 12_000  # training problems of which the target sees the draft's own steps
LOSSES = ("targets", "verdicts", "flaws", "differences", "owners", "sources")
TAUGHT_LAYERS = {"owners": 1, "sources": 3}  # whose first attention head is taught where to look
CONTEXT_OF_A_COPY = 5  # tokens from a name on that must stand before what is copied as before the original
# Words that a step cannot choose freely, besides digits and names.
CONTENT_WORDS = (
    *("more", "fewer", "times", "half", "third", "quarter", "fifth", "sum", "together"),
    *("day", "boxes", "bags", "baskets", "trays", "among", "dollars"),
)


@dataclass(frozen=True)
class Stage:
    """A part of the training of one model."""

    layers: int
    steps: int
    rates: tuple[float, float] = (1.0, 1.0)  # learning rate at its beginning and end, as a share of the recipe's
    max_level: int = 10
    mixed: float = 0.2  # share of sequences with steps of the other model's voice among the model's own
    dense: float = 0.0  # share of sequences whose problem is, of four, the hardest
    drills: int = 0  # branches of a sequence that practise what solutions need seldom
    copying: bool = False  # whether an attention head is taught where what is said of a person was said before
    judged: float = 0.0  # share of sequences with judgements
    batch: int = 24
    content_weight: float = 3.0  # of what a step must say, against words that one of several phrasings has
    verdict_weight: float = 1.0  # of the judge's answers; the first ones are far off and would drown the reasoning


@dataclass(frozen=True)
class Recipe:
    """Shape and training of one model."""

    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    stages: tuple[Stage, ...]
    matrix_lr: float = 0.02
    other_lr: float = 3e-3


DRILLED: dict[str, Any] = {"mixed": 0.1, "dense": 0.6, "content_weight": 30.0}
JUDGED: dict[str, Any] = DRILLED | {"mixed": 0.3, "drills": 1, "copying": True, "judged": 0.7, "batch": 16}

RECIPES: dict[Voice, Recipe] = {
    "draft": Recipe(
        width=96,
        feed_forward=256,
        heads=4,
        kv_heads=2,
        head_size=32,
        stages=(
            Stage(2, 1500, max_level=4),
            Stage(2, 1000, rates=(1.0, 0.7778)),
            Stage(2, 800, rates=(0.7, 0.0)),
            Stage(2, 1500, rates=(0.6, 0.0)),
            Stage(2, 600, rates=(0.3, 0.0)),
            Stage(2, 400, rates=(0.2, 0.0)),
        ),
    ),
    "target": Recipe(
        width=192,
        feed_forward=512,
        heads=6,
        kv_heads=2,
        head_size=32,
        matrix_lr=0.007,
        other_lr=2.1e-3,
        stages=(
            Stage(3, 800, max_level=4, mixed=0.0, content_weight=10.0),
            Stage(3, 1500, mixed=0.1, content_weight=10.0),
            Stage(6, 750, rates=(0.8, 0.572), mixed=0.1, content_weight=10.0),
            Stage(6, 250, rates=(0.57, 0.49), **DRILLED),
            Stage(6, 250, rates=(0.6, 0.49), drills=2, **DRILLED),
            Stage(6, 250, rates=(0.7, 0.6), drills=6, batch=16, **DRILLED),
            Stage(6, 500, rates=(0.7, 0.6), drills=4, copying=True, batch=16, **DRILLED),
            Stage(6, 500, rates=(0.7, 0.5), drills=4, copying=True, batch=16, **DRILLED),
            Stage(10, 150, rates=(0.5, 0.5), verdict_weight=0.05, **JUDGED),
            Stage(10, 1000, rates=(0.5, 0.0), **JUDGED),
        ),
    ),
}


def build_model(recipe: Recipe, layers: int, tokenizer: Any) -> Any:
    """A Llama of the recipe's width with fresh weights."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.width,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=layers,
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
def deepen(shallow: Any, recipe: Recipe, layers: int, tokenizer: PreTrainedTokenizerFast) -> Any:
    """The same function with more layers; those on top add nothing to the residual stream at first."""
    deep = build_model(recipe, layers, tokenizer)
    deep.load_state_dict(shallow.state_dict(), strict=False)
    for layer in deep.model.layers[shallow.config.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return deep


def places_to_look(
    ids: torch.Tensor, targets: torch.Tensor, visible: torch.Tensor, names: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Where a number of somebody is found, in two steps, [B, T, T] each: what an attention head is taught.

    `owners` is, of the tokens that come shortly after a name, the name. `sources` are, of what is said after a name, the
    tokens that it can be copied from: the next token itself, seen after the same name and the same tokens since.

    Args:
        ids: [B, T].
        targets: the tokens to be written next, [B, T].
        visible: [B, T, T].
        names: ids of names.
    """
    length = ids.shape[1]
    pad = torch.nn.functional.pad
    same = pad(ids[:, :, None] == ids[:, None, :], (1, 0))[:, :, :length]  # a token, and that before another
    is_name = torch.isin(ids, names)
    matched, nameless = same, ~is_name
    owners, sources = torch.zeros_like(same), torch.zeros_like(same)
    for back in range(1, CONTEXT_OF_A_COPY):
        matched = matched & pad(same, (back, 0, back, 0))[:, :length, :length]
        here = pad(is_name, (back, 0))[:, :length] & nameless
        sources |= matched & here[:, :, None]
        owners |= torch.diag_embed(here[:, back:], -back)
        nameless = nameless & ~here
    return {"owners": owners & visible, "sources": sources & visible & (targets[:, :, None] == ids[:, None, :])}


def collate(sequences: Sequence[TreeSequence], names: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Pads to one length and builds the mask of the trees [B, 1, T, T]; with the ids of names also `places_to_look`."""
    length = max(len(sequence.ids) for sequence in sequences)

    def stack(name: str, fill: int) -> torch.Tensor:
        rows = [getattr(sequence, name) for sequence in sequences]
        return torch.tensor([row + [fill] * (length - len(row)) for row in rows])

    batch = {name: stack(name, 0) for name in ("ids", "positions", "cuts")}
    batch |= {name: stack(name, -100) for name in ("targets", "verdicts", "flaws", "differences")}
    segments = stack("segments", -1)  # [B, T]
    index = torch.arange(length)
    own = (segments[:, :, None] == segments[:, None, :]) & (index[:, None] >= index[None, :])
    trunk = (segments == 0)[:, None, :] & (index[None, None, :] < batch.pop("cuts")[:, :, None])
    visible = own | trunk
    batch["mask"] = torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[:, None]
    if names is not None:
        batch |= places_to_look(batch["ids"], batch["targets"], visible, names)
    return batch


PART = 12  # sequences that a CPU reads at a time: what they touch stays longer in its cache
POOL = 8  # batches that are drawn together and cut by length, so that little is padding


class Batches(torch.utils.data.IterableDataset[list[dict[str, torch.Tensor]]]):
    """Training batches from step `first_step` on, in parts; each depends on the seed and its number alone."""

    def __init__(self, maker: SequenceMaker, stage: Stage, seed: str, first_step: int, together: int) -> None:
        self.maker = maker
        self.stage = stage
        self.seed = seed
        self.first_step = first_step
        self.together = together

    def __iter__(self) -> Iterator[list[dict[str, torch.Tensor]]]:
        stage, batch = self.stage, self.stage.batch
        names = torch.tensor([self.maker.encode(f" {name}")[0] for name in NAMES]) if stage.copying else None
        for pool in itertools.count(self.first_step // POOL):
            rng = random.Random(f"{self.seed}/{pool}")
            sequences = [
                self.maker.draw(
                    rng,
                    stage.max_level,
                    mixed=rng.random() < stage.mixed,
                    judged=rng.random() < stage.judged,
                    drills=stage.drills,
                    candidates=4 if rng.random() < stage.dense else 1,
                )
                for _ in range(POOL * batch)
            ]
            sequences.sort(key=lambda sequence: len(sequence.ids))
            cuts = [sequences[index : index + batch] for index in range(0, len(sequences), batch)]
            rng.shuffle(cuts)
            for step, cut in enumerate(cuts, start=pool * POOL):
                if step >= self.first_step:
                    yield [collate(cut[i : i + self.together], names) for i in range(0, batch, self.together)]


class Heads(torch.nn.Module):
    """What is thrown away after training: whether a step is wrong by this token, or differs from another by it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.flaws = torch.nn.Linear(width, 1)
        self.differences = torch.nn.Linear(width, 1)


def losses_of(
    model: Any, heads: Heads, batch: dict[str, torch.Tensor], weights: torch.Tensor, totals: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a part of a batch adds to the mean losses of the whole, by kind of label.

    Args:
        weights: [V], of the tokens of the text: content more than words whose choice nobody can predict.
        totals: what the whole batch weighs, by the kinds of label that it has.
    """
    watched = [layer for name, layer in TAUGHT_LAYERS.items() if name in totals]
    hidden, scores = forward_hidden(model, batch["ids"], batch["positions"], batch["mask"], watched)  # [B, T, width]
    losses: dict[str, torch.Tensor] = {}
    for name, total in totals.items():
        if name in TAUGHT_LAYERS:
            learned = batch[name].any(-1)
            law = scores[TAUGHT_LAYERS[name]][learned].log_softmax(-1)  # [N, T]
            losses[name] = -law.masked_fill(~batch[name][learned], -torch.inf).logsumexp(-1).sum() / total
            continue
        learned = batch[name] >= 0
        if name in ("targets", "verdicts"):
            logits = (hidden[learned] @ model.lm_head.weight.to(hidden.dtype).t()).float()  # [N, V]
            weight = weights if name == "targets" else None
            loss = torch.nn.functional.cross_entropy(logits, batch[name][learned], weight, reduction="sum")
        else:
            logits = getattr(heads, name)(hidden[learned].float()).squeeze(-1)  # [N]
            wanted = batch[name][learned].float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        losses[name] = loss / total
    return losses


def totals_of(batches: Sequence[dict[str, torch.Tensor]], weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the labels of a batch weigh together; the heads are trained with judgements only."""
    totals: dict[str, torch.Tensor] = {}
    for name in TAUGHT_LAYERS:
        if name in batches[0]:
            totals[name] = torch.stack([batch[name].any(-1).sum() for batch in batches]).sum()
    for name in ("targets", "verdicts", "flaws", "differences"):
        labels = torch.cat([batch[name][batch[name] >= 0] for batch in batches])
        if len(labels) and (name in ("targets", "verdicts") or "verdicts" in totals):
            totals[name] = weights[labels].sum() if name == "targets" else torch.tensor(float(len(labels)))
    return totals


def optimizers_for(model: Any, heads: Heads, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embeddings, AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in (*model.parameters(), *heads.parameters()) if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
    return optimizers


def learning_rate_factor(step: int, stage: Stage) -> float:
    """Warm-up over 100 steps into a straight line between the stage's rates."""
    start, end = stage.rates
    return min(1.0, (step + 1) / 100) * (start + (end - start) * step / stage.steps)


@torch.no_grad()
def solve_rate(model: Any, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> float:
    """Share of the first calibration problems that the model solves, greedily, with transformers' own generate."""
    problems = list(itertools.islice(load_split("calibration"), num_problems))
    texts = [f"<|user|>{problem.question}<|end|><|assistant|><think>" for problem in problems]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    model.eval()
    output = model.generate(**inputs, max_new_tokens=440, do_sample=False)
    model.train()
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    solved = [f"\\boxed{{{problem.answer}}}" in answer for problem, answer in zip(problems, answers, strict=True)]
    return sum(solved) / len(solved)


class Trainer:
    """Trains one model of the pair, stage by stage, and writes it to `output`; goes on from its checkpoint."""

    def __init__(self, voice: Voice, recipe: Recipe, seed: int, output: Path, checkpoints: Path, device: str) -> None:
        torch.manual_seed(seed)
        self.recipe = recipe
        self.seed = f"{seed}/{voice}"
        self.voice: Voice = voice
        self.output = output
        self.checkpoint = checkpoints / f"{voice}.pt"
        self.device = device
        self.tokenizer = load_tokenizer(output / voice)
        self.maker = SequenceMaker(self.tokenizer, voice)
        words = (*"0123456789", *(f" {word}" for word in (*NAMES, *CONTENT_WORDS)))
        self.content = [self.maker.encode(word)[0] for word in words]
        self.weights = torch.ones(VOCAB_SIZE, device=device)
        self.model = build_model(recipe, recipe.stages[0].layers, self.tokenizer).to(device)
        self.heads = Heads(recipe.width).to(device)
        self.optimizers = optimizers_for(self.model, self.heads, recipe)

    def run(self) -> None:
        """All stages, or those that the checkpoint leaves."""
        first_stage, first_step = self._restore() if self.checkpoint.exists() else (0, 0)
        for index, stage in enumerate(self.recipe.stages):
            if index < first_stage:
                continue
            if index > first_stage:
                first_step = 0
            self._deepen_to(stage.layers)
            self._run_stage(index, stage, first_step)
        self.model.to(torch.bfloat16).save_pretrained(self.output / self.voice)

    def _deepen_to(self, layers: int) -> None:
        if layers > self.model.config.num_hidden_layers:
            self.model = deepen(self.model, self.recipe, layers, self.tokenizer).to(self.device)
            self.optimizers = optimizers_for(self.model, self.heads, self.recipe)

    def _run_stage(self, index: int, stage: Stage, first_step: int) -> None:
        if stage.judged and not self.maker.proposals:
            path = self.checkpoint.with_name("proposals.jsonl")
            proposals = load_proposals(self.output / "draft", path, NUM_PROPOSED, self.device)
            self.maker = SequenceMaker(self.tokenizer, self.voice, proposals)
        self.weights[self.content] = stage.content_weight
        together = PART if self.device == "cpu" else stage.batch
        dataset = Batches(self.maker, stage, f"{self.seed}/{index}", first_step, together)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=4)
        started, solved = time.perf_counter(), None
        window: list[dict[str, torch.Tensor]] = []
        with Progress(transient=True) as progress:
            bar = progress.add_task(f"{self.seed} stage {index}", total=stage.steps, completed=first_step)
            for step, batch in enumerate(itertools.islice(loader, stage.steps - first_step), start=first_step):
                moved = [{name: tensor.to(self.device) for name, tensor in part.items()} for part in batch]
                window.append(self._step(moved, step, stage))
                progress.advance(bar)
                if (step + 1) % SAVE_EVERY == 0 or step + 1 == stage.steps:
                    self._save(index, step + 1)
                    solved = solve_rate(self.model, self.tokenizer, 48)
                if (step + 1) % LOG_EVERY == 0 or step + 1 == stage.steps:
                    seconds = round(time.perf_counter() - started)
                    self._log(
                        {"stage": index, "step": step + 1, "seconds": seconds, "solved": solved, **_means(window)}
                    )
                    solved, window = None, []

    def _step(self, batches: Sequence[dict[str, torch.Tensor]], step: int, stage: Stage) -> dict[str, torch.Tensor]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * learning_rate_factor(step, stage)
        totals = totals_of(batches, self.weights)
        means = {name: torch.zeros((), device=self.device) for name in totals}
        for batch in batches:
            losses = losses_of(self.model, self.heads, batch, self.weights, totals)
            weighted = (stage.verdict_weight * loss if name == "verdicts" else loss for name, loss in losses.items())
            torch.stack(list(weighted)).sum().backward()
            for name, loss in losses.items():
                means[name] += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return means

    def _log(self, entry: Mapping[str, object]) -> None:
        with self.checkpoint.with_suffix(".jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    def _save(self, stage: int, step: int) -> None:
        state = {
            "stage": stage,
            "step": step,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def _restore(self) -> tuple[int, int]:
        """Takes up the checkpoint; gives the stage and the step to go on from."""
        state: dict[str, Any] = torch.load(self.checkpoint, weights_only=True)
        self._deepen_to(self.recipe.stages[state["stage"]].layers)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["stage"], state["step"]


def _means(window: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    names = {name for losses in window for name in losses}
    return {
        name: round(torch.stack([losses[name] for losses in window if name in losses]).mean().item(), 4)
        for name in sorted(names)
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m stepspec.mini.train", description="Trains the embedded pair.")
    parser.add_argument("--role", choices=list(RECIPES), help="which model (default: the draft, then the target)")
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
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    for role in (arguments.role,) if arguments.role else ("draft", "target"):
        Trainer(role, RECIPES[role], arguments.seed, arguments.output, arguments.checkpoints, device).run()


if __name__ == "__main__":
    main()
