"""How draft steps are judged: the panel of judges, and one pass of the target that all who need it read."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from stepspec.engines.protocol import Verification, check_room
from stepspec.errors import ContextError, UnknownIdError
from stepspec.loop.chain import Chain
from stepspec.loop.draft import is_hopeless
from stepspec.loop.judge import Evidence, Verifier, own_choices
from stepspec.loop.request import Request
from stepspec.loop.step import JudgedStep, Proposal, StepJudged, StepProposed, Verdict
from stepspec.loop.step_pass import ChainPass, StepPass
from stepspec.loop.target import TargetWriter


@dataclass(frozen=True)
class Judged:
    """A proposed step, the verdict on it, and the target's pass over it; None if no judge and no salvage needed one."""

    proposal: Proposal
    verdict: Verdict
    seen: Verification | None
    by_judges: bool = False
    """Whether the judges were asked."""
    recorded: Verification | None = None
    """The target's pass over it for a recording, which may need one where nothing else does."""
    seconds: float = 0.0
    """Seconds in which it was judged."""
    next_id: int | None = None
    """The id that the draft has written after it."""
    answers: bool = False
    """Whether it belongs to the answer, of which only what the target would have written itself is kept."""
    answer: Sequence[int] = ()
    """The answer that the draft has written after it and its tag."""
    own_answer: Sequence[int] = ()
    """The target's own choice at each place of that answer, and after it; empty if they are not known."""

    @property
    def accepted(self) -> bool:
        """Whether the step is accepted."""
        return self.verdict.accepted

    def to_record(self, index: int, num_salvaged: int, write_s: float) -> JudgedStep:
        """Return what was seen of the step, with what was kept of it and what writing the rest of it took."""
        proposal, seen = self.proposal, self.recorded or self.seen
        return JudgedStep(
            index=index,
            text=proposal.text,
            num_tokens=proposal.num_written,
            accepted=self.accepted,
            asked=self.by_judges,
            scores=self.verdict.scores,
            target_logprobs=None if seen is None else seen.logprobs,
            own_choices=own_choices(proposal.ids, seen),
            draft_logprobs=proposal.logprobs,
            num_salvaged=num_salvaged,
            draft_s=proposal.seconds,
            judge_s=self.seconds,
            write_s=write_s,
        )


class Reviewer:
    """Judges draft steps. It commits nothing."""

    def __init__(self, request: Request, target: TargetWriter) -> None:
        self._request, self._target = request, target

    def _tell(self, judged: Judged, *, accepted: bool) -> None:
        self._request.record.judged(by_judges=judged.by_judges)
        index = len(self._request.transcript.steps)
        self._request.record.emit([StepJudged(index, accepted, judged.verdict.scores)])

    async def chain(self, chain: Chain) -> AsyncGenerator[Judged, None]:
        """Yield the steps of a chain as they are judged. The caller commits each of them before it takes the next one.

        It ends after a rejected step, at the end of the thinking, and at a step that the target cannot read before the
        deadline. Empty steps, repeated steps and tool calls are rejected without asking the judges. The target cannot
        read a step that does not fit its context, or that has a token which it does not have. The context may still
        have room for writing then. An answer after the thinking comes with the last step.
        """
        request, transcript, record = self._request, self._request.transcript, self._request.record
        shared = ChainPass(chain, self._target.read) if len(chain.steps) > 1 or chain.answer else None
        number, judged, is_last = 0, None, False
        for index, proposal in enumerate(chain.steps, len(transcript.steps)):
            record.emit([StepProposed(index, proposal.text, len(proposal.ids))])
        for number, proposal in enumerate(chain.steps):
            judged = await self.judge(proposal, shared, number)
            if judged is not None:
                judged = replace(judged, next_id=chain.next_id(number))
                if is_last := number + 1 == len(chain.steps):
                    own = shared.answer_choices if shared else ()
                    judged = replace(judged, answer=chain.answer, own_answer=own)
                self._tell(judged, accepted=judged.accepted)
                yield judged
            if judged is None or not judged.accepted or not transcript.thinking or request.only_target:
                break
        record.abandoned(chain.num_after(number, answer=judged is None or not is_last))
        request.choice.ends_chain(request)

    async def judge(self, proposal: Proposal, chain: ChainPass | None = None, number: int = 0) -> Judged | None:
        """Judge a step, of a chain where it has a pass. None if the target cannot read it before the deadline."""
        since, started, request = time.time_ns(), time.perf_counter(), self._request
        own_pass = StepPass(proposal, self._target, scores=request.reads_scores, chain=chain, number=number)
        try:
            check_room(request.target, len(request.transcript.buffer), proposal.num_written)
            hopeless = is_hopeless(request, proposal, request.transcript.last_text)
            judged = await (self._unasked(proposal, own_pass) if hopeless else self._asked(proposal, own_pass))
        except (ContextError, UnknownIdError, TimeoutError):
            request.record.abandoned(len(proposal.ids))
            return None
        request.record.reviewed(since, len(request.transcript.steps), judged.verdict)
        return replace(judged, seconds=time.perf_counter() - started)

    async def _unasked(self, proposal: Proposal, own_pass: StepPass) -> Judged:
        """Decide about a step without asking the judges: only a bare tag that the target chooses too is accepted."""
        if proposal.num_written and self._request.policy.salvage is None:
            return Judged(proposal, Verdict(False, {}), None)
        seen = await own_pass.read()
        return Judged(proposal, Verdict(not proposal.num_written and seen.next_choice == proposal.tag, {}), seen)

    async def _asked(self, proposal: Proposal, own_pass: StepPass) -> Judged:
        """Ask the judges about a step."""
        request = self._request
        with request.record.time("judge"):
            steps, group = request.transcript.steps, request.options.cache_salt
            evidence = Evidence.of(proposal, request.question, steps, request.judges, group)
            verdict = await self.ask_panel(evidence, own_pass.read)
        if own_pass.seen is None and not request.target_has(proposal.ids):  # else the target has read them
            raise UnknownIdError(f"{request.target.name} does not have a token of the draft's step.")
        ends = proposal.tag is not None or request.thinking.steps_are_answer
        if own_pass.seen is None and (ends if verdict.accepted else request.policy.salvage is not None):
            with suppress(ContextError, TimeoutError):  # without room or time, no tag is confirmed and nothing salvaged
                await own_pass.read()
        seen = recorded = own_pass.seen
        answers = self.answers(proposal, seen) and own_prefix(request, proposal, seen) < proposal.num_written
        verdict = replace(verdict, accepted=verdict.accepted and not answers)
        if request.judged_steps is not None and seen is None:  # the text must not depend on this pass
            with suppress(ContextError, TimeoutError):
                recorded = await own_pass.read_alone()
        return Judged(proposal, verdict, seen, by_judges=True, recorded=recorded, answers=answers)

    async def ask_panel(self, evidence: Evidence, verify: Verifier) -> Verdict:
        """Return the judges' verdict on a step, see `Panel.judge`."""
        panel = self._request.panel
        verdict = await panel.judge(evidence, verify, self._request.limits.deadline)
        self._request.record.asked_judges(verdict, len(panel.with_models & verdict.scores.keys()))
        return verdict

    def answers(self, proposal: Proposal, seen: Verification | None) -> bool:
        """Whether a draft's text belongs to the answer of a model that does not mark its thinking.

        It does if the answer is marked in it or before it, or if one of the models would end the text after it.
        """
        request = self._request
        ends = proposal.tag is not None or seen is None or seen.next_choice in request.ends
        text = request.open_text + proposal.text
        return request.thinking.answers([text], before=request.transcript.last_text, ends=ends)


def own_prefix(request: Request, proposal: Proposal, seen: Verification | None) -> int:
    """Return how many leading tokens of a draft's text are the target's own choices; 0 if these are not known."""
    own = own_choices(proposal.written, seen) if request.is_own_text else None
    return [*(own or ()), False].index(False)
