"""Work ahead of a request: steps of both models that are not committed yet, written and compared concurrently."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

from stepspec.engines.protocol import Probe
from stepspec.errors import ContextError, StepSpecError, UnknownIdError
from stepspec.loop.judge import Evidence
from stepspec.loop.ledger import Role, ahead
from stepspec.loop.step import Proposal, Step, StepJudged, StepProposed, Verdict
from stepspec.loop.step_loop import StepLoop

T = TypeVar("T")
MIN_PATIENCE_S = 0.05
"""Shortest wait for the draft's step once the target's own is finished."""


@dataclass(frozen=True)
class LookaheadPosition:
    """A place after the committed text.

    Attributes:
        ids: the uncommitted ids before it.
        steps: the uncommitted steps before it.
    """

    ids: tuple[int, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(eq=False)
class StepAhead:
    """A step that is not committed.

    Attributes:
        writer: the model that writes it.
        ids: token ids received so far.
        compared: whether a draft step was compared with the target's own.
        judged: whether its words or its meaning decided, and not its form.
        committed: whether it was committed.
        finished: the whole step; None before its end.
    """

    writer: Literal["draft", "target"]
    ids: list[int] = field(default_factory=list[int])
    compared: bool = False
    judged: bool = False
    committed: bool = False
    finished: Proposal | None = None

    @property
    def step(self) -> Proposal:
        """The whole step."""
        assert self.finished is not None, "the step is not finished"
        return self.finished


@dataclass
class StepComparison:
    """The target's own step at a place, the draft step that was compared with it, and the verdict on that."""

    own: StepAhead
    draft: StepAhead | None = None
    verdict: Verdict | None = None

    @property
    def accepted(self) -> StepAhead | None:
        """The draft step, if it was accepted."""
        return self.draft if self.verdict is not None and self.verdict.accepted else None


@dataclass(frozen=True)
class LookaheadBranch:
    """What is written at a place: the target's own step, and the draft's with what follows it, if it writes one."""

    place: LookaheadPosition
    started: float
    own: "asyncio.Task[StepAhead | None]"
    draft: "asyncio.Task[StepAhead | None] | None" = None
    following: "asyncio.Task[LookaheadBranch | None] | None" = None


class Lookahead:
    """The steps ahead of a request, from one commit to the next. On exit, unfinished work is cancelled and counted."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop, self._request = loop, loop.request
        self._tasks: list[asyncio.Task[Any]] = []
        self._steps: list[StepAhead] = []
        self._draft_failed = False

    async def __aenter__(self) -> "Lookahead":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        record = self._request.record
        for step in self._steps:
            if step.committed:
                continue
            if step.writer == "target":
                record.discarded(len(step.ids))
            elif step.compared and not step.step.aborted:
                record.rejected(len(step.ids))
            else:
                record.abandoned(len(step.ids))
        for outcome in outcomes:  # a failed model matters only where its step is needed, a bug always
            if isinstance(outcome, Exception) and not isinstance(outcome, StepSpecError) and error is None:
                raise outcome

    def start(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> "asyncio.Task[T]":
        """Start work that the request does not wait for yet."""
        task = asyncio.create_task(ahead(work, *arguments))
        self._tasks.append(task)
        return task

    def look(self, place: LookaheadPosition, depth: int) -> LookaheadBranch:
        """Start the target's own step at a place, and the draft's, with everything after it up to a depth."""
        started, own = time.perf_counter(), self.start(self.write, place)
        if not depth:
            return LookaheadBranch(place, started, own)
        draft = self.start(self.draft, place)
        return LookaheadBranch(place, started, own, draft, self.start(self._follow, place, draft, depth - 1))

    async def _follow(
        self, place: LookaheadPosition, draft: "asyncio.Task[StepAhead | None]", depth: int
    ) -> LookaheadBranch | None:
        found = await draft
        if found is None or found.step.tag is not None or not self._may_stand(place, found.step):
            return None
        step, ids = found.step, found.step.ids
        committed = Step(self._index(place), "draft", step.text, len(ids), len(ids), "delimiter")
        return self.look(LookaheadPosition((*place.ids, *ids), (*place.steps, committed)), depth)

    async def wait(self, role: Role, task: "asyncio.Task[T]") -> T:
        """Wait for work of a role."""
        with self._request.record.waiting(role):
            return await task

    async def wait_for_draft(self, branch: LookaheadBranch) -> StepAhead | None:
        """Return the draft step; None without one, or if it takes more than twice as long as the target's own.

        The target then continues alone, as looking ahead cannot save time.
        """
        if (draft := branch.draft) is None:
            return None
        patience = max(MIN_PATIENCE_S, time.perf_counter() - branch.started)
        with self._request.record.waiting("draft"):
            await asyncio.wait([draft], timeout=patience)
        if draft.done():
            return draft.result()
        self._draft_failed, self._request.not_proposed = True, "the draft was too slow"
        return None

    async def draft(self, place: LookaheadPosition) -> StepAhead | None:
        """Return the draft's next step at a place; None if it failed, was too slow, or has no room."""
        request, since = self._request, time.time_ns()
        room = request.limits.room - len(place.ids)
        if room <= 0:
            return None
        step = self._step_ahead("draft")
        try:
            stop = request.transcript.rest_of_step(room, place.ids)
            step.finished = await self._loop.draft.text(stop, step.ids, place.ids)
        finally:
            request.record.drafted(len(step.ids))
        if step.finished is None:
            self._draft_failed |= not place.ids
            return None
        request.record.proposed(since, self._index(place), len(step.ids))
        return step

    async def write(self, place: LookaheadPosition) -> StepAhead | None:
        """Return the target's own step at a place; None if there is no room or no time for one."""
        request, since = self._request, time.time_ns()
        room = request.limits.room - len(place.ids)
        if room <= 0:
            return None
        step = self._step_ahead("target")
        try:
            step.finished = await self._loop.target.step_ahead(room, step.ids, place.ids)
        except (ContextError, UnknownIdError, TimeoutError):
            return None
        finally:
            request.record.generated(len(step.ids))
        request.record.generated_ahead(since, self._index(place), len(step.ids))
        return step

    def _step_ahead(self, writer: Literal["draft", "target"]) -> StepAhead:
        step = StepAhead(writer)
        self._steps.append(step)
        return step

    def _index(self, place: LookaheadPosition) -> int:
        return len(self._request.transcript.steps) + len(place.steps)

    def _may_stand(self, place: LookaheadPosition, step: Proposal) -> bool:
        """Whether a draft step can be accepted at all.

        A repeated step, one that begins a tool call, one that reached its longest length, and one with tokens that the
        target does not have are never accepted.
        """
        request = self._request
        before = self._text_before(place)
        repeated = bool(step.text.strip()) and step.text.strip() == before.strip()
        unusable = step.aborted or repeated or request.has_control_token(step.written)
        usable = step.end != "length" and not unusable
        return usable and request.target_has(step.ids) and not request.limits.opens_call(step.text, before)

    def _text_before(self, place: LookaheadPosition) -> str:
        return place.steps[-1].text if place.steps else self._request.transcript.last_text

    def _answers(self, place: LookaheadPosition, *steps: Proposal) -> bool:
        """Whether one of the steps at a place ends the thinking, or belongs to the answer of a model that does not mark
        its thinking. Then the target's own step stands."""
        if any(step.tag is not None for step in steps):
            return True
        thinking, texts = self._request.thinking, [step.text for step in place.steps]
        before = self._request.transcript.last_text
        return any(thinking.answers([*texts, step.text], before=before, ends=False) for step in steps)

    async def compare(self, place: LookaheadPosition, draft: StepAhead, comparison: StepComparison) -> bool:
        """Compare a draft step with the target's own step at a place. Return whether both mean the same.

        Steps with the same words do. A step that ends the thinking or answers means the same only as one with the same
        tokens.
        """
        own, step, since = comparison.own.step, draft.step, time.time_ns()
        verdict = Verdict(False, {})
        if self._answers(place, step, own):
            draft.judged = bool(step.text)
            verdict = Verdict(step.ids == own.ids, {})
        elif self._may_stand(place, step):
            draft.judged = bool(step.text)
            if step.text.casefold().split() == own.text.casefold().split():
                verdict = Verdict(True, {})
            elif step.text.strip():
                verdict = await self._judge(place, step, own)
        draft.compared = True
        self._request.record.reviewed(since, self._index(place), verdict)
        comparison.draft, comparison.verdict = draft, verdict
        return verdict.accepted

    async def _judge(self, place: LookaheadPosition, step: Proposal, own: Proposal) -> Verdict:
        request = self._request
        evidence = replace(
            Evidence.of(step, request.question, [*request.transcript.steps, *place.steps], request.judges),
            group=request.options.cache_salt,
            tokenizer=request.tokenizer,
            own_step=own.text,
            ask=partial(self._loop.target.ask, place.ids),
        )
        with request.record.time("judge"):
            return await self._loop.reviewer.ask_panel(evidence, _no_pass)

    def _may_be_last(self, path: "list[StepComparison]", number: int) -> bool:
        """Whether an accepted draft step may be the last one of a model that does not mark its thinking: the target
        ends the text after it, or has not written there."""
        comparison = path[number]
        if not self._request.thinking.steps_are_answer or comparison.accepted is None:
            return False
        if comparison.accepted.step.ids == comparison.own.step.ids:
            return False
        following = path[number + 1].own.step if number + 1 < len(path) else None
        return following is None or not following.num_written

    def commit(self, path: list[StepComparison]) -> bool:
        """Commit the steps of a path while the thinking goes on. Return whether to keep speculating."""
        request = self._request
        for number, comparison in enumerate(path):
            if self._may_be_last(path, number):
                assert comparison.verdict is not None
                comparison.verdict = replace(comparison.verdict, accepted=False)  # the target's own step stands
                path = path[: number + 1]
            index, draft, verdict = len(request.transcript.steps), comparison.draft, comparison.verdict
            if draft is not None and verdict is not None:
                request.record.judged(by_judges=draft.judged)
                request.record.emit([StepProposed(index, draft.step.text, len(draft.step.ids))])
                request.record.emit([StepJudged(index, verdict.accepted, verdict.scores)])
            step = comparison.accepted or comparison.own
            step.committed = True
            self._loop.committer.whole(step.step, step.writer, verdict)
            if not request.transcript.thinking or number + 1 == len(path):
                break
        return bool(path) and not self._draft_failed


async def _no_pass(probes: Sequence[Probe]) -> NoReturn:
    raise AssertionError("policies whose judges ask for a pass are rejected in this family")
