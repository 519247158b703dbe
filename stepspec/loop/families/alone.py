"""A single model writes the whole text."""

import time
from typing import ClassVar

from stepspec.errors import ContextError
from stepspec.loop.family import FamilyTable
from stepspec.loop.step import Proposal
from stepspec.loop.step_loop import StepLoop

REWRITE_SEED = 0xE8AC7
"""Added to the seed of a request when a step is written again, so that it has other random numbers."""

NOTHING = Proposal((), "", 0)
"""No step."""


class AloneTable(FamilyTable):
    """No settings."""

    speculates: ClassVar[bool] = False


async def alone(loop: StepLoop, table: AloneTable) -> None:
    """Let the target or the draft write everything, the baseline of all other families."""
    if not loop.request.policy.token_level_exact:
        await _relaxed_steps(loop)
    await loop.finish()


async def _relaxed_steps(loop: StepLoop) -> None:
    """Let the target think with relaxed tokens. None of them may be in the answer, in a tool call or in what ends the
    thinking.

    A model that does not mark its thinking may end the text right after a step, which then is the answer. So a step
    with relaxed tokens is held until the next one is there.
    """
    request, transcript = loop.request, loop.request.transcript
    plain, held = request.thinking.steps_are_answer, NOTHING
    while transcript.thinking and request.limits.allow_more() and request.limits.room > len(held.ids):
        await loop.target.wait_for_reader()
        step = await _step_after(loop, held)
        if step is None:
            break
        before = held.text or transcript.last_text
        opens_call = request.limits.opens_call(step.text, before)
        answers = request.thinking.answers([step.text], before=before, ends=step.tag is not None)
        first_own = 0 if opens_call or answers else transcript.num_before_ending(step.ids)
        if held.ids and not step.num_written:
            request.record.discarded(len(step.ids))
            await _rewrite(loop, held)
            return
        _commit(loop, held)
        held = NOTHING
        if any(place >= first_own for place in step.relaxed):
            await _rewrite(loop, step)
        elif plain and step.relaxed:
            held = step
        else:
            _commit(loop, step)
        if opens_call or answers:
            return
    _commit(loop, held)


async def _step_after(loop: StepLoop, held: Proposal) -> Proposal | None:
    """Return the target's next step, with relaxed tokens; None if there is no room or no time for one."""
    request, ids, since = loop.request, list[int](), time.time_ns()
    step = None
    try:
        step = await loop.target.step_ahead(request.limits.room - len(held.ids), ids, held.ids)
    except (ContextError, TimeoutError):
        request.record.discarded(len(ids))
    finally:
        request.record.generated(len(ids))
        request.record.generated_ahead(since, len(request.transcript.steps) + bool(held.ids), len(ids))
    return step


def _commit(loop: StepLoop, step: Proposal) -> None:
    """Commit a step with its relaxed tokens, if there is one."""
    if step.ids:
        loop.request.record.relaxed(step.relaxed, loop.request.num_written)
        loop.committer.whole(step, "target")


async def _rewrite(loop: StepLoop, step: Proposal) -> None:
    """Let the target write a step exactly: at temperature 0 from its first relaxed token, and else as a whole with
    other random numbers, so that it has the target's distribution after the text before it."""
    request = loop.request
    num_kept = step.relaxed[0] if request.sampling.temperature == 0 else 0
    request.record.written(num_kept, "forced")
    request.record.discarded(len(step.ids) - num_kept)
    request.transcript.extend(step.ids[:num_kept])
    if request.sampling.temperature > 0:
        request.sampling = request.sampling.reseeded(REWRITE_SEED)
    await loop.committer.write_step()
