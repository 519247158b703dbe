"""Relaxed acceptance, which does not keep the target's distribution: see `stepspec.engines.protocol.Acceptance`.

`relaxed` returns which tokens that the exact rule rejects stand nevertheless. Like the exact rule, it takes tensors for
all rows of a batch and reads no values back.

The exact rule rejects a token drafted from q with probability (q - p)+. A relaxed rule lets it stand, or a sample of
`sampling.residual` replaces it. So a token that is relaxed has the probability q, which exceeds p by (q - p)+, and any
other token at most p. The distance from p, in total variation, is the sum of (q - p)+ over the relaxed tokens.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepspec.engines.protocol import Acceptance, Tokenizer
from stepspec.engines.torch_engine.transfer import upload

PLAIN, DIGIT, CONTROL = range(3)
"""Kinds of token. A token that is special, ends a text or has no text is `CONTROL`."""


class Fly(NamedTuple):
    """Settings of B rows under the rule `fly`, as tensors [B]."""

    window: Tensor  # 0 for a row under another rule
    entropy: Tensor  # inf for a row under another rule


class Relaxation(NamedTuple):
    """Acceptance rules of B rows. A rule that no row uses is None and costs nothing."""

    kinds: Tensor  # int8 [V], the kind of each token
    exact_from: Tensor  # [B], the lowest kind of the tokens that are never relaxed
    ratio: Tensor | None  # [B], the least log of the ratio; inf for a row under another rule
    typical: Tensor | None  # [B], the threshold; inf for a row under another rule
    fly: Fly | None


def token_kinds(tokenizer: Tokenizer, vocab_size: int, device: torch.device) -> Tensor:
    """Return the kind of each token, int8 [V]. Ids that the tokenizer does not have are `CONTROL`."""
    kinds = torch.full((vocab_size,), CONTROL, dtype=torch.int8)
    for id in range(min(vocab_size, tokenizer.num_ids or vocab_size)):
        if not tokenizer.is_special(id):
            kinds[id] = DIGIT if any(map(str.isdigit, tokenizer.piece(id))) else PLAIN
    return kinds.to(device)


def relaxation_of(rules: Sequence[Acceptance], kinds: Tensor | None) -> Relaxation | None:
    """Return the rows' rules as tensors, on the device of `kinds`; None if all are exact."""
    if kinds is None or all(rule.is_exact for rule in rules):
        return None
    device = kinds.device

    def column(values: Sequence[float]) -> Tensor | None:
        return upload(values, device, torch.float32) if min(values) < math.inf else None

    entropy = column([math.inf if rule.entropy is None else rule.entropy for rule in rules])
    windows = upload([rule.window or 0 for rule in rules], device)
    return Relaxation(
        kinds,
        upload([DIGIT if rule.exact_digits else CONTROL for rule in rules], device),
        column([math.log(rule.threshold) if rule.rule == "ratio" and rule.threshold else math.inf for rule in rules]),
        column([rule.threshold if rule.rule == "typical" and rule.threshold else math.inf for rule in rules]),
        None if entropy is None else Fly(windows, entropy),
    )


def relaxed(how: Relaxation, logits: Tensor, drafted: Tensor, accepted: Tensor) -> Tensor:
    """Return which drafted tokens the rows' rules keep although the exact rule rejects them, bool [B, K].

    Args:
        how: the rules of the rows.
        logits: the target's at each drafted position, [B, K, V].
        drafted: drafted tokens, [B, K].
        accepted: whether the exact rule accepts each of them, bool [B, K]; false for padding.
    """
    best, favorite = logits.max(-1)
    own = logits.gather(-1, drafted[..., None])[..., 0]
    kept = torch.zeros_like(accepted)
    if how.ratio is not None:
        kept = kept | (own - best >= how.ratio[:, None])
    if how.typical is not None:
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).nan_to_num().sum(-1)
        threshold = how.typical[:, None]
        bound = torch.minimum(threshold, threshold.sqrt() * (-entropy).exp())
        kept = kept | ((own - logits.logsumexp(-1)).exp() >= bound)
    if how.fly is not None:
        highest = logits.topk(min(3, logits.shape[-1])).values - logits.logsumexp(-1, keepdim=True)
        entropy = -(highest.exp() * highest).nan_to_num().sum(-1)
        kept = kept | ((entropy >= how.fly.entropy[:, None]) & _agreed_after(accepted, how.fly.window))
    kinds = torch.maximum(how.kinds[drafted], how.kinds[favorite])
    return kept & ~accepted & ~own.isneginf() & (kinds < how.exact_from[:, None])


def _agreed_after(accepted: Tensor, window: Tensor) -> Tensor:
    """Return whether the next `window` [B] tokens after each one are accepted, bool [B, K]."""
    count = accepted.long().cumsum(-1)
    last = torch.arange(accepted.shape[1], device=accepted.device) + window[:, None]
    return count.gather(-1, last.clamp(max=accepted.shape[1] - 1)) - count == window[:, None]
