"""Llama forward pass for training on a CPU, in 0.7 times the time of the model's own pass under bfloat16 autocast.

Activations are `COMPUTE_DTYPE` and the residual stream is float32. Norm, rotation, gate and attention have custom
backward passes that save only the tensors they need. Attention processes queries in blocks and skips the keys that are
masked for a complete block. Gradients are as close to float32 gradients as those of autocast
(`tests/mini/test_forward.py`).
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCKS = 4
COMPUTE_DTYPE = torch.bfloat16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else torch.float32
"""Type of activations. Without AVX-512, products in bfloat16 take several times as long as in float32."""


class Read(NamedTuple):
    """The outputs of a forward pass."""

    hidden: Tensor  # input of the output head, [B, T, width]
    scores: dict[int, Tensor]  # scores of the first attention head by watched layer, [B, T, T] in float32
    tapped: dict[int, Tensor]  # normalized residual stream by tapped layer, [B, T, width] in float32


def forward_hidden(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor,
    watched: Collection[int],
    tapped: Collection[int],
) -> Read:
    """Run sequences through a `LlamaForCausalLM`, with gradients for its parameters.

    Args:
        model: the model, with float32 parameters.
        ids: token ids, [B, T].
        positions: position ids, [B, T].
        mask: additive attention mask, [B, 1, T, T]. It must be causal.
        watched: indices of the layers whose attention scores are returned.
        tapped: indices of the layers whose output residual stream is returned.
    """
    config = model.config
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    batch, length = ids.shape
    epsilon = config.rms_norm_eps
    cosine, sine = rotation(positions, size, config.rope_parameters["rope_theta"])
    x = torch.nn.functional.embedding(ids, model.model.embed_tokens.weight).view(batch * length, -1)
    mask = mask.to(COMPUTE_DTYPE)[:, :, None]
    scores: dict[int, Tensor] = {}
    taps: dict[int, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        h = Norm.apply(x, layer.input_layernorm.weight, epsilon)
        scaled = attention.q_proj.weight * size**-0.5
        weight = torch.cat([scaled, attention.k_proj.weight, attention.v_proj.weight]).to(COMPUTE_DTYPE)
        qkv = (h @ weight.t()).view(batch, length, heads + 2 * kv_heads, size)
        qk, v = qkv.split([heads + kv_heads, kv_heads], 2)
        q, k = Rotate.apply(qk, cosine, sine).split([heads, kv_heads], 2)
        q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, length, size)
        k, v = (each.transpose(1, 2).reshape(batch * kv_heads, length, size) for each in (k, v))
        if index in watched:
            first_q, first_k = q.unflatten(0, (batch, -1))[:, 0, 0], k.unflatten(0, (batch, -1))[:, 0]
            scores[index] = torch.bmm(first_q, first_k.transpose(1, 2)).float() + mask[:, 0, 0]
        o = Attend.apply(q, k, v, mask).view(batch, kv_heads, -1, length, size)
        o = o.permute(0, 3, 1, 2, 4).reshape(batch * length, heads * size)
        x = x + o @ attention.o_proj.weight.to(COMPUTE_DTYPE).t()
        h = Norm.apply(x, layer.post_attention_layernorm.weight, epsilon)
        gate, up = (h @ each.weight.to(COMPUTE_DTYPE).t() for each in (mlp.gate_proj, mlp.up_proj))
        x = x + Gate.apply(gate, up) @ mlp.down_proj.weight.to(COMPUTE_DTYPE).t()
        if index in tapped:
            taps[index] = torch.nn.functional.rms_norm(x, x.shape[-1:]).view(batch, length, -1)
    return Read(Norm.apply(x, model.model.norm.weight, epsilon).view(batch, length, -1), scores, taps)


def rotation(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of the rotary embedding, [B, T, 1, size] each."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size)
    angles = (positions[..., None].float() * frequencies)[:, :, None]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([cosine, cosine], -1).to(COMPUTE_DTYPE), torch.cat([-sine, sine], -1).to(COMPUTE_DTYPE)


class Norm(torch.autograd.Function):
    """RMSNorm of x [N, W] in float32, with output in `COMPUTE_DTYPE`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(COMPUTE_DTYPE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        grad = grad.float()
        along = grad * normed
        mean = torch.mv(along, weight).div_(x.shape[-1])[:, None]
        return grad.mul_(weight).sub_(normed.mul_(mean)).mul_(scale), along.sum(0), None


class Gate(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        activated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate, up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, activated = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * activated


class Rotate(torch.autograd.Function):
    """Rotary embedding of x [B, T, H, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return torch.addcmul(grad * cosine, grad.roll(grad.shape[-1] // 2, -1), -sine), None, None


class Attend(torch.autograd.Function):
    """Attention of scaled queries [B * K, G, T, D] to keys and values [B * K, T, D] under a mask [B, 1, 1, T, T]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        rows, groups, length, size = q.shape
        batch = mask.shape[0]
        ctx.step = -(-length // BLOCKS)
        output, keys, saved = torch.empty_like(q), k.transpose(1, 2), []
        for start in range(0, length, ctx.step):
            end = min(length, start + ctx.step)
            block = q[:, :, start:end].reshape(rows, -1, size)
            scores = torch.bmm(block, keys[:, :, :end]).view(batch, -1, groups, end - start, end)
            probs = scores.add_(mask[:, :, :, start:end, :end]).softmax(-1).view(rows, -1, end)
            output[:, :, start:end] = torch.bmm(probs, v[:, :end]).view(rows, groups, -1, size)
            saved.append(probs)
        ctx.save_for_backward(q, k, v, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors
        rows, groups, length, size = q.shape
        q_grad = torch.empty_like(q)
        k_grad, v_grad = (torch.zeros(k.shape, device=k.device) for _ in range(2))
        values = v.transpose(1, 2)
        for start, probs in zip(range(0, length, ctx.step), saved, strict=True):
            end = min(length, start + ctx.step)
            incoming, block = (each[:, :, start:end].reshape(rows, -1, size) for each in (grad, q))
            probs_grad = torch.bmm(incoming, values[:, :, :end])
            score_grad = torch._softmax_backward_data(probs_grad, probs, -1, COMPUTE_DTYPE)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            v_grad[:, :end] += torch.bmm(probs.transpose(1, 2), incoming)
            k_grad[:, :end] += torch.bmm(score_grad.transpose(1, 2), block)
            q_grad[:, :, start:end] = torch.bmm(score_grad, k[:, :end]).view(rows, groups, -1, size)
        return q_grad, k_grad.to(COMPUTE_DTYPE), v_grad.to(COMPUTE_DTYPE), None
