"""Hidden states of a model over the slot cache, from the model's own modules or from fused layers.

Fused layers exist for the Llama family: Llama, Mistral, Qwen2, Qwen3. They use one product for queries, keys and
values, one for gate and up, and no module calls. Rows are flat, [B * T, W], so a product is a single operation that
also adds the residual. A token of a Qwen3 with two layers of width 96 takes 0.29 ms on a CPU core, instead of 0.74 ms.

Fused layers share the model's weights: its parameters become views of the joined weights. Only the packed weights of
`stepspec.engines.torch_engine.matrix` are stored twice.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # other types change their frequencies with the text's length


class Body(Protocol):
    """A model without its head: from ids to hidden states."""

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache) -> Tensor:
        """Read ids into the cache and return their hidden states.

        Args:
            ids: [B, T].
            positions: position ids of the ids, [B, T].
            mask: bool [B, 1, T, S], true where a position is visible; None makes all visible.
            cache: the cache, after `SlotCache.begin`.

        Returns:
            Hidden states [B, T, W].
        """
        ...

    def first_layers(self, num_layers: int) -> "Body":
        """Return the same body with only its first `num_layers` layers."""
        ...


def make_body(network: PreTrainedModel) -> Body:
    """Return the network's layers, fused if `is_fusible` allows it."""
    return FusedBody(network) if is_fusible(network) else ModuleBody(network)


class ModuleBody:
    """The network's own modules."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._body: Any = network.base_model

    def first_layers(self, num_layers: int) -> "ModuleBody":
        """Return the same body with only its first `num_layers` layers."""
        short = copy.copy(self)
        short._body = _shortened(self._body, num_layers)
        return short

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: SlotCache) -> Tensor:
        return self._body(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        ).last_hidden_state


def sharing_weights(network: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the network that shares its weights but has its own configuration."""
    return copy.deepcopy(network, {id(parameter): parameter for parameter in network.parameters()})


def _shortened(body: Any, num_layers: int) -> Any:
    """Return a copy of the modules with only their first `num_layers` layers."""
    short = copy.copy(body)
    depth = body.config.num_hidden_layers
    layers = {name: part for name, part in body.named_children() if isinstance(part, ModuleList) and len(part) == depth}
    short._modules = body._modules | {name: part[:num_layers] for name, part in layers.items()}
    short.config = copy.copy(body.config)
    short.config.num_hidden_layers = num_layers
    return short


def make_head(network: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a function from hidden states [.., W] to logits [.., V]; for fused layers it is the last product alone."""
    return FusedHead(network) if is_fusible(network) else Head(network)


class FusedHead:
    """The output projection of a network with fused layers."""

    def __init__(self, network: PreTrainedModel) -> None:
        head: Any = network.get_output_embeddings()
        self._matrix = Matrix(head.weight.detach().T, head.bias, packed=packing_pays(head.weight, _size(network)))

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._matrix.product(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


class PartialHead:
    """Logits of a draft vocabulary. All other ids get -inf, so they are never sampled.

    Args:
        network: if its head is a product alone, the head's rows for `ids` are copied, so a pass reads only those.
        ids: ids of the draft vocabulary, [N].
    """

    def __init__(self, network: PreTrainedModel, ids: Tensor) -> None:
        head: Any = network.get_output_embeddings()
        self.ids = ids
        self._vocab_size = len(head.weight)
        self._full_head, self._matrix = None, None
        if is_fusible(network):
            weight = head.weight.detach()[self.ids]
            bias = None if head.bias is None else head.bias.detach()[self.ids]
            self._matrix = Matrix(weight.T, bias, packed=packing_pays(weight, _size(network)))
        else:
            self._full_head = Head(network)

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = self.scored(hidden).flatten(0, -2)
        logits = rows.new_full((len(rows), self._vocab_size), -torch.inf).index_copy_(1, self.ids, rows)
        return logits.unflatten(0, hidden.shape[:-1])

    def scored(self, hidden: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary alone, from hidden states [.., W] to [.., N]."""
        rows = hidden.flatten(0, -2)
        if self._matrix is not None:
            subset = self._matrix.product(rows)
        else:
            assert self._full_head is not None
            subset = self._full_head(rows[None])[0].index_select(-1, self.ids)
        return subset.unflatten(0, hidden.shape[:-1])

    def named(self, places: Tensor) -> Tensor:
        """Return the ids at these places of the draft vocabulary."""
        return self.ids[places]


class Head:
    """The network's own head, from hidden states [.., W] to logits [.., V], with all that follows the last product."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._headed = copy.copy(network)
        self._headed._modules = network._modules | {network.base_model_prefix: _PassThrough(network.base_model)}

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._headed(inputs_embeds=hidden).logits


class _PassThrough(torch.nn.Module):
    """A body that returns its `inputs_embeds` as hidden states.

    The decoder inside a body is replaced too, because some networks call it directly.
    """

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        for name, part in body.named_children():
            if isinstance(part, PreTrainedModel):
                self.add_module(name, _PassThrough(part))

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> "_HiddenStates":
        return _HiddenStates(last_hidden_state=inputs_embeds)


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """A body's output with hidden states only. Every other attribute, such as router logits, is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def is_fusible(network: PreTrainedModel) -> bool:
    """Return whether `FusedBody` supports the network. Loading the model checks that the logits agree."""
    text = network.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    return (
        text.model_type in FUSED
        and type(network).__module__.startswith("transformers.")
        and text.hidden_act == "silu"
        and rope.get("rope_type") in STATIC_ROPE
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


class RaggedRow(NamedTuple):
    """A row of a pass without padding.

    Attributes:
        slot: its slot in the cache.
        start: position of its first id.
        length: number of its ids, T.
        mask: bool [1, 1, T, S], true where a position is visible; None makes all visible.
    """

    slot: int
    start: int
    length: int
    mask: Tensor | None


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer; parallel products have joined weights."""

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
        """Return the same body with only its first `num_layers` layers."""
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
        bias = self._bias(mask)

        def attend(q: Tensor, k: Tensor, v: Tensor, index: int) -> Tensor:
            keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
            return self._attend(q.transpose(1, 2), keys, values, bias, cache.runs)

        return self._read(ids, positions, attend)

    def ragged(self, ids: Tensor, positions: Tensor, rows: Sequence[RaggedRow], cache: SlotCache) -> Tensor:
        """Read rows of different lengths without padding. Call `SlotCache.reserve` before.

        Args:
            ids: the ids of all rows, one row after the other, [1, N].
            positions: their position ids, [1, N].
            rows: the rows.
            cache: the cache.

        Returns:
            Hidden states [1, N, W].
        """
        biases = [self._bias(row.mask) for row in rows]
        lengths = [row.length for row in rows]

        def attend(q: Tensor, k: Tensor, v: Tensor, index: int) -> Tensor:
            parts: list[Tensor] = []
            split = zip(*(each.transpose(1, 2).split(lengths, 2) for each in (q, k, v)), strict=True)
            for row, bias, (query, new_keys, new_values) in zip(rows, biases, split, strict=True):
                keys, values = cache.update_row(new_keys, new_values, index, row.slot, row.start)
                parts.append(self._attend(query, keys, values, bias, ()))
            return torch.cat(parts, 1)

        return self._read(ids, positions, attend)

    def _bias(self, mask: Tensor | None) -> Tensor | None:
        return packed_bias(mask, self._heads // self._kv_heads, self._embedding.dtype)

    def _read(self, ids: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Tensor:
        """Return the hidden states of ids [B, T], as [B, T, W].

        `attend` takes queries [B, T, H, D], keys and values [B, T, H_kv, D] and the layer's number, and returns what
        the queries attend to, [B, T, H, D].
        """
        batch, length = ids.shape
        heads, num_qk, normed = self._heads, self._heads + self._kv_heads, self._rms_norm
        cosine, sine = self._rotation(positions)
        x = self._embedding[ids.flatten()]  # [B * T, W]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.product(normed(x, layer.attention_norm)).view(batch, length, -1, self._size)
            qk = qkv[:, :, :num_qk]
            if layer.qk_norm is not None:
                qk = normed(qk, layer.qk_norm)
            qk = torch.addcmul(qk * cosine, qk.roll(self._size // 2, -1), sine)
            attended = attend(qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, num_qk:], index)
            layer.out.add_product(x, attended.reshape(len(x), -1))
            gate, up = layer.gate_up.product(normed(x, layer.mlp_norm)).chunk(2, -1)
            layer.down.add_product(x, silu(gate).mul_(up))
        return normed(x, self._norm).view(batch, length, -1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [B, T, 1, D] each; the first half of the sines is negated (arXiv:2104.09864)."""
        angles = positions[..., None, None] * self._frequencies
        return (angles.cos() * self._scale).to(self._norm.dtype), (angles.sin() * self._signs).to(self._norm.dtype)


class RmsNorm:
    """Root mean square normalization of the last dimension (arXiv:1910.07467)."""

    def __init__(self, epsilon: float, device: torch.device) -> None:
        self._epsilon = epsilon
        self._epsilons = torch.tensor(epsilon, device=device)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            if weight.ndim == 1:
                return rms_norm(x, weight.shape, weight, self._epsilon)
            return rms_norm(x, x.shape[-1:], None, self._epsilon) * weight
        # Half the operations of torch's rms_norm on a CPU: at these sizes each operation costs its launch.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * torch.addcmul(self._epsilons, norm, norm, value=1 / x.shape[-1]).rsqrt_()).mul_(weight)


def _size(network: PreTrainedModel) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def _joined(*products: torch.nn.Linear, packed: bool) -> Matrix:
    """Join the weights and the biases of several products into one matrix; the products keep views of it."""
    names = ["weight"] if products[0].bias is None else ["weight", "bias"]
    joined: dict[str, Tensor] = {}
    for name in names:
        parameters = [getattr(product, name) for product in products]
        joined[name] = torch.cat([parameter.detach() for parameter in parameters])
        # On a CPU, a transposed weight cuts the time of a product by up to half; a single row takes as long as before.
        if name == "weight" and joined[name].device.type == "cpu" and joined[name].dtype == torch.float32:
            joined[name] = joined[name].T.contiguous().T
        for parameter, part in zip(parameters, joined[name].split([len(each) for each in parameters]), strict=True):
            parameter.data = part
    return Matrix(joined["weight"].T, joined.get("bias"), packed=packed)
