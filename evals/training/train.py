"""Train the embedded pair on generated problems: `python -m evals.training.train`.

All training data comes from the problem generator. A sequence is a question in a common prompt, the reasoning between
`<think>` and `</think>`, and the boxed answer. The loss covers only the tokens that the model writes.

Training has stages. The target's first stage has few layers and short problems. The slowest skill to learn is finding a
person's number in the story, and a shallow model learns it several times faster. Later stages add layers on top, which
contribute nothing at first. The later stages also train judgments: after a step of the trunk, or after a variant of it
on a separate branch, the judge's answer is learned. A branch sees itself and the trunk before it, as in the engine's
`verify`. So one sequence holds a judgment after most of its steps. Judging also has labels at every token: a temporary
linear head predicts from each token of a step whether the step is already wrong.

Without help, the target guesses the next number from the order of the story and never learns to look it up by name. So
two attention heads get attention targets (`batches.places_to_look`). One finds the name that a number belongs to, the
other the text after the same name. Once the first works, the second takes 100 steps.

The draft is trained first. The target learns to judge the draft's steps on training problems, labeled by the oracle,
among others.

Muon (https://kellerjordan.github.io/posts/muon/) trains the hidden matrices, and AdamW the other weights, under
bfloat16 autocast. Training is seeded and resumable: a killed run resumes from its checkpoint. Random sampling depends
only on the seed, the stage and the step.
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

from evals.training.batches import PART, Batches
from evals.training.forward import forward_hidden
from evals.training.gsm_mini import load_split
from evals.training.muon import Muon
from evals.training.proposals import load_proposals
from evals.training.recipes import RECIPES, Recipe, Stage
from evals.training.sequences import SequenceMaker
from evals.training.tokenizer import CONTEXT, VOCAB_SIZE, load_tokenizer, opening
from evals.training.wording import Voice
from stepspec.mini import WEIGHTS

LOG_EVERY, SAVE_EVERY = 25, 250
NUM_PROPOSED = 12_000  # training problems with the draft's steps, for the target
# Layers whose first attention head has attention targets (`batches.collate`).
TAUGHT_LAYERS = {"owners": 1, "sources": 3, "before": 6, "ends": 8}
# Layers whose output must predict these labels, so that later layers can answer the judge's question.
TAPPED_LAYERS = {"onsets": 6, "flaws": 7, "differences": 7}
ONSET_WEIGHT = 10.0  # loss weight of the token where a step goes wrong, relative to the tokens before


def build_model(recipe: Recipe, layers: int, tokenizer: Any) -> Any:
    """Return a Llama model of the recipe's width with random weights."""
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
    model.set_attn_implementation("eager")  # on a CPU, trains a quarter faster than the fused kernel
    return model


@torch.no_grad()
def deepen(shallow: Any, recipe: Recipe, layers: int, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the model with more layers and the same outputs. The new layers add nothing to the residual stream."""
    deep = build_model(recipe, layers, tokenizer)
    deep.load_state_dict(shallow.state_dict(), strict=False)
    for layer in deep.model.layers[shallow.config.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return deep


class Heads(torch.nn.Module):
    """Linear heads that are used only during training.

    For each token of a step they predict whether the step is already wrong or differs from another step, and whether
    that starts at this token.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.flaws = torch.nn.Linear(width, 1)
        self.differences = torch.nn.Linear(width, 1)
        self.onsets = torch.nn.Linear(width, 1)


def losses_of(
    model: Any, heads: Heads, batch: dict[str, torch.Tensor], content_weight: float, totals: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the contribution of a part of a batch to the mean losses of the batch, by kind of label.

    Args:
        model: the model to train.
        heads: the linear heads for token labels.
        batch: the part of the batch.
        content_weight: the weight of required content relative to words of optional phrasings.
        totals: the total label weight of the whole batch, by kind of label.
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
    """Return the loss weights of the target tokens, [N]."""
    return torch.where(batch["free"][batch["targets"] >= 0] > 0, 1.0, content_weight)


def totals_of(batches: Sequence[dict[str, torch.Tensor]], content_weight: float) -> dict[str, torch.Tensor]:
    """Return the total label weight of a batch, by kind of label. The heads train only on batches with judgments."""
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
    """Return Muon for the hidden matrices, and AdamW for the other weights."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in (*model.parameters(), *heads.parameters()) if id(p) not in chosen]
    optimizers = [
        Muon(matrices, lr=recipe.matrix_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
    return optimizers


def learning_rate_factor(step: int, stage: Stage) -> float:
    """Return the learning rate factor: a warm-up over 100 steps, on a line between the stage's two rates."""
    start, end = stage.rates
    return min(1.0, (step + 1) / 100) * (start + (end - start) * step / stage.steps)


@torch.no_grad()
def solve_rate(model: Any, tokenizer: PreTrainedTokenizerFast, num_problems: int) -> float:
    """Return the share of the first calibration problems that greedy decoding with transformers' `generate` solves."""
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
    """A trainer of one model of the pair. It runs all stages, resumes from checkpoints and saves to `output`."""

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
        """Run all stages that the checkpoint has not finished."""
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
                on_device = [{name: tensor.to(self.device) for name, tensor in part.items()} for part in batch]
                window.append(self._step(on_device, step, stage))
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
        """Load the checkpoint. Return the stage and the step to resume from."""
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
    parser = argparse.ArgumentParser(prog="python -m evals.training.train", description="Train the embedded pair.")
    parser.add_argument("--role", choices=list(RECIPES), help="model to train (default: the draft, then the target)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads (default: 1)")
    parser.add_argument(
        "--output", type=Path, default=WEIGHTS, help="folder for the model folders (default: the package's weights)"
    )
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="folder for the checkpoints to resume from"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.checkpoints.mkdir(parents=True, exist_ok=True)
    for role in (arguments.role,) if arguments.role else ("draft", "target"):
        Trainer(role, RECIPES[role], arguments.seed, arguments.output, arguments.checkpoints, device).run()


if __name__ == "__main__":
    main()
