"""Laws over the next token, and the exact rule by which drafted tokens are accepted (arXiv:2211.17192, section 2.3).

`acceptance` and `residual` are the whole of the rule: a token drafted from q is kept with probability
`acceptance(p, q)` of that token, otherwise a token is drawn from `residual(p, q)`, and the outcome has law p:
`q * a + (1 - sum(q * a)) * residual == p`. Everything is float32.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from stepspec.engine import Sampling


def law(logits: Tensor, sampling: Sampling) -> Tensor:
    """The law that `sampling` makes of logits [..., V]: temperature, then top-k, then top-p. Greedy is one-hot."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    logits = logits.float() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)
    return _nucleus(probs, sampling.top_p) if sampling.top_p < 1 else probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose mass reaches `top_p`, renormalised (arXiv:1904.09751)."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(probs).scatter(-1, order, ordered * (before < top_p))
    return kept / kept.sum(-1, keepdim=True)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that each token is accepted when drafted: min(1, p / q), and 1 where q is 0; [..., V]."""
    return torch.where(p < q, p / q.clamp(min=torch.finfo(q.dtype).tiny), 1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Law of the token that replaces a rejected one: max(p - q, 0), normalised; p itself where nothing is left."""
    left = (p - q).clamp(min=0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0, left / mass.clamp(min=torch.finfo(p.dtype).tiny), p)


class Stream:
    """The random numbers of one call, a generator per purpose, so that drafting and accepting never share a number.

    A call's seed and position in the text decide them: neither batch-mates nor the number of passes do.
    """

    def __init__(self, seed: int, position: int, device: torch.device) -> None:
        self._key = (seed, position)
        self._device = device
        self._generators: dict[str, torch.Generator] = {}

    def _generator(self, purpose: str) -> torch.Generator:
        if purpose not in self._generators:
            digest = hashlib.sha256(repr((*self._key, purpose)).encode()).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "big"))
            self._generators[purpose] = generator
        return self._generators[purpose]

    def uniform(self, count: int, purpose: str) -> Tensor:
        """`count` numbers in [0, 1)."""
        return torch.rand(count, generator=self._generator(purpose), device=self._device)

    def draw(self, probs: Tensor, purpose: str) -> Tensor:
        """One token from a law [V], by an exponential race: no synchronisation, unlike `multinomial`."""
        noise = torch.empty_like(probs).exponential_(generator=self._generator(purpose))
        return (probs / noise).argmax(-1)


def accept(p: Tensor, q: Tensor, drafted: Tensor, stream: Stream) -> tuple[int, int]:
    """How many of K drafted tokens are accepted, and the token that follows them.

    Args:
        p: the target's law at each drafted position and one beyond, [K + 1, V].
        q: the law each token was drafted from, [K, V].
        drafted: [K].
    """
    count = drafted.shape[0]
    column = drafted[:, None]
    # u * q < p, strictly, so that a token the target never writes is not accepted even at u = 0.
    kept = stream.uniform(count, "accept") * q.gather(1, column)[:, 0] < p[:count].gather(1, column)[:, 0]
    num_accepted = int(kept.int().cumprod(0).sum())
    last = p[count] if num_accepted == count else residual(p[num_accepted], q[num_accepted])
    return num_accepted, int(stream.draw(last, "resample"))


def accept_greedy(choices: Sequence[int], drafted: Sequence[int]) -> tuple[int, int]:
    """The same at temperature 0, where both laws are one-hot: the agreeing prefix, then the target's own choice."""
    num_accepted = 0
    while num_accepted < len(drafted) and drafted[num_accepted] == choices[num_accepted]:
        num_accepted += 1
    return num_accepted, choices[num_accepted]
