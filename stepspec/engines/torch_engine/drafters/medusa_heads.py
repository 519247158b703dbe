"""Medusa heads and their file."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stepspec.engines.torch_engine.model import CausalModel
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
    return heads.to(model.device, model.dtype)
