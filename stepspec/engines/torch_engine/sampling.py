"""Distributions over the next token, and the exact rule that accepts drafted tokens (arXiv:2211.17192, section 2.3).

`acceptance` and `residual` are the whole of the rule: a token drafted from q is kept with probability
`acceptance(p, q)` of that token, otherwise a token is drawn from `residual(p, q)`, and the outcome has distribution p:
`q * a + (1 - sum(q * a)) * residual == p`. Distributions are float32. Everything is a function of tensors, for all rows
of a batch together and without reading a value, so that a device never waits for the host.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepspec.engines.protocol import Drafting, Sampling

DRAFT, ACCEPT, RESAMPLE = range(3)
"""What a random number is for; no two purposes share one."""


class Filters(NamedTuple):
    """Which tokens B rows leave out, as tensors [B]."""

    top_p: Tensor
    top_k: Tensor  # V where a row asks for none
    min_p: Tensor


class Samplers(NamedTuple):
    """How each of B rows draws, as tensors [B]. What no row asks for is None and costs nothing."""

    keys: Tensor  # int64, from the seed
    temperature: Tensor | None = None  # None: every row is greedy
    filters: Filters | None = None
    penalty: Tensor | None = None
    bias: Tensor | None = None  # [B, V]; -inf where a token is not allowed
    allowed: Tensor | None = None  # bool [B, K + 1, V], which tokens may stand at the K + 1 positions of a round
    seen: Tensor | None = None  # bool [B, V], the tokens of each row's text; there if `penalty` is
    tolerance: Tensor | None = None


def samplers(
    rows: Sequence[Sampling], vocab_size: int, device: torch.device, draftings: Sequence[Drafting] = ()
) -> Samplers:
    """The rows' settings side by side."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    keys = column([seed_key(row.seed) for row in rows], torch.int64)
    penalised = any(row.repetition_penalty != 1 for row in rows)
    edited = any(row.logit_bias or row.allowed is not None for row in rows)
    penalty = column([row.repetition_penalty for row in rows]) if penalised else None
    bias = torch.stack([_bias(row, vocab_size, device) for row in rows]) if edited else None
    tolerances = [drafting.tolerance for drafting in draftings]
    how = Samplers(
        keys,
        penalty=penalty,
        bias=bias,
        tolerance=column(tolerances) if any(tolerances) else None,
    )
    if all(row.temperature == 0 for row in rows):
        return how
    filtered = any(row.top_p < 1 or row.top_k > 0 or row.min_p > 0 for row in rows)
    filters = Filters(
        column([row.top_p for row in rows]),
        column([row.top_k or vocab_size for row in rows], torch.int64),
        column([row.min_p for row in rows]),
    )
    temperature = column([row.temperature for row in rows])
    return how._replace(temperature=temperature, filters=filters if filtered else None)


def _bias(row: Sampling, vocab_size: int, device: torch.device) -> Tensor:
    """What is added to a row's logits, [V]."""
    bias = torch.zeros(vocab_size, device=device)
    if row.allowed is not None:
        bias.fill_(-torch.inf)[sorted(row.allowed)] = 0
    for token, amount in row.logit_bias:
        bias[token] += amount
    return bias


def seen_along(how: Samplers, after: Tensor) -> Tensor | None:
    """Which tokens stand before each of K + 1 positions, bool [B, K + 1, V]; None if no row asks.

    The first position follows the rows' texts, and `after` [B, K] stands between it and the others.
    """
    if how.seen is None:
        return None
    later = torch.nn.functional.one_hot(after, how.seen.shape[-1]).bool()
    return torch.cat([how.seen[:, None], later], 1).cumsum(1) > 0


def edited(logits: Tensor, how: Samplers, seen: Tensor | None, *, partial: bool = False) -> Tensor:
    """Logits [B, T, V] in float32 after the repetition penalty (arXiv:1909.05858) for what was seen, the bias, and
    what is allowed. `partial`: whether the model scores a draft vocabulary alone."""
    logits = logits.float()
    if how.penalty is not None and seen is not None:
        penalty = how.penalty[:, None, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    limited = _limited(logits, how)
    if not partial or limited is logits:
        return limited
    # If a draft vocabulary has none of the allowed tokens, sample among those by their bias alone.
    none_left = limited.isneginf().all(-1, keepdim=True)
    return torch.where(none_left, _limited(torch.zeros_like(logits), how), limited)


def _limited(logits: Tensor, how: Samplers) -> Tensor:
    """After the bias and what is allowed."""
    if how.bias is not None:
        logits = logits + how.bias[:, None]
    return logits if how.allowed is None else logits.masked_fill(~how.allowed, -torch.inf)


def distributions(logits: Tensor, how: Samplers) -> Tensor:
    """The rows' distributions from logits [B, T, V]: temperature, then top-k, top-p and min-p; greedy is one-hot."""
    if how.temperature is None:
        return _one_hot(logits.argmax(-1), logits.shape[-1])
    temperature = how.temperature[:, None, None]
    greedy = temperature == 0
    probs = (logits.float() / temperature.masked_fill(greedy, 1.0)).softmax(-1)
    if how.filters is not None:
        probs = _filtered(probs, how.filters)
    return torch.where(greedy, _one_hot(logits.argmax(-1), logits.shape[-1]), probs)


def _filtered(probs: Tensor, filters: Filters) -> Tensor:
    """The k most likely tokens; of these the fewest whose share reaches top_p (arXiv:1904.09751); of these the ones
    at least min_p times as likely as the first (arXiv:2407.01082); renormalised."""
    top_p, top_k, min_p = (each[:, None, None] for each in filters)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered = ordered * (torch.arange(probs.shape[-1], device=probs.device) < top_k)
    reached = ordered.cumsum(-1)
    kept = (reached - ordered < top_p * reached[..., -1:]) & (ordered >= min_p * ordered[..., :1])
    probs = torch.zeros_like(probs).scatter(-1, order, ordered * kept)
    return probs / probs.sum(-1, keepdim=True)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that each token is accepted when drafted: min(1, p / q), and 1 where q is 0; [..., V]."""
    return torch.where(p < q, p / q.clamp(min=torch.finfo(q.dtype).tiny), 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Distribution of the token that replaces a rejected one: max(p - q, 0), normalized; p where nothing is left."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


def overrides(logits: Tensor, drafted: Tensor, how: Samplers) -> Tensor | None:
    """Which drafted tokens are kept whatever the exact rule says, bool [B, K]; None if none is.

    Typical acceptance (arXiv:2401.10774, section 2.3.1), by the distributions of logits [B, K + 1, V] at temperature 1.
    """
    if drafted.shape[1] == 0 or how.tolerance is None:
        return None
    logprobs = logits[:, : drafted.shape[1]].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num().sum(-1)
    tolerance = how.tolerance[:, None]
    bound = torch.minimum(tolerance, tolerance.sqrt() * (-entropy).exp())
    probability = logprobs.gather(-1, drafted[..., None])[..., 0].exp()
    return (tolerance > 0) & (probability >= bound)


def accept(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    counts: Tensor,
    accept_noise: Tensor,
    resample_noise: Tensor,
    override: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How many of its drafted tokens each row keeps, [B], and the token that follows them, [B].

    Args:
        p: the target's distributions at each drafted position and one beyond, [B, K + 1, V].
        q: the distributions that the tokens were drafted from, [B, K, V].
        drafted: [B, K].
        counts: how many of them each row has, [B].
        accept_noise: uniform in [0, 1), [B, K].
        resample_noise: uniform in [0, 1) for each position, [B, K + 1].
        override: which tokens are kept whatever the rule says, bool [B, K].
    """
    width, vocab_size = drafted.shape[1], p.shape[-1]
    column = drafted[..., None]
    p_drafted, q_drafted = p[:, :width].gather(-1, column)[..., 0], q.gather(-1, column)[..., 0]
    # u * q < p, strictly, so that a token the target never writes is not accepted even at u = 0.
    num_kept = leading(_overruled(accept_noise * q_drafted < p_drafted, override), counts)
    place = num_kept[:, None, None].expand(-1, 1, vocab_size)
    distribution, instead = p.gather(1, place)[:, 0], q.gather(1, place.clamp(max=width - 1))[:, 0]
    distribution = torch.where((num_kept == counts)[:, None], distribution, residual(distribution, instead))
    return num_kept, draw(distribution, resample_noise.gather(1, num_kept[:, None])[:, 0])


def accept_choices(
    choices: Tensor, drafted: Tensor, counts: Tensor, override: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same where tokens were not drawn but certain: what agrees with the target's own `choices` [B, K + 1].

    The choices are the most likely tokens, or samples from the target's distributions. A token x is then kept with
    probability p(x), as the rule has it for a one-hot q, and the text is the one that the target writes alone.
    """
    num_kept = leading(_overruled(choices[:, : drafted.shape[1]] == drafted, override), counts)
    return num_kept, choices.gather(1, num_kept[:, None])[:, 0]


def _overruled(kept: Tensor, override: Tensor | None) -> Tensor:
    return kept if override is None else override | kept


def leading(kept: Tensor, counts: Tensor) -> Tensor:
    """How many of a row's first `counts` are true before the first that is not; [B, K] and [B] to [B]."""
    kept = kept & (torch.arange(kept.shape[1], device=kept.device) < counts[:, None])
    return kept.long().cumprod(1).sum(1)


def draw(distribution: Tensor, noise: Tensor) -> Tensor:
    """A token from each distribution [.., V], by one uniform number each, [..]: the first of a larger cumulative mass.

    In float64, where a sum over any vocabulary is exact to far below what a float32 distribution says.
    """
    mass = distribution.double().cumsum(-1)
    return (mass <= noise[..., None] * mass[..., -1:]).sum(-1)


def choose(logits: Tensor, positions: Tensor, how: Samplers, purpose: int) -> tuple[Tensor, Tensor | None]:
    """A token for every position [B, T] from logits [B, T, V], and their distributions unless all is greedy."""
    if how.temperature is None:
        return logits.argmax(-1), None
    distribution = distributions(logits, how)
    return draw(distribution, uniform(how.keys, positions, purpose)), distribution


def uniform(keys: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Numbers in [0, 1), float64, one for each position [B, ..] of rows with these keys [B].

    Counter-based (SplitMix64 of key, position and purpose), so that a row's numbers depend on its seed and on the place
    in its text, and neither on its batch-mates nor on how many passes came before.
    """
    keys = keys.view(-1, *[1] * (positions.dim() - 1))
    return (_shifted(_mixed(_mixed(keys + positions * 4 + purpose) + keys), 11)).double() * 2.0**-53


def seed_key(seed: int) -> int:
    """A seed's key, any 64 bits."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64, whose products wrap (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + -0x61C8864680B583EB  # the golden ratio, as signed 64 bits
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _one_hot(tokens: Tensor, size: int) -> Tensor:
    return torch.zeros(*tokens.shape, size, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)
