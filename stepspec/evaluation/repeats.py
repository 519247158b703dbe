"""pass@k, maj@k and avg@k of problems that were sampled several times, with intervals clustered by problem.

pass@k is the probability that at least one of k samples is correct, maj@k that the most frequent of their answers is,
and avg@k the mean share of correct ones. All are means over every choice of k of a problem's n samples, computed
exactly. For avg@k this mean is the same for every k.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb

from stepspec.evaluation.grade.latex import cleaned, text_key
from stepspec.evaluation.grade.number import read_number
from stepspec.evaluation.stats import Share

MAX_CHOICES = 2**13
"""Largest product of k and n for which maj@k is computed, in about 0.1 s. Only k = n costs little for any n."""


@dataclass(frozen=True)
class Samples:
    """The samples of one problem, counted by answer."""

    correct: int
    others: tuple[int, ...]
    """How many samples give each answer that is not correct, the most frequent first."""
    unanswered: int

    @classmethod
    def of(cls, answers: Iterable[tuple[bool, str | None]]) -> "Samples":
        """Count samples, each given as whether it is correct and its answer.

        Correct answers are one group. Others are the same answer if they are equal numbers or, normalized, equal texts.
        """
        correct, others, unanswered = 0, Counter[Fraction | str](), 0
        for is_correct, answer in answers:
            correct += is_correct
            if not is_correct and answer is not None:
                others[_answer_key(answer)] += 1
            unanswered += not is_correct and answer is None
        return cls(correct, tuple(sorted(others.values(), reverse=True)), unanswered)

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.correct + sum(self.others) + self.unanswered

    def pass_at(self, k: int) -> float:
        """Return 1 - C(n - c, k) / C(n, k), the unbiased estimate of pass@k (M. Chen et al., arXiv:2107.03374)."""
        return 1 - comb(self.n - self.correct, k) / comb(self.n, k)

    @lru_cache(maxsize=4096)  # noqa: B019 - samples are small values, and many problems have equal ones
    def majority_at(self, k: int) -> float:
        """Return maj@k: the mean over all choices of k samples of the correct answer's share of the first place.

        Answers with equally many votes share it evenly. Samples without an answer do not vote.
        """
        if k == self.n:
            won = self.correct > 0 and self.correct >= max(self.others, default=0)
            return 1 / (1 + self.others.count(self.correct)) if won else 0.0
        total = Fraction(0)
        for votes in range(max(1, k - (self.n - self.correct)), min(self.correct, k) + 1):
            rest, rivals = k - votes, [size for size in self.others if size >= votes]
            free = self.n - self.correct - sum(rivals)  # samples that cannot tie, in any number
            # By how many rivals have as many votes and how many samples are chosen, the number of such choices.
            choices = Counter({(0, chosen): comb(free, chosen) for chosen in range(min(free, rest) + 1)})
            for size in rivals:
                longer = Counter[tuple[int, int]]()
                for (ties, chosen), number in choices.items():
                    for more in range(min(votes, rest - chosen) + 1):
                        longer[ties + (more == votes), chosen + more] += number * comb(size, more)
                choices = longer
            shares = [Fraction(number, 1 + ties) for (ties, chosen), number in choices.items() if chosen == rest]
            total += comb(self.correct, votes) * sum(shares, Fraction(0))
        return float(total / comb(self.n, k))


def at_k(problems: Sequence[Samples]) -> Mapping[str, Share]:
    """Return `pass@k` and `maj@k` for k = 1, 2, 4, ... and n, and `avg@n`; empty for n < 2.

    n is the smallest number of samples of a problem. Of problems with more, all samples are used.
    """
    n = min((each.n for each in problems), default=0)
    found: dict[str, Share] = {}
    for k in sorted({n, *(2**power for power in range(n.bit_length()))}) if n > 1 else ():
        found[f"pass@{k}"] = _share(n // k, [each.pass_at(k) for each in problems])
        if all(k == each.n or k * each.n <= MAX_CHOICES for each in problems):
            found[f"maj@{k}"] = _share(n // k, [each.majority_at(k) for each in problems])
    return found | ({f"avg@{n}": found["pass@1"]} if n > 1 else {})


def _share(choices: int, values: Sequence[float]) -> Share:
    # n samples are as much as n // k independent choices of k, so that k = 1 has the interval of the accuracy.
    return Share.of([[value] * choices for value in values])


def _answer_key(answer: str) -> Fraction | str:
    clean = cleaned(answer)
    number = read_number(clean)
    return text_key(clean) if number is None else number.value
