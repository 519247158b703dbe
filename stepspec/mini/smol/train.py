"""Train the adapter of the pair `smol`: `python -m stepspec.mini.smol.train --work FOLDER`.

If the folder has steps of a model (`stepspec.mini.smol.proposals`), the target also learns to judge them. A killed run
resumes from its checkpoint. Random sampling depends only on the seed and the pool number. The loss covers only the
tokens that the model writes. After a short warm-up, the learning rate falls linearly to zero at the end of the budget.
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from stepspec.mini.smol.base import TAGS, find_base, load_base, load_tokenizer
from stepspec.mini.smol.lora import Adapter, Trunk, merge_file
from stepspec.mini.smol.sequences import TreeMaker, rows
from stepspec.mini.smol.texts import PROPOSALS_FILE, load_proposals

RANK = 40
RATE = 1e-3
BATCH_TOKENS = 2048
WARM_UP = 20
SAVE_SECONDS = 120


class Trainer:
    """A trainer with a token budget, which includes the prompts."""

    def __init__(
        self,
        work: Path,
        seed: int,
        budget: int,
        parts: Sequence[Path] = (),
        rate: float = RATE,
        rank: int = RANK,
    ) -> None:
        torch.manual_seed(seed)
        path = find_base()
        self.work, self.seed, self.budget, self.rate = work, seed, budget, rate
        self.tokenizer: Any = load_tokenizer(path)
        proposals = work / PROPOSALS_FILE
        self.maker = TreeMaker(self.tokenizer, load_proposals(proposals) if proposals.exists() else ())
        tag_ids = self.tokenizer.convert_tokens_to_ids([*TAGS.values()])
        model = load_base(path)
        for part in parts:
            merge_file(part, model, tag_ids)
        self.adapter = Adapter(model, rank, tag_ids)
        self.trunk = Trunk(model, self.adapter)
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
        self.step, self.tokens, self.pool, self.row, self.seconds = 0, 0, 0, 0, 0.0
        self.checkpoint = work / "target.pt"
        if self.checkpoint.exists():
            self._restore()

    def run(self) -> None:
        """Train until the budget is used up, then write `adapter.safetensors`."""
        if self.tokens < self.budget:
            self._train()
        self.adapter.save(self.work / "adapter.safetensors")

    def _train(self) -> None:
        batch: list[dict[str, torch.Tensor]] = []
        saved = started = time.perf_counter()
        for pool in rows(self.maker, f"{self.seed}", self.pool):
            for row in itertools.islice(pool, self.row, None):
                batch.append(row)
                self.row += 1
                if sum(each["ids"].numel() for each in batch) < BATCH_TOKENS:
                    continue
                loss = self._step(batch)
                batch = []
                now = time.perf_counter()
                self.seconds, started = self.seconds + now - started, now
                self._log(
                    {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds), "loss": round(loss, 4)}
                )
                if now - saved > SAVE_SECONDS:
                    saved = now
                    self._save()
                if self.tokens >= self.budget:
                    self._save()
                    return
            self.pool, self.row = self.pool + 1, 0

    def _step(self, batch: list[dict[str, torch.Tensor]]) -> float:
        done = self.tokens / self.budget
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (self.step + 1) / WARM_UP) * max(0.0, 1 - done)
        learned = sum(int((row["targets"] >= 0).sum()) for row in batch)
        total = 0.0
        for row in batch:
            hidden = self.trunk.hidden(row["ids"], row["positions"], row["mask"])[0]
            where = row["targets"] >= 0
            loss = self.trunk.loss(hidden[where], row["targets"][where]) / learned
            loss.backward()
            total += loss.item()
            self.tokens += row["ids"].numel()
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def _log(self, entry: dict[str, Any]) -> None:
        with (self.work / "target.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")

    def _save(self) -> None:
        state = {
            "adapter": self.adapter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": (self.step, self.tokens, self.pool, self.row, self.seconds),
        }
        torch.save(state, self.checkpoint.with_suffix(".tmp"))
        self.checkpoint.with_suffix(".tmp").replace(self.checkpoint)

    def _restore(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.adapter.load_state_dict(state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.pool, self.row, self.seconds = state["counters"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="Use this folder for the checkpoint and the log.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="Number of training tokens, including prompts.")
    parser.add_argument("--rank", type=int, default=RANK, help="Rank of the adapter.")
    parser.add_argument("--rate", type=float, default=RATE, help="Peak learning rate.")
    parser.add_argument(
        "--on",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="Merge this adapter into the base before training. Repeatable.",
    )
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    Trainer(arguments.work, arguments.seed, arguments.tokens, arguments.on, arguments.rate, arguments.rank).run()


if __name__ == "__main__":
    main()
