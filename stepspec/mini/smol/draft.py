"""Train the draft of the pair `smol`: `python -m stepspec.mini.smol.draft --work FOLDER --target FOLDER`.

The draft has two of the target's layers. It trains on references and on the target's own texts, if the folder has some
(`samples.jsonl`). It shares the target's embedding, which stays fixed. Its head scores only the ids of the draft
vocabulary, the most frequent ids of those texts. A killed run resumes from its checkpoint.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from stepspec.chat.prompts import checked_messages
from stepspec.engines.draft_vocabulary import FILE as VOCABULARY_FILE
from stepspec.mini.forward import COMPUTE_DTYPE, forward_hidden
from stepspec.mini.muon import Muon
from stepspec.mini.smol.samples import FILE as SAMPLES_FILE
from stepspec.mini.smol.samples import load_samples
from stepspec.mini.smol.sequences import ROW, Tree, TreeMaker, collate

LAYERS = (0, -1)
"""Indices of the target's layers that the draft starts from."""

VOCABULARY_SIZE = 4_000
COUNTED = 20_000
"""Number of reference texts in which ids are counted."""

MATRIX_RATE, RATE = 0.05, 1e-3
"""Learning rates of the layers' matrices (Muon) and of everything else (AdamW)."""

DIGIT_WEIGHT = 5.0
"""Weight of digits in the loss. Left to itself the loss is mostly about the choice among phrasings."""

WARM_UP, BATCH_ROWS = 50, 16
SHARES = {"plain": 0.48, "sums": 0.27, "mini": 0.25}
"""Share of each kind of reference. The draft never calls a tool, and long prompts would use up the budget."""

OWN_SHARE = 0.2
"""Share of conversations with the target's own text, which are about everything else."""

SAVE_SECONDS = 120


def sample_tree(maker: TreeMaker, row: dict[str, Any]) -> Tree:
    """Return the tokens of a question and the target's own text."""
    tree = Tree()
    opening = maker.tokenizer.apply_chat_template(
        checked_messages([{"role": "user", "content": row["question"]}]), add_generation_prompt=True, tokenize=False
    )
    tree.add(maker.encode(opening), learned=False)
    tree.add(maker.encode(row["text"] + maker.tokenizer.eos_token), learned=True)
    return tree


def draft_vocabulary(trees: Iterator[Tree], always: Sequence[int], size: int) -> list[int]:
    """Return the most frequent ids of the learned tokens and the ids in `always`, in ascending order."""
    counts = Counter(id for tree in trees for id, learned in zip(tree.ids, tree.learned, strict=True) if learned)
    found = dict.fromkeys(always)
    for id, _ in counts.most_common():
        if len(found) == size:
            break
        found[id] = None
    return sorted(found)


def cut_draft(target: Any, layers: Sequence[int]) -> LlamaForCausalLM:
    """Return a model with some of the target's layers and its embedding."""
    config = type(target.config)(**(target.config.to_dict() | {"num_hidden_layers": len(layers)}))
    draft = LlamaForCausalLM(config).float()
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for own, index in zip(draft.model.layers, layers, strict=True):
        own.load_state_dict(target.model.layers[index].state_dict())
    draft.model.embed_tokens.weight.requires_grad_(False)
    return draft


class Trainer:
    """A trainer with a token budget, which includes the prompts."""

    def __init__(self, work: Path, target: Path, seed: int, budget: int) -> None:
        torch.manual_seed(seed)
        self.work, self.seed, self.budget = work, seed, budget
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self.maker = TreeMaker(self.tokenizer, shares=SHARES)
        rows = load_samples(work / SAMPLES_FILE)
        self.samples = [sample_tree(self.maker, row) for row in rows if row["ended"]]
        self.draft = cut_draft(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), LAYERS)
        digits = [self.maker.encode(str(digit))[0] for digit in range(10)]
        self.vocabulary = torch.tensor(self._vocabulary([*self.tokenizer.all_special_ids, *digits]))
        self.places = torch.full((self.draft.config.vocab_size,), -100)
        self.places[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.head = self.draft.model.embed_tokens.weight[self.vocabulary].detach().to(COMPUTE_DTYPE)
        self.weights = torch.ones(len(self.vocabulary))
        self.weights[self.places[digits]] = DIGIT_WEIGHT
        trained = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        self.optimizers: dict[float, torch.optim.Optimizer] = {
            MATRIX_RATE: Muon(
                [each for each in trained if each.ndim == 2], lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01
            ),
            RATE: torch.optim.AdamW(
                [each for each in trained if each.ndim == 1], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
            ),
        }
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.checkpoint = work / "draft.pt"
        if self.checkpoint.exists():
            self._restore()

    def _vocabulary(self, always: Sequence[int]) -> list[int]:
        """Return the vocabulary of the samples and `COUNTED` references, with the ids that always belong to it."""
        rng = random.Random(self.seed)
        references = (self.maker.draw(rng) for _ in range(COUNTED))
        return draft_vocabulary(iter([*self.samples, *references]), always, VOCABULARY_SIZE)

    def run(self) -> None:
        """Train until the budget is used up, then write the draft."""
        saved = started = time.perf_counter()
        while self.tokens < self.budget:
            loss = self._step(self._batch(random.Random(f"{self.seed}/{self.step}")))
            now = time.perf_counter()
            self.seconds, started = self.seconds + now - started, now
            entry = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds), "loss": round(loss, 4)}
            with (self.work / "draft.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
            if now - saved > SAVE_SECONDS:
                saved = now
                self._save()
        self._save()
        self.write(self.work)

    def write(self, folder: Path) -> None:
        """Write the draft and the draft vocabulary. The embedding is left out, because it is the target's."""
        shared = {"model.embed_tokens.weight", "lm_head.weight"}
        own = {name: tensor.bfloat16() for name, tensor in self.draft.state_dict().items() if name not in shared}
        save_file(own, folder / "draft.safetensors")
        content = {"version": 1, "ids": self.vocabulary.tolist()}
        (folder / VOCABULARY_FILE).write_text(json.dumps(content) + "\n", "utf-8")

    def _batch(self, rng: random.Random) -> list[dict[str, torch.Tensor]]:
        """Sample rows of conversations without judgements, which only the target makes. Some have the target's text."""
        rows: list[dict[str, torch.Tensor]] = []
        open_row: list[Tree] = []
        while len(rows) < BATCH_ROWS:
            own = self.samples and rng.random() < OWN_SHARE
            tree = rng.choice(self.samples) if own else self.maker.draw(rng).trunk()
            if sum(len(each.ids) for each in open_row) + len(tree.ids) > ROW and open_row:
                rows.append(collate(open_row))
                open_row = []
            open_row.append(tree)
        return rows

    def _step(self, rows: Sequence[dict[str, torch.Tensor]]) -> float:
        factor = min(1.0, (self.step + 1) / WARM_UP) * max(0.0, 1 - self.tokens / self.budget)
        for rate, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        targets = [torch.where(row["targets"] >= 0, self.places[row["targets"].clamp(min=0)], -100) for row in rows]
        learned = sum(float(self.weights[each[each >= 0]].sum()) for each in targets)
        total = 0.0
        for row, wanted in zip(rows, targets, strict=True):
            hidden = forward_hidden(self.draft, row["ids"], row["positions"], row["mask"]).hidden[0]
            where = wanted >= 0
            logits = (hidden[where] @ self.head.t()).float()
            loss = torch.nn.functional.cross_entropy(logits, wanted[where], self.weights, reduction="sum") / learned
            loss.backward()
            total += loss.item()
            self.tokens += row["ids"].numel()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def _save(self) -> None:
        state = {
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers.values()],
            "counters": (self.step, self.tokens, self.seconds),
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def _restore(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self.optimizers.values(), state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.tokens, self.seconds = state["counters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="Use this folder for the samples, the checkpoint and the log."
    )
    parser.add_argument("--target", type=Path, required=True, help="Load the target from this folder.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8_500_000, help="Number of training tokens, including prompts.")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    Trainer(arguments.work, arguments.target, arguments.seed, arguments.tokens).run()


if __name__ == "__main__":
    main()
