"""Steps that no judge decides about, which the two models write in turns."""

from contextlib import suppress

from stepspec.engines.protocol import Verification
from stepspec.errors import ContextError
from stepspec.loop.commit import Committer
from stepspec.loop.draft import DraftWriter
from stepspec.loop.request import Request
from stepspec.loop.review import Reviewer, own_prefix
from stepspec.loop.step import Proposal
from stepspec.loop.target import TargetWriter


class Turns:
    """Writes the open step with both models. Of an answer, and of tags, only what the target chooses too is kept."""

    def __init__(
        self, request: Request, draft: DraftWriter, target: TargetWriter, reviewer: Reviewer, committer: Committer
    ) -> None:
        self._request, self._draft, self._target = request, draft, target
        self._reviewer, self._committer = reviewer, committer
        self._refused = False  # whether some of the draft's tokens of the open step were not kept

    async def keep(self, draft: Proposal) -> None:
        """Commit the draft's tokens to the open step. An end tag is kept only if the target chooses it too. Nothing is
        kept of a tool call, of a step that repeats itself, and of tokens that the target does not have.

        A model that does not mark its thinking may answer at any place. The beginning of a step is then held until the
        whole step is there, because the target has to see how it ends.
        """
        if self._request.thinking.steps_are_answer and self._is_beginning(draft):
            self._draft.held = draft
        else:
            await self._keep(draft)

    def _is_beginning(self, draft: Proposal) -> bool:
        """Return whether the open step goes on after the draft's tokens."""
        num_open, longest = len(self._request.transcript.open_ids), self._request.policy.step.max_step_tokens
        return draft.end == "length" and num_open + len(draft.ids) < longest

    async def _keep(self, draft: Proposal) -> None:
        """Commit the draft's tokens as `keep` does. Of an answer, only the target's own beginning is kept."""
        request, transcript, kept = self._request, self._request.transcript, draft.written
        text = request.tokenizer.decode([*transcript.open_ids, *kept])
        opens_call = request.limits.opens_call(text, transcript.last_text)
        hopeless = draft.aborted or request.has_control_token(kept) or opens_call
        if hopeless or not request.target_has(kept):
            kept, self._refused = (), True
        elif draft.tag is not None or request.thinking.steps_are_answer:
            seen: Verification | None = None
            with suppress(ContextError, TimeoutError):  # without room or time, the draft's text does not end here
                seen = await self._target.read(draft.written, scores=request.reads_scores)
            if self._reviewer.answers(draft, seen) or self._is_beginning(draft):  # the target may end the text with it
                kept = kept[: own_prefix(request, draft, seen)]
            if len(kept) == draft.num_written and seen is not None and seen.next_choice == draft.tag:
                kept = draft.ids
            self._refused = len(kept) < len(draft.ids)
        request.record.accepted(len(kept))
        request.record.dropped(draft, len(draft.ids) - len(kept))
        self._committer.num_from_draft += min(len(kept), draft.num_written)
        transcript.extend(kept)

    async def take_over(self, draft: Proposal, num_tokens: int, sentence: str = "") -> None:
        """Drop the draft's tokens, and let the target write at most `num_tokens` instead, after a sentence if given."""
        request = self._request
        request.record.rejected(len(draft.ids))
        if sentence:
            room = min(request.policy.step.max_step_tokens, request.room_after(()))
            ids = request.tokenizer.encode_text(sentence)[:room]
            request.record.generated(len(ids), "forced")
            request.transcript.extend(ids)
        await self._target.rest_of_step("forced", num_tokens=num_tokens)

    async def finish_step(self) -> bool:
        """Let the draft write the rest of the open step, or the target if the draft cannot, and commit it.

        Returns:
            Whether the draft still works.
        """
        request, works = self._request, True
        if not request.step_is_over and not self._refused:
            rest = await self._draft.more(request.policy.step.max_step_tokens)
            works = rest is not None or request.limits.room <= 0
            if rest is not None:
                await self._keep(rest)
        if not request.step_is_over:
            await self._target.rest_of_step("forced")
        if self._committer.num_from_draft:
            num_tags = request.transcript.has_end_tag
            others = len(request.transcript.open_ids) > self._committer.num_from_draft + num_tags
            self._committer.origin = "salvaged" if others else "draft"
        self._committer.close_step()
        self._refused = False
        return works
