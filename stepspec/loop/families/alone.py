"""A single model writes the whole text."""

from contextlib import aclosing
from typing import ClassVar

from stepspec.loop.family import FamilyTable
from stepspec.loop.step import Proposal
from stepspec.loop.step_loop import StepLoop
from stepspec.loop.stepped_call import SteppedCall

REWRITE_SEED = 0xE8AC7
"""Added to the seed of a request when a step is written again, so that it has other random numbers."""


class AloneTable(FamilyTable):
    """No settings."""

    speculates: ClassVar[bool] = False


async def alone(loop: StepLoop, table: AloneTable) -> None:
    """Let the target or the draft write everything, the baseline of all other families."""
    request = loop.request
    relaxes = not request.policy.token_level_exact
    while relaxes and request.transcript.thinking and request.limits.allow_more():
        relaxes = await _relaxed_steps(loop)
    await loop.finish()


async def _relaxed_steps(loop: StepLoop) -> bool:
    """Commit steps of the target with relaxed tokens, in one call. It ends with the first step that is written again,
    as none of its relaxed tokens may be in the answer, in a tool call or in what ends the thinking.

    A model that does not mark its thinking may end the text right after a step, which then is the answer. So a step
    with relaxed tokens is held until the next one is there.

    Returns:
        Whether relaxed thinking may go on.
    """
    request, transcript = loop.request, loop.request.transcript
    held: Proposal | None = None
    async with aclosing(SteppedCall(request, loop.target).steps()) as steps:
        async for step in steps:
            before = held.text if held else transcript.last_text
            opens_call = request.limits.opens_call(step.text, before)
            is_last = opens_call or request.thinking.answers([step.text], before=before, ends=step.tag is not None)
            if held and not step.num_written:
                request.record.discarded(len(step.ids))
                await steps.aclose()
                await _rewrite(loop, held)
                return False
            if held:
                _commit(loop, held)
                held = None
            if not transcript.thinking:  # by a stop string in the held step
                request.record.discarded(len(step.ids))
                return False
            first_own = 0 if is_last else transcript.num_before_ending(step.ids)
            if any(place >= first_own for place in step.relaxed):
                await steps.aclose()
                await _rewrite(loop, step)
                return not is_last
            if request.thinking.steps_are_answer and step.relaxed:
                held = step
            else:
                _commit(loop, step)
            if is_last or not transcript.thinking:
                return False
            await loop.target.wait_for_reader()
    if held:
        _commit(loop, held)
    return False


def _commit(loop: StepLoop, step: Proposal) -> None:
    """Commit a step with its relaxed tokens."""
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
