"""From a request to its events: first the policy's family, then a single writer for the rest, then the result.

Step-level speculation is not exact: the draft writes accepted steps, not the target. After speculative steps, the
target writes the answer.
"""

import asyncio
import json
from collections.abc import AsyncGenerator

from stepspec.errors import ContextError, EngineError, TargetError, UsageError
from stepspec.loop.families import FAMILIES
from stepspec.loop.request import Request
from stepspec.loop.result import Done, Event, FinishReason, NotProposed, Result


async def run(request: Request) -> AsyncGenerator[Event, None]:
    """Run a request and yield its events, `Done` last. It runs ahead of the caller.

    Closing the generator cancels the request.

    Raises:
        ContextError: the prompt leaves no room for a token.
        UsageError: the JSON schema of the answer cannot be followed.
        TargetError: the target failed; the error carries the committed text.
    """
    work = asyncio.create_task(_work(request))
    work.add_done_callback(lambda _: request.events.put_nowait(None))
    try:
        while (event := await request.events.get()) is not None:
            request.events_read.set()
            yield event
        await work
    finally:
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # the caller has it, or does not want it any more


async def _work(request: Request) -> None:
    """Emit all events of a request."""
    controller = request.ledger.time("controller")  # excludes nested timers: the engines' time
    with request.spans.request(), request.pace.request(request), controller:
        request.limits.start()
        try:
            if request.tags is not None or request.limits.json_schema is None:
                await FAMILIES[request.policy.family].run(request, request.policy.settings)
            request.pace.load.stops_asking(request)
            await request.write_rest()
        except ContextError:
            if not request.num_written:
                raise
        except EngineError as error:
            committed = "".join(step.text for step in request.transcript.steps)
            committed += request.answer.text if request.tags is not None else request.transcript.open_text
            raise TargetError(f"{error} Text committed before the failure: {committed!r}.", committed) from error
        finally:
            request.tell_committed()
        request.emit(request.answer.finish(cut=not request.transcript.ended))
        _check_json(request)
        request.emit([Done(_result(request))])


def _check_json(request: Request) -> None:
    """Check that an answer under a schema is valid JSON, since an engine's grammar may give up midway.

    Answers that a limit, a stop or a tool call ended are not checked.

    Raises:
        UsageError: the answer is not valid JSON.
    """
    answer = request.answer
    cut = not request.transcript.ended or answer.stopped or request.options.stop_token_ids
    if request.limits.json_schema is None or cut or answer.calls or not answer.text:
        return
    try:
        json.loads(answer.text)
    except ValueError as error:
        raise UsageError(
            f"The JSON schema cannot be followed: {request.target.name} ended its answer before it was valid JSON. "
            "Simplify it."
        ) from error


def _not_proposed(request: Request) -> NotProposed | None:
    """Return why the draft proposed no step, or no further one; None if it proposed steps to the end."""
    if not FAMILIES[request.policy.family].table.speculates:
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
    ledger.add(steps=len(steps))
    ledger.committed(request.num_written)
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
        thinks=request.tags is not None,
        not_proposed=_not_proposed(request),
        limit=limits.reached,
        token_level_exact=request.policy.token_level_exact,
        token_rounds=ledger.token_rounds,
        judged_steps=tuple(request.judged_steps or ()),
    )
