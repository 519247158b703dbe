"""Distributions over the next token, and the exact rule that accepts drafted tokens (arXiv:2211.17192, section 2.3).

`acceptance` and `residual` define the rule. A token drafted from q is accepted with probability a = `acceptance(p, q)`;
otherwise a token is sampled from `residual(p, q)`. The outcome has distribution p:
`q * a + (1 - sum(q * a)) * residual == p`.

Distributions are float32. All functions take tensors for all rows of a batch and read no values back, so a device never
waits for the host.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stepspec.engines.protocol import Acceptance, Sampling
from stepspec.engines.torch_engine.relaxation import Relaxation, relaxation_of
from stepspec.engines.torch_engine.transfer import upload

DRAFT, ACCEPT, RESAMPLE = range(3)
"""Purposes of random numbers. Different purposes never share a number."""


class Filters(NamedTuple):
    """Truncation settings of B rows, as tensors [B]."""

    top_p: Tensor
    top_k: Tensor  # V for a row without top-k
    min_p: Tensor


FEW, WORD = 8, (1 << 64) - 1
"""Most random numbers that are computed one by one on a CPU, and the mask of their 64 bits."""
BLOCK = 128
"""Tokens whose probabilities are summed before the sums are accumulated, in `draw`."""
BELOW_ONE = 1 - 2**-52
"""Times a number in float64, this is less than the number."""


class Penalties(NamedTuple):
    """Penalties of B rows for tokens that their texts have, as tensors [B]."""

    repetition: Tensor  # 1 for a row without it
    presence: Tensor
    frequency: Tensor


class Seen(NamedTuple):
    """The tokens of rows' texts, as tensors [B, V], or [B, T, V] before each of T positions."""

    text: Tensor  # bool, whether prompt and output have a token
    output: Tensor  # float32, how often the output has it

    def before(self) -> "Seen":
        """Return them before a single position, [B, 1, V]."""
        return Seen(self.text[:, None], self.output[:, None])

    def last(self) -> "Seen":
        """Return them before the last position, [B, 1, V]."""
        return Seen(self.text[:, -1:], self.output[:, -1:])


class Samplers(NamedTuple):
    """Sampling settings of B rows, as tensors [B]. A setting that no row uses is None and costs nothing."""

    keys: Tensor  # int64, derived from the seeds
    temperature: Tensor | None = None  # None: every row is greedy; 1 for greedy rows beside others
    greedy: Tensor | None = None  # bool, which rows are greedy beside others
    filters: Filters | None = None
    penalties: Penalties | None = None
    bias: Tensor | None = None  # [B, V]; -inf where a token is not allowed
    allowed: Tensor | None = None  # bool [B, K + 1, V], tokens allowed at the K + 1 positions of a round
    seen: Seen | None = None  # the tokens in each row's text, [B, V]; set if `penalties` are
    relaxation: Relaxation | None = None

    @property
    def edits(self) -> bool:
        """Whether `edited` changes logits."""
        return self.penalties is not None or self.bias is not None or self.allowed is not None


def samplers(
    rows: Sequence[Sampling],
    vocab_size: int,
    device: torch.device,
    rules: Sequence[Acceptance] = (),
    kinds: Tensor | None = None,
) -> Samplers:
    """Return the rows' settings as tensors. The caller sets `seen` and `allowed`.

    Args:
        rows: their sampling settings.
        vocab_size: V.
        device: of the tensors.
        rules: their acceptance rules; exact by default.
        kinds: see `relaxation.token_kinds`; needed if a rule is not exact.
    """

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return upload(values, device, dtype)

    keys = column([seed_key(row.seed) for row in rows], torch.int64)
    penalties = Penalties(
        column([row.repetition_penalty for row in rows]),
        column([row.presence_penalty for row in rows]),
        column([row.frequency_penalty for row in rows]),
    )
    edited = any(row.logit_bias or row.allowed is not None for row in rows)
    bias = torch.stack([_bias(row, vocab_size, device) for row in rows]) if edited else None
    how = Samplers(
        keys,
        penalties=penalties if any(row.depends_on_text for row in rows) else None,
        bias=bias,
        relaxation=relaxation_of(rules, kinds),
    )
    if all(row.temperature == 0 for row in rows):
        return how
    filtered = any(row.top_p < 1 or row.top_k > 0 or row.min_p > 0 for row in rows)
    filters = Filters(
        column([row.top_p for row in rows]),
        column([row.top_k or vocab_size for row in rows], torch.int64),
        column([row.min_p for row in rows]),
    )
    greedy = [row.temperature == 0 for row in rows]
    return how._replace(
        temperature=column([row.temperature or 1.0 for row in rows]),
        greedy=column(greedy, torch.bool) if any(greedy) else None,
        filters=filters if filtered else None,
    )


def _bias(row: Sampling, vocab_size: int, device: torch.device) -> Tensor:
    """Return the bias to add to a row's logits, [V]."""
    bias = torch.zeros(vocab_size, device=device)
    if row.allowed is not None:
        bias.fill_(-torch.inf)[upload(sorted(row.allowed), device, torch.long)] = 0
    if row.logit_bias:
        ids, amounts = zip(*row.logit_bias, strict=True)
        bias.index_add_(0, upload(ids, device), upload(amounts, device, torch.float32))
    return bias


def seen_along(how: Samplers, after: Tensor) -> Seen | None:
    """Return the tokens before each of K + 1 positions, [B, K + 1, V]; None if `how.seen` is None.

    Args:
        how: sampling settings of the rows.
        after: the K tokens that follow each row's text, [B, K]. The first position is before all of them.
    """
    if how.seen is None:
        return None
    text, output = how.seen.before()
    later = torch.nn.functional.one_hot(after, text.shape[-1])
    counts = torch.cat([output, later.to(output.dtype)], 1).cumsum(1)
    return Seen(text | (counts > 0), counts)


def edited(logits: Tensor, how: Samplers, seen: Seen | None, *, partial: bool = False) -> Tensor:
    """Apply the repetition penalty (arXiv:1909.05858), the penalties of OpenAI's API, the bias and the mask of allowed
    tokens, in this order.

    Args:
        logits: [B, T, V].
        how: sampling settings of the rows.
        seen: tokens that get penalties, broadcast to [B, T, V].
        partial: whether the model scores a draft vocabulary only.

    Returns:
        Logits [B, T, V] in float32.
    """
    logits = logits.float()
    if how.penalties is not None and seen is not None:
        repetition, presence, frequency = (each[:, None, None] for each in how.penalties)
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen.text, penalized, logits) - frequency * seen.output - presence * (seen.output > 0)
    masked = _masked(logits, how)
    if not partial or masked is logits:
        return masked
    # If a draft vocabulary has none of the allowed tokens, sample among those by their bias alone.
    none_left = masked.isneginf().all(-1, keepdim=True)
    return torch.where(none_left, _masked(torch.zeros_like(logits), how), masked)


def _masked(logits: Tensor, how: Samplers) -> Tensor:
    """Apply the bias, and set tokens that are not allowed to -inf."""
    if how.bias is not None:
        logits = logits + how.bias[:, None]
    return logits if how.allowed is None else logits.masked_fill(~how.allowed, -torch.inf)


def distributions(logits: Tensor, how: Samplers) -> Tensor:
    """Return distributions [B, T, V] from logits: temperature, then top-k, top-p and min-p. Greedy rows are one-hot."""
    if how.temperature is None:
        return _one_hot(logits.argmax(-1), logits.shape[-1])
    probs = (logits.float() / how.temperature[:, None, None]).softmax(-1)
    if how.filters is not None:
        probs = _filtered(probs, how.filters)
    if how.greedy is None:
        return probs
    return torch.where(how.greedy[:, None, None], _one_hot(logits.argmax(-1), logits.shape[-1]), probs)


def _filtered(probs: Tensor, filters: Filters) -> Tensor:
    """Truncate distributions by top-k, then top-p (arXiv:1904.09751), then min-p (arXiv:2407.01082), and renormalize.

    Top-p applies to the share among the k most likely tokens; min-p is relative to the most likely token.
    """
    top_p, top_k, min_p = (each[:, None, None] for each in filters)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered = ordered * (torch.arange(probs.shape[-1], device=probs.device) < top_k)
    reached = ordered.cumsum(-1)
    kept = (reached - ordered < top_p * reached[..., -1:]) & (ordered >= min_p * ordered[..., :1])
    probs = torch.zeros_like(probs).scatter(-1, order, ordered * kept)
    return probs / probs.sum(-1, keepdim=True)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that each drafted token is accepted: min(1, p / q), and 1 if q is 0; [..., V]."""
    return torch.where(p < q, p / q.clamp(min=torch.finfo(q.dtype).tiny), 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution of the token that replaces a rejected one: max(p - q, 0), normalized; p if that is 0."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


class Decision(NamedTuple):
    """What stands of the drafted tokens of B rows."""

    num_kept: Tensor  # how many, [B]
    following: Tensor  # the token after them, [B]
    relaxed: Tensor | None = None  # which of them the exact rule rejects, bool [B, K]


def accept(
    p: Tensor,
    q: Tensor,
    drafted: Tensor,
    counts: Tensor,
    accept_noise: Tensor,
    resample_noise: Tensor,
    relax: Callable[[Tensor], Tensor] | None = None,
) -> Decision:
    """Accept drafted tokens that were sampled from distributions.

    Args:
        p: the target's distributions at each drafted position and one beyond, [B, K + 1, V].
        q: the distributions that the tokens were sampled from, [B, K, V].
        drafted: drafted tokens, [B, K].
        counts: how many of them each row has, [B].
        accept_noise: uniform random numbers in [0, 1), [B, K].
        resample_noise: uniform random numbers in [0, 1), one for each position, [B, K + 1].
        relax: returns which further tokens to keep, bool [B, K], from those that the exact rule accepts.
    """
    width, vocab_size = drafted.shape[1], p.shape[-1]
    column = drafted[..., None]
    p_drafted, q_drafted = p[:, :width].gather(-1, column)[..., 0], q.gather(-1, column)[..., 0]
    # The strict u * q < p never accepts a token of probability 0, even at u = 0.
    num_kept, relaxed = _kept(accept_noise * q_drafted < p_drafted, counts, relax)
    index = num_kept[:, None, None].expand(-1, 1, vocab_size)
    p_next, q_next = p.gather(1, index)[:, 0], q.gather(1, index.clamp(max=width - 1))[:, 0]
    distribution = torch.where((num_kept == counts)[:, None], p_next, residual(p_next, q_next))
    return Decision(num_kept, draw(distribution, resample_noise.gather(1, num_kept[:, None])[:, 0]), relaxed)


def accept_choices(
    choices: Tensor, drafted: Tensor, counts: Tensor, relax: Callable[[Tensor], Tensor] | None = None
) -> Decision:
    """Accept drafted tokens that agree with the target's own choices; for drafts without distributions.

    The choices are the argmax tokens, or samples from the target's distributions. A token x is accepted with
    probability p(x), which is the exact rule for a one-hot q. The text is the same as without drafting.

    Args:
        choices: the target's token at each drafted position and one beyond, [B, K + 1].
        drafted: drafted tokens, [B, K].
        counts: how many of them each row has, [B].
        relax: see `accept`.
    """
    num_kept, relaxed = _kept(choices[:, : drafted.shape[1]] == drafted, counts, relax)
    return Decision(num_kept, choices.gather(1, num_kept[:, None])[:, 0], relaxed)


def _kept(accepted: Tensor, counts: Tensor, relax: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """Return how many tokens stand before the first that does not, [B], and which tokens are relaxed, bool [B, K]."""
    if relax is None:
        return leading(accepted, counts), None
    inside = _inside(accepted, counts)
    relaxed = relax(accepted & inside) & inside
    return leading(accepted | relaxed, counts), relaxed


def leading(kept: Tensor, counts: Tensor) -> Tensor:
    """Return how many of each row's first `counts` [B] values of `kept` [B, K] are true before the first false; [B]."""
    return (kept & _inside(kept, counts)).long().cumprod(1).sum(1)


def _inside(tokens: Tensor, counts: Tensor) -> Tensor:
    """Return which columns of tokens [B, K] are among each row's first `counts` [B], bool [B, K]."""
    return torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]


def draw(distribution: Tensor, noise: Tensor) -> Tensor:
    """Sample a token from each distribution [.., V], given one uniform random number each, [..].

    The result is the first token whose cumulative probability exceeds the number. To accumulate over a large vocabulary
    takes a sixth of a pass over many rows, so only the sums of blocks of tokens are. These have the precision of the
    distribution, float32, and are accumulated in float64.
    """
    if missing := -distribution.shape[-1] % BLOCK:
        distribution = torch.nn.functional.pad(distribution, (0, missing))
    blocks = distribution.unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    mass = sums.cumsum(-1)
    aim = noise[..., None] * (mass[..., -1:] * BELOW_ONE)
    block = (mass <= aim).sum(-1, keepdim=True)
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, BLOCK))[..., 0, :].double().cumsum(-1)
    left = torch.minimum(aim - (mass - sums).gather(-1, block), inside[..., -1:] * BELOW_ONE)
    return block[..., 0] * BLOCK + (inside <= left).sum(-1)


def details(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token at temperature 1, and the entropy of its distribution, [B, T, 2].

    Args:
        logits: the model's own logits, [B, T, V]; -inf for tokens that it does not score.
        tokens: [B, T].
    """
    logprobs = logits.float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).nan_to_num().sum(-1)
    return torch.stack([logprobs.gather(-1, tokens[..., None])[..., 0], entropy], -1)


def choose(logits: Tensor, positions: Tensor, how: Samplers, purpose: int) -> tuple[Tensor, Tensor | None]:
    """Return a token for each position [B, T], and the distributions [B, T, V]; None for these if all rows are greedy.

    Args:
        logits: [B, T, V].
        positions: positions of the tokens in the rows' texts, [B, T].
        how: sampling settings of the rows.
        purpose: `DRAFT`, `ACCEPT` or `RESAMPLE`.
    """
    if how.temperature is None:
        return logits.argmax(-1), None
    distribution = distributions(logits, how)
    return draw(distribution, uniform(how.keys, positions, purpose)), distribution


def uniform(keys: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Return random numbers in [0, 1), float64, one for each position [B, ..] of rows with keys [B].

    The numbers are counter-based: SplitMix64 of key, position and purpose. They depend only on a row's seed and the
    position in its text, not on the other rows of the batch or on the number of earlier passes.
    """
    if positions.device.type == "cpu" and positions.numel() <= FEW:
        rows = zip(keys.tolist(), positions.flatten(1).tolist(), strict=True)
        numbers = [[_number(key, position * 4 + purpose) for position in row] for key, row in rows]
        return torch.tensor(numbers, dtype=torch.float64).view(positions.shape)
    keys = keys.view(-1, *[1] * (positions.dim() - 1))
    return (_shifted(_mixed(_mixed(keys + positions * 4 + purpose) + keys), 11)).double() * 2.0**-53


def seed_key(seed: int) -> int:
    """Return the key of a seed, as a signed 64-bit integer."""
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big", signed=True)


def _number(key: int, count: int) -> float:
    """Return the random number of `uniform` for one position. For few numbers, tensors take longer."""
    for _ in range(2):
        x = (key + count + 0x9E3779B97F4A7C15) & WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
        count = x ^ (x >> 31)
    return (count >> 11) * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    """Apply SplitMix64's output function to int64, with wrapping products (Steele, Lea, Flood, OOPSLA 2014)."""
    x = x + -0x61C8864680B583EB  # the golden ratio, as signed 64 bits
    x = (x ^ _shifted(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _one_hot(tokens: Tensor, size: int) -> Tensor:
    return torch.zeros(*tokens.shape, size, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)
