"""The draft proposes steps, and judges decide about each of them."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stepspec.base.file_model import number_or_auto
from stepspec.loop.chain import Chains, Proposing
from stepspec.loop.depth import MAX_DEPTH, Depth
from stepspec.loop.family import FamilyTable
from stepspec.loop.request import Request


class ScoreTable(FamilyTable):
    """What family `score` proposes."""

    judged: ClassVar[bool] = True
    reads_steps: ClassVar[bool] = True

    depth: Depth = 1
    """Draft steps that one pass of the target judges, each after the last one. `auto` chooses from measured acceptance
    and costs."""
    draft_answer: bool = False
    """Whether the draft goes on with the answer after it has ended the thinking. The target keeps what it would have
    written itself."""
    look_ahead: bool | Literal["auto"] = False
    """Whether the draft writes the next steps while the target judges, and the target reads the prompt while the draft
    writes the first ones. `auto` does so where a model is on a server and that is faster by measured times."""
    max_overhead: float | None = Field(default=None, ge=0)
    """Largest share of the target's own time that speculation on steps may cost, over the requests of a session. Beyond
    it, the target writes until the draft may try again; so it does under load, where speculation was measured to give
    all requests together fewer tokens per second. None for no limit; 0 never tries again once a loss was made."""
    candidates: int = Field(default=1, ge=1, le=16)
    """Draft steps side by side at each place, above temperature 0. Of those that the judges accept, the one with the
    highest score of the first judge that can accept is kept."""

    @field_validator("depth", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        return number_or_auto(value, MAX_DEPTH)

    @field_validator("look_ahead", mode="before")
    @classmethod
    def _switch_or_auto(cls, value: object) -> object:
        if isinstance(value, bool) or value == "auto":
            return value
        raise ValueError('it must be true, false or "auto"')

    @model_validator(mode="after")
    def _chains_of_one_candidate(self) -> "ScoreTable":
        if self.depth != 1 and self.candidates > 1:
            raise ValueError("depth and candidates cannot both be above 1")
        for name in ("draft_answer", "look_ahead", "max_overhead"):
            if getattr(self, name) and self.candidates > 1:
                raise ValueError(f"{name} is for one candidate a step")
        return self

    @property
    def waste_rate(self) -> int:
        """See `FamilyTable.waste_rate`."""
        return max(self.candidates, (1 + bool(self.look_ahead)) * (MAX_DEPTH if self.depth == "auto" else self.depth))


async def score(request: Request, table: ScoreTable) -> None:
    """SpecReason (arXiv:2504.07891, section 3): the target judges every step of the draft and writes the rejected ones.
    RSD (arXiv:2501.19324, section 3): a process reward model judges them.

    Departures: several judges may decide, the draft may propose several steps side by side or one after the other, the
    target may keep the part of a rejected step that it agrees with, and the draft may go on behind that part. Empty and
    repeated steps are rejected without asking, a step that repeats itself is aborted, too much waste ends the
    speculation, only the target ends the thinking, and it writes the answer.
    """
    works = True
    proposing = Proposing.fitted(request, table.depth, answer=table.draft_answer, ahead=table.look_ahead)
    async with Chains(request, proposing) as chains:
        while works and await request.speculates(chains.drop_ahead):
            works = False
            several = table.candidates > 1
            async for step in request.judge(await request.propose(table.candidates)) if several else chains.judged():
                works = True
                if step.accepted:
                    request.accept(step)
                else:
                    await request.replace(step)
    await request.complete_step()
