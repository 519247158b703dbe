"""The steps of one request: who may write the next one, and the parts that write, judge and commit it."""

from functools import partial

from stepspec.loop.commit import Committer
from stepspec.loop.draft import DraftWriter
from stepspec.loop.request import Request
from stepspec.loop.review import Reviewer
from stepspec.loop.target import TargetWriter
from stepspec.loop.turns import Turns


class StepLoop:
    """What a family works with.

    Attributes:
        request: the request, as data.
        draft: proposes steps.
        target: writes and reads as the target.
        reviewer: judges proposed steps.
        committer: commits steps.
        turns: writes a step with both models.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.draft, self.target = DraftWriter(request), TargetWriter(request)
        self.reviewer = Reviewer(request, self.target)
        self.committer = Committer(request, self.target)
        self.turns = Turns(request, self.draft, self.target, self.reviewer, self.committer)

    async def reach_proposal(self) -> bool:
        """Let the target write the steps that the policy leaves to it. Return whether the draft may propose the next.

        False once the thinking or the budget has ended, the draft is missing, too much was wasted, or a tool call has
        begun, which only the target writes. False too if the policy is exact and the target cannot say what it would
        write here.
        """
        request, transcript, limits = self.request, self.request.transcript, self.request.limits
        if request.policy.step_level_exact and not request.is_own_text:
            request.not_proposed = "the sampling"
            return False
        if transcript.in_header and not limits.separate_answer:
            await self.target.header()
        while transcript.thinking and request.draft is not None and limits.allow_more():
            await self.target.wait_for_reader()
            if request.only_target or not request.ledger.may_waste(*request.policy.waste):
                request.not_proposed = "a tool call" if request.only_target else "too much was wasted"
                return False
            if len(transcript.steps) < request.policy.first_target_steps:
                await self.committer.write_step()
            elif request.choice.speculates(request):
                if request.choice.lacks_target:
                    await self.target.measure()
                request.not_proposed = None
                return True
            else:
                request.not_proposed = request.choice.why
                await self.complete_step()  # which may open a tool call
                if not request.only_target:
                    await self._pause()
        return False

    async def complete_step(self) -> None:
        """Let the target write the rest of the open step, if there is one, and commit it."""
        if self.request.transcript.open_ids:
            await self.committer.write_step("regenerated")

    async def finish(self) -> None:
        """Let a single writer finish the text. What the thinking still takes counts for the way that was chosen."""
        if not self.request.transcript.thinking:
            self.request.choice.stops_asking(self.request)
        await self.target.rest(until=self._asks_in_vain)
        self._close_rest()

    def _asks_in_vain(self) -> bool:
        self.request.choice.speculates(self.request)
        return False

    async def _pause(self) -> None:
        """Let the target write steps in one call until speculation pays again, and commit them."""
        request, transcript = self.request, self.request.transcript
        num_before = len(transcript.steps)
        if await self.target.rest(until=partial(request.choice.speculates, request)):
            self._close_rest()
        elif transcript.open_ids:
            await self.committer.write_step()
        new = range(num_before, len(transcript.steps))
        request.only_target = any(map(request.limits.step_opens_call, new))

    def _close_rest(self) -> None:
        """Commit a step that a limit has cut."""
        if self.request.transcript.open_ids:
            self.committer.close_step()
