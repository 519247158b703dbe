"""The joint distribution of a model's next tokens by enumeration, and a chi-square test of samples against it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from tiny_models import piece
from torch import Tensor
from transformers import PreTrainedModel

from stepspec.engines.metrics import EngineMetrics
from stepspec.engines.protocol import Drafting, Sampling, Stop, TokenBuffer
from stepspec.engines.stops import StopMatcher
from stepspec.engines.torch_engine.decode import Rounds
from stepspec.engines.torch_engine.drafters import Drafter
from stepspec.engines.torch_engine.model import CausalModel
from stepspec.engines.torch_engine.pace import Pacer
from stepspec.engines.torch_engine.row import BatchRow
from stepspec.engines.torch_engine.sampling import distributions as distributions_of
from stepspec.engines.torch_engine.sampling import edited, samplers
from stepspec.engines.torch_engine.slots import Slot

FALSE_ALARM = 1e-6
"""Probability that a correct sampler fails, over the choice of seeds. With fixed seeds a test is repeatable."""

MIN_EXPECTED = 5.0
"""Texts with a smaller expected count are pooled, because the chi-square approximation needs large counts."""


@torch.inference_mode()
def conditional_distributions(
    network: PreTrainedModel, prompt: Sequence[int], depth: int, sampling: Sampling
) -> list[Tensor]:
    """Return next-token distributions after the prompt and each text of 0, 1, .. `depth` - 1 tokens: [V], [V, V], .."""
    size = network.config.vocab_size
    distributions = []
    for length in range(depth):
        texts = [[*prompt, *text] for text in itertools.product(range(size), repeat=length)]
        logits = network(input_ids=torch.tensor(texts, device=network.device), use_cache=False).logits[:, -1]
        how = samplers([sampling], size, network.device)
        rows = torch.cat([distributions_of(edited(row[None, None], how, None), how)[0] for row in logits])
        distributions.append(rows.reshape([size] * (length + 1)).double().cpu())
    return distributions


def joint_distribution(distributions: Sequence[Tensor]) -> Tensor:
    """Return the distribution of whole texts, [V, .., V], given the conditional distribution of each token."""
    joint = distributions[0]
    for following in distributions[1:]:
        joint = joint[..., None] * following
    return joint


def p_value(texts: Tensor, joint: Tensor) -> float:
    """Return the chi-square p-value of texts [N, depth] under the distribution; 0 if one of them has probability 0."""
    size = joint.shape[0]
    cells = torch.zeros(texts.shape[0], dtype=torch.long)
    for column in texts.T.cpu():
        cells = cells * size + column
    counts = torch.bincount(cells, minlength=joint.numel()).double()
    expected = joint.flatten() / joint.sum() * texts.shape[0]
    if counts[expected == 0].any():
        return 0.0
    expected, order = expected.sort(descending=True)
    counts = counts[order]
    num_unpooled = int((expected >= MIN_EXPECTED).sum())
    if expected[num_unpooled:].sum() < MIN_EXPECTED:  # even the pool is too small
        num_unpooled -= 1
    counts = torch.cat([counts[:num_unpooled], counts[num_unpooled:].sum()[None]])
    expected = torch.cat([expected[:num_unpooled], expected[num_unpooled:].sum()[None]])
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor(len(counts) - 1, dtype=torch.double)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@torch.inference_mode()
def sample_texts(
    target: CausalModel,
    drafter: Drafter | None,
    prompt: Sequence[int],
    sampling: Sampling,
    num_rows: int,
    *,
    depth: int = 3,
    num_tokens: int = 2,
    batch: int = 500,
    pacer: Pacer | None = None,
) -> tuple[Tensor, float]:
    """Return the texts that `num_rows` seeds give, [N, depth], and the share of drafted tokens accepted.

    `pacer` chooses the number of tokens in place of `num_tokens`.
    """
    rows: list[BatchRow] = []
    for first in range(0, num_rows, batch):
        rows += _run_batch(target, drafter, prompt, sampling, range(first, first + batch), depth, num_tokens, pacer)
    drafted = sum(row.metrics.drafted for row in rows)
    return torch.tensor([row.beyond for row in rows]), sum(row.metrics.accepted for row in rows) / max(drafted, 1)


def _run_batch(
    target: CausalModel,
    drafter: Drafter | None,
    prompt: Sequence[int],
    sampling: Sampling,
    seeds: range,
    depth: int,
    num_tokens: int,
    pacer: Pacer | None,
) -> list[BatchRow]:
    """Run one row per seed together until each row has `depth` tokens."""
    slots = list(range(len(seeds)))
    for slot in slots:
        target.rollback(slot, 0)
    target.extend(slots, [prompt[:-1] for _ in slots], keep=[[] for _ in slots])
    rounds, rows = Rounds(target, EngineMetrics()), []
    if pacer is not None:
        assert drafter is not None
        rounds.pacers[drafter] = pacer
    drafting = Drafting(num_tokens=None if pacer is not None else num_tokens)
    for slot, seed in zip(slots, seeds, strict=True):
        watch = StopMatcher(Stop(depth), piece, frozenset())
        row = BatchRow(TokenBuffer(prompt), len(prompt), replace(sampling, seed=seed), drafting, watch)
        row.slot = Slot(slot)
        rows.append(row)
    while running := [row for row in rows if row.end is None]:
        rounds.run(running, drafter)
        target.cache.check()
        for row in running:
            if row.end is not None and drafter is not None:
                drafter.release(row)
    return rows
