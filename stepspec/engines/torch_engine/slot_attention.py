"""Attention of captured passes on a GPU: the keys and values of each row are read where they lie in the cache.

Attention of PyTorch needs the rows' keys and values in one tensor, which copies them in every layer, and a mask as long
as the longest text. This kernel reads them by slot, up to each row's own length, so neither the copy nor the mask is
needed and one captured graph serves texts of any length. The keys are split among many programs (Flash-Decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), whose results a second kernel joins.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

PROGRAMS = 256
"""Number of programs to aim for, about two for each multiprocessor of a large GPU."""

MAX_SPLITS = 32
MAX_ROWS = 64
"""Queries of one program."""


def attend_in_slots(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, starts: Tensor, window: int | None = None
) -> Tensor:
    """Attend from new tokens to what their slots hold, themselves included.

    Args:
        query: [B, T, H, D]; the last dimension must be contiguous.
        keys: the cache of a layer, [slots, H_kv, capacity, D], which holds the new keys already; contiguous.
        values: likewise.
        slots: the slot of each row, [B].
        starts: the position of each row's first query, [B].
        window: how many positions a query sees, including itself; None for all.

    Returns:
        [B, T, H, D].
    """
    batch, length, heads, size = query.shape
    kv_heads = keys.shape[1]
    packed = heads // kv_heads
    rows = length * packed
    block_rows = min(MAX_ROWS, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block_rows)
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(PROGRAMS, batch * kv_heads * tiles)))
    parts = query.new_empty(batch * kv_heads, splits, rows, size, dtype=torch.float32)
    sums = query.new_empty(batch * kv_heads, splits, rows, 2, dtype=torch.float32)
    output = query.new_empty(batch, length, heads, size)
    block_size = max(16, triton.next_power_of_2(size))
    shape = {"packed": packed, "kv_heads": kv_heads, "size": size, "block_size": block_size}
    launch: Any = _attend_to_part
    launch[(splits, batch * kv_heads, tiles)](
        query,
        keys,
        values,
        slots.contiguous(),
        starts.contiguous(),
        parts,
        sums,
        size**-0.5 * 1.4426950408889634,  # log2(e): the kernel takes powers of 2
        *query.stride()[:3],
        *keys.stride()[:3],
        length,
        rows,
        splits,
        window=window or 0,
        block_rows=block_rows,
        block_keys=64 if query.dtype.itemsize == 2 else 32,
        **shape,
    )
    join: Any = _join_parts
    join[(batch * kv_heads, rows)](parts, sums, output, *output.stride()[:3], rows, splits=splits, num_warps=1, **shape)
    return output


# Compiled once for all lengths: by default, Triton compiles anew for a 1 and for multiples of 16.
@triton.jit(do_not_specialize=["length", "rows", "splits"])
def _attend_to_part(
    query,
    keys,
    values,
    slots,
    starts,
    parts,
    sums,
    scale,
    query_batch,
    query_time,
    query_head,
    key_slot,
    key_head,
    key_time,
    length,
    rows,
    splits,
    window: tl.constexpr,
    packed: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_size: tl.constexpr,
):
    """Attend to one of `splits` parts of a slot's positions, for one key head and up to `block_rows` queries.

    Stores the weighted sum of the values without its denominator, the largest score, and the denominator.
    """
    split, pair, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // kv_heads, pair % kv_heads
    start = tl.load(starts + batch)
    row = tile * block_rows + tl.arange(0, block_rows)
    inside, place = row < rows, tl.arange(0, block_size)
    time = row // packed
    at = query + batch * query_batch + time * query_time + (head * packed + row % packed) * query_head
    q = tl.load(at[:, None] + place[None], mask=inside[:, None] & (place < size)[None], other=0.0)
    newest = start + time  # the last position that each query sees

    first = tl.maximum(start - window + 1, 0) if window else 0
    first = first // block_keys
    num_blocks = tl.cdiv(tl.cdiv(start + length, block_keys) - first, splits)
    begin = (first + split * num_blocks) * block_keys
    end = tl.minimum(begin + num_blocks * block_keys, start + length)
    base = tl.load(slots + batch).to(tl.int64) * key_slot + head * key_head

    top = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    joined = tl.zeros([block_rows, block_size], tl.float32)
    for block in range(begin, end, block_keys):
        position = block + tl.arange(0, block_keys)
        there = (position < end)[:, None] & (place < size)[None]
        cells = base + position[:, None].to(tl.int64) * key_time + place[None]
        k = tl.load(keys + cells, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        sees = (position[None] <= newest[:, None]) & (position < end)[None]
        if window:
            sees = sees & (position[None] > newest[:, None] - window)
        scores = tl.where(sees, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        v = tl.load(values + cells, mask=there, other=0.0)
        joined = joined * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher

    line = (pair.to(tl.int64) * splits + split) * rows + row
    tl.store(parts + line[:, None] * size + place[None], joined, mask=inside[:, None] & (place < size)[None])
    tl.store(sums + line * 2, top, mask=inside)
    tl.store(sums + line * 2 + 1, total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _join_parts(
    parts,
    sums,
    output,
    output_batch,
    output_time,
    output_head,
    rows,
    splits: tl.constexpr,
    packed: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    block_size: tl.constexpr,
):
    """Join what `_attend_to_part` stored for one query."""
    pair, row = tl.program_id(0), tl.program_id(1)
    batch, head = pair // kv_heads, pair % kv_heads
    place = tl.arange(0, block_size)
    line = (pair.to(tl.int64) * splits + tl.arange(0, splits)) * rows + row
    tops, totals = tl.load(sums + line * 2), tl.load(sums + line * 2 + 1)
    shares = tl.exp2(tops - tl.max(tops, 0))
    joined = tl.load(parts + line[:, None] * size + place[None], mask=(place < size)[None], other=0.0)
    attended = tl.sum(joined * shares[:, None], 0) / tl.sum(totals * shares, 0)
    at = output + batch * output_batch + (row // packed) * output_time + (head * packed + row % packed) * output_head
    tl.store(at + place, attended.to(output.dtype.element_ty), mask=place < size)
