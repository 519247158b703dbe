"""What computes a model's hidden states over the slot cache: the model's own modules, or the same layers fused.

Fused, the layers of the Llama family (Llama, Mistral, Qwen2, Qwen3) take one product for queries, keys and values, one
for gate and up, and no module calls; rows are flat, [B * T, W], so that a product is a single operation, which adds a
residual besides. Of a Qwen3 with two layers of width 96 a token takes 0.29 ms in place of 0.74 on a CPU core. The
weights are the model's own: its parameters become views of the joined ones, so nothing is held twice but what
`stepspec.engines.torch_engine.matrix` holds twice on purpose.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import ModuleList
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from stepspec.engines.torch_engine.attention import attend_in_runs, packed_bias
from stepspec.engines.torch_engine.cache import SlotCache
from stepspec.engines.torch_engine.matrix import Matrix, packing_pays

FUSED = {"llama", "mistral", "qwen2", "qwen3"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # the others' frequencies depend on the length of the text


class Body(Protocol):
    """A model between its ids and its head."""

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache) -> Tensor:
        """Hidden states [B, T, W] of ids [B, T] at positions [B, T], read into the cache.

        `mask` is a bool [B, 1, T, S], true where a position is seen; None sees everything.
        """
        ...

    def first_layers(self, num_layers: int) -> "Body":
        """The same without its later layers."""
        ...


def make_body(network: PreTrainedModel) -> Body:
    """The network's layers, fused where that is known how."""
    return FusedBody(network) if is_fusible(network) else ModuleBody(network)


class ModuleBody:
    """The network's own modules."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._body: Any = network.base_model

    def first_layers(self, num_layers: int) -> "ModuleBody":
        """The same without its later layers."""
        short = copy.copy(self)
        short._body = _shortened(self._body, num_layers)
        return short

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache) -> Tensor:
        return self._body(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).last_hidden_state


def sharing_weights(network: PreTrainedModel) -> PreTrainedModel:
    """A copy over the same weights, with a configuration of its own."""
    return copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})


def _shortened(body: Any, num_layers: int) -> Any:
    """The same modules without the later layers."""
    short = copy.copy(body)
    depth = body.config.num_hidden_layers
    layers = {name: part for name, part in body.named_children() if isinstance(part, ModuleList) and len(part) == depth}
    short._modules = body._modules | {name: part[:num_layers] for name, part in layers.items()}
    short.config = copy.copy(body.config)
    short.config.num_hidden_layers = num_layers
    return short


def make_head(network: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """From hidden states [.., W] to logits [.., V]: where layers are fused the last product and nothing else."""
    return FusedHead(network) if is_fusible(network) else Head(network)


class FusedHead:
    """The last product."""

    def __init__(self, network: PreTrainedModel) -> None:
        head: Any = network.get_output_embeddings()
        self._matrix = Matrix(head.weight.detach().T, head.bias, packed=packing_pays(head.weight, _size(network)))

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._matrix.product(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


class PartialHead:
    """Logits of some ids; those of all others are -inf, so that a draw never takes them.

    Args:
        network: its head's rows are copied, if it is a product alone, so that a pass reads no others.
        ids: [N].
    """

    def __init__(self, network: PreTrainedModel, ids: Tensor) -> None:
        head: Any = network.get_output_embeddings()
        self._ids = ids
        self._vocab_size = len(head.weight)
        self._whole, self._matrix = None, None
        if is_fusible(network):
            weight = head.weight.detach()[self._ids]
            bias = None if head.bias is None else head.bias.detach()[self._ids]
            self._matrix = Matrix(weight.T, bias, packed=packing_pays(weight, _size(network)))
        else:
            self._whole = Head(network)

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        if self._matrix is not None:
            some = self._matrix.product(rows)
        else:
            assert self._whole is not None
            some = self._whole(rows[None])[0].index_select(-1, self._ids)
        logits = some.new_full((len(rows), self._vocab_size), -torch.inf).index_copy_(1, self._ids, some)
        return logits.unflatten(0, hidden.shape[:-1])


class Head:
    """What the network makes of hidden states [.., W]: logits [.., V], with whatever comes after the last product."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._headed = copy.copy(network)
        self._headed._modules = network._modules | {network.base_model_prefix: _Given(network.base_model)}

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._headed(inputs_embeds=hidden).logits


class _Given(torch.nn.Module):
    """A body that has already been run; so has the decoder inside it, which some networks call by itself."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        for name, part in body.named_children():
            if isinstance(part, PreTrainedModel):
                self.add_module(name, _Given(part))

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> "_HiddenStates":
        return _HiddenStates(last_hidden_state=inputs_embeds)


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """Hidden states alone. Whatever else bodies of some family give, router logits for one, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def is_fusible(network: PreTrainedModel) -> bool:
    """Whether the network is one that `FusedBody` computes; that it does is checked when the model is loaded."""
    text = network.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return (
        text.model_type in FUSED
        and type(network).__module__.startswith("transformers.")
        and text.hidden_act == "silu"
        and rope.get("rope_type") in STATIC_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer, those of parallel products joined."""

    attention_norm: Tensor  # [W]
    qkv: Matrix  # [W, (H + 2 H_kv) D]
    qk_norm: Tensor | None  # [H + H_kv, D]
    out: Matrix  # [H D, W]
    mlp_norm: Tensor  # [W]
    gate_up: Matrix  # [W, 2 F]
    down: Matrix  # [F, W]


class FusedBody:
    """The layers of the Llama family, fused."""

    def __init__(self, network: PreTrainedModel) -> None:
        body: Any = network.base_model
        config = body.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._rms_norm = RmsNorm(config.rms_norm_eps, network.device)
        self._embedding = body.embed_tokens.weight
        self._frequencies = body.rotary_emb.inv_freq.float().repeat(2)
        self._scale = body.rotary_emb.attention_scaling
        self._signs = self._scale * torch.ones_like(self._frequencies)
        self._signs[: self._size // 2].neg_()
        packed = packing_pays(self._embedding, _size(network))
        self._layers = [self._fused(layer, packed) for layer in body.layers]
        self._norm = body.norm.weight
        self._attend = attend_in_runs

    def first_layers(self, num_layers: int) -> "FusedBody":
        """The same without its later layers."""
        short = copy.copy(self)
        short._layers = self._layers[:num_layers]
        return short

    def _fused(self, layer: Any, packed: bool) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qk_norm = None
        if hasattr(attention, "q_norm"):
            weights = (
                attention.q_norm.weight.expand(self._heads, -1),
                attention.k_norm.weight.expand(self._kv_heads, -1),
            )
            qk_norm = torch.cat(weights)
        return _Layer(
            attention_norm=layer.input_layernorm.weight,
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj, packed=packed),
            qk_norm=qk_norm,
            out=_joined(attention.o_proj, packed=packed),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_joined(mlp.gate_proj, mlp.up_proj, packed=packed),
            down=_joined(mlp.down_proj, packed=packed),
        )

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache) -> Tensor:
        batch, length = ids.shape
        heads, num_qk, normed = self._heads, self._heads + self._kv_heads, self._rms_norm
        cosine, sine = self._rotation(positions)
        bias = packed_bias(mask, heads // self._kv_heads, self._embedding.dtype)
        x = self._embedding[ids.flatten()]  # [B * T, W]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.product(normed(x, layer.attention_norm)).view(batch, length, -1, self._size)
            qk = qkv[:, :, :num_qk]
            if layer.qk_norm is not None:
                qk = normed(qk, layer.qk_norm)
            qk = torch.addcmul(qk * cosine, qk.roll(self._size // 2, -1), sine)
            q, k, v = (each.transpose(1, 2) for each in (qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, num_qk:]))
            keys, values = cache.update(k, v, index)
            attended = self._attend(q, keys, values, bias, cache.runs).reshape(len(x), -1)
            layer.out.add_product(x, attended)
            gate, up = layer.gate_up.product(normed(x, layer.mlp_norm)).chunk(2, -1)
            layer.down.add_product(x, silu(gate).mul_(up))
        return normed(x, self._norm).view(batch, length, -1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, the first half of the sines negative, [B, T, 1, D] each (arXiv:2104.09864)."""
        angles = positions[..., None, None] * self._frequencies
        return (angles.cos() * self._scale).to(self._norm.dtype), (angles.sin() * self._signs).to(self._norm.dtype)


class RmsNorm:
    """Root mean square normalisation of the last dimension (arXiv:1910.07467)."""

    def __init__(self, epsilon: float, device: torch.device) -> None:
        self._epsilon = epsilon
        self._epsilons = torch.tensor(epsilon, device=device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            if weight.ndim == 1:
                return rms_norm(x, weight.shape, weight, self._epsilon)
            return rms_norm(x, x.shape[-1:], None, self._epsilon) * weight
        # Half of the operations that torch's own takes on a CPU, which are too small to take longer than their launch.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._epsilons, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)


def _size(network: PreTrainedModel) -> int:
    """Its parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def _joined(*products: torch.nn.Linear, packed: bool) -> Matrix:
    """The products' weights side by side, and their biases; the products keep views of them."""
    names = ["weight"] if products[0].bias is None else ["weight", "bias"]
    joined: dict[str, Tensor] = {}
    for name in names:
        parameters = [getattr(product, name) for product in products]
        joined[name] = torch.cat([parameter.detach() for parameter in parameters])
        # Transposed, a product over several rows takes down to half the time there, and one over a single row as long.
        if name == "weight" and joined[name].device.type == "cpu" and joined[name].dtype == torch.float32:
            joined[name] = joined[name].T.contiguous().T
        for parameter, part in zip(parameters, joined[name].split([len(each) for each in parameters]), strict=True):
            parameter.data = part
    return Matrix(joined["weight"].T, joined.get("bias"), packed=packed)
