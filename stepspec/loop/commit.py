"""Commits steps: those of the draft as a whole, in part, or not at all, and what the target writes instead."""

import math
import time
from typing import Literal

from stepspec.engines.protocol import Verification
from stepspec.loop.record import Fate
from stepspec.loop.request import Request
from stepspec.loop.review import Judged, own_prefix
from stepspec.loop.step import Origin, Proposal, Verdict
from stepspec.loop.target import TargetWriter

SURE = math.log(0.5)
"""A token above this log-probability is the most likely one: all others are less likely."""


class Committer:
    """Commits what the models write, and closes steps.

    Attributes:
        origin: who has written the open step.
        num_from_draft: how many of its tokens are the draft's.
    """

    def __init__(self, request: Request, target: TargetWriter) -> None:
        self._request, self._target = request, target
        self.origin: Origin = "target"
        self.num_from_draft = 0

    def accept(self, judged: Judged) -> None:
        """Commit the draft's step. An end tag is included only if the target chooses it too.

        The target's own choice after the step may also end the thinking.
        """
        request, transcript, proposal = self._request, self._request.transcript, judged.proposal
        chosen = None if judged.seen is None else judged.seen.next_choice
        accepted = proposal.ids if proposal.tag is not None and proposal.tag == chosen else proposal.written
        num_rejected = len(proposal.ids) - len(accepted)
        request.record.accepted(len(accepted), rejected=num_rejected, step=bool(proposal.text))
        self._note(judged)
        self.origin = "salvaged" if transcript.open_ids else "draft"
        self.num_from_draft += proposal.num_written
        transcript.extend(accepted)
        self.close_step(judged.verdict)
        if judged.answer:
            self._keep_answer(judged)
        if chosen not in request.ends or chosen == judged.next_id:  # the draft may have ended it too
            return
        if request.is_edited and not request.samples:  # then it need not be what the target would write
            return
        if transcript.thinking and not request.only_target and request.ledger.remaining > 0:
            request.record.generated(1, "forced")
            transcript.extend([chosen])
            request.record.emit(transcript.close_step("target"))

    def _keep_answer(self, judged: Judged) -> None:
        """Commit the beginning of the draft's answer that is the target's own, and the target's token after it."""
        request, transcript, answer, own = self._request, self._request.transcript, judged.answer, judged.own_answer
        ended = not (transcript.thinking or transcript.ended)
        if not ended or transcript.last_id != judged.proposal.tag:  # it was read after the draft's own tag
            request.record.abandoned(len(answer))
            return
        num_kept = [*map(int.__eq__, answer, own), False].index(False)
        kept = [*answer[:num_kept]]
        request.record.accepted(num_kept, rejected=len(answer) - num_kept)
        if own and request.ledger.remaining > 0 and not (kept and kept[-1] in request.answer_ends):
            request.record.generated(1, "forced")
            kept.append(own[num_kept])
        if kept:
            request.record.emit(transcript.write_on(kept, "target"))

    def whole(self, step: Proposal, writer: Literal["draft", "target"], verdict: Verdict | None = None) -> None:
        """Commit a whole step of one model, with the tag that ends it. The target's was counted when it was written."""
        if writer == "draft":
            self._request.record.accepted(len(step.ids), step=bool(step.text))
            self.origin, self.num_from_draft = "draft", step.num_written
        else:
            self._request.record.written(len(step.ids), "forced")
        self._request.transcript.extend(step.ids)
        self.close_step(verdict)

    async def replace(self, judged: Judged) -> None:
        """Let the target write a rejected step again, after the part of it that the policy salvages.

        With `redraft`, a step of which a beginning is committed stays open instead, for the draft to go on with.
        """
        request, transcript, salvage = self._request, self._request.transcript, self._request.policy.salvage
        request.record.abandoned(len(judged.answer))
        num_open = len(transcript.open_ids)
        num_salvaged, since = self._salvage(judged), time.perf_counter()
        num_new = len(transcript.open_ids) - num_open  # a token of the target may follow those
        num_left = len(judged.proposal.ids) - num_new
        redrafts = salvage is not None and salvage.redraft and not judged.proposal.aborted
        redrafts = redrafts and (not request.draft_is_far or request.choice.continues(num_left))
        if redrafts and num_new and not request.step_is_over and request.limits.room > 0:
            self._note(judged, num_salvaged)
            return
        waited_s = await self._target.rest_of_step("regenerated")
        self._note(judged, num_salvaged, time.perf_counter() - since - waited_s)
        self.close_step(judged.verdict)

    def _salvage(self, judged: Judged) -> int:
        """Keep the prefix of a rejected step that the target agrees with, if the policy salvages.

        The verifying pass also shows the target's own choice after that prefix. If that choice was made under the
        request's sampling, it is the next token, which needs no extra pass. If no judge scored the step, only the
        target's own choices are kept; otherwise empty or repeated steps could be accepted here.

        Returns:
            The number of tokens of the step that are kept.
        """
        request, transcript, proposal, seen = self._request, self._request.transcript, judged.proposal, judged.seen
        opens_call = request.limits.opens_call(request.open_text + proposal.text, transcript.last_text)
        table = None if opens_call else request.policy.salvage
        num_kept = 0
        if judged.answers or (table and request.thinking.steps_are_answer):  # the rest of the step may end the text
            num_kept = own_prefix(request, proposal, seen)
        elif table and seen is not None:
            num_kept = agreed_prefix(proposal, seen, table.min_logprob if judged.verdict.scores else 0.0)
        num_kept = transcript.num_before_ending(proposal.ids[:num_kept])
        request.record.salvaged(num_kept)
        request.record.dropped(proposal, len(proposal.ids) - num_kept)
        transcript.extend(proposal.ids[:num_kept])
        self.num_from_draft += num_kept
        self.origin = "salvaged" if self.num_from_draft else "target"
        free = (table is not None or judged.answers) and request.is_own_text and not transcript.step_is_over
        if free and seen is not None and seen.choices is not None and request.limits.room > 0:
            request.record.generated(1, "regenerated")
            transcript.extend([(*seen.choices, seen.next_choice)[num_kept]])
        return num_kept

    # Closing a step

    async def write_step(self, fate: Fate = "forced") -> None:
        """Let the target write the rest of the open step, or the next one, and commit it."""
        await self._target.rest_of_step(fate)
        self.close_step()

    def close_step(self, verdict: Verdict | None = None) -> None:
        """Commit the open step. If it opens a tool call, the target continues alone."""
        request, scores = self._request, None if verdict is None else verdict.scores
        request.record.emit(request.transcript.close_step(self.origin, self.num_from_draft, scores))
        self.origin, self.num_from_draft = "target", 0
        request.record.ended_step()
        steps = request.transcript.steps
        request.only_target = bool(steps) and request.limits.step_opens_call(len(steps) - 1)
        request.tell_committed()

    def _note(self, judged: Judged, num_salvaged: int = 0, write_s: float = 0.0) -> None:
        """Record what was seen of a step, if the caller wants it. Call it before the step is closed."""
        if self._request.judged_steps is not None:
            index = len(self._request.transcript.steps)
            self._request.judged_steps.append(judged.to_record(index, num_salvaged, write_s))


def agreed_prefix(proposal: Proposal, seen: Verification, min_logprob: float) -> int:
    """Return how many leading tokens of a step the target agrees with.

    The target agrees with a token if it is the target's own choice or has at least `min_logprob` (in nats) under it.
    """
    logprobs, choices = seen.logprobs, seen.choices
    assert logprobs is not None, "policies that salvage are rejected if the target returns no log-probs"
    for index in range(proposal.num_written):
        own_choice = logprobs[index] > SURE if choices is None else proposal.ids[index] == choices[index]
        if not own_choice and logprobs[index] < min_logprob:
            return index
    return proposal.num_written
