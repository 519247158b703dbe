"""The PyTorch engine: Hugging Face models, a slot cache, token-level speculation. Full-attention models only."""

from stepspec.base.extras import from_extra

with from_extra("torch", "The torch engine"):
    from stepspec.engines.torch_engine.engine import TorchEngine

__all__ = ["TorchEngine"]
