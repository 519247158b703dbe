"""The order of a run: which policy answers which problems when, so that none has the better time of day.

Policies take turns in blocks, in orders that are balanced. With one request at a time a block is one problem, so
policies alternate problem by problem. With more in flight a block is several times as many problems, and no two
policies ever share a batch.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepspec.errors import UsageError
from stepspec.evaluation.running.problems import EvalProblem

ROUNDS_PER_BLOCK = 4
"""Problems per block over requests in flight: enough that the last ones, which run alone, weigh little."""


@dataclass(frozen=True)
class Part:
    """One of the parts that several processes run, each with problems of its own, so that pairs stay together."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Part":
        """From `2/4`.

        Raises:
            UsageError: it is not that.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise UsageError(f"{text!r} is no part; write 2/4 for the second of four.")
        return part

    @property
    def suffix(self) -> str:
        """What the part's files have behind their names."""
        return "" if self.count == 1 else f"-{self.number}of{self.count}"

    def of(self, problems: Sequence[EvalProblem]) -> Sequence[EvalProblem]:
        """The problems of this part."""
        return problems[self.number - 1 :: self.count]


WHOLE = Part()


@dataclass(frozen=True)
class Job:
    """One row to be."""

    problem: EvalProblem
    policy: str
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its row."""
        return self.problem.id, self.policy, self.repeat


def balanced_orders(policies: Sequence[str]) -> list[list[str]]:
    """Orders of the policies to go through one after the other (Williams, Australian J. Chem. 2, 1949).

    After every two of them each policy has run as often before as after every other. After all of them each has also
    stood as often in every place, and as often directly behind every other.
    """
    n = len(policies)
    zigzag = [place // 2 if place % 2 == 0 else n - 1 - place // 2 for place in range(n)]
    orders = list[list[str]]()
    for shift in range(n // 2 if n % 2 == 0 else n):
        order = [policies[(place + shift) % n] for place in zigzag]
        orders += [order, order[::-1]]
    return orders


def schedule(
    problems: Sequence[EvalProblem], policies: Sequence[str], concurrency: int, num_repeats: int = 1
) -> Iterator[list[Job]]:
    """All jobs, in blocks of one policy each that run after one another."""
    items = [(problem, repeat) for repeat in range(num_repeats) for problem in problems]
    size = 1 if concurrency == 1 else concurrency * ROUNDS_PER_BLOCK
    orders = balanced_orders(policies)
    for index, start in enumerate(range(0, len(items), size)):
        for policy in orders[index % len(orders)]:
            yield [Job(problem, policy, repeat) for problem, repeat in items[start : start + size]]


def seed_of(run_seed: int, problem: str, repeat: int) -> int:
    """The seed of a request: the same under every policy, on every machine and after every resumption."""
    digest = hashlib.sha256(f"{run_seed}/{repeat}/{problem}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
