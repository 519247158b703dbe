"""Passes of the target over draft steps, which all read that need to know what it sees there."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from stepspec.engines.protocol import Probe, Verification
from stepspec.errors import ContextError
from stepspec.loop.chain import Chain
from stepspec.loop.step import Proposal
from stepspec.loop.target import TargetWriter


class ChainPass:
    """One pass of the target over a chain, made when the first of its steps needs it.

    Args:
        chain: the chain.
        read: makes a pass over ids after the committed text, with probes.
    """

    def __init__(self, chain: Chain, read: Callable[[Sequence[int], Sequence[Probe]], Awaitable[Verification]]) -> None:
        self._ends = [0, *accumulate(step.num_written for step in chain.steps)]
        ids = [id for step in chain.steps for id in step.ids]
        self._ids = [*ids, *chain.answer] if chain.answer else ids[: self._ends[-1]]
        self._read = read
        self._probes: tuple[Probe, ...] = ()
        self._seen: Verification | None = None
        self._first = 0
        self._failed = False

    async def read(self, number: int, probes: Sequence[Probe]) -> Verification | None:
        """Return what the pass says about a step of the chain; None if it does not have that.

        The first call makes the pass, with its probes after every step from this one on. Those before are committed.

        Args:
            number: number of the step in the chain.
            probes: what the target is asked after the step.
        """
        if self._seen is None and not self._failed:
            self._probes, self._first = tuple(probes), number
            begin = self._ends[number]
            asked = [replace(probe, place=end - begin) for end in self._ends[number + 1 :] for probe in probes]
            try:
                self._seen = await self._read(self._ids[begin:], asked)
            except ContextError:  # a single step may still fit
                self._failed = True
        seen = self._seen
        if seen is None or not set(probes) <= set(self._probes):
            return None
        start, end = (each - self._ends[self._first] for each in self._ends[number : number + 2])
        places = [(number - self._first) * len(self._probes) + self._probes.index(probe) for probe in probes]
        assert seen.choices is not None, "chains are only for targets that return their choices"
        return Verification(
            logprobs=None if seen.logprobs is None else seen.logprobs[start:end],
            choices=seen.choices[start:end],
            next_choice=(*seen.choices, seen.next_choice)[end],
            probe_logprobs=tuple(seen.probe_logprobs[place] for place in places) if seen.probe_logprobs else (),
            probe_choices=tuple(seen.probe_choices[place] for place in places),
        )

    @property
    def answer_choices(self) -> Sequence[int]:
        """The target's own choice at each place of the answer, and after it; empty if the pass was not made."""
        seen = self._seen
        if seen is None or seen.choices is None:
            return ()
        return (*seen.choices, seen.next_choice)[self._ends[-1] - self._ends[self._first] + 1 :]


class StepPass:
    """The target's pass over one step, made when it is first needed. Judges, salvage and the step's end read it.

    Args:
        step: the step.
        target: reads it.
        scores: whether the log-probs of its tokens are needed.
        chain: the pass over the step's chain; None without one.
        number: number of the step in the chain.
    """

    def __init__(
        self, step: Proposal, target: TargetWriter, *, scores: bool, chain: ChainPass | None = None, number: int = 0
    ) -> None:
        self._ids, self._target, self._scores = step.written, target, scores
        self._chain, self._number = chain, number
        self.seen: Verification | None = None

    async def read(self, probes: Sequence[Probe] = ()) -> Verification:
        """Return what the target sees in the step. Of a further pass, only the probes count."""
        if self.seen is not None:
            return await self._target.read(self._ids, probes, scores=False)
        found = None if self._chain is None else await self._chain.read(self._number, probes)
        self.seen = found or await self.read_alone(probes)
        return self.seen

    async def read_alone(self, probes: Sequence[Probe] = ()) -> Verification:
        """Return what a pass over this step alone says."""
        return await self._target.read(self._ids, probes, scores=self._scores)
