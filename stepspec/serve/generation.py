"""Runs the answers to one request: waits for its turn, then passes on the events of all answers as they come."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from stepspec.api.session import PreparedRequest
from stepspec.chat.events import AnswerDelta, ToolCalled
from stepspec.errors import UsageError
from stepspec.loop.limits import cut_off, end_of
from stepspec.loop.result import Done, Event
from stepspec.loop.step import Noted, StepCommitted, StepDelta
from stepspec.serve.admission import Admission, Ticket
from stepspec.serve.choices import unquoted
from stepspec.serve.errors import BusyError
from stepspec.serve.keys import Client, Rates
from stepspec.serve.log import LogEntry
from stepspec.serve.models import ServedModel
from stepspec.serve.monitor import Monitor, Outcome

IndexedEvents = AsyncGenerator[tuple[int, Event], None]
"""Events with the number of the answer that they belong to."""


@dataclass(frozen=True)
class Generation:
    """A request that may run, with what it is counted by.

    Attributes:
        prompts: the prepared prompts.
        num_answers: answers to each prompt. They differ in their random seeds.
        model: the model.
        policy: name of the policy.
        client: who pays.
        priority: its priority in the queue.
        has_choices: whether the answer is one of several texts, which the engine writes as a JSON string.
        log: receives what the log says about the request.
        deadline_s: the request's deadline, in seconds after `since`.
        since: when it was accepted, by `time.perf_counter`.
    """

    prompts: Sequence[PreparedRequest]
    num_answers: int
    model: ServedModel
    policy: str
    client: Client
    priority: int
    has_choices: bool
    log: LogEntry
    deadline_s: float | None
    since: float
    admission: Admission
    rates: Rates
    monitor: Monitor

    async def events(self) -> IndexedEvents:
        """Wait in the queue, then generate all answers concurrently.

        Raises:
            BusyError: the request cannot be taken now.
            TargetError: the target failed.
        """
        try:
            async with aclosing(self._admitted()) as events:
                async for each in events:
                    yield each
        except BusyError as error:
            self.monitor.rejected(error.reason)
            raise

    async def _admitted(self) -> IndexedEvents:
        num_tokens = sum(len(prompt.prompt) for prompt in self.prompts)
        most = self.admission.limits.max_running
        num_answers = min(len(self.prompts) * self.num_answers, most)
        ticket = Ticket(self.client.name, self.priority, num_tokens, num_answers, self.model.name)
        asked_at = time.perf_counter()
        end = end_of(self.deadline_s, asked_at - self.since)
        async with AsyncExitStack() as turn:
            async with cut_off(end) as limit:  # without a turn, the answers end where they begin, and cost nothing
                await turn.enter_async_context(self.admission.slot(ticket))
            self.log.counts["prompt_tokens"] = num_tokens
            self.log.queue_s = time.perf_counter() - asked_at
            if not limit.expired():
                self.rates.used(self.client, num_tokens)
            answers = [
                self._answer(place * self.num_answers + number, prompt, number, asked_at)
                for place, prompt in enumerate(self.prompts)
                for number in range(self.num_answers)
            ]
            async with aclosing(answers[0] if len(answers) == 1 else merged(answers, most)) as events:
                async for each in events:
                    yield each

    async def _answer(self, index: int, prompt: PreparedRequest, number: int, asked_at: float) -> IndexedEvents:
        """`asked_at`: when the request entered the queue, in which its later answers may wait for its first ones."""
        queue_s = time.perf_counter() - asked_at
        watch = self.monitor.watch(self.model.name, self.policy, self.model.pair, self.since)
        watch.queued(queue_s)
        stream = prompt.stream(number, queue_s, max(0.0, asked_at - self.since - prompt.seconds))
        outcome: Outcome = "cancelled"
        num_tokens: int | None = None
        num_thought, open_step, answer = 0, list[str](), list[str]()
        try:
            async with aclosing(unquoted(stream) if self.has_choices else stream) as events:
                async for event in events:
                    watch.saw(event)
                    self.log.ttft_s = self.log.ttft_s or watch.first_s
                    if isinstance(event, StepCommitted) and not event.in_answer:  # else the answer has its text, too
                        num_thought += event.step.num_tokens
                        open_step.clear()
                    elif isinstance(event, StepDelta):
                        open_step.append(event.text)
                    elif isinstance(event, AnswerDelta):
                        answer.append(event.text)
                    elif isinstance(event, ToolCalled) and event.call.problem is None:
                        answer.append(event.call.arguments)
                    elif isinstance(event, Noted):
                        self.log.unfamiliar = event.text
                    elif isinstance(event, Done):
                        num_tokens = event.result.counts.committed
                        self.log.done(event.result)
                        watch.done(event.result)
                    yield index, event
        except Exception as error:
            outcome = "refused" if isinstance(error, UsageError) else "error"
            raise
        finally:
            watch.end(outcome)
            if num_tokens is None:  # a client that leaves early pays for what it has got
                shown = "".join([*open_step, *answer])
                num_tokens = num_thought + len(self.model.pair.target.tokenizer.encode_text(shown))
            self.log.num_tokens += num_tokens
            self.admission.generated(self.client.name, num_tokens)
            self.rates.used(self.client, num_tokens)


async def merged(streams: Sequence[IndexedEvents], most: int) -> IndexedEvents:
    """Pass on the events of several streams as they come, of `most` at a time. The first failure ends all of them."""
    places = asyncio.Semaphore(most)
    queue: asyncio.Queue[tuple[int, Event] | BaseException | None] = asyncio.Queue(maxsize=len(streams))

    async def pump(stream: IndexedEvents) -> None:
        try:
            async with places, aclosing(stream) as events:
                async for each in events:
                    await queue.put(each)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                num_open -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
