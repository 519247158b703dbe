"""The adapter of the pair `smol`, and the forward pass that trains it on a CPU.

Each projection of a layer gets a product of two low-rank matrices (arXiv:2106.09685). Query, key and value share one
product, and so do gate and up, because one product is faster than three. The embedding rows of the two think tags are
trained too. Activations are `COMPUTE_DTYPE` and the residual stream is float32. Base weights have no gradients.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stepspec.mini.forward import COMPUTE_DTYPE, Attend, Gate, Norm, Rotate, rotation

HEAD_BLOCK = 512
"""Number of tokens whose logits are in memory at the same time."""

PROJECTIONS = ("qkv", "o", "gate_up", "down")


class Adapter(torch.nn.Module):
    """The trained weights: `down` [rank, in] and `up` [out, rank] for each layer and projection, and the tags' rows.

    Args:
        model: the base, a `LlamaForCausalLM`.
        rank: the rank of the products.
        tag_ids: ids of the tokens whose embedding rows are trained.
    """

    def __init__(self, model: Any, rank: int, tag_ids: Sequence[int]) -> None:
        super().__init__()
        self.tag_ids = list(tag_ids)
        self.tags = torch.nn.Parameter(model.model.embed_tokens.weight[self.tag_ids].detach().float().clone())
        self.downs, self.ups = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for index, layer in enumerate(model.model.layers):
            for name, weights in projections(layer).items():
                out, inside = sum(len(weight) for weight in weights), weights[0].shape[1]
                down = torch.empty(rank, inside)
                torch.nn.init.kaiming_uniform_(down, a=5**0.5)
                self.downs[f"{index}_{name}"] = torch.nn.Parameter(down)
                self.ups[f"{index}_{name}"] = torch.nn.Parameter(torch.zeros(out, rank))

    @torch.no_grad()
    def merge_into(self, model: Any) -> None:
        """Add the products to the base's weights and set the tags' rows."""
        for index, layer in enumerate(model.model.layers):
            for name, weights in projections(layer).items():
                change = self.ups[f"{index}_{name}"] @ self.downs[f"{index}_{name}"]
                for weight, part in zip(weights, change.split([len(weight) for weight in weights]), strict=True):
                    weight.add_(part.to(weight.dtype))
        model.model.embed_tokens.weight[self.tag_ids] = self.tags.to(model.model.embed_tokens.weight.dtype)

    def save(self, path: Path) -> None:
        """Write a file that `merge_file` reads.

        A product is a sum of outer products. The two vectors of each are stored in 8 bits with a scale.
        """
        tensors = {"tags": self.tags.detach().to(torch.bfloat16)}
        for name in self.downs:
            for side, rows in (("down", self.downs[name]), ("up", self.ups[name].t())):
                scale = rows.detach().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                tensors[f"{name}.{side}"] = (rows.detach() / scale).round().to(torch.int8).contiguous()
                tensors[f"{name}.{side}.scale"] = scale
        save_file(tensors, path)


def merge_file(path: Path, model: Any, tag_ids: Sequence[int]) -> None:
    """Merge a saved adapter into a model.

    Args:
        path: the adapter file.
        model: a `LlamaForCausalLM`. Its weights are changed in place.
        tag_ids: ids of the tokens whose embedding rows were trained.
    """
    tensors = load_file(path)
    adapter = Adapter(model, len(tensors["0_qkv.down"]), tag_ids)
    with torch.no_grad():
        adapter.tags.copy_(tensors["tags"])
        for name in adapter.downs:
            down, up = (tensors[f"{name}.{side}"] * tensors[f"{name}.{side}.scale"] for side in ("down", "up"))
            adapter.downs[name].copy_(down)
            adapter.ups[name].copy_(up.t())
    adapter.merge_into(model)


def projections(layer: Any) -> dict[str, list[Tensor]]:
    """Return the weights of a layer by projection."""
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
        "o": [attention.o_proj.weight],
        "gate_up": [mlp.gate_proj.weight, mlp.up_proj.weight],
        "down": [mlp.down_proj.weight],
    }


class Trunk:
    """The base's weights in `COMPUTE_DTYPE`, arranged for the forward pass, and the adapter."""

    def __init__(self, model: Any, adapter: Adapter) -> None:
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, self.epsilon = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
        self.theta = config.rope_parameters["rope_theta"]
        self.adapter = adapter
        self.weights = [
            {name: torch.cat(weights).detach().to(COMPUTE_DTYPE) for name, weights in projections(layer).items()}
            for layer in model.model.layers
        ]
        self.norms = [
            (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach())
            for layer in model.model.layers
        ]
        self.last_norm = model.model.norm.weight.detach()
        self.embedding = model.model.embed_tokens.weight.detach().to(COMPUTE_DTYPE)

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the input of the output head, [B, T, width].

        Args:
            ids: token ids, [B, T].
            positions: position ids, [B, T].
            mask: additive attention mask, [B, 1, T, T]. It must be causal.
        """
        batch, length = ids.shape
        heads, kv_heads, size = self.heads, self.kv_heads, self.size
        cosine, sine = rotation(positions, size, self.theta)
        x = self._embedded(ids).view(batch * length, -1)
        mask = mask.to(COMPUTE_DTYPE)[:, :, None]
        for index, (first, second) in enumerate(self.norms):
            h = Norm.apply(x, first, self.epsilon)
            qkv = self._project(index, "qkv", h).view(batch, length, heads + 2 * kv_heads, size)
            qk, v = qkv.split([heads + kv_heads, kv_heads], 2)
            q, k = Rotate.apply(qk, cosine, sine).split([heads, kv_heads], 2)
            q = (q * size**-0.5).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
            q = q.reshape(batch * kv_heads, -1, length, size)
            k, v = (each.transpose(1, 2).reshape(batch * kv_heads, length, size) for each in (k, v))
            o = Attend.apply(q, k, v, mask).view(batch, kv_heads, -1, length, size)
            x = x + self._project(index, "o", o.permute(0, 3, 1, 2, 4).reshape(batch * length, heads * size))
            h = Norm.apply(x, second, self.epsilon)
            gates, ups = self._project(index, "gate_up", h).chunk(2, -1)
            x = x + self._project(index, "down", Gate.apply(gates, ups))
        return Norm.apply(x, self.last_norm, self.epsilon).view(batch, length, -1)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy of targets [N] after hidden states [N, width]."""
        losses = [
            _HeadLoss.apply(part, self.adapter.tags, self.embedding, self.adapter.tag_ids, wanted)
            for part, wanted in zip(hidden.split(HEAD_BLOCK), targets.split(HEAD_BLOCK), strict=True)
        ]
        return torch.stack(losses).sum()

    def _embedded(self, ids: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, self.embedding).float()
        for row, id in enumerate(self.adapter.tag_ids):
            x = torch.where((ids == id)[..., None], self.adapter.tags[row], x)
        return x

    def _project(self, index: int, name: str, h: Tensor) -> Tensor:
        down, up = self.adapter.downs[f"{index}_{name}"], self.adapter.ups[f"{index}_{name}"]
        down, up = down.to(COMPUTE_DTYPE).t(), up.to(COMPUTE_DTYPE).t()
        return torch.addmm(h @ self.weights[index][name].t(), h @ down, up)


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy over an embedding where only a few rows are trained and have gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, tags: Tensor, embedding: Tensor, tag_ids: list[int], targets: Tensor
    ) -> Tensor:
        logits = (hidden @ embedding.t()).float()
        logits[:, tag_ids] = (hidden @ tags.to(COMPUTE_DTYPE).t()).float()
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        grad = logits.softmax(-1)
        grad[torch.arange(len(targets)), targets] -= 1
        low = grad.to(COMPUTE_DTYPE)
        tag_grad = low[:, tag_ids]
        low[:, tag_ids] = 0
        ctx.save_for_backward(low @ embedding + tag_grad @ tags.to(COMPUTE_DTYPE), tag_grad.t() @ hidden)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, tags = ctx.saved_tensors
        return hidden * grad.to(COMPUTE_DTYPE), tags.float() * grad, None, None, None
