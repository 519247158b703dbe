"""Train the complete pair `smol` from its base model: `python -m stepspec.mini.smol.recipe --work FOLDER`.

Each part is a separate command that resumes after it was killed. This command resumes with the first unfinished part.
The files that ship with stepspec are written to `FOLDER/weights`. The later adapters learn to judge steps of the first
target, which makes its own mistakes. The draft trains on texts of the finished target.

The shipped adapters were trained while the data grew, as the model card says, so this makes a pair like the shipped one
and not the same weights.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stepspec.engines import draft_vocabulary
from stepspec.mini.smol import reward
from stepspec.mini.smol.base import find_base, load_tokenizer
from stepspec.mini.smol.build import draft_of, merged_target, write_model
from stepspec.mini.smol.texts import PROPOSALS_FILE

FIRST_TOKENS, SECOND_TOKENS, THIRD_TOKENS = 2_000_000, 1_100_000, 600_000
DRAFT_TOKENS = 8_500_000
LATER_RATE, THIRD_RANK = 6e-4, 16
"""Learning rate of the second and third adapter, and a rank that keeps all weights below 40 MB."""
NUM_SAMPLES, NUM_PROPOSALS, NUM_JUDGED = 552, 800, 4_000
DRAFT_FILE = "draft.safetensors"


class Recipe:
    """The parts of the training, in order.

    Args:
        work: the folder for all intermediate files and results.
    """

    def __init__(self, work: Path) -> None:
        self.work, self.weights = work, work / "weights"
        self.weights.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Run all unfinished parts."""
        adapters = [self.weights / f"adapter-{number}.safetensors" for number in (1, 2, 3)]
        self._part(adapters[0], lambda: self._train(adapters[:1], FIRST_TOKENS))
        first = self._target("first-target", adapters[:1])
        self._part(self.work / "proposals.done", lambda: self._proposals(first))
        later = ["--rate", str(LATER_RATE)]
        self._part(adapters[1], lambda: self._train(adapters[:2], SECOND_TOKENS, *later))
        rank = ["--rank", str(THIRD_RANK)]
        self._part(adapters[2], lambda: self._train(adapters, THIRD_TOKENS, *later, *rank))
        target = self._target("target", adapters)
        self._part(self.work / "samples.done", lambda: self._samples(target))
        self._part(self.weights / DRAFT_FILE, lambda: self._draft(target))
        self._part(self.weights / reward.FILE, lambda: self._reward(target))

    def _part(self, result: Path, make: Callable[[], None]) -> None:
        if not result.exists():
            print(f"Creating {result.name}.", flush=True)
            make()

    def _command(self, name: str, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", f"stepspec.mini.smol.{name}", *map(str, arguments)]
        subprocess.run(command, check=True)

    def _train(self, adapters: Sequence[Path], tokens: int, *arguments: str) -> None:
        """Train the last of these adapters on top of the others."""
        work = self.work / adapters[-1].stem
        work.mkdir(exist_ok=True)
        proposals = self.work / PROPOSALS_FILE
        if proposals.exists():
            shutil.copyfile(proposals, work / PROPOSALS_FILE)
        on = [argument for adapter in adapters[:-1] for argument in ("--on", str(adapter))]
        seed = str(len(adapters) - 1)
        self._command("train", "--work", work, "--tokens", str(tokens), "--seed", seed, *on, *arguments)
        _copy(work / "adapter.safetensors", adapters[-1])

    def _target(self, folder: str, adapters: Sequence[Path]) -> Path:
        path, base = self.work / folder, find_base()
        if not (path / "model.safetensors").exists():
            unfinished = self.work / f"{folder}.unfinished"
            write_model(unfinished, merged_target(base, [*adapters]), load_tokenizer(base))
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
        return path

    def _samples(self, target: Path) -> None:
        self._command("samples", "--work", self.work, "--target", target, "--count", str(NUM_SAMPLES))
        (self.work / "samples.done").touch()

    def _proposals(self, target: Path) -> None:
        self._command("proposals", "--work", self.work, "--model", target, "--count", str(NUM_PROPOSALS))
        (self.work / "proposals.done").touch()

    def _draft(self, target: Path) -> None:
        self._command("draft", "--work", self.work, "--target", target, "--tokens", str(DRAFT_TOKENS))
        for name in (draft_vocabulary.FILE, DRAFT_FILE):
            _copy(self.work / name, self.weights / name)

    def _reward(self, target: Path) -> None:
        """Fit the reward head to steps of the draft, which it is to judge."""
        work, draft = self.work / "reward", self.work / "draft-model"
        base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        write_model(draft, draft_of(base, self.weights / DRAFT_FILE), load_tokenizer(find_base()))
        shutil.copyfile(self.weights / draft_vocabulary.FILE, draft / draft_vocabulary.FILE)
        work.mkdir(exist_ok=True)
        count = str(NUM_JUDGED)
        self._command("proposals", "--work", work, "--model", draft, "--count", count)
        self._command("reward", "--work", work, "--target", target, "--problems", count)
        _copy(work / reward.FILE, self.weights / reward.FILE)


def _copy(source: Path, target: Path) -> None:
    """Copy a file. A killed copy leaves nothing under the target's name, which stands for a finished part."""
    unfinished = target.with_suffix(".unfinished")
    shutil.copyfile(source, unfinished)
    unfinished.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="Write all intermediate files and results to this folder."
    )
    Recipe(parser.parse_args().work).run()


if __name__ == "__main__":
    main()
