"""Computes throughput and token usage of policies from blocks of rows that ran together."""

from collections.abc import Mapping, Sequence

import numpy as np

from stepspec.evaluation.records import BASELINE, Block, ModelUsage, Throughput
from stepspec.evaluation.stats import ratio_of_sums


def throughputs(blocks: Sequence[Block], policies: Sequence[str], seed: int) -> Mapping[str, Throughput]:
    """Return throughput by policy, over the blocks with the same rows under every policy; empty without such blocks.

    A block that was stopped and resumed is split into different rows than under other policies, so it is left out, as
    are blocks that ran on different machines.
    """
    by_jobs: dict[tuple[frozenset[tuple[str, int]], str | None], dict[str, Block]] = {}
    for block in blocks:
        by_jobs.setdefault((frozenset(block.jobs), block.node and block.node.name), {})[block.policy] = block
    complete = [by_policy for by_policy in by_jobs.values() if set(by_policy) == set(policies)]
    if not complete:
        return {}
    target = [by_policy[BASELINE] for by_policy in complete] if BASELINE in policies else None
    return {policy: _throughput([by_policy[policy] for by_policy in complete], target, seed) for policy in policies}


def _throughput(own: Sequence[Block], target: Sequence[Block] | None, seed: int) -> Throughput:
    wall_s = sum(block.wall_s for block in own)
    num_rows = sum(len(block.jobs) for block in own)
    speedup, interval = None, None
    if target:
        walls = [block.wall_s for block in target], [block.wall_s for block in own]
        speedup, interval = ratio_of_sums(*walls, np.random.default_rng(seed))
    return Throughput(
        problems_per_s=num_rows / wall_s,
        tokens_per_s=sum(block.committed_tokens for block in own) / wall_s,
        speedup_vs_target=speedup,
        speedup_vs_target_ci=interval,
        usage=_total_usage(own),
    )


def _total_usage(blocks: Sequence[Block]) -> dict[str, ModelUsage] | None:
    counted = [block.usage for block in blocks if block.usage is not None]
    if len(counted) < len(blocks):
        return None
    return {
        role: ModelUsage(
            **{name: sum(getattr(usage[role], name) for usage in counted) for name in ModelUsage.model_fields}
        )
        for role in counted[0]
    }
