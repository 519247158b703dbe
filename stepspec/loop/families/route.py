"""The first tokens of a step decide who writes it. Nothing is judged."""

from typing import Literal

from pydantic import Field, model_validator

from stepspec.engines.protocol import Ability
from stepspec.loop.family import FamilyTable
from stepspec.loop.step import Proposal
from stepspec.loop.step_loop import StepLoop


class RouteTable(FamilyTable):
    """How family `route` decides who writes a step."""

    signal: Literal["first-entropy", "words"] = "first-entropy"
    """`first-entropy`: the entropy of the draft's first token. `words`: words of doubt, checking or concluding."""
    threshold: float = Field(default=0.5, ge=0)
    """`first-entropy`: above this entropy, in nats, the target writes the step."""
    opening_tokens: int = Field(default=20, ge=1)
    """`words`: tokens of a step that are searched. Where a word is found, the target writes as many."""
    checking_tokens: int = Field(default=125, ge=1)
    """`words`: tokens that the target writes after a word of checking."""
    doubts: int = Field(default=15, ge=1)
    """`words`: after this many doubts, the target checks the steps so far."""

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """See `FamilyTable.draft_needs`."""
        return frozenset({"entropies"} if self.signal == "first-entropy" else ())

    @model_validator(mode="after")
    def _keys_of_the_signal(self) -> "RouteTable":
        words = {"opening_tokens", "checking_tokens", "doubts"}
        for key in {"threshold"} if self.signal == "words" else words:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with the signal {self.signal!r}")
        return self


async def route(loop: StepLoop, table: RouteTable) -> None:
    """GlimpRouter (arXiv:2601.05110, section 3): the draft writes the first token of a step, and its entropy decides
    which of the two models writes the step.

    Speculative Thinking (arXiv:2504.12329, section 3): the draft writes the first tokens of a step. If they doubt or
    conclude, the target writes as many instead; if they check, it writes more; after many doubts, it is asked to check
    the steps so far. Then the draft writes on.

    Departures: the target confirms the end of the thinking and writes the answer, and it writes the step after two
    equal ones. The draft's first token is kept if the draft writes the step, and dropped otherwise. A step that repeats
    itself is aborted, and too much waste ends the speculation. Words are looked for in the draft's opening alone.
    """
    router = Words(table) if table.signal == "words" else Entropy(table)
    while await loop.reach_proposal():
        opening = await loop.draft.more(router.num_opening_tokens)
        if opening is None:
            return
        num_target = WHOLE_STEP if loop.request.transcript.is_stuck else router.target_tokens(opening)
        if num_target:
            await loop.turns.take_over(opening, num_target, router.asks())
        else:
            await loop.turns.keep(opening)
        if not await loop.turns.finish_step():
            return


class Entropy:
    """The target writes a step whose first token has an entropy above the threshold."""

    num_opening_tokens = 1

    def __init__(self, table: RouteTable) -> None:
        self._table = table

    def target_tokens(self, opening: Proposal) -> int:
        """Return how many tokens the target writes instead of the opening; 0 to keep it."""
        if not opening.num_written:
            return 0  # a tag alone, which the target has to confirm
        certain = opening.entropies and opening.entropies[0] <= self._table.threshold
        return 0 if certain else WHOLE_STEP

    def asks(self) -> str:
        """Return a sentence to begin the target's part with."""
        return ""


WHOLE_STEP = 1 << 30
# The published lists and sentence: speculative/config/1b_32b.yml of the released code, commit 98310f3.
DOUBT = ("wait", "alternatively", "hold on", "another")
CHECK = ("verify", "think again", "recap", "check")
CONCLUSION = ("yeah", "yes", "final answer", "confident")
CHECK_STEPS = "Let me check whether there are some wrong steps:"


class Words:
    """The target writes instead of an opening that has words of doubt, checking or concluding."""

    def __init__(self, table: RouteTable) -> None:
        self._table = table
        self._num_doubts = 0
        self.num_opening_tokens = table.opening_tokens

    def target_tokens(self, opening: Proposal) -> int:
        """Return how many tokens the target writes instead of the opening; 0 to keep it."""
        text = opening.text.lower()
        checks, doubts, concludes = (sum(map(text.count, words)) for words in (CHECK, DOUBT, CONCLUSION))
        self._num_doubts += 0 < checks + doubts >= concludes
        if checks or self._num_doubts >= self._table.doubts:
            return self._table.checking_tokens
        return self._table.opening_tokens if doubts or concludes else 0

    def asks(self) -> str:
        """Return a sentence to begin the target's part with, after many doubts."""
        if self._num_doubts < self._table.doubts:
            return ""
        self._num_doubts = 0
        return CHECK_STEPS
