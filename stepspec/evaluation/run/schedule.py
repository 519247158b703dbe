"""The order of a run: which policy answers which problems when, so that no policy benefits from the time of day.

Policies take turns in blocks, in balanced orders. With one request at a time a block is one problem, so policies
alternate problem by problem. With concurrent requests a block has several times as many problems, and two policies
never share a batch. The blocks of the same problems, one for each policy, are a round.
"""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from stepspec.errors import UsageError
from stepspec.evaluation.run.problems import EvalProblem

ROUNDS_PER_BLOCK = 4
"""Problems per block over concurrent requests: enough that the last ones, which run alone, matter little."""


@dataclass(frozen=True)
class Part:
    """One of several parts that separate processes run. Each has its own problems, so that pairs stay together."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Part":
        """Parse a part from text such as `2/4`.

        Raises:
            UsageError: the text has another format.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        part = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise UsageError(f"{text!r} is no part; write 2/4 for the second of four.")
        return part

    @property
    def suffix(self) -> str:
        """The suffix of the part's file names."""
        return "" if self.count == 1 else f"-{self.number}of{self.count}"

    def of(self, problems: Sequence[EvalProblem]) -> Sequence[EvalProblem]:
        """Return the problems of this part."""
        return problems[self.number - 1 :: self.count]


WHOLE = Part()


@dataclass(frozen=True)
class Job:
    """One problem to run under one policy, for one repeat."""

    problem: EvalProblem
    policy: str
    repeat: int

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of its row."""
        return self.problem.id, self.policy, self.repeat


def balanced_orders(policies: Sequence[str]) -> list[list[str]]:
    """Return orders of the policies to use one after the other (Williams, Australian J. Chem. 2, 1949).

    After every two orders, each policy has run as often before as after every other. After all orders, each has also
    been equally often in every position, and equally often directly after every other.
    """
    n = len(policies)
    zigzag = [index // 2 if index % 2 == 0 else n - 1 - index // 2 for index in range(n)]
    orders = list[list[str]]()
    for shift in range(n // 2 if n % 2 == 0 else n):
        order = [policies[(index + shift) % n] for index in zigzag]
        orders += [order, order[::-1]]
    return orders


JobBlock = Sequence[Job]
"""Jobs of one policy that run together."""
Round = Sequence[JobBlock]
"""Blocks with the same problems, which run one after the other and on the same machine."""


def rounds(
    problems: Sequence[EvalProblem], policies: Sequence[str], concurrency: int, num_repeats: int = 1
) -> Iterator[Round]:
    """Yield all jobs in rounds."""
    items = [(problem, repeat) for repeat in range(num_repeats) for problem in problems]
    size = 1 if concurrency == 1 else concurrency * ROUNDS_PER_BLOCK
    orders = balanced_orders(policies)
    for index, start in enumerate(range(0, len(items), size)):
        own = items[start : start + size]
        yield [[Job(problem, policy, repeat) for problem, repeat in own] for policy in orders[index % len(orders)]]


def unfinished(found: Round, done: Collection[tuple[str, str, int]]) -> Round:
    """Return a round without the jobs whose keys are done, and without blocks that are empty then."""
    left = ([job for job in block if job.key not in done] for block in found)
    return [block for block in left if block]


def seed_of(run_seed: int, problem: str, repeat: int) -> int:
    """Return the seed of a request: the same under every policy, on every machine and after a run is resumed."""
    digest = hashlib.sha256(f"{run_seed}/{repeat}/{problem}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
