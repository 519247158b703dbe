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

Left to itself the target guesses whose number comes next by the order of the story and never learns to look it up by
name. So two attention heads are taught where to look (`batches.places_to_look`): one finds the name that a number
belongs to, the other what was said after the same name. With the first in place, the second takes 100 steps.

The draft is trained first. Its own steps on training problems, labelled by the oracle, are among those that the
target learns to judge.

Hidden matrices are trained with Muon (https://kellerjordan.github.io/posts/muon/), the rest with AdamW; bfloat16
autocast. Seeded and resumable: a killed run goes on from its checkpoint, and every draw depends on the seed, the stage
and the step alone.
"""

import argparse
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stepspec.evaluation.generators.gsm_mini import load_split
from stepspec.evaluation.generators.wording import Voice
from stepspec.mini import WEIGHTS
from stepspec.mini.batches import PART, Batches
from stepspec.mini.forward import forward_hidden
from stepspec.mini.medusa import train_heads
from stepspec.mini.proposals import load_proposals
from stepspec.mini.recipes import RECIPES, Recipe, Stage
from stepspec.mini.sequences import SequenceMaker
from stepspec.mini.tokenizer import CONTEXT, VOCAB_SIZE, load_tokenizer, opening

LOG_EVERY, SAVE_EVERY = 25, 250
NUM_PROPOSED = 12_000  # training problems of which the target sees the draft's own steps
# Layers whose first attention head is taught where to look (`batches.collate`).
TAUGHT_LAYERS = {"owners": 1, "sources": 3, "before": 6, "ends": 8}
# Layers after which something must be known of a token, so that later ones can answer the judge's question.
TAPPED_LAYERS = {"onsets": 6, "flaws": 7, "differences": 7}
ONSET_WEIGHT = 10.0  # of the token where a step goes wrong, against each of those where it does not


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


class Heads(torch.nn.Module):
    """What is thrown away after training.

    They say whether a step is wrong by a token, or differs from another by it, and whether that begins at the token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.flaws = torch.nn.Linear(width, 1)
        self.differences = torch.nn.Linear(width, 1)
        self.onsets = torch.nn.Linear(width, 1)


def losses_of(
    model: Any, heads: Heads, batch: dict[str, torch.Tensor], content_weight: float, totals: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a part of a batch adds to the mean losses of the whole, by kind of label.

    Args:
        content_weight: of what the text must say, against words whose choice nobody can predict.
        totals: what the whole batch weighs, by the kinds of label that it has.
    """
    watched = [layer for name, layer in TAUGHT_LAYERS.items() if name in totals]
    last = model.config.num_hidden_layers - 1
    tapped = {name: min(layer, last) for name, layer in TAPPED_LAYERS.items() if name in totals}
    read = forward_hidden(model, batch["ids"], batch["positions"], batch["mask"], watched, tapped.values())
    losses: dict[str, torch.Tensor] = {}
    for name, total in totals.items():
        if name in TAUGHT_LAYERS:
            learned = batch[name].any(-1)
            logprobs = read.scores[TAUGHT_LAYERS[name]][learned].log_softmax(-1)  # [N, T]
            losses[name] = -logprobs.masked_fill(~batch[name][learned], -torch.inf).logsumexp(-1).sum() / total
            continue
        learned = batch[name] >= 0
        if name in ("targets", "verdicts"):
            logits = (read.hidden[learned] @ model.lm_head.weight.to(read.hidden.dtype).t()).float()  # [N, V]
            each = torch.nn.functional.cross_entropy(logits, batch[name][learned], reduction="none")
            loss = each.sum() if name == "verdicts" else each @ weights_of(batch, content_weight)
        else:
            logits = getattr(heads, name)(read.tapped[tapped[name]][learned]).squeeze(-1)  # [N]
            wanted = batch[name][learned].float()
            weight = logits.new_tensor(ONSET_WEIGHT) if name == "onsets" else None
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, wanted, pos_weight=weight, reduction="sum"
            )
        losses[name] = loss / total
    return losses


def weights_of(batch: dict[str, torch.Tensor], content_weight: float) -> torch.Tensor:
    """The weights of the text's tokens, [N]."""
    return torch.where(batch["free"][batch["targets"] >= 0] > 0, 1.0, content_weight)


def totals_of(batches: Sequence[dict[str, torch.Tensor]], content_weight: float) -> dict[str, torch.Tensor]:
    """What the labels of a batch weigh together; the heads are trained with judgements only."""
    totals: dict[str, torch.Tensor] = {}
    for name in ("targets", "verdicts", *TAPPED_LAYERS):
        labels = torch.cat([batch[name][batch[name] >= 0] for batch in batches])
        if len(labels) and (name in ("targets", "verdicts") or "verdicts" in totals):
            totals[name] = torch.tensor(float(len(labels)))
            if name == "targets":
                totals[name] = torch.stack([weights_of(batch, content_weight).sum() for batch in batches]).sum()
    for name in TAUGHT_LAYERS:
        if name in batches[0] and (name in ("owners", "sources") or "verdicts" in totals):
            totals[name] = torch.stack([batch[name].any(-1).sum() for batch in batches]).sum()
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
    texts = [opening(problem.question) for problem in problems]
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
        totals = totals_of(batches, stage.content_weight)
        means = {name: torch.zeros((), device=self.device) for name in totals}
        for batch in batches:
            losses = losses_of(self.model, self.heads, batch, stage.content_weight, totals)
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
    parser.add_argument("--medusa", action="store_true", help="Medusa heads for the target that is there, not a model")
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
    if arguments.medusa:
        train_heads(arguments.output / "target", arguments.seed, device)
        return
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    for role in (arguments.role,) if arguments.role else ("draft", "target"):
        Trainer(role, RECIPES[role], arguments.seed, arguments.output, arguments.checkpoints, device).run()


if __name__ == "__main__":
    main()
