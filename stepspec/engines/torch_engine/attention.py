"""Attention over the slot cache, registered with transformers as `stepspec_packed`.

The query heads that share a key head are packed into one longer query, so keys and values are never repeated. With
8 query heads per key head and 2,048 cached positions on a CPU, this is 11 times faster than repeating them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "stepspec_packed"
BLOCK, SPAN = 512, 16
"""Positions that PyTorch's attention on a CPU adds together, and the least difference between two even spans."""
ALIGNED = 16
"""Positions to a multiple of which the lines of a bias are padded on a GPU. PyTorch would copy another one in each
layer."""


class SlotRows(NamedTuple):
    """The rows of a pass that reads the cache by slot. Their ids follow one another, and padding follows the last."""

    table: Tensor  # of each row: its slot, position and place in the pass of its first id, and length; [4, R]
    branches: Tensor  # what `model.branch_columns` returns, [3, N]
    longest: int  # at least the length of the longest row


class Masks(NamedTuple):
    """The positions that a pass may see, bool [B, 1, T, S]; None makes all of them visible."""

    full: Tensor | None = None
    window: Tensor | None = None
    """For the layers with a sliding window."""
    keys: Tensor | None = None
    """The positions of the keys, [B, S]; None where nothing depends on them."""
    rows: SlotRows | None = None
    """Set in a pass that reads the cache by slot, which has no masks."""


class SlotAttention(Protocol):
    """The signature of `slot_attention.attend_in_slots`."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: SlotRows,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class UnsupportedAttentionError(Exception):
    """A layer needs a feature that `packed_attention` does not support. The message calls the model "it"."""


def packed_attention(
    module: torch.nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run `attend` with the signature that transformers calls.

    Args:
        module: the layer.
        query: [B, H, T, D].
        key: [B, H_kv, S, D].
        value: [B, H_kv, S, D].
        attention_mask: bool [B, 1, T, S], true where a position is visible; None makes all visible.
        scaling: factor on the attention scores; None is 1 / sqrt(D).
        dropout: unused.
        options: further options of transformers. `softcap` is a bound on the scores (arXiv:2408.00118, section 2), and
            `s_aux` holds the sinks of the heads (arXiv:2508.10925, section 2), [H]. The mask has a sliding window. In a
            pass by slot, `slots` has the rows, the kernel, and a function from a layer to its window; key and value are
            the whole cache of the layer.

    Raises:
        UnsupportedAttentionError: the mask is not bool.
    """
    softcap, sinks, slots = options.get("softcap"), options.get("s_aux"), options.get("slots")
    if slots is not None:
        rows, attend_in_slots, window_of = slots
        flat = query[0].transpose(0, 1).contiguous()
        kept = {"scaling": scaling, "window": window_of(module), "softcap": softcap, "sinks": sinks}
        return attend_in_slots(flat, key, value, rows, **kept)[None], None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise UnsupportedAttentionError("its layers add a bias to the attention scores")
    bias = packed_bias(attention_mask, query.shape[1] // key.shape[1], query.dtype)
    if softcap is None and sinks is None:
        return attend(query, key, value, bias, scaling).contiguous(), None
    return attend_with_scores(query, key, value, bias, scaling, softcap, sinks).contiguous(), None


def packed_bias(mask: Tensor | None, packed: int, dtype: torch.dtype, multiple: int = 1) -> Tensor | None:
    """Return the bias to add to the attention scores, [B, 1, N, S]; None without a mask.

    Call it once per pass, not in every layer.

    Args:
        mask: bool [B, 1, T, S], true where a position is visible.
        packed: query heads per key head.
        dtype: of the bias.
        multiple: N is `packed * T`, rounded up to a multiple of this number.
    """
    if mask is None:
        return None
    span = mask.shape[-1]
    width = span + (-span % ALIGNED if mask.is_cuda else 0)
    bias = mask.new_zeros((*mask.shape[:-1], width), dtype=dtype)
    bias[..., :span].masked_fill_(~mask, -torch.inf)
    return _padded(bias.repeat(1, 1, packed, 1) if packed > 1 else bias, multiple)[..., :span]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float | None = None,
    multiple: int = 1,
) -> Tensor:
    """Attend from query [B, H, T, D] to key and value [B, H_kv, S, D]; return [B, T, H, D].

    `bias` is what `packed_bias` returns for `multiple`.
    """
    batch, heads, length, size = query.shape
    query = _padded(packed := query.reshape(batch, key.shape[1], -1, size), multiple)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return output[:, :, : packed.shape[2]].reshape(batch, heads, length, -1).transpose(1, 2)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Add rows of zeros to [B, H, N, ..] until their number is a multiple."""
    missing = -x.shape[2] % multiple
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def even_span(end: int, size: int) -> int:
    """Return at least `end` positions, a number such that attention to them adds in the same order as to more.

    Other positions are masked. Quantized models need this: sums in another order differ in the last bits, which
    quantization amplifies. Of a model with 0.5 billion parameters, logits differed by 5% of their spread.

    Args:
        end: positions to attend to.
        size: of a head.
    """
    before = (end - 1) // BLOCK * BLOCK
    return before + next(each for each in _even_ends(size) if each >= end - before)


@lru_cache
@torch.inference_mode()
def _even_ends(size: int) -> Sequence[int]:
    """Return the places within a block of keys where a span may end, by trial.

    Libraries split sums over many positions. MKL splits more than 192 into parts of 192, but in two halves if they are
    fewer than 384.
    """
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, length, size, generator=random) for length in (8, BLOCK, BLOCK))
    hides = torch.arange(BLOCK) >= torch.arange(BLOCK + 1)[:, None]
    biases = torch.zeros(BLOCK + 1, BLOCK).masked_fill_(hides, -torch.inf)

    def attended(end: int, span: int) -> Tensor:
        return attend(query, key[:, :, :span], value[:, :, :span], biases[None, None, [end] * 8, :span])

    return [*(end for end in range(SPAN, BLOCK, SPAN) if attended(end, end).equal(attended(end, BLOCK))), BLOCK]


def attend_with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `attend` with changes to the scores, which take a softmax in float32 as in transformers.

    Args:
        query: [B, H, T, D].
        key: [B, H_kv, S, D].
        value: [B, H_kv, S, D].
        bias: what `packed_bias` returns.
        scaling: factor on the attention scores; None is 1 / sqrt(D).
        softcap: bound on the scores; None for no bound.
        sinks: for each head, the score of a position without value, [H]; None without sinks.

    Returns:
        [B, T, H, D].
    """
    batch, heads, length, size = query.shape
    packed = query.reshape(batch, key.shape[1], -1, size)
    scores = packed @ key.transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = (scores if bias is None else scores + bias).float()
    if sinks is not None:
        sink = sinks.float().view(1, key.shape[1], -1, 1).repeat_interleave(length, 2)  # [1, H_kv, packed * T, 1]
        scores = torch.cat([scores, sink.expand(batch, -1, -1, -1)], -1)
    weights = scores.softmax(-1).to(value.dtype)[..., : key.shape[2]]
    return (weights @ value).reshape(batch, heads, length, -1).transpose(1, 2)


def attend_in_runs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, runs: Sequence[tuple[int, int]], multiple: int = 1
) -> Tensor:
    """Run `attend` once for each run that `runs_of_like_length` returned; once for all rows if there are none."""
    if not runs:
        return attend(query, key, value, bias, multiple=multiple)
    parts: list[Tensor] = []
    first = 0
    for count, fewer in runs:
        rows, span = slice(first, first + count), key.shape[2] - fewer
        run_bias = None if bias is None else bias[rows, :, :, :span]
        parts.append(attend(query[rows], key[rows, :, :span], value[rows, :, :span], run_bias, multiple=multiple))
        first += count
    return torch.cat(parts)


def runs_of_like_length(lengths: Sequence[int], call_cost: float) -> list[tuple[int, int]]:
    """Split the rows into runs of neighbors that are cheapest to attend together.

    A row costs as much as the longest row of its run, and each run costs one more call of attention.

    Args:
        lengths: positions of each row.
        call_cost: cost of one more call, in positions that could be read in the same time.

    Returns:
        For each run, its number of rows, and how many positions its longest row is shorter than the longest row of all
        runs. Empty if a single run is cheapest.
    """
    longest = max(lengths)
    if len(lengths) * longest - sum(lengths) <= call_cost:
        return []
    # For the rows up to each row: lowest cost, first row of the last run, length of that run's longest row.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for end in range(1, len(lengths) + 1):
        options: list[tuple[float, int, int]] = []
        run_longest = 0
        for first in range(end - 1, -1, -1):
            run_longest = max(run_longest, lengths[first])
            options.append((best[first][0] + call_cost + (end - first) * run_longest, first, run_longest))
        best.append(min(options))
    runs: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        _, first, run_longest = best[end]
        runs.insert(0, (end - first, longest - run_longest))
        end = first
    return runs if len(runs) > 1 else []


AttentionInterface.register(NAME, packed_attention)
