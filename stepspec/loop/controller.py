"""From a request to its events: first the policy's family, then a single writer for the rest, then the result.

Step-level speculation is not exact: the draft writes accepted steps, not the target. After speculative steps, the
target writes the answer.
"""

import asyncio
from collections.abc import AsyncGenerator

from stepspec.errors import ContextError, EngineError, TargetError
from stepspec.loop.families import FAMILIES
from stepspec.loop.request import Request
from stepspec.loop.result import Done, Event, FinishReason, NotProposed, Result
from stepspec.loop.step_loop import StepLoop


async def run(request: Request) -> AsyncGenerator[Event, None]:
    """Run a request and yield its events, `Done` last. It runs ahead of the caller.

    Closing the generator cancels the request.

    Raises:
        ContextError: the prompt leaves no room for a token.
        UsageError: the JSON schema of the answer cannot be followed.
        TargetError: the target failed; the error carries the committed text.
    """
    work = asyncio.create_task(_work(request))
    events = request.record.events
    work.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            request.record.events_read.set()
            yield event
        await work
    finally:
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # the caller has it, or does not want it any more


async def _work(request: Request) -> None:
    """Emit all events of a request."""
    loop, controller = StepLoop(request), request.record.time("controller")  # without the engines' time
    with request.spans.request(), request.choice.request(request), controller:
        request.limits.start()
        try:
            if not request.thinking.steps_are_answer or request.limits.json_schema is None:
                await FAMILIES[request.policy.family].run(loop, request.policy.settings)
            await loop.finish()
        except ContextError:
            if not request.num_written:
                raise
        except EngineError as error:
            transcript = request.transcript
            committed = request.thinking.committed_text(transcript.steps, transcript.open_text, request.answer.text)
            raise TargetError(f"{error} Text committed before the failure: {committed!r}.", committed) from error
        finally:
            request.tell_committed()
        request.record.emit(request.answer.finish(cut=not request.transcript.ended))
        request.limits.check_json(request.answer, request.target.name)
        request.record.emit([Done(_result(request))])


def _not_proposed(request: Request) -> NotProposed | None:
    """Return why the draft proposed no step, or no further one; None if it proposed steps to the end."""
    if not request.policy.settings.speculates:
        return "the policy proposes none"
    if request.draft is None:
        return "no draft"
    if request.not_proposed or request.ledger.counts.steps_proposed:
        return request.not_proposed
    return "the deadline" if request.limits.reached == "deadline" else "the thinking ended first"


def _result(request: Request) -> Result:
    """Return the result of a finished request."""
    ledger, limits, answer = request.ledger, request.limits, request.answer
    steps = tuple(request.transcript.steps)
    request.record.finished(len(steps), request.num_written)
    reason: FinishReason = "tool_calls" if answer.has_call else "stop"
    if not request.transcript.ended:
        reason = "length"
        limits.cut()
    elif answer.incomplete:
        reason = "length"
    salt = request.options.cache_salt
    hides_cached = salt is not None and "forget" not in request.target.abilities  # they may be of another key
    return Result(
        reasoning="".join(step.text for step in steps),
        answer=answer.text,
        steps=steps,
        counts=ledger.counts,
        times=ledger.times(),
        finish_reason=reason,
        num_prompt_tokens=len(request.prompt),
        num_cached_tokens=0 if hides_cached else ledger.cached or 0,
        tool_calls=tuple(answer.calls),
        thinks=not request.thinking.steps_are_answer,
        not_proposed=_not_proposed(request),
        limit=limits.reached,
        stop_string=answer.stop_string if answer.stop_string in request.options.stop else None,
        token_level_exact=request.policy.token_level_exact,
        first_relaxed=ledger.first_relaxed,
        token_rounds=ledger.token_rounds,
        judged_steps=tuple(request.judged_steps or ()),
    )
