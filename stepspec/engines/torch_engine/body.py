"""Hidden states of a model over the slot cache, from the model's own modules or from fused layers.

Fused layers exist for the Llama family: Llama, Mistral, Qwen2, Qwen3. They use one product for queries, keys and
values, one for gate and up, and no module calls. Rows are flat, [B * T, W], so a product is a single operation that
also adds the residual. A token of a Qwen3 with two layers of width 96 takes 0.29 ms on a CPU core, instead of 0.74 ms.

Fused layers share the model's weights: its parameters become views of the joined weights. `store_as` stores the weights
in another layout of `stepspec.engines.torch_engine.matrix`, and frees the parameters that are not used any more.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from stepspec.engines.torch_engine.attention import (
    Masks,
    SlotAttention,
    attend_in_runs,
    packed_bias,
)
from stepspec.engines.torch_engine.cache import SlotCache
from stepspec.engines.torch_engine.matrix import Layout, Matrix, PlainMatrix, stored_as

FUSED = {"llama", "mistral", "qwen2", "qwen3"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # other types change their frequencies with the text's length

PRODUCTS: Mapping[str, Sequence[str]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a fused layer, and the modules whose weights they join."""

MULTIPLE = 8
"""Quantized models attend with multiples of so many rows. With a rest of up to five rows, matrix products round
differently, which quantization amplifies."""


class ModelBody(Protocol):
    """A model without its head: from ids to hidden states."""

    attend_in_slots: SlotAttention | None
    """What reads the cache in passes with `Masks.rows`; None if there can be none."""

    def __call__(self, ids: Tensor, positions: Tensor, masks: Masks, cache: SlotCache) -> Tensor:
        """Read ids into the cache and return their hidden states.

        Args:
            ids: [B, T].
            positions: position ids of the ids, [B, T].
            masks: the visible positions.
            cache: the cache, after `SlotCache.begin`.

        Returns:
            Hidden states [B, T, W].
        """
        ...


def make_body(network: PreTrainedModel) -> ModelBody:
    """Return the network's layers, fused if `is_fusible` allows it."""
    if has_alibi(network):
        return AlibiBody(network)
    return FusedBody(network) if is_fusible(network) else ModuleBody(network)


def find_slot_attention(device: torch.device) -> SlotAttention | None:
    """Return the kernel that reads the cache by slot; None if there is none for a device."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from stepspec.engines.torch_engine.slot_attention import attend_in_slots

    return attend_in_slots


def has_alibi(network: PreTrainedModel) -> bool:
    """Return whether `AlibiBody` supports the network."""
    return network.config.model_type == "bloom"


class AlibiBody:
    """The layers of Bloom, which add a bias to the attention scores that grows with a key's position
    (arXiv:2108.12409). The network itself takes only biases for texts that begin at position 0."""

    def __init__(self, network: PreTrainedModel) -> None:
        body: Any = network.base_model
        self._embed: Callable[[Tensor], Tensor] = lambda ids: body.word_embeddings_layernorm(body.word_embeddings(ids))
        self.layers: Sequence[Any] = [*body.h]
        self._norm = body.ln_f
        self._slopes = alibi_slopes(network.config.n_head).to(network.device)
        self.attend_in_slots: SlotAttention | None = None

    def __call__(self, ids: Tensor, positions: Tensor, masks: Masks, cache: SlotCache) -> Tensor:
        assert masks.keys is not None
        hidden = self._embed(ids)
        alibi = (self._slopes[:, None] * masks.keys[:, None]).flatten(0, 1)[:, None].to(hidden.dtype)  # [B * H, 1, S]
        mask = None
        if masks.full is not None:
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros_like(masks.full, dtype=hidden.dtype).masked_fill_(~masks.full, lowest)
        for layer in self.layers:
            hidden = layer(hidden, alibi=alibi, attention_mask=mask, layer_past=cache, use_cache=True)[0]
        return self._norm(hidden)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head's bias, [H]: a geometric series for a power of 2, else completed by every second
    term of the next one (arXiv:2108.12409, section 3)."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * step / power) for step in range(1, power + 1)]
    further = [2.0 ** (-4 * step / power) for step in range(1, 2 * (num_heads - power) + 1, 2)]
    return torch.tensor([*slopes, *further])


class ModuleBody:
    """The network's own modules."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.modules: Any = network.base_model
        text: Any = network.config.get_text_config()
        self.attend_in_slots = find_slot_attention(network.device)
        self._window = window_of(text)
        self._by_type = "sliding_attention" in (getattr(text, "layer_types", None) or ())
        self._text = text

    def _window_of(self, layer: Any) -> int | None:
        """Return the window of an attention layer, from the configuration: some do not pass theirs on."""
        return self._window if self._window is not None and _slides(self._text, layer.layer_idx) else None

    def __call__(self, ids: Tensor, positions: Tensor, masks: Masks, cache: SlotCache) -> Tensor:
        mask: Any = masks.window if self._window is not None else masks.full
        if self._by_type:
            mask = {"full_attention": masks.full, "sliding_attention": masks.window}
        options = {} if masks.rows is None else {"slots": (masks.rows, self.attend_in_slots, self._window_of)}
        return self.modules(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True, **options
        ).last_hidden_state


def window_of(text: Any) -> int | None:
    """Return the window of a model's sliding layers, in tokens, from its text configuration; None if no layer slides.

    A position sees itself and the `window - 1` positions before it.
    """
    types, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    slides = "sliding_attention" in types if types else getattr(text, "use_sliding_window", True)
    return window if slides else None


def _slides(text: Any, index: int) -> bool:
    """Return whether a layer has a sliding window."""
    types = getattr(text, "layer_types", None)
    return window_of(text) is not None and (not types or types[index] == "sliding_attention")


def make_head(network: PreTrainedModel) -> "FusedHead | Head":
    """Return a function from hidden states [.., W] to logits [.., V]; for fused layers it is the last product alone."""
    return FusedHead(network) if is_fusible(network) else Head(network)


class FusedHead:
    """The output projection of a network with fused layers."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._linear: Any = network.get_output_embeddings()
        self._is_embedding = self._linear.weight is network.get_input_embeddings().weight
        self.matrix: Matrix = PlainMatrix(self._linear.weight.detach().T, self._linear.bias)

    def store_as(self, layout: Layout) -> None:
        """Store the weight in another layout, and free the plain one if nothing else reads it."""
        self.matrix = stored_as(layout, self.matrix)
        if not (self.matrix.holds_plain or self._is_embedding):
            _free(self._linear)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.matrix.product(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


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
        self._full_head = None if is_fusible(network) else Head(network)
        self.matrix: Matrix | None = None
        if self._full_head is None:
            bias = None if head.bias is None else head.bias.detach()[self.ids]
            self.matrix = PlainMatrix(head.weight.detach()[self.ids].T, bias)

    def store_as(self, layout: Layout) -> None:
        """Store the copied rows in another layout."""
        assert self.matrix is not None
        self.matrix = stored_as(layout, self.matrix)

    def __call__(self, hidden: Tensor) -> Tensor:
        rows = self.scored(hidden).flatten(0, -2)
        logits = rows.new_full((len(rows), self._vocab_size), -torch.inf).index_copy_(1, self.ids, rows)
        return logits.unflatten(0, hidden.shape[:-1])

    def scored(self, hidden: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary alone, from hidden states [.., W] to [.., N]."""
        rows = hidden.flatten(0, -2)
        if self.matrix is not None:
            subset = self.matrix.product(rows)
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
        span: positions that it reads, of which the masks hide some.
        masks: the visible positions.
    """

    slot: int
    start: int
    length: int
    span: int
    masks: Masks


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
    slides: bool
    """Whether it has a sliding window."""


class FusedBody:
    """The layers of the Llama family, fused."""

    def __init__(self, network: PreTrainedModel) -> None:
        body: Any = network.base_model
        config = body.config
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._rms_norm = RmsNorm(config.rms_norm_eps, network.device)
        self._embedding = body.embed_tokens.weight
        self._dtype = network.dtype
        self._frequencies = body.rotary_emb.inv_freq.float().repeat(2)
        self._scale = body.rotary_emb.attention_scaling
        self._signs = self._scale * torch.ones_like(self._frequencies)
        self._signs[: self.head_size // 2].neg_()
        self._modules = [*body.layers]
        self.layers = [self._fused(layer, slides=_slides(config, index)) for index, layer in enumerate(body.layers)]
        self._norm = body.norm.weight
        self._attend = attend_in_runs
        self._multiple = 1
        self._window = window_of(config)
        self.attend_in_slots = find_slot_attention(network.device)

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All weights that a pass multiplies with."""
        return (getattr(layer, name) for layer in self.layers for name in PRODUCTS)

    def store_as(self, layout: Layout) -> None:
        """Store the weights in another layout, layer by layer, and free the plain ones that are not used any more.

        Between quantized products, all operations are in float32.
        """
        if layout in ("int8", "int4"):
            self._dtype, self._multiple = torch.float32, MULTIPLE
        self._norm = self._norm.to(self._dtype)
        for index, (module, layer) in enumerate(zip(self._modules, self.layers, strict=True)):
            norms = ((name, getattr(layer, name)) for name in ("attention_norm", "qk_norm", "mlp_norm"))
            changes: dict[str, Any] = {name: norm if norm is None else norm.to(self._dtype) for name, norm in norms}
            for name, parts in PRODUCTS.items():
                changes[name] = stored_as(layout, getattr(layer, name))
                if not changes[name].holds_plain:
                    for part in parts:
                        _free(module.get_submodule(part))
            self.layers[index] = replace(layer, **changes)

    def _fused(self, layer: Any, *, slides: bool) -> _Layer:
        attention = layer.self_attn
        qk_norm = None
        if hasattr(attention, "q_norm"):
            weights = (
                attention.q_norm.weight.expand(self._heads, -1),
                attention.k_norm.weight.expand(self._kv_heads, -1),
            )
            qk_norm = torch.cat(weights)
        return _Layer(
            attention_norm=layer.input_layernorm.weight,
            qk_norm=qk_norm,
            mlp_norm=layer.post_attention_layernorm.weight,
            slides=slides,
            **{name: _joined(*map(layer.get_submodule, parts)) for name, parts in PRODUCTS.items()},
        )

    def __call__(self, ids: Tensor, positions: Tensor, masks: Masks, cache: SlotCache) -> Tensor:
        biases = self._biases(masks)

        def attend(q: Tensor, k: Tensor, v: Tensor, index: int) -> Tensor:
            keys, values = cache.update(k.transpose(1, 2), v.transpose(1, 2), index)
            if masks.rows is not None:
                assert self.attend_in_slots is not None
                window = self._window if self.layers[index].slides else None
                return self.attend_in_slots(q[0], keys, values, masks.rows, window=window)[None]
            bias = biases[self.layers[index].slides]
            return self._attend(q.transpose(1, 2), keys, values, bias, cache.runs, self._multiple)

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
        biases = [self._biases(row.masks) for row in rows]
        lengths = [row.length for row in rows]

        def attend(q: Tensor, k: Tensor, v: Tensor, index: int) -> Tensor:
            parts: list[Tensor] = []
            split = zip(*(each.transpose(1, 2).split(lengths, 2) for each in (q, k, v)), strict=True)
            for row, bias, (query, new_keys, new_values) in zip(rows, biases, split, strict=True):
                keys, values = cache.update_row(new_keys, new_values, index, row.slot, row.start, row.span)
                parts.append(self._attend(query, keys, values, bias[self.layers[index].slides], (), self._multiple))
            return torch.cat(parts, 1)

        return self._read(ids, positions, attend)

    def _biases(self, masks: Masks) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of layers with full attention, and of those with a sliding window."""
        packed = self._heads // self._kv_heads
        full, window = (packed_bias(mask, packed, self._dtype, self._multiple) for mask in (masks.full, masks.window))
        return full, window

    def _read(self, ids: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Tensor:
        """Return the hidden states of ids [B, T], as [B, T, W].

        `attend` takes queries [B, T, H, D], keys and values [B, T, H_kv, D] and the layer's number, and returns what
        the queries attend to, [B, T, H, D].
        """
        batch, length = ids.shape
        heads, num_qk, normed = self._heads, self._heads + self._kv_heads, self._rms_norm
        cosine, sine = self._rotation(positions)
        x = self._embedding[ids.flatten()].to(self._dtype)  # [B * T, W]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv.product(normed(x, layer.attention_norm)).view(batch, length, -1, self.head_size)
            qk = qkv[:, :, :num_qk]
            if layer.qk_norm is not None:
                qk = normed(qk, layer.qk_norm)
            qk = torch.addcmul(qk * cosine, qk.roll(self.head_size // 2, -1), sine)
            attended = attend(qk[:, :, :heads], qk[:, :, heads:], qkv[:, :, num_qk:], index)
            layer.out.add_product(x, attended.reshape(len(x), -1))
            gate, up = layer.gate_up.product(normed(x, layer.mlp_norm)).chunk(2, -1)
            layer.down.add_product(x, silu(gate, inplace=True).mul_(up))
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


def _joined(*products: Any) -> Matrix:
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
    return PlainMatrix(joined["weight"].T, joined.get("bias"))


def _free(product: Linear) -> None:
    """Free a product's weight. What remains has its shape, but no memory."""
    product.weight = Parameter(product.weight.to("meta"), requires_grad=False)
