"""Train Medusa heads for the embedded target: `python -m evals.training.train --medusa`.

The target's weights stay fixed (Medusa-1, arXiv:2401.10774). From the target's hidden state at a position, head k
learns the token k + 2 positions later. The texts are solutions of training problems in the target's voice.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from evals.training.batches import PART, Batches
from evals.training.forward import forward_hidden
from evals.training.recipes import Stage
from evals.training.sequences import NOT_LEARNED, SequenceMaker
from evals.training.tokenizer import load_tokenizer
from stepspec.engines.torch_engine.drafters.medusa_heads import FILE, MedusaHeads

NUM_HEADS = 4
LEARNING_RATE = 2e-3
STAGE = Stage(layers=0, steps=600, mixed=0.0, batch=PART)


def train_heads(folder: Path, seed: int, device: str, num_steps: int = STAGE.steps) -> None:
    """Train heads for the model in a folder and save them there."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    embeddings = model.lm_head.weight
    heads = MedusaHeads(NUM_HEADS, embeddings.shape[1], embeddings.shape[0]).to(device)
    with torch.no_grad():
        heads.heads.copy_(embeddings.expand(NUM_HEADS, -1, -1))
    optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, num_steps)
    maker = SequenceMaker(load_tokenizer(folder), "target")
    dataset = Batches(maker, STAGE, f"{seed}/medusa", first_step=0, together=STAGE.batch)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1, prefetch_factor=4)
    with Progress(transient=True) as progress:
        for (batch,) in progress.track(itertools.islice(loader, num_steps), num_steps, description="medusa"):
            inputs = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                hidden = forward_hidden(model, inputs["ids"], inputs["positions"], inputs["mask"]).hidden.float()
            loss_of(heads, hidden, inputs["targets"]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in heads.state_dict().items()}
    (folder / FILE).parent.mkdir(exist_ok=True)
    save_file(weights, folder / FILE)


def loss_of(heads: MedusaHeads, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the heads.

    Args:
        heads: the K Medusa heads.
        hidden: the input of the target's output head, [B, T, W].
        targets: the next token at each position, or `NOT_LEARNED`, [B, T].
    """
    num_heads = len(heads.blocks)
    padded = torch.nn.functional.pad(targets, (0, num_heads), value=NOT_LEARNED)
    later = padded.unfold(1, num_heads + 1, 1)  # [B, T, K + 1]
    later = torch.where(targets[..., None] == NOT_LEARNED, NOT_LEARNED, later[..., 1:])
    learned = (later != NOT_LEARNED).any(-1)
    logits = heads(hidden[learned])  # [N, K, V]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), later[learned].flatten(), ignore_index=NOT_LEARNED)
