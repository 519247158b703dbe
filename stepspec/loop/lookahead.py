"""Work ahead of a request: steps of both models that are not committed yet, written and compared at the same time."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar

from stepspec.errors import ContextError, UnknownIdError
from stepspec.loop.judging import Evidence
from stepspec.loop.ledger import Role, ahead
from stepspec.loop.request import Request
from stepspec.loop.step import Proposal, StepJudged, StepProposed, Verdict

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A place after the committed text.

    Attributes:
        ids: the uncommitted ids before it.
        texts: the texts of the uncommitted steps before it.
    """

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()

    def after(self, piece: "Piece") -> "Place":
        """Return the place after a step at this place."""
        return Place((*self.ids, *piece.step.ids[: piece.step.num_written]), (*self.texts, piece.step.text))


@dataclass(eq=False)
class Piece:
    """A step ahead.

    Attributes:
        writer: who writes it.
        ids: what has arrived of it.
        judged: whether a draft step was compared with the target's own.
        kept: whether it was committed.
    """

    writer: Literal["draft", "target"]
    ids: list[int] = field(default_factory=list[int])
    judged: bool = False
    kept: bool = False

    @property
    def step(self) -> Proposal:
        """The finished step."""
        assert self._step is not None, "the step is not finished"
        return self._step

    _step: Proposal | None = None


@dataclass
class Standing:
    """The target's own step at a place, the draft's steps that were compared with it, and the one that stands."""

    own: Piece
    compared: list[tuple[Piece, Verdict]] = field(default_factory=list[tuple[Piece, Verdict]])
    accepted: Piece | None = None


@dataclass(frozen=True)
class Branches:
    """What is written at a place: the target's own step, and the draft's steps, each with what follows it."""

    place: Place
    own: "asyncio.Task[Piece | None]"
    drafts: "list[tuple[asyncio.Task[Piece | None], asyncio.Task[Branches | None]]]"

    @property
    def tasks(self) -> "list[asyncio.Task[Any]]":
        """Everything that is written here and after here."""
        return [self.own, *(task for pair in self.drafts for task in pair)]


class Lookahead:
    """The steps ahead of a request, from one commit to the next. On exit, unfinished work is cancelled and counted."""

    def __init__(self, request: Request, width: int) -> None:
        """`width`: number of draft steps at each place."""
        self._request = request
        self._width = width
        self._tasks: dict[asyncio.Task[Any] | None, list[asyncio.Task[Any]]] = defaultdict(list)  # by parent
        self._pieces: list[Piece] = []
        self._draft_failed = False

    async def __aenter__(self) -> "Lookahead":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [task for children in self._tasks.values() for task in children]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ledger = self._request.ledger
        for piece in self._pieces:
            if piece.kept:
                continue
            if piece.writer == "target":
                ledger.wrote("discarded", len(piece.ids))
            elif piece.judged:
                ledger.judged(accepted=0, rejected=len(piece.ids))
            else:
                ledger.abandoned(len(piece.ids))

    def start(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> "asyncio.Task[T]":
        """Start work that the request does not wait for yet."""
        task = asyncio.create_task(ahead(work, *arguments))
        self._tasks[asyncio.current_task()].append(task)
        return task

    def drop(self, tasks: "Iterable[asyncio.Task[Any]]") -> None:
        """Cancel work, and all work that it has started."""
        for task in tasks:
            task.cancel()
            self.drop(self._tasks[task])

    def look(self, place: Place, depth: int) -> Branches:
        """Start the target's own step at a place, and the draft's, with everything after them up to a depth."""
        own = self.start(self.write, place)
        drafts = [self.start(self.draft, place, sibling) for sibling in range(self._width if depth else 0)]
        return Branches(place, own, [(draft, self.start(self._follow, place, draft, depth - 1)) for draft in drafts])

    async def _follow(self, place: Place, draft: "asyncio.Task[Piece | None]", depth: int) -> Branches | None:
        piece = await draft
        return None if piece is None or piece.step.tag is not None else self.look(place.after(piece), depth)

    async def wait(self, role: Role, task: "asyncio.Task[T]") -> T:
        """Wait for work of a role."""
        with self._request.ledger.waiting(role):
            return await task

    async def draft(self, place: Place, sibling: int = 0) -> Piece | None:
        """Return the draft's next step at a place; None if it failed, was too slow, or has no room.

        Steps of other `sibling` numbers have other random seeds.
        """
        request, since = self._request, time.time_ns()
        room = request.limits.room - len(place.ids)
        if room <= 0:
            return None
        piece = self._piece("draft")
        try:
            step = await request.drafted(room, piece.ids, place.ids, sibling)
        finally:
            request.ledger.proposed(len(piece.ids))
        if step is None:
            self._draft_failed = True
            return None
        request.spans.drafted(since, self._index(place), len(step.ids))
        piece._step = step
        return piece

    async def write(self, place: Place) -> Piece | None:
        """Return the target's own step at a place; None if there is no room or no time for one."""
        request, since = self._request, time.time_ns()
        room = request.limits.room - len(place.ids)
        if room <= 0:
            return None
        piece = self._piece("target")
        try:
            piece._step = await request.written(room, piece.ids, place.ids)
        except (ContextError, UnknownIdError, TimeoutError):
            return None
        finally:
            request.ledger.generated(len(piece.ids))
        request.spans.wrote_ahead(since, self._index(place), len(piece.ids))
        return piece

    def _index(self, place: Place) -> int:
        return len(self._request.transcript.steps) + len(place.texts)

    def _piece(self, writer: Literal["draft", "target"]) -> Piece:
        piece = Piece(writer)
        self._pieces.append(piece)
        return piece

    async def same(self, place: Place, draft: Piece, standing: Standing) -> bool:
        """Return whether a draft step means the same as the target's own step at a place.

        Steps with the same words do. A repeated step, a step that begins a tool call, one that reached its longest
        length and one that ends the thinking where the target's does not never stand.
        """
        request, own, step, since = self._request, standing.own.step, draft.step, time.time_ns()
        before = place.texts[-1] if place.texts else request.transcript.last_text
        verdict = Verdict(False, {})
        complete = step.tag is not None or step.text.endswith(request.policy.step.delimiter)
        repeated = bool(step.text.strip()) and step.text.strip() == before.strip()
        usable = complete and not repeated and request.target_has(step.ids)
        if usable and step.tag == own.tag and not request.demands.opens_call(step.text):
            if step.text.casefold().split() == own.text.casefold().split():
                verdict = Verdict(True, {})
            elif step.text.strip():
                verdict = await self._judge(place, step, own)
        draft.judged = True
        request.spans.judged(since, self._index(place), verdict)
        standing.compared.append((draft, verdict))
        if verdict.accepted:
            standing.accepted = draft
        return verdict.accepted

    async def _judge(self, place: Place, step: Proposal, own: Proposal) -> Verdict:
        request = self._request

        async def no_pass() -> NoReturn:
            raise AssertionError("no judge of compared steps asks for a pass over them")

        evidence = replace(
            Evidence.of(step, request.question, request.transcript.steps, request.judges),
            tokenizer=request.tokenizer,
            own_step=own.text,
            ask=lambda probe: request.ask(place.ids, probe),
        )
        with request.ledger.time("judge"):
            return await request.panel.judge(evidence, no_pass, request.limits.deadline)

    def commit(self, path: list[Standing]) -> bool:
        """Commit the steps of a path, as far as the thinking goes on. Return whether the draft is still of use."""
        request = self._request
        for standing in path:
            index, verdict = len(request.transcript.steps), None
            for draft, verdict in standing.compared:
                request.ledger.add(steps_judged=1)
                request.emit(
                    [
                        StepProposed(index, draft.step.text, len(draft.step.ids)),
                        StepJudged(index, verdict.accepted, verdict.scores),
                    ]
                )
            piece = standing.accepted or standing.own
            piece.kept = True
            request.commit(piece.step, piece.writer, verdict)
            if not request.transcript.thinking:
                break
        return bool(path) and not self._draft_failed
