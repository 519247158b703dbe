"""Drafting by heads on the target's last hidden state (arXiv:2401.10774), verified exactly by rejection sampling.

Head i predicts the token i positions after the newest one, without seeing the predictions in between. Acceptance is
exact, unless `Drafting.tolerance` enables the paper's typical acceptance.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stepspec.engines.torch_engine import sampling
from stepspec.engines.torch_engine.drafters.base import Draft, Drafter
from stepspec.engines.torch_engine.graphs import captured
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import DRAFT, Samplers
from stepspec.errors import ModelError, reason_of

FILE = "medusa/heads.safetensors"
"""Path in the model's folder. It is a subfolder because some loaders read every weights file next to the model's."""


class MedusaHeads(torch.nn.Module):
    """K heads with one residual block and one linear layer each, as in Medusa-1."""

    def __init__(self, num_heads: int, width: int, vocab_size: int) -> None:
        super().__init__()
        self.blocks = torch.nn.Parameter(torch.zeros(num_heads, width, width))
        self.heads = torch.nn.Parameter(torch.zeros(num_heads, vocab_size, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [.., K, V] from hidden states [.., W]."""
        inner = torch.einsum("...w,kvw->...kv", hidden, self.blocks)
        return torch.einsum("...kw,kvw->...kv", hidden[..., None, :] + torch.nn.functional.silu(inner), self.heads)


def load_heads(folder: Path, model: CausalModel) -> MedusaHeads | None:
    """Load the Medusa heads from a model's folder; None if there are none.

    Raises:
        ModelError: the file cannot be read, its shapes do not match the model, or its values are not finite.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        weights = load_file(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"The Medusa heads in {file} cannot be read: {reason_of(error)}.") from error
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    width = model.network.config.get_text_config().hidden_size
    count = shapes.get("heads", (0,))[0] if shapes.get("heads") else 0
    if count < 1 or shapes != {"heads": (count, model.vocab_size, width), "blocks": (count, width, width)}:
        raise ModelError(
            f"The Medusa heads in {file} have shapes {shapes}. The model needs 'heads' of shape "
            f"(K, {model.vocab_size}, {width}) and 'blocks' of shape (K, {width}, {width}), with K at least 1."
        )
    if not all(weight.is_floating_point() and weight.isfinite().all() for weight in weights.values()):
        raise ModelError(f"The Medusa heads in {file} must be finite floating-point numbers.")
    heads = MedusaHeads(count, width, model.vocab_size)
    heads.load_state_dict(weights)
    return heads.to(model.device, model.network.dtype)


class Medusa(Drafter):
    """A drafter of Medusa heads. It stores the hidden state that each row's newest token was sampled from."""

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads
        self._hidden: dict[BatchRow, Tensor] = {}
        self._guess = captured(guess, heads.blocks.device)

    def propose(self, rows: Sequence[BatchRow], counts: Sequence[int], how: Samplers) -> Draft | None:
        """See `Drafter.propose`. A row gets no draft until `observe` has received a hidden state for it."""
        num_heads = len(self._heads.blocks)
        counts = [min(count, num_heads) if row in self._hidden else 0 for row, count in zip(rows, counts, strict=True)]
        if not any(counts):
            return None
        zeros = self._heads.blocks.new_zeros(self._heads.blocks.shape[1])
        hidden = torch.stack([self._hidden.get(row, zeros) for row in rows])
        firsts = torch.tensor([row.length for row in rows]).to(hidden.device)
        tokens, distributions = self._guess(self._heads, hidden, firsts, max(counts), how)
        return Draft(tokens, counts, distributions, 1)

    def observe(self, rows: Sequence[BatchRow], hidden: Tensor) -> None:
        """See `Drafter.observe`."""
        self._hidden.update(zip(rows, hidden.clone(), strict=False))  # a captured round overwrites `hidden`

    def release(self, row: BatchRow) -> None:
        """See `Drafter.release`."""
        self._hidden.pop(row, None)


def guess(
    heads: MedusaHeads, hidden: Tensor, firsts: Tensor, num_tokens: int, how: Samplers
) -> tuple[Tensor, Tensor | None]:
    """Return tokens [B, K] for positions from `firsts` [B] on, and their distributions; None if all rows are greedy."""
    logits = heads(hidden)[:, :num_tokens]  # [B, K, V]
    tokens = firsts.new_empty(len(firsts), 0)
    distributions: list[Tensor] = []
    for index in range(num_tokens):
        seen = sampling.seen_along(how, tokens)
        step_logits = sampling.edited(logits[:, index : index + 1], how, None if seen is None else seen.last())
        token, distribution = sampling.choose(step_logits, firsts[:, None] + index, how, DRAFT)
        tokens = torch.cat([tokens, token], 1)
        distributions.extend([] if distribution is None else [distribution])
    return tokens, torch.cat(distributions, 1) if distributions else None
