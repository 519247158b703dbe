"""StepSpec, the async Python API: a pair of models, a policy, and questions.

    async with StepSpec() as spec:                      # the embedded pair, the policy `stepspec`
        result = await spec.generate("Ann has 3 apples. Ben has 4 more apples than Ann. How many apples has Ben?")
        print(result.answer)

Engines are found by the name in front of the colon of their spec string, so that heavy libraries load only when used.
"""

import hashlib
import importlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

from stepspec.answer import AnswerReader
from stepspec.breaker import Breaker
from stepspec.calls import CallReader, ListedCalls, WrittenCalls
from stepspec.controller import Controller, Demands
from stepspec.engine import Engine, Sampling, side_by_side
from stepspec.errors import ContextError, ModelError, StepSpecError, UsageError, unknown_name
from stepspec.files import package_folder
from stepspec.judges import Panel
from stepspec.ledger import Ledger
from stepspec.policy import Policy, load_policy
from stepspec.prompts import Message, checked_messages, encode_messages, problem_prompt, think_end_id
from stepspec.step import Done, Event, Result
from stepspec.tools import HERMES, Tool, Toolbox, call_format, call_marks, schema_text
from stepspec.tracing import Asked, traced
from stepspec.translation import TranslatedDraft

REMOTE = ("stepspec.remote", "RemoteEngine", "remote")
ENGINES: Mapping[str, tuple[str, str, str]] = {
    "torch": ("stepspec.torch_engine", "TorchEngine", "torch"),
    "vllm": ("stepspec.vllm_engine", "VllmEngine", "vllm"),
    "http": REMOTE,
    "https": REMOTE,
}
"""Engine kinds: module, class, and the extra that installs what it needs."""

DEFAULT_MAX_TOKENS = 1024
NO_DRAFT = "The policy needs a draft model. Name one with --draft, or choose the policy 'target'."


@dataclass(frozen=True)
class Pair:
    """The models, loaded once and shared by any number of sessions."""

    target: Engine
    draft: Engine | None
    one_vocabulary: bool = True
    """Whether the two give every token the same id."""
    breaker: Breaker = field(default_factory=Breaker)
    """Keeps a draft that has died out of the way of all sessions."""

    @property
    def hash(self) -> str:
        """One short hash for both models' weights, or their names where the weights are not at hand."""
        described = [engine.describe() if engine else {} for engine in (self.target, self.draft)]
        parts = [engine.get("weights") or engine.get("name") for engine in described]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    async def aclose(self) -> None:
        """Frees both models."""
        await self.target.aclose()
        if self.draft is not None:
            await self.draft.aclose()


def load_pair(target: str | None = None, draft: str | None = None, *, needs_draft: bool = True) -> Pair:
    """Loads target and draft by spec string; the embedded pair if both are left out.

    A spec string is `torch:FOLDER_OR_NAME`, `vllm:FOLDER_OR_NAME` or the address of a server, `http://HOST:PORT/v1#MODEL`.
    One is loaded after the other, as the second may have to fit into what the first leaves of a device.

    Raises:
        UsageError: a spec string is not one, or only the draft is named.
        ModelError: a model cannot be loaded or served.
    """
    titles = titles_of(target)
    target, draft = named_models(target, draft)
    for spec in filter(None, (target, draft)):
        check_spec(spec)
    if draft is None and needs_draft:
        raise UsageError(NO_DRAFT)
    target_engine = _load_engine(target, titles[0])
    draft_engine = _load_engine(draft, titles[1]) if draft is not None else None
    if draft_engine is None:
        return Pair(target_engine, None)
    one_vocabulary = target_engine.tokenizer.same_vocabulary(draft_engine.tokenizer)
    if one_vocabulary and hasattr(target_engine, "drafted_by") and type(draft_engine) is type(target_engine):
        target_engine = target_engine.drafted_by(draft_engine)
    return Pair(target_engine, draft_engine, one_vocabulary)


def titles_of(target: str | None) -> tuple[str | None, str | None]:
    """What results call target and draft: something else than their names if they are the embedded pair."""
    return ("embedded target", "embedded draft") if target is None else (None, None)


def named_models(target: str | None, draft: str | None) -> tuple[str, str | None]:
    """Spec strings of target and draft; those of the embedded pair if both are left out.

    Raises:
        UsageError: only the draft is named.
    """
    if target is not None:
        return target, draft
    if draft is not None:
        raise UsageError("A draft was named without a target. Name both with --target and --draft, or neither.")
    weights = package_folder() / "mini" / "weights"
    return f"torch:{weights / 'target'}", f"torch:{weights / 'draft'}"


def check_spec(spec: str) -> None:
    """Whether a spec string names a model, as far as that can be seen without loading one.

    Raises:
        UsageError: it does not.
        ModelError: it names a folder that is not there.
    """
    kind, separator, name = spec.partition(":")
    if not separator or not name:
        raise UsageError(f"{spec!r} does not name a model. Write KIND:NAME, for instance torch:path/to/folder.")
    if kind not in ENGINES:
        raise UsageError(unknown_name("engine kind", kind, ENGINES))
    path = name.partition("?")[0]
    # The hub has no such names, but would be asked for them, and that again and again without a network.
    if ENGINES[kind] is not REMOTE and path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        raise ModelError(f"There is no folder {path} to load a model from.")


def _load_engine(spec: str, title: str | None = None) -> Any:
    check_spec(spec)
    kind, _, name = spec.partition(":")
    module, engine, extra = ENGINES[kind]
    try:
        name = spec if ENGINES[kind] is REMOTE else name  # of an address the scheme is a part
        return getattr(importlib.import_module(module), engine).load(name, title=title)
    except ModuleNotFoundError as error:
        raise StepSpecError(
            f"The {kind} engine needs {error.name}, which is not installed: pip install 'stepspec[{extra}]'."
        ) from error


def check_abilities(policy: Policy, pair: Pair) -> None:
    """Whether these engines can do what the policy asks of them.

    Raises:
        UsageError: they cannot; the message says what to change.
    """
    target, drafter = pair.target, policy.token.drafter
    if policy.family == "score" and policy.needs_scores and "scores" not in target.abilities:
        raise UsageError(
            f"The policy judges or salvages by the log-probabilities of proposed tokens, which {target.name} does not "
            "give. Choose a policy with a rating judge alone, such as 'specreason', or serve the target with vLLM."
        )
    if policy.needs_label_laws and "label laws" not in target.abilities:
        raise UsageError(
            f"The policy rates by the expected digit, but {target.name} gives no log-probabilities. "
            'Set readout = "greedy" in its rating judge.'
        )
    if target.drafters is None:
        if policy.token.tolerance:
            raise UsageError(
                f"The policy has a token-level tolerance, which cannot be set for {target.name} from here."
            )
    elif drafter not in ("none", *target.drafters):
        why = "has another vocabulary than" if not pair.one_vocabulary else "is not served by the engine of"
        raise UsageError(
            f"The policy drafts tokens by {drafter!r}, but {target.name} can do so only by "
            f"{', '.join(target.drafters) or 'nothing'}"
            + (f": the draft {why} the target" if drafter == "draft-model" and pair.draft is not None else "")
            + ". Choose another drafter in the policy's [token] table."
        )


class Options(TypedDict, total=False):
    """How a question is to be answered; see `StepSpec.stream`."""

    prompt: str
    sampling: Sampling
    max_tokens: int
    max_thinking_tokens: int | None
    deadline_s: float | None
    stop: Sequence[str]
    json_schema: Mapping[str, Any] | None
    tools: Sequence[Tool]
    tool_choice: str
    parallel_tool_calls: bool


class StepSpec:
    """A session: requests under one policy. Requests made at the same time share the models' passes."""

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        policy: str | Policy = "stepspec",
        *,
        pair: Pair | None = None,
    ) -> None:
        """Takes a loaded pair, or loads one and then closes it too.

        Raises:
            UsageError: the policy does not exist, or needs a draft that is missing, or a model cannot serve.
        """
        self.policy = policy if isinstance(policy, Policy) else load_policy(policy)[0]
        self.policy_name = "a policy of one's own" if isinstance(policy, Policy) else policy
        self._owns_pair = pair is None
        self.pair = pair or load_pair(target, draft, needs_draft=self.policy.needs_draft)
        if self.policy.needs_draft and self.pair.draft is None:
            raise UsageError(NO_DRAFT)
        check_abilities(self.policy, self.pair)
        self._panel = Panel(self.policy.judges, self.pair.target.tokenizer)

    async def __aenter__(self) -> "StepSpec":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Frees the models if this session loaded them."""
        if self._owns_pair:
            await self.pair.aclose()

    @property
    def thinks(self) -> bool:
        """Whether the target thinks apart from its answer; if not, its steps are the answer."""
        return think_end_id(self.pair.target.tokenizer) is not None

    async def stream(
        self,
        question: str | Sequence[Message],
        *,
        prompt: str = "bare",
        sampling: Sampling = Sampling(),
        max_tokens: int = DEFAULT_MAX_TOKENS,
        max_thinking_tokens: int | None = None,
        deadline_s: float | None = None,
        stop: Sequence[str] = (),
        json_schema: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
    ) -> AsyncGenerator[Event, None]:
        """Answers a question, event by event; the last event is `Done` with the result.

        Args:
            question: the problem's text, or a conversation: turns with `role` and `content`, the last one to be
                answered. What an earlier answer was thought through goes as `reasoning_content` or between think tags.
            prompt: which wording a problem's text is put in, a name in `stepspec.prompts.PROBLEM_PROMPTS`.
            sampling: how both models draw their tokens.
            max_tokens: most tokens generated, rejected and discarded ones included.
            max_thinking_tokens: after so many the thinking is ended, and the target answers.
            deadline_s: the same after so many seconds; where a model does not think apart, its text is ended.
            stop: strings of which the first to come ends the answer and is no part of it. Thinking has no part in this.
            json_schema: what the answer has to be; the target is held to it token by token.
            tools: what the target may call, each `{"type": "function", "function": {...}}`; calls come as events of
                their own and are never the draft's.
            tool_choice: "auto", "none", "required", or the name of the tool that has to be called.
            parallel_tool_calls: whether several calls may come at once.

        Raises:
            UsageError: the prompt's name is unknown, there is nothing to answer, a turn holds something else than
                text, a tool is described wrongly, or the settings contradict each other or what the engine can do.
            ContextError: the question does not fit the target's context.
            TargetError: the target failed; the error carries what was committed.
        """
        ledger = Ledger(max_tokens)
        messages = one_conversation(question, prompt)
        toolbox = Toolbox.checked(tools, tool_choice, parallel=parallel_tool_calls)
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; it must be at least 1.")
        stop = [stop] if isinstance(stop, str) else stop
        if not all(stop):
            raise UsageError("A stop string is empty; it would end every answer before it begins.")
        demands = self._demands(toolbox, json_schema, max_thinking_tokens, deadline_s)
        if demands.json_schema is not None:
            await self._answering.check_schema(demands.json_schema)
        target, shown = self.pair.target, list(toolbox.tools.values())
        ids = encode_messages(target.tokenizer, messages, shown)
        if len(ids) >= target.max_context:
            raise ContextError(
                f"The prompt has {len(ids)} tokens, but {target.name} has a context of {target.max_context}. "
                "Shorten the question or choose a model with a longer context."
            )
        controller = Controller(
            policy=self.policy,
            target=target,
            draft=self._draft_of(messages, shown, len(ids)),
            panel=self._panel,
            think_end=think_end_id(target.tokenizer),
            sampling=sampling,
            ledger=ledger,
            breaker=self.pair.breaker,
            demands=demands,
            answer=AnswerReader(
                stop,
                self._call_reader(toolbox, listed=demands.json_schema is not None),
                only_call=not toolbox.parallel,
                marks=call_marks(target.tokenizer) if shown and demands.json_schema is None else "",
            ),
        )
        asked = Asked(target.name, self.policy_name, sampling, max_tokens, tuple(stop))
        async with aclosing(traced(controller.run(ids), asked)) as events:
            async for event in events:
                yield event

    def _demands(
        self,
        toolbox: Toolbox,
        json_schema: Mapping[str, Any] | None,
        max_thinking_tokens: int | None,
        deadline_s: float | None,
    ) -> Demands:
        """What is asked of the answer.

        Raises:
            UsageError: it contradicts itself, or what the models can do.
        """
        if deadline_s is not None and deadline_s <= 0:
            raise UsageError(f"deadline_s is {deadline_s}; it must be above 0.")
        if max_thinking_tokens is not None:
            if max_thinking_tokens < 0:
                raise UsageError(f"max_thinking_tokens is {max_thinking_tokens}; it must be 0 (no thinking) or more.")
            if not self.thinks:
                raise UsageError(
                    f"{self.pair.target.name} does not think apart from its answer, so max_thinking_tokens means "
                    "nothing to it. Set max_tokens."
                )
        if toolbox.forced and json_schema is not None:
            raise UsageError(
                f"A tool has to be called (tool_choice {toolbox.choice!r}), but the answer has to be JSON of another "
                "form. Leave out json_schema, or let tool_choice be 'auto'."
            )
        if toolbox.tools and json_schema is not None and json_schema.get("type") == "array":
            raise UsageError("Beside tools the answer's form cannot be a list, as calls are one. Wrap it in an object.")
        schema: str | None = None
        if toolbox.forced:
            schema = schema_text(toolbox.schema())
        elif json_schema is not None:
            schema = schema_text(json_schema, toolbox)
        if schema is not None and "json schema" not in self._answering.abilities:
            raise UsageError(
                f"{self._answering.name} cannot be held to a JSON schema, which json_schema and a tool_choice other "
                "than 'auto' and 'none' need. Serve it with the torch engine or vLLM, or describe the form in words."
            )
        opener = None
        if toolbox.tools and not self.thinks:
            opener = (call_format(self.pair.target.tokenizer) or HERMES).opener
        return Demands(schema, opener, max_thinking_tokens, deadline_s)

    @property
    def _answering(self) -> Engine:
        """The engine that writes answers."""
        return self.pair.draft if self.policy.family == "draft" and self.pair.draft else self.pair.target

    def _call_reader(self, toolbox: Toolbox, *, listed: bool) -> CallReader | None:
        if not toolbox.tools:
            return None
        if listed:
            return ListedCalls()
        tokenizer = self.pair.target.tokenizer
        form = call_format(tokenizer) or HERMES
        parser = tokenizer.response_parser(form.template, list(toolbox.tools.values()))
        return WrittenCalls(parser, in_json=form.in_json)

    def _draft_of(self, messages: Sequence[Message], tools: Sequence[Tool], num_ids: int) -> Engine | None:
        """The draft for one request, in the target's ids."""
        draft, target = self.pair.draft, self.pair.target
        if draft is None or self.pair.one_vocabulary:
            return draft
        return TranslatedDraft(draft, encode_messages(draft.tokenizer, messages, tools), target.tokenizer, num_ids)

    async def generate(self, question: str | Sequence[Message], **options: Unpack[Options]) -> Result:
        """Answers a question; arguments and errors as for `stream`."""
        async with aclosing(self.stream(question, **options)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event.result
        raise AssertionError("a request ends with Done or an error")

    async def batch(self, questions: Sequence[str | Sequence[Message]], **options: Unpack[Options]) -> list[Result]:
        """Answers questions at the same time, in passes that they share; arguments and errors as for `stream`.

        Results come in the order of the questions. The first that fails ends the others.
        """
        return await side_by_side(*(self.generate(each, **options) for each in questions))


def one_conversation(question: str | Sequence[Message], prompt: str) -> list[Message]:
    """The turns to be answered."""
    if isinstance(question, str):
        if not question.strip():
            raise UsageError("The question is empty.")
        return [{"role": "user", "content": problem_prompt(prompt).format(question=question)}]
    if prompt != "bare":
        raise UsageError(f"The prompt {prompt!r} is a wording for one question. Leave it out with a conversation.")
    return checked_messages(question)
