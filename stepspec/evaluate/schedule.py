"""The order of a run: which policy answers which problems when, so that none has the better time of day.

Policies take turns in blocks, and who begins moves on by one with every block. With one request at a time a
block is one problem, so policies alternate problem by problem. With more in flight a block is several times
as many problems, and no two policies ever share a batch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepspec.evaluate.problems import EvalProblem

ROUNDS_PER_BLOCK = 4
"""Problems per block over requests in flight: enough that the last ones, which run alone, weigh little."""


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


def schedule(
    problems: Sequence[EvalProblem], policies: Sequence[str], concurrency: int, num_repeats: int = 1
) -> Iterator[list[Job]]:
    """All jobs, in blocks of one policy each that run after one another."""
    items = [(problem, repeat) for repeat in range(num_repeats) for problem in problems]
    size = 1 if concurrency == 1 else concurrency * ROUNDS_PER_BLOCK
    for index, start in enumerate(range(0, len(items), size)):
        first = index % len(policies)
        for policy in [*policies[first:], *policies[:first]]:
            yield [Job(problem, policy, repeat) for problem, repeat in items[start : start + size]]


def seed_of(run_seed: int, problem: str, repeat: int) -> int:
    """The seed of a request: the same under every policy, on every machine and after every resumption."""
    digest = hashlib.sha256(f"{run_seed}/{repeat}/{problem}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
