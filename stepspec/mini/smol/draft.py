"""Trains the draft of the pair `smol`: `python -m stepspec.mini.smol.draft --work FOLDER --target FOLDER`.

The draft is two of the target's layers, trained on references and, if the folder has some (`samples.jsonl`), on the
target's own texts. Its embedding is the target's and stays as it is. Its head scores the ids of its draft vocabulary
alone, the most frequent of those texts. A killed run goes on from its checkpoint.
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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from stepspec.chat.prompts import checked_messages
from stepspec.engines.draft_vocabulary import FILE as VOCABULARY_FILE
from stepspec.mini.forward import forward_hidden
from stepspec.mini.smol.samples import FILE as SAMPLES_FILE
from stepspec.mini.smol.samples import load_samples
from stepspec.mini.smol.sequences import ROW, Tree, TreeMaker, collate

LAYERS = (0, -1)
"""Of the target, which the draft begins with."""

VOCABULARY_SIZE = 4_000
COUNTED = 20_000
"""Reference texts in which ids are counted."""

RATE, WARM_UP, BATCH_ROWS = 1e-3, 50, 8
OWN_SHARE = 0.5
"""Of conversations, those with the target's own text."""

SAVE_SECONDS = 120


def sample_tree(maker: TreeMaker, row: dict[str, Any]) -> Tree:
    """A question and the target's own text in tokens."""
    tree = Tree()
    opening = maker.tokenizer.apply_chat_template(
        checked_messages([{"role": "user", "content": row["question"]}]), add_generation_prompt=True, tokenize=False
    )
    tree.add(maker.encode(opening), learned=False)
    tree.add(maker.encode(row["text"] + maker.tokenizer.eos_token), learned=True)
    return tree


def draft_vocabulary(trees: Iterator[Tree], always: Sequence[int], size: int) -> list[int]:
    """The ids that are written most often, and those that always belong to it, ascending."""
    counts = Counter(id for tree in trees for id, learned in zip(tree.ids, tree.learned, strict=True) if learned)
    found = dict.fromkeys(always)
    for id, _ in counts.most_common():
        if len(found) == size:
            break
        found[id] = None
    return sorted(found)


def cut_draft(target: Any, layers: Sequence[int]) -> LlamaForCausalLM:
    """A model of some of the target's layers, with its embedding."""
    config = type(target.config)(**(target.config.to_dict() | {"num_hidden_layers": len(layers)}))
    draft = LlamaForCausalLM(config).float()
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for own, index in zip(draft.model.layers, layers, strict=True):
        own.load_state_dict(target.model.layers[index].state_dict())
    draft.model.embed_tokens.weight.requires_grad_(False)
    return draft


class Trainer:
    """Trains for a number of tokens, prompts included."""

    def __init__(self, work: Path, target: Path, seed: int, budget: int, on: Path | None = None) -> None:
        torch.manual_seed(seed)
        self.work, self.seed, self.budget = work, seed, budget
        self.tokenizer: Any = AutoTokenizer.from_pretrained(target)
        self.maker = TreeMaker(self.tokenizer)
        rows = load_samples(work / SAMPLES_FILE)
        self.samples = [sample_tree(self.maker, row) for row in rows if row["ended"]]
        self.draft = cut_draft(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), LAYERS)
        if on is not None:
            self.draft.load_state_dict(load_file(on), strict=False)
        self.vocabulary = torch.tensor(self._vocabulary())
        self.places = torch.full((self.draft.config.vocab_size,), -100)
        self.places[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.head = self.draft.model.embed_tokens.weight[self.vocabulary].detach().to(torch.bfloat16)
        trained = [parameter for parameter in self.draft.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.checkpoint = work / "draft.pt"
        if self.checkpoint.exists():
            self._restore()

    def _vocabulary(self) -> list[int]:
        """Of the samples and as many references; digits and the special tokens always belong to it."""
        rng = random.Random(self.seed)
        references = (self.maker.draw(rng) for _ in range(COUNTED))
        always = [*self.tokenizer.all_special_ids, *(self.maker.encode(str(digit))[0] for digit in range(10))]
        return draft_vocabulary(iter([*self.samples, *references]), always, VOCABULARY_SIZE)

    def run(self) -> None:
        """Trains until the budget is used up, then writes the draft."""
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
        """Writes the draft but for its embedding, which is the target's, and the draft vocabulary."""
        shared = {"model.embed_tokens.weight", "lm_head.weight"}
        own = {name: tensor.bfloat16() for name, tensor in self.draft.state_dict().items() if name not in shared}
        save_file(own, folder / "draft.safetensors")
        content = {"version": 1, "ids": self.vocabulary.tolist()}
        (folder / VOCABULARY_FILE).write_text(json.dumps(content) + "\n", "utf-8")

    def _batch(self, rng: random.Random) -> list[dict[str, torch.Tensor]]:
        """Rows of conversations, some with the target's own text. They have no judgements, which the target makes."""
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
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (self.step + 1) / WARM_UP) * max(0.0, 1 - self.tokens / self.budget)
        targets = [torch.where(row["targets"] >= 0, self.places[row["targets"].clamp(min=0)], -100) for row in rows]
        learned = sum(int((each >= 0).sum()) for each in targets)
        total = 0.0
        for row, wanted in zip(rows, targets, strict=True):
            hidden = forward_hidden(self.draft, row["ids"], row["positions"], row["mask"]).hidden[0]
            where = wanted >= 0
            logits = (hidden[where] @ self.head.t()).float()
            loss = torch.nn.functional.cross_entropy(logits, wanted[where], reduction="sum") / learned
            loss.backward()
            total += loss.item()
            self.tokens += row["ids"].numel()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def _save(self) -> None:
        state = {
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": (self.step, self.tokens, self.seconds),
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def _restore(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["counters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="Folder of the samples, the checkpoint and the log.")
    parser.add_argument("--target", type=Path, required=True, help="Folder of the target.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=7_000_000, help="Training tokens, prompts included.")
    parser.add_argument("--on", type=Path, metavar="FILE", help="The weights of a draft to train on top of.")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    Trainer(arguments.work, arguments.target, arguments.seed, arguments.tokens, arguments.on).run()


if __name__ == "__main__":
    main()
