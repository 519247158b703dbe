"""The asynchronous Python API: a session answers questions with a pair of models under a policy.

    async with StepSpec() as spec:                      # the embedded pair, the policy `two-level`
        result = await spec.generate(
            "Some friends met. Ann has 3 apples. Ben has 4 more apples than Ann. How many apples does Ben have?"
        )
        print(result.answer)

The name before the colon of a spec string selects the engine. The engine's library loads when it is first used.
"""

import asyncio
import logging
import reprlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from types import TracebackType
from typing import Any

from stepspec.api.models import NO_DRAFT, JudgeSpecs, Pair, close_now, load_pair
from stepspec.api.policy_support import RETURNED, fit_policy
from stepspec.base.keywords import known_options
from stepspec.base.workers import off_the_loop
from stepspec.chat.answer import AnswerReader
from stepspec.chat.calls import CallReader, ListedCalls, OnlyCalls, WrittenCalls
from stepspec.chat.prompts import (
    ContextBudget,
    Message,
    Prompt,
    RawPrompt,
    checked_messages,
    encode_prompt,
    problem_prompt,
)
from stepspec.chat.tools import HERMES, Toolbox, call_format, call_marks, schema_text
from stepspec.engines.protocol import Engine, Sampling, TokenBuffer, Verify, check_range, side_by_side
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import EngineError, StepSpecError, TargetError, UnknownIdError, UsageError
from stepspec.loop.calibrated import CalibratedSetting, proposing, setting_at, settings_of
from stepspec.loop.choice import StepChoice
from stepspec.loop.controller import run
from stepspec.loop.judge import Panel
from stepspec.loop.ledger import Ledger, Role
from stepspec.loop.limits import cut_off, end_of, has_passed
from stepspec.loop.options import RequestOptions
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.request import Request
from stepspec.loop.result import Done, Event, Result, TokenLogprob
from stepspec.loop.step import Noted
from stepspec.loop.tracing import RequestAttributes, Spans
from stepspec.loop.translation import TranslatedDraft

logger = logging.getLogger(__name__)

Question = str | Sequence[Message] | RawPrompt
"""A problem, a conversation, or a prompt without a chat template."""

MAX_UNKNOWN_TOKENS = 256
"""Default of `max_tokens` for a question that is unlike the pair's training data: its answer is likely nonsense."""
SCORED_TOKENS = 256
"""Most tokens of which one pass returns log-probabilities at the end of a request."""
MAX_OTHERS = 64
"""Most other policies of which a session keeps what it learned."""


@dataclass(frozen=True)
class _Encoded:
    """A request in the form that the loop needs."""

    toolbox: Toolbox
    options: RequestOptions
    json_schema: str | None
    """JSON schema of the answer, see `Limits`."""
    prompt: Prompt
    tags: ThinkingTags | None
    draft_prompt: list[int] | None
    """The draft's own prompt, if it has another vocabulary."""
    question: str
    """Text of the last user turn."""


@dataclass(frozen=True)
class PreparedRequest:
    """A checked and encoded request, see `StepSpec.prepare`. It can run any number of times."""

    prompt: Sequence[int]
    """Ids of the target's prompt."""
    thinking: ThinkingTags | None
    """How the thinking is marked; None if it is not separate, and the steps are the answer."""
    sampling: Sampling
    seconds: float
    """What the preparation took."""
    _run: Callable[[Sampling, float, float], AsyncGenerator[Event, None]]

    def stream(self, number: int = 0, queue_s: float = 0.0, overhead_s: float = 0.0) -> AsyncGenerator[Event, None]:
        """Run the request and yield its events. The last event is `Done` with the result.

        Closing the generator cancels the request.

        Args:
            number: number of the answer among several to the same request. Each has its own random seed.
            queue_s: seconds in a service's queue. They count in the result's times, and for `deadline_s` and
                `max_thinking_s`.
            overhead_s: other seconds of the request before now, besides those of its preparation. They count as well.

        Raises:
            TargetError: the target failed; the error carries the committed text.
        """
        return self._run(self.sampling.reseeded(number), queue_s, overhead_s)


class StepSpec:
    """Answers questions under one policy. Concurrent requests share forward passes."""

    @known_options
    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        policy: str | Policy = "two-level",
        *,
        pair: Pair | str | None = None,
        judges: JudgeSpecs | None = None,
        record: bool = False,
    ) -> None:
        """Create a session. If it loads the models, closing it frees them.

        Args:
            target: spec string of the target.
            draft: spec string of the draft.
            policy: name of a policy or path of a policy file, with the thresholds that were calibrated for the pair; or
                a `Policy`, with its own thresholds.
            pair: a loaded pair, or the name of one, instead of target and draft.
            judges: judge models by name, see `load_pair`. A loaded pair has its own.
            record: whether results have `judged_steps`: the draft's steps in family `score` with what was seen of them.
                The draft then proposes every step, without the limit `max_overhead`.

        Raises:
            UsageError: the policy is unknown or needs a draft, or a model cannot be loaded.
        """
        wanted = policy if isinstance(policy, Policy) else load_policy(policy)[0]
        self.policy_name = policy.summary if isinstance(policy, Policy) else policy
        self._owns_pair, self._record, self._closed = not isinstance(pair, Pair), record, False
        self._warned = set[str]()
        self._others: dict[str, StepSpec] = {}
        """Sessions with the same models, by the policy of a request, in the order of their last use."""
        if isinstance(pair, Pair):
            if judges:
                raise UsageError("judges belong to the pair: pass them to load_pair.")
            self.pair = pair
        else:
            self.pair = load_pair(
                target,
                draft,
                pair=pair,
                needs_draft=wanted.needs_draft,
                judges=judges,
                judge_names=wanted.judge_models,
            )
        if wanted.needs_draft and self.pair.draft is None:
            raise UsageError(NO_DRAFT)
        try:
            self._calibrated = () if isinstance(policy, Policy) else settings_of(wanted, self.pair.hash, record=record)
            self.policy, note = fit_policy(proposing(wanted, self._calibrated), self.pair)
            self._choice = StepChoice(None if record else self.policy.max_overhead)
            policies = {each.temperature: each.applied(self.policy) for each in self._calibrated}
            self._panels = {
                temperature: (each, each.panel(self.pair.target.tokenizer))
                for temperature, each in (policies or {None: self.policy}).items()
            }
        except StepSpecError:
            if self._owns_pair:
                close_now(self.pair)
            raise
        if note is not None:
            logger.warning("%s", note)

    def __repr__(self) -> str:
        draft = f" with the draft {self.pair.draft.name}" if self.pair.draft else " without a draft"
        closed = ", closed" if self._closed else ""
        return f"<StepSpec: {self.pair.target.name}{draft}, policy {self.policy_name}{closed}>"

    async def __aenter__(self) -> "StepSpec":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def choice(self) -> StepChoice:
        """What the requests of the session have measured, and what follows from it."""
        return self._choice

    async def forget(self) -> None:
        """Clear the caches of both models, see `Engine.forget`, and what was learned about their steps."""
        for each in (self, *self._others.values()):
            each.choice.forget()
        await self.pair.forget()

    async def aclose(self) -> None:
        """Close the session, and free the models if it loaded them."""
        self._closed = True
        if self._owns_pair:
            await self.pair.aclose()

    @property
    def thinks(self) -> bool:
        """Whether the target separates its thinking from the answer. If not, the steps are the answer."""
        return self.pair.target.tokenizer.thinking is not None

    @known_options
    async def stream(
        self, question: Question, options: RequestOptions | None = None, **changes: Any
    ) -> AsyncGenerator[Event, None]:
        """Answer a question and yield its events. The last event is `Done` with the result.

        Closing the generator cancels the request. Arguments and errors are those of `prepare`.

        Raises:
            TargetError: the target failed; the error carries the committed text.
        """
        prepared = await self.prepare(question, options, **changes)
        async with aclosing(prepared.stream()) as events:
            async for event in events:
                yield event

    @known_options
    async def prepare(
        self, question: Question, options: RequestOptions | None = None, **changes: Any
    ) -> PreparedRequest:
        """Check and encode a request without running it.

        Args:
            question: the text of a problem, a list of messages with `role` and `content`, or a `RawPrompt`. Earlier
                thinking goes into `reasoning_content`, or between think tags at the beginning of the content.
            options: the request's options; the default is `RequestOptions()`.
            changes: fields of `RequestOptions` that replace those of `options`, such as `max_tokens=200`.

        Raises:
            UsageError: an option has a wrong type, a name is unknown, the question is empty, a message is not text, a
                tool is invalid, or options contradict each other or are not supported by the engine.
            ContextError: the question does not fit the target's context.
            EngineError: the model that answers failed while it checked the JSON schema.
        """
        since = time.perf_counter()
        options = RequestOptions.of(options, changes)
        check_open(closed=self._closed)
        session = self if options.policy in (None, self.policy_name) else await self._under(options.policy)
        return await session.prepared(question, options, since)

    async def prepared(
        self, question: Question, options: RequestOptions, since: float, *, must_fit: bool = True
    ) -> PreparedRequest:
        """Check and encode a request under this session's policy. See `prepare`.

        Args:
            question: what to answer.
            options: the request's options.
            since: when it began. It may have waited for a policy to load.
            must_fit: whether a conversation must fit the target's context. One that does not can only be counted.
        """
        sampling = options.sampled(self._answering.default_sampling)

        def encode() -> _Encoded:
            toolbox = Toolbox.checked(options.tools, options.tool_choice, parallel=options.parallel_tool_calls)
            try:
                if isinstance(question, RawPrompt):
                    encoded = self._raw(question, toolbox, options)
                else:
                    messages = one_conversation(question, options.prompt)
                    encoded = self._conversation(messages, toolbox, options, must_fit=must_fit)
            except RecursionError:
                raise UsageError("A message or a tool is nested too deeply.") from None
            self._check_sampling(sampling, encoded)
            return encoded

        variables = options.chat_template_kwargs, options.draft_chat_template_kwargs
        inputs = question, options.tools, options.json_schema, options.stop_token_ids, variables
        encoded = await off_the_loop(inputs, encode)
        checked_at = encoded_at = time.perf_counter()
        if encoded.json_schema is not None:
            async with cut_off(end_of(options.deadline_s, encoded_at - since)):
                await self._answering.check_schema(encoded.json_schema)
            checked_at = time.perf_counter()
        spent: Mapping[Role, float] = {"controller": encoded_at - since, "target": checked_at - encoded_at}
        work = partial(self._run, encoded, spent)
        return PreparedRequest(encoded.prompt.ids, encoded.tags, sampling, sum(spent.values()), work)

    async def _under(self, policy: str) -> "StepSpec":
        """Return a session with the same models under another policy.

        Raises:
            UsageError: the policy is unknown, or these models do not support it.
        """
        if policy not in self._others:
            other = await asyncio.to_thread(StepSpec, policy=policy, pair=self.pair, record=self._record)
            self._others.setdefault(policy, other)
        found = self._others[policy] = self._others.pop(policy)  # the dictionary begins with the least recently used
        if len(self._others) > MAX_OTHERS:
            del self._others[next(iter(self._others))]
        return found

    async def _run(
        self, encoded: _Encoded, spent: Mapping[Role, float], sampling: Sampling, queue_s: float, overhead_s: float
    ) -> AsyncGenerator[Event, None]:
        spent = {**spent, "queue": queue_s, "controller": spent["controller"] + overhead_s}
        since, mean, options, scope = time.perf_counter(), None, encoded.options, self.pair.scope
        setting = setting_at(self._calibrated, sampling.temperature)
        if scope is not None or (setting is not None and setting.reads_prompts):
            with suppress(EngineError):  # the answer is valid without a note
                async with cut_off(end_of(options.deadline_s, sum(spent.values()))):
                    mean = await self.pair.prompts.mean_logprob(encoded.prompt.ids, options.cache_salt)
        note = None if scope is None else scope.note(mean)
        spent = {**spent, "target": spent["target"] + time.perf_counter() - since}
        if note is not None:
            mean = None  # the note says more than that a certificate is for other problems
            yield Noted(note)
        if options.max_tokens is not None:
            most = options.max_tokens
        elif note is not None:
            most = MAX_UNKNOWN_TOKENS
        else:  # above every possible number of committed tokens, because the prompt takes part of it
            most = self.pair.target.max_context
        request = self._request(encoded, sampling, Ledger(most, spent))
        uncovered = self._uncovered(setting, sampling, mean)
        async with aclosing(run(request)) as events:
            async for event in events:
                if isinstance(event, Done):
                    result = replace(
                        event.result, model=self.pair.target.name, policy=self.policy_name, uncovered=uncovered
                    )
                    result = await self._with_logprobs(result, request)
                    yield Done(self._with_notes(result, note, request))
                else:
                    yield event

    async def _with_logprobs(self, result: Result, request: Request) -> Result:
        """Add the log-probabilities of the committed tokens to the result, if the request wants them.

        Raises:
            TargetError: the target failed; the error carries the committed text.
        """
        options = request.options
        if not options.logprobs:
            return result
        target, prompt = self.pair.target, TokenBuffer(request.prompt, options.session_id, options.cache_salt)
        ids, found = request.transcript.buffer.since(len(prompt)), list[TokenLogprob]()
        size = SCORED_TOKENS if "cached scores" in target.abilities or "samples" in target.abilities else len(ids)
        piece = target.tokenizer.piece
        for start in range(0, len(ids), max(1, size)):
            part = ids[start : start + size]
            try:
                async with cut_off(request.limits.end):
                    seen = await target.verify(Verify(prompt, part, top=options.top_logprobs))
                    tops = seen.top or ((),) * len(part)
                    for id, logprob, top in zip(part, seen.logprobs or (), tops, strict=True):
                        likely = tuple((piece(each), value) for each, value in top)
                        found.append(TokenLogprob(piece(id), logprob, likely))
            except EngineError as error:
                committed = result.reasoning * result.thinks + result.answer
                raise TargetError(f"{error} The text was complete.", committed) from error
            if has_passed(request.limits.end):
                break
            prompt.append(part)
        return replace(result, logprobs=tuple(found))

    def _with_notes(self, result: Result, note: str | None, request: Request) -> Result:
        """Add `note` to the result, and whether a judge or a server failed or the model left out the answer.

        Errors go only to the log, because the service shows notes to its clients.
        """
        notes, tags = [] if note is None else [note], request.tags
        if tags is not None and tags.is_asked_for and result.finish_reason == "stop" and not result.answer:
            notes.append(
                f"The model wrote no answer after {tags.text.strip()!r}. Ask for it in the prompt, or set "
                "thinking=none in the address of the model."
            )
        notes += [
            f"The judge {name} failed at {count} steps and did not accept them. The log has its first error."
            for name, count in request.record.judge_failures.items()
        ]
        if request.transcript.buffer.num_moves:
            notes.append("A server failed during this request, which then went on at another one.")
        return replace(result, note=" ".join(notes) or None)

    def _at(self, temperature: float) -> tuple[Policy, Panel]:
        """Return the policy for a request's temperature, and its judges."""
        setting = setting_at(self._calibrated, temperature)
        return self._panels[None if setting is None else setting.temperature]

    def _uncovered(
        self, setting: CalibratedSetting | None, sampling: Sampling, mean_logprob: float | None
    ) -> tuple[str, ...]:
        """Return what a calibration does not cover in a request, and log it once in a session for each setting."""
        if setting is None:
            return ()
        usual = Sampling(sampling.temperature, sampling.top_p, seed=sampling.seed)
        names = [each.name for each in fields(Sampling)]
        unusual = {name: "set" for name in names if getattr(sampling, name) != getattr(usual, name)}
        biased = frozenset(id for id, _ in sampling.logit_bias)
        if biased and biased == self.pair.target.tokenizer.end_ids:  # what the service makes of `ignore_eos`
            unusual["ignore_eos"] = unusual.pop("logit_bias")
        known: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, **unusual}
        known["template_sha256"] = self.pair.template_sha256
        notes = setting.notes(self.pair.by_role, None, [] if mean_logprob is None else [mean_logprob], **known)
        for settings, note in notes:
            if not self._warned.issuperset(settings):  # a note has the request's values
                self._warned.update(settings)
                logger.warning("%s", note)
        return tuple(note for _, note in notes)

    def _request(self, encoded: _Encoded, sampling: Sampling, ledger: Ledger) -> Request:
        target, toolbox, options = self.pair.target, encoded.toolbox, encoded.options
        draft = self.pair.draft
        if draft is not None and encoded.draft_prompt is not None:
            draft = TranslatedDraft(
                draft,
                encoded.draft_prompt,
                target.tokenizer,
                start=len(encoded.prompt.ids),
                session=options.session_id,
                group=options.cache_salt,
            )
        policy, panel = self._at(sampling.temperature)
        in_json = encoded.json_schema is not None
        form = encoded.tags and encoded.tags.format
        opener = None
        if toolbox.tools and not self.thinks:
            opener = (call_format(target.tokenizer) or HERMES).opener
        return Request(
            policy=policy,
            target=target,
            draft=draft,
            panel=panel,
            tags=encoded.tags,
            starts_thinking=encoded.prompt.thinks,
            sampling=sampling,
            ledger=ledger,
            prompt=encoded.prompt.ids,
            question=encoded.question,
            breaker=self.pair.breaker,
            choice=self._choice,
            options=options,
            json_schema=encoded.json_schema,
            call_opener=opener,
            answer=AnswerReader(
                (*options.stop, *([form.answer_ending] if form is not None and form.answer_ending else ())),
                self._call_reader(toolbox, listed=in_json),
                only_call=not toolbox.parallel,
                marks=call_marks(target.tokenizer) if toolbox.tools and not in_json else "",
                opening=form.answer_opening if form is not None else "",
            ),
            spans=Spans(RequestAttributes(target.name, self.policy_name, options, sampling)),
            judges=self.pair.judges,
            judged_steps=[] if self._record else None,
        )

    def _answer_schema(self, toolbox: Toolbox, options: RequestOptions) -> str | None:
        """Return the JSON schema of the answer, and check a request's other constraints on it.

        Raises:
            UsageError: they contradict each other, or the models do not support them.
        """
        json_schema = options.json_schema
        if options.max_thinking_tokens is not None and not self.thinks:
            raise UsageError(
                f"max_thinking_tokens has no effect, because {self.pair.target.name} does not separate thinking from "
                "its answer. Set max_tokens."
            )
        if toolbox.forced and json_schema is not None:
            raise UsageError(
                f"tool_choice {toolbox.choice!r} requires a tool call, which does not match json_schema. Leave out "
                "json_schema, or set tool_choice to 'auto'."
            )
        if toolbox.tools and json_schema is not None and json_schema.get("type") == "array":
            raise UsageError(
                "With tools, an answer cannot be a JSON array, because tool calls are one. Wrap it in an object."
            )
        schema: str | None = None
        if toolbox.forced:
            schema = schema_text(toolbox.schema())
        elif json_schema is not None:
            schema = schema_text(json_schema, toolbox)
        if schema is not None and "json schema" not in self._answering.abilities:
            raise UsageError(
                f"{self._answering.name} does not support a JSON schema, which json_schema and a tool_choice other "
                "than 'auto' and 'none' require. Serve it with the torch engine or vLLM, or describe the format in the "
                "prompt."
            )
        self._check_stop_ids(options.stop_token_ids)
        if options.logprobs and "scores" not in self.pair.target.abilities:
            raise UsageError(
                f"{self.pair.target.name} does not return {RETURNED['scores']}, so logprobs are not supported. Serve "
                "it with the torch engine, vLLM or SGLang, or leave out logprobs."
            )
        return schema

    def _check_sampling(self, sampling: Sampling, encoded: _Encoded) -> None:
        """Check that the model has the tokens of a bias, and that its engine counts the tokens of the whole output, if
        the request has penalties for them.

        An engine that counts only those of a call is right if one call writes everything.
        """
        engine = self._answering
        if sampling.named_ids and engine.tokenizer.num_ids is not None:
            check_range(sampling.named_ids, engine.tokenizer.num_ids, engine.name)
        if not (sampling.presence_penalty or sampling.frequency_penalty) or "penalties" in engine.abilities:
            return
        separate = encoded.json_schema is not None or encoded.options.separates_answer
        if self.policy.family != "target" or separate:
            raise UsageError(
                f"presence_penalty and frequency_penalty are not supported by {engine.name} with this policy: it "
                "counts only the tokens of one call, and a step is a call. Choose the policy 'target' or 'engine', or "
                "serve the model with the torch engine."
            )

    def _check_stop_ids(self, stop_token_ids: Sequence[int]) -> None:
        """Check that the target has these tokens, if the size of its vocabulary is known."""
        target = self.pair.target
        if stop_token_ids and target.tokenizer.num_ids is not None:
            try:
                check_range(stop_token_ids, target.tokenizer.num_ids, target.name)
            except UnknownIdError as error:
                raise UnknownIdError(f"stop_token_ids: {error}") from None

    def _conversation(
        self, messages: Sequence[Message], toolbox: Toolbox, options: RequestOptions, *, must_fit: bool
    ) -> _Encoded:
        """Encode a conversation once for each model.

        Raises:
            UsageError: the target's chat template rejects the conversation, or does not have a variable of the request.
            ContextError: the conversation does not fit the target's context.
        """
        target, draft, tools = self.pair.target, self.pair.draft, list(toolbox.tools.values())
        schema, draft_prompt = self._answer_schema(toolbox, options), None
        given = options.template_variables(target)
        room = ContextBudget(target.max_context, target.name) if must_fit else None
        prompt = encode_prompt(target.tokenizer, messages, tools, room, given)
        tags = target.tokenizer.thinking
        if tags is not None and prompt.thinks and options.turns_thinking_off(given, tags):
            options = options.model_copy(update={"max_thinking_tokens": 0})  # it ends where it begins
        if tags is not None and tags.is_asked_for and (tools or schema is not None):  # the answer has another form
            prompt = replace(prompt, thinks=False)
        if tags is not None and (not tools or schema is not None):  # no token opens a call
            tags = replace(tags, implicit_ends=frozenset())
        if draft is not None and not self.pair.one_vocabulary:
            given = options.template_variables(draft, is_draft=True)
            draft_prompt = encode_prompt(draft.tokenizer, messages, tools, arguments=given).ids
        elif options.draft_chat_template_kwargs:
            raise UsageError(
                "draft_chat_template_kwargs has no effect, because the draft reads the target's prompt. Set "
                "chat_template_kwargs."
            )
        asked = [message["content"] for message in messages if message["role"] == "user"]
        return _Encoded(toolbox, options, schema, prompt, tags, draft_prompt, asked[-1] if asked else "")

    def _raw(self, raw: RawPrompt, toolbox: Toolbox, options: RequestOptions) -> _Encoded:
        """Encode a prompt without a chat template. The text goes on with thinking if the prompt leaves it open.

        Raises:
            UsageError: an option is for conversations only, or an id is not in the target's vocabulary.
            ContextError: the prompt does not fit the target's context.
        """
        target, draft, tags = self.pair.target, self.pair.draft, self.pair.target.tokenizer.thinking
        if toolbox.tools or options.chat_template_kwargs or options.draft_chat_template_kwargs:
            raise UsageError("Tools and template variables need a chat template. Send messages instead of a prompt.")
        if options.enable_thinking is not None or options.reasoning_effort is not None:
            raise UsageError("Only a chat template turns the thinking on or off. Send messages instead of a prompt.")
        ids, text = raw.encoded(target.tokenizer, ContextBudget(target.max_context, target.name))
        if tags is not None and not tags.is_open_in(text):
            tags = None
        if tags is None and options.max_thinking_tokens is not None:
            raise UsageError("max_thinking_tokens has no effect, because the prompt does not open the thinking.")
        if tags is not None:  # no token opens a tool call
            tags = replace(tags, implicit_ends=frozenset())
        foreign = draft is not None and not self.pair.one_vocabulary
        draft_prompt = RawPrompt(text).encoded(draft.tokenizer)[0] if draft is not None and foreign else None
        schema = self._answer_schema(toolbox, options)
        return _Encoded(toolbox, options, schema, Prompt(ids, True), tags, draft_prompt, text)

    @property
    def _answering(self) -> Engine:
        """The engine that generates answers."""
        return self.pair.draft if self.policy.family == "draft" and self.pair.draft else self.pair.target

    def _call_reader(self, toolbox: Toolbox, *, listed: bool) -> CallReader | None:
        if not toolbox.tools:
            return None
        if listed:
            return ListedCalls(toolbox.tools)
        tokenizer = self.pair.target.tokenizer
        form = call_format(tokenizer) or HERMES
        typed = [] if form.in_json else toolbox.typed()
        written = WrittenCalls(tokenizer.response_parser(form.template, typed), form, toolbox.tools)
        return OnlyCalls(written, toolbox.tools, leading=form.leading)

    @known_options
    async def generate(self, question: Question, options: RequestOptions | None = None, **changes: Any) -> Result:
        """Answer a question and return the result. Arguments and errors are those of `stream`."""
        async with aclosing(self.stream(question, options, **changes)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event.result
        raise AssertionError("a request ends with Done or an error")

    @known_options
    async def batch(
        self,
        questions: Sequence[Question],
        options: RequestOptions | None = None,
        **changes: Any,
    ) -> list[Result]:
        """Answer questions concurrently, in shared forward passes. Arguments and errors are those of `stream`.

        Results are in the order of the questions. The first failure cancels the other questions.
        """
        return await side_by_side(*(self.generate(each, options, **changes) for each in questions))


def check_open(*, closed: bool) -> None:
    """Check that a session is open.

    Raises:
        UsageError: it was closed.
    """
    if closed:
        raise UsageError("The session was closed. Open a new one.")


def one_conversation(question: str | Sequence[Message], prompt: str) -> list[Message]:
    """Convert a question or a conversation to messages.

    Raises:
        UsageError: the question is empty, a message is invalid, or a prompt is set for a conversation.
    """
    if isinstance(question, str):
        if not question.strip():
            raise UsageError("The question is empty.")
        return checked_messages([{"role": "user", "content": problem_prompt(prompt).format(question=question)}])
    if not isinstance(question, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"The question must be a string or a list of messages, got {reprlib.repr(question)}.")
    if prompt != "bare":
        raise UsageError(f"The prompt {prompt!r} applies only to a single question. Leave it out with a conversation.")
    return checked_messages(question)
