# pyright: reportOperatorIssue=false
"""Attention on a GPU: the keys and values of each row are read where they lie in the cache.

Attention of PyTorch needs the rows' keys and values in one tensor, which copies them in every layer, and a mask as long
as the longest text. This kernel reads them by slot, up to each row's own length, so neither the copy nor the mask is
needed: rows of different lengths share a pass, and one captured graph serves texts of any length. The keys are split
among many programs (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html), whose results a second
kernel joins.
"""

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from stepspec.engines.torch_engine.attention import SlotRows

PROGRAMS = 256
"""Number of programs to aim for, about two for each multiprocessor of a large GPU."""

MAX_SPLITS = 32
MAX_QUERIES = 64
"""Queries of one program."""

STAGES = 2
"""Blocks of keys and values that are loaded at the same time. More do not fit into the shared memory of all GPUs."""

LOG2_E = tl.constexpr(1.4426950408889634)
"""The kernels take powers of 2."""


def attend_in_slots(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: SlotRows,
    *,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the ids of a pass to what their slots hold, themselves included.

    Args:
        query: [N, H, D]; the last dimension must be contiguous.
        keys: the cache of a layer, [slots, H_kv, capacity, D], which holds the new keys already; contiguous.
        values: likewise, [slots, H_kv, capacity, E].
        rows: the rows of the pass.
        scaling: factor on the attention scores; None is 1 / sqrt(D).
        window: how many positions a query sees, including itself; None for all.
        softcap: bound on the scores (arXiv:2408.00118, section 2); None for no bound.
        sinks: for each head, the score of a position without value, [H] (arXiv:2508.10925, section 2); None without.

    Returns:
        [N, H, E]; zeros for ids that are in no row.
    """
    count, heads, size = query.shape
    kv_heads, value_size = keys.shape[1], values.shape[3]
    packed, num_rows = heads // kv_heads, rows.table.shape[1]
    # A program has as many queries as an average row, so that few of them are empty.
    block_queries = min(MAX_QUERIES, max(16, triton.next_power_of_2(triton.cdiv(count, num_rows) * packed)))
    tiles = triton.cdiv(rows.longest * packed, block_queries)
    busy = max(num_rows, triton.cdiv(count * packed, block_queries))
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(PROGRAMS, kv_heads * busy)))
    parts = query.new_empty(splits, count, heads, value_size, dtype=torch.float32)
    sums = query.new_empty(splits, count, heads, 2, dtype=torch.float32)
    output = query.new_empty(count, heads, value_size)
    shape = {"value_size": value_size, "block_values": max(16, triton.next_power_of_2(value_size))}
    launch: Any = _attend_to_part
    launch[(splits, num_rows * kv_heads, tiles)](
        query,
        keys,
        values,
        rows.table,
        rows.branches,
        parts,
        sums,
        (size**-0.5 if scaling is None else scaling) * (1 if softcap else LOG2_E.value),
        softcap or 0.0,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        count,
        num_rows,
        splits,
        window=window or 0,
        capped=bool(softcap),
        block_queries=block_queries,
        block_keys=64 if query.dtype.itemsize == 2 else 32,
        num_stages=STAGES,
        packed=packed,
        kv_heads=kv_heads,
        size=size,
        block_size=max(16, triton.next_power_of_2(size)),
        **shape,
    )
    join: Any = _join_parts
    has_sinks = sinks is not None
    join[(count, heads)](
        parts, sums, sinks if has_sinks else sums, output, rows.table, count, num_rows, splits=splits,
        has_sinks=has_sinks, num_warps=1, **shape,
    )  # fmt: skip
    return output


# Compiled once for all lengths: by default, Triton compiles anew for a 1 and for multiples of 16.
@triton.jit(do_not_specialize=["count", "num_rows", "splits"])
def _attend_to_part(
    query,
    keys,
    values,
    table,
    branches,
    parts,
    sums,
    scale,
    softcap,
    query_id,
    query_head,
    key_slot,
    key_head,
    key_time,
    value_slot,
    value_head,
    value_time,
    count,
    num_rows,
    splits,
    window: tl.constexpr,
    capped: tl.constexpr,
    packed: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    block_size: tl.constexpr,
    block_values: tl.constexpr,
):
    """Attend to one of `splits` parts of a slot's positions, for one key head and up to `block_queries` queries.

    Stores the weighted sum of the values without its denominator, the largest score, and the denominator.
    """
    split, pair, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = pair // kv_heads, pair % kv_heads
    length = tl.load(table + 3 * num_rows + row)
    if tile * block_queries >= length * packed:
        return
    slot, start, first = tl.load(table + row), tl.load(table + num_rows + row), tl.load(table + 2 * num_rows + row)
    number = tile * block_queries + tl.arange(0, block_queries)
    time = number // packed
    inside = time < length
    id = first + time
    dims, value_dims = tl.arange(0, block_size), tl.arange(0, block_values)
    query_heads = head * packed + number % packed
    at = query + id * query_id + query_heads * query_head
    q = tl.load(at[:, None] + dims[None], mask=inside[:, None] & (dims < size)[None], other=0.0)
    branch = tl.load(branches + id, mask=inside, other=0)
    newest = start + time  # the query's own position in the slot
    own = newest - tl.load(branches + count + id, mask=inside, other=0)  # and in its text
    trunk_end = start + tl.load(branches + 2 * count + id, mask=inside, other=0)

    limit = start + tl.minimum(length, (tile * block_queries + block_queries - 1) // packed + 1)
    begin = 0
    if window:
        oldest = tl.min(tl.where(inside, own, limit), 0) - window + 1
        begin = tl.maximum(oldest, 0) // block_keys
    num_blocks = tl.cdiv(tl.cdiv(limit, block_keys) - begin, splits)
    begin = (begin + split * num_blocks) * block_keys
    end = tl.minimum(begin + num_blocks * block_keys, limit)
    base = keys + slot.to(tl.int64) * key_slot + head * key_head
    value_base = values + slot.to(tl.int64) * value_slot + head * value_head

    top = tl.full([block_queries], -float("inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    joined = tl.zeros([block_queries, block_values], tl.float32)
    for block in range(begin, end, block_keys):
        position = block + tl.arange(0, block_keys)
        there = position < end
        cells = position.to(tl.int64)[:, None]
        k = tl.load(base + cells * key_time + dims[None], mask=there[:, None] & (dims < size)[None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if capped:
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * (softcap * LOG2_E)
        new = there & (position >= start)
        column = branches + first + position - start
        key_branch = tl.load(column, mask=new, other=0)
        of_trunk = (key_branch == 0)[None] & (position[None] < trunk_end[:, None])
        sees = there[None] & (position[None] <= newest[:, None])
        sees = sees & (of_trunk | (key_branch[None] == branch[:, None]))
        if window:
            key_own = position - tl.load(column + count, mask=new, other=0)
            sees = sees & (key_own[None] > own[:, None] - window)
        scores = tl.where(sees, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(top - finite)
        at_values = value_base + cells * value_time + value_dims[None]
        v = tl.load(at_values, mask=there[:, None] & (value_dims < value_size)[None], other=0.0)
        joined = joined * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher

    line = (split.to(tl.int64) * count + id) * (kv_heads * packed) + query_heads
    tl.store(
        parts + line[:, None] * value_size + value_dims[None],
        joined,
        mask=inside[:, None] & (value_dims < value_size)[None],
    )
    tl.store(sums + line * 2, top, mask=inside)
    tl.store(sums + line * 2 + 1, total, mask=inside)


@triton.jit(do_not_specialize=["count", "num_rows"])
def _join_parts(
    parts,
    sums,
    sinks,
    output,
    table,
    count,
    num_rows,
    splits: tl.constexpr,
    has_sinks: tl.constexpr,
    value_size: tl.constexpr,
    block_values: tl.constexpr,
):
    """Join what `_attend_to_part` stored for one query."""
    id, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    dims = tl.arange(0, block_values)
    at = output + (id.to(tl.int64) * heads + head) * value_size + dims
    last = 3 * num_rows - 1
    if id >= tl.load(table + last) + tl.load(table + last + num_rows):
        tl.store(at, tl.zeros([block_values], output.dtype.element_ty), mask=dims < value_size)
        return
    line = (tl.arange(0, splits).to(tl.int64) * count + id) * heads + head
    tops, totals = tl.load(sums + line * 2), tl.load(sums + line * 2 + 1)
    sink = -float("inf")
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    top = tl.maximum(tl.max(tops, 0), sink)
    shares = tl.exp2(tops - top)
    total = tl.sum(totals * shares, 0) + tl.exp2(sink - top)
    joined = tl.load(parts + line[:, None] * value_size + dims[None], mask=(dims < value_size)[None], other=0.0)
    attended = tl.sum(joined * shares[:, None], 0) / total
    tl.store(at, attended.to(output.dtype.element_ty), mask=dims < value_size)
