"""The asynchronous Python API: a session answers questions with a pair of models under a policy.

    async with StepSpec() as spec:                      # the embedded pair, the policy `stepspec`
        result = await spec.generate("Ann has 3 apples. Ben has 4 more apples than Ann. How many apples has Ben?")
        print(result.answer)

The name before the colon of a spec string selects the engine. The engine's library loads when it is first used.
"""

import asyncio
import hashlib
import importlib
import logging
import math
import reprlib
import threading
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from stepspec.api.pairs import EMBEDDED_NAME, find_pair
from stepspec.api.scope import PairScope
from stepspec.base.extras import from_extra
from stepspec.base.keywords import known_options
from stepspec.base.workers import off_the_loop
from stepspec.chat.answer import AnswerReader
from stepspec.chat.calls import CallReader, ListedCalls, WrittenCalls
from stepspec.chat.prompts import Message, Prompt, Room, checked_messages, encode_prompt, problem_prompt
from stepspec.chat.tools import HERMES, Toolbox, call_format, call_marks, schema_text
from stepspec.engines.judge_model import JudgeModel
from stepspec.engines.protocol import (
    Ability,
    DrafterName,
    Engine,
    Sampling,
    TokenBuffer,
    Verify,
    check_range,
    side_by_side,
)
from stepspec.engines.thinking import ThinkingTags
from stepspec.errors import (
    EngineError,
    ModelError,
    StepSpecError,
    TargetError,
    UnknownIdError,
    UsageError,
    unknown_name,
)
from stepspec.loop.breaker import Breaker
from stepspec.loop.controller import run
from stepspec.loop.ledger import Ledger
from stepspec.loop.limits import Demands
from stepspec.loop.options import Options, RequestOptions
from stepspec.loop.pace import StepPace
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.request import Request
from stepspec.loop.step import Done, Event, Result, TokenLogprob
from stepspec.loop.tracing import Asked, Spans
from stepspec.loop.translation import TranslatedDraft

logger = logging.getLogger(__name__)

REMOTE = ("stepspec.engines.remote", "RemoteEngine", "remote")
ENGINES: Mapping[str, tuple[str, str, str]] = {
    "torch": ("stepspec.engines.torch_engine", "TorchEngine", "torch"),
    "vllm": ("stepspec.engines.vllm_engine", "VllmEngine", "vllm"),
    "http": REMOTE,
    "https": REMOTE,
}
"""Engine kinds: module, class, and the extra that installs the required packages."""

REMOTE_JUDGE = ("stepspec.engines.remote.judge", "RemoteJudge", "remote")
JUDGE_ENGINES: Mapping[str, tuple[str, str, str]] = {
    "torch": ("stepspec.engines.torch_engine.judge", "TorchJudge", "torch"),
    "http": REMOTE_JUDGE,
    "https": REMOTE_JUDGE,
}
"""Engine kinds of judge models, like `ENGINES`."""

RETURNED: Mapping[Ability, str] = {
    "scores": "log-probabilities of proposed tokens",
    "cached scores": "log-probabilities of proposed tokens without reading the whole prompt again",
    "choices": "its most likely tokens at the places of proposed ones",
    "label logprobs": "log-probabilities of a judge's answers",
    "logprobs": "log-probabilities of the tokens that it writes",
    "entropies": "the entropies of its predictions",
}
"""What models return, by ability."""

SCORED_TOKENS = 256
"""Most tokens of which one pass returns log-probabilities at the end of a request."""

NO_DRAFT = "The policy needs a draft model. Name one with --draft, or choose the policy 'target'."


@dataclass(frozen=True)
class Pair:
    """Loaded models. Any number of sessions can share them."""

    target: Engine
    draft: Engine | None
    one_vocabulary: bool = True
    """Whether both models give every token the same id."""
    breaker: Breaker = field(default_factory=Breaker)
    """Disables a draft that keeps failing, for all sessions."""
    judges: Mapping[str, JudgeModel] = field(default_factory=dict[str, JudgeModel])
    """Judge models by name."""
    scope: PairScope | None = None
    """Description of the training data, for pairs that stepspec provides. Results of other questions get a note."""
    folder: Path | None = None
    """Folder of a pair that was loaded by its name."""

    @property
    def hash(self) -> str:
        """A short hash of both models' weights, or of their names if the weights are not local."""
        described = [None if engine is None else engine.describe() for engine in (self.target, self.draft)]
        parts = [each and (each.get("weights") or each["name"]) for each in described]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @cached_property
    def models(self) -> Mapping[str, str]:
        """The hash of each model's weights by role, or its name if the weights are not local. Judge models have their
        names in policies."""
        models: dict[str, Any] = {"target": self.target, "draft": self.draft, **self.judges}
        described = {role: model.describe() for role, model in models.items() if model is not None}
        return {role: str(each.get("weights") or each["name"]) for role, each in described.items()}

    @cached_property
    def template_sha256(self) -> str:
        """Hash of the target's chat template, as rendered for a question."""
        message = {"role": "user", "content": "QUESTION"}
        rendered = self.target.tokenizer.render([message], add_generation_prompt=True)
        return hashlib.sha256(rendered.encode()).hexdigest()

    async def forget(self) -> None:
        """Clear the caches of both models, see `Engine.forget`."""
        self.breaker.worked()
        for model in (self.target, self.draft, *self.judges.values()):
            if model is not None:
                await model.forget()

    async def aclose(self) -> None:
        """Free all models."""
        for model in (self.target, self.draft, *self.judges.values()):
            if model is not None:
                await model.aclose()


@dataclass(frozen=True)
class Models:
    """The models to load, as returned by `choose_models`.

    Attributes:
        target: spec string of the target.
        draft: spec string of the draft, if there is one.
        titles: names of target and draft in results; None uses a model's own name.
        folder: folder of the named pair; None for models chosen by spec string.
    """

    target: str
    draft: str | None
    titles: tuple[str | None, str | None] = (None, None)
    folder: Path | None = None


def choose_models(target: str | None, draft: str | None, pair: str | None = None) -> Models:
    """Choose models by spec strings or by the name of a pair. The default is the embedded pair.

    Raises:
        UsageError: only the draft is named, both models and a pair are named, or the pair is unknown.
        ModelError: the pair has not been built, or is damaged.
    """
    if pair is not None and (target is not None or draft is not None):
        raise UsageError(f"The pair {pair!r} has its own target and draft. Name either a pair or the models.")
    if target is not None:
        return Models(target, draft)
    if draft is not None:
        raise UsageError("A draft was named without a target. Name both with --target and --draft, or neither.")
    name, mark, options = (pair or EMBEDDED_NAME).partition("?")
    folder = find_pair(name)
    target, draft = (f"torch:{folder / role}{mark}{options}" for role in ("target", "draft"))
    return Models(target, draft, (f"{name} target", f"{name} draft"), folder)


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    *,
    pair: str | None = None,
    needs_draft: bool = True,
    notes: bool = True,
    judges: Mapping[str, str] | None = None,
    judge_names: Collection[str] = (),
) -> Pair:
    """Load target and draft by spec strings, or a pair by its name. The default is the embedded pair.

    A spec string is `torch:FOLDER_OR_NAME`, `vllm:FOLDER_OR_NAME`, or a server address, `http://HOST:PORT/v1#MODEL`.
    Options follow after a question mark, as in `torch:FOLDER?dtype=bfloat16&threads=2`; those of a pair count for both
    models. The target loads first, because the draft may have to fit into the remaining memory.

    Args:
        target: spec string of the target.
        draft: spec string of the draft.
        pair: name of a pair, instead of target and draft.
        needs_draft: whether a target without a draft is an error.
        notes: whether results get a note if the question is unlike the pair's training data. The note takes another
            pass over the prompt after the answer, so measurements turn it off.
        judges: spec strings of judge models by name, `torch:FOLDER_OR_NAME` or a server address.
        judge_names: names of judge models that policies need. A named pair may have them.

    Raises:
        UsageError: a spec string is invalid, only the draft is named, or there is no pair of that name.
        ModelError: a model cannot be loaded or served.
    """
    models = choose_models(target, draft, pair)
    scope = PairScope.load(models.folder) if notes and models.folder is not None else None
    judge_specs = choose_judges(judges or {}, judge_names, models.folder)
    for spec in filter(None, (models.target, models.draft)):
        check_spec(spec)
    for name, spec in judge_specs.items():
        check_judge_spec(name, spec)
    if models.draft is None and needs_draft:
        raise UsageError(NO_DRAFT)
    loaded: list[Any] = []
    try:
        loaded.append(target_engine := _load_engine(models.target, models.titles[0]))
        draft_engine = _load_engine(models.draft, models.titles[1]) if models.draft is not None else None
        loaded += [] if draft_engine is None else [draft_engine]
        judge_models: dict[str, JudgeModel] = {}
        for name, spec in judge_specs.items():
            loaded.append(judge := load_judge(name, spec))
            judge_models[name] = judge
    except StepSpecError:
        _close_now(*loaded)
        raise
    if draft_engine is None:
        return Pair(target_engine, None, judges=judge_models)
    one_vocabulary = target_engine.tokenizer.same_vocabulary(draft_engine.tokenizer)
    if hasattr(target_engine, "drafted_by") and type(draft_engine) is type(target_engine):
        target_engine = target_engine.drafted_by(draft_engine)
    return Pair(target_engine, draft_engine, one_vocabulary, judges=judge_models, scope=scope, folder=models.folder)


def _close_now(*models: Any) -> None:
    """Close models that the caller has no reference to. Blocks, in a thread with its own event loop."""

    async def close() -> None:
        for model in models:
            await model.aclose()

    thread = threading.Thread(target=asyncio.run, args=(close(),))
    thread.start()
    thread.join()


def choose_judges(given: Mapping[str, str], wanted: Collection[str], folder: Path | None) -> Mapping[str, str]:
    """Return the spec strings of judge models: the given ones, and those of a named pair that are wanted.

    Args:
        given: spec strings by name.
        wanted: names of judge models that policies need.
        folder: folder of the named pair, if there is one.
    """
    if folder is None:
        return given
    return {name: f"torch:{folder / name}" for name in wanted if (folder / name / "config.json").exists()} | dict(given)


def load_judge(name: str, spec: str) -> JudgeModel:
    """Load a judge model by its spec string; `name` is its name in policies.

    Raises:
        UsageError: the spec string is invalid.
        ModelError: the model cannot be loaded or served.
    """
    check_judge_spec(name, spec)
    return _load(JUDGE_ENGINES[spec.partition(":")[0]], spec, None)


def check_judge_spec(name: str, spec: str) -> None:
    """Check the spec string of a judge model without loading the model. Errors are those of `check_spec`."""
    check_spec(spec)
    kind = spec.partition(":")[0]
    if kind not in JUDGE_ENGINES:
        unknown = unknown_name("engine of judge models", kind, JUDGE_ENGINES)
        raise UsageError(f"The judge model {name!r} is {spec!r}. {unknown}")


def check_spec(spec: str) -> None:
    """Check a spec string without loading the model.

    Raises:
        UsageError: the spec string is invalid.
        ModelError: its folder does not exist.
    """
    kind, separator, name = spec.partition(":")
    if not separator or not name:
        raise UsageError(f"{spec!r} does not name a model. Write KIND:NAME, for instance torch:path/to/folder.")
    if kind not in ENGINES:
        raise UsageError(unknown_name("engine kind", kind, ENGINES))
    path = name.partition("?")[0]
    # Such a name cannot be on the Hub. transformers would still request it, and retry without a network.
    if ENGINES[kind] is not REMOTE and path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        raise ModelError(f"There is no folder {path} to load a model from.")


def _load_engine(spec: str, title: str | None = None) -> Any:
    check_spec(spec)
    return _load(ENGINES[spec.partition(":")[0]], spec, title)


def _load(engine: tuple[str, str, str], spec: str, title: str | None) -> Any:
    module, name, extra = engine
    kind, _, model = spec.partition(":")
    is_address = kind in ("http", "https")  # the scheme is part of an address
    with from_extra(extra, f"The {kind} engine"):
        return getattr(importlib.import_module(module), name).load(spec if is_address else model, title=title)


def fit_policy(policy: Policy, pair: Pair) -> tuple[Policy, str | None]:
    """Adapt a policy to the engines of a pair.

    Returns:
        The policy with a drafter in place of "auto" and with the judges that the target supports, and a note for the
        user if that is not the draft model or if other judges replace those of the policy.

    Raises:
        UsageError: the engines do not support the policy; the message says what to change.
    """
    notes: list[str | None] = []
    policy, missing = policy.on(pair.target.abilities)
    if missing is not None:
        names = " and ".join(judge.name for judge in policy.judges)
        notes.append(f"{pair.target.name} does not return {RETURNED.get(missing, missing)}: {names} judges its steps.")
    if policy.token.drafter == "auto":
        drafter, note = _best_drafter(pair)
        notes.append(note)
        policy = policy.model_copy(update={"token": policy.token.model_copy(update={"drafter": drafter})})
    _check_judging(policy, pair)
    _check_drafting(policy, pair)
    return policy, " ".join(filter(None, notes)) or None


def _best_drafter(pair: Pair) -> tuple[DrafterName, str | None]:
    """Return the drafter for "auto", and a note if it is not the draft model."""
    target = pair.target
    if "draft-model" in target.drafters:
        return "draft-model", None
    if "engine" in target.drafters:
        how = {None: "of unknown type", "none": "which is off"}.get(target.own_speculation, target.own_speculation)
        return "engine", f"{target.name} uses its engine's built-in speculation ({how}) instead of the draft model."
    drafter: DrafterName = "prompt-lookup" if "prompt-lookup" in target.drafters else "none"
    return drafter, f"Tokens are drafted by {drafter!r}{_why_no_draft_model(pair)}."


def _why_no_draft_model(pair: Pair) -> str:
    if pair.draft is None:
        return ", because no draft is loaded"
    why = "runs on another engine than" if pair.one_vocabulary else "has another vocabulary than"
    return f": the draft {why} the target"


def _check_judging(policy: Policy, pair: Pair) -> None:
    """Reject a policy that needs a judge model that is not there, or log-probabilities that a model does not return."""
    for name, ability in policy.judge_models.items():
        model = pair.judges.get(name)
        if model is None:
            raise UsageError(
                f"The policy needs the judge model {name!r}. Name it with --judge {name}=torch:FOLDER or a server's "
                f'address (judges={{"{name}": "torch:FOLDER"}} in Python).'
            )
        if ability not in model.abilities:
            what = "reward steps" if ability == "reward" else "embed texts"
            raise UsageError(f"The judge model {name!r}, {model.name}, does not {what}. Choose another model for it.")
    wanted = [(f"The judge {judge.name}", pair.target, judge.needs) for judge in policy.judges]
    wanted += [(f"The judge {judge.name}", pair.draft, judge.draft_needs) for judge in policy.judges]
    wanted.append((f"Family {policy.family!r}", pair.draft, policy.draft_needs))
    if policy.salvage is not None:
        wanted.append(("Salvage", pair.target, frozenset({"scores"})))
    for what, engine, needs in wanted:
        if engine is None or not (missing := needs - engine.abilities):
            continue
        values = " and ".join(sorted(RETURNED.get(ability, ability) for ability in missing))
        where = "with the torch engine" if "entropies" in missing else "with vLLM"
        raise UsageError(
            f"{what} needs {values}, which {engine.name} does not return. Choose a policy without it, such as "
            f"'specreason', whose judge takes the most likely digit, or serve the model {where}."
        )


def _check_drafting(policy: Policy, pair: Pair) -> None:
    """Reject a `[token]` table that the target's engine does not support."""
    target, table = pair.target, policy.token
    if policy.family == "draft":
        return  # only the draft generates text, and without token-level speculation
    if table.drafter == "none" and target.own_speculation not in (None, "none"):
        raise UsageError(
            f"The policy drafts no tokens, but {target.name} drafts by itself ({target.own_speculation}). Set "
            "drafter = \"engine\" in its [token] table, choose the policy 'engine', or turn off its speculation."
        )
    if table.drafter == "engine" and (table.tolerance or table.num_tokens != "auto"):
        raise UsageError(
            f"The policy sets num_tokens or tolerance, which {target.name} controls by itself. Leave them out of its "
            "[token] table."
        )
    if table.drafter not in ("none", "engine", *target.drafters):
        why = _why_no_draft_model(pair) if table.drafter == "draft-model" and pair.draft is not None else ""
        supported = ", ".join(map(repr, target.drafters)) or "'none'"
        raise UsageError(
            f"The policy drafts tokens by {table.drafter!r}, but {target.name} supports only {supported}{why}. "
            'Choose another drafter in its [token] table, or "auto".'
        )


@dataclass(frozen=True)
class _Prepared:
    """A request in the form that the loop needs."""

    toolbox: Toolbox
    demands: Demands
    prompt: Prompt
    tags: ThinkingTags | None
    draft: Engine | None
    question: str
    """Text of the last user turn."""


class StepSpec:
    """Answers questions under one policy. Concurrent requests share forward passes."""

    @known_options
    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        policy: str | Policy = "stepspec",
        *,
        pair: Pair | str | None = None,
        judges: Mapping[str, str] | None = None,
        record: bool = False,
    ) -> None:
        """Create a session. If it loads the models, closing it frees them.

        Args:
            target: spec string of the target.
            draft: spec string of the draft.
            policy: name of a policy, path of a policy file, or a `Policy`.
            pair: a loaded pair, or the name of one, instead of target and draft.
            judges: spec strings of judge models by name. A loaded pair has its own.
            record: whether results have `judged_steps`: the draft's steps in family `score` with what was seen of them.
                The draft then proposes every step, without the limit `max_overhead`.

        Raises:
            UsageError: the policy is unknown or needs a draft, or a model cannot be loaded.
        """
        wanted = policy if isinstance(policy, Policy) else load_policy(policy)[0]
        self.policy_name = "custom" if isinstance(policy, Policy) else policy
        self._owns_pair, self._record = not isinstance(pair, Pair), record
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
            self.policy, note = fit_policy(wanted, self.pair)
            self._pace = StepPace(None if record else self.policy.score.max_overhead)
            self._panels = {
                bound: (each := self.policy.at(bound), each.panel(self.pair.target.tokenizer))
                for bound in (*(table.at_most for table in self.policy.temperatures), math.inf)
            }
        except StepSpecError:
            if self._owns_pair:
                _close_now(self.pair)
            raise
        if note is not None:
            logger.warning("%s", note)
        if any(each.certificate is not None for each, _ in self._panels.values()):
            _ = self.pair.models  # hashes weights now, and not in the first request

    async def __aenter__(self) -> "StepSpec":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def forget(self) -> None:
        """Clear the caches of both models, see `Engine.forget`, and what was learned about their steps."""
        self._pace.forget()
        await self.pair.forget()

    async def aclose(self) -> None:
        """Free the models if this session loaded them."""
        if self._owns_pair:
            await self.pair.aclose()

    @property
    def thinks(self) -> bool:
        """Whether the target separates its thinking from the answer. If not, the steps are the answer."""
        return self.pair.target.tokenizer.thinking is not None

    @known_options
    async def stream(
        self,
        question: str | Sequence[Message],
        options: RequestOptions | None = None,
        **changes: Unpack[Options],
    ) -> AsyncGenerator[Event, None]:
        """Answer a question and yield its events. The last event is `Done` with the result.

        Closing the generator cancels the request.

        Args:
            question: the text of a problem, or a list of messages with `role` and `content`. Earlier thinking goes into
                `reasoning_content` or between think tags.
            options: the request's options; the default is `RequestOptions()`.
            changes: fields of `RequestOptions` that replace those of `options`, such as `max_tokens=200`.

        Raises:
            UsageError: an option has a wrong type, a name is unknown, the question is empty, a message is not text, a
                tool is invalid, or options contradict each other or are not supported by the engine.
            ContextError: the question does not fit the target's context.
            TargetError: the target failed; the error carries the committed text.
        """
        options = RequestOptions.of(options, changes)
        sampling = options.sampled(self._answering.default_sampling)
        # max_context is above every possible number of committed tokens, because the prompt takes part of it.
        ledger = Ledger(self.pair.target.max_context if options.max_tokens is None else options.max_tokens)

        def prepare() -> _Prepared:
            messages = one_conversation(question, options.prompt)
            toolbox = Toolbox.checked(options.tools, options.tool_choice, parallel=options.parallel_tool_calls)
            demands = self._demands(toolbox, options)
            try:
                self._check_sampling(sampling, demands)
                return self._prepared(messages, toolbox, demands, options)
            except RecursionError:
                raise UsageError("A message or a tool is nested too deeply.") from None

        with ledger.time("controller"):
            variables = options.chat_template_kwargs, options.draft_chat_template_kwargs
            inputs = question, options.tools, options.json_schema, options.stop_token_ids, variables
            prepared = await off_the_loop(inputs, prepare)
            if prepared.demands.json_schema is not None:
                with ledger.time("target"):
                    await self._answering.check_schema(prepared.demands.json_schema)
            request = self._request(prepared, options, sampling, ledger)
        async with aclosing(run(request)) as events:
            async for event in events:
                if isinstance(event, Done):
                    result = await self._with_logprobs(event.result, request, options)
                    yield Done(await self._with_notes(result, prepared.prompt.ids, request))
                else:
                    yield event

    async def _with_logprobs(self, result: Result, request: Request, options: RequestOptions) -> Result:
        """Add the log-probabilities of the committed tokens to the result, if the request wants them.

        Raises:
            TargetError: the target failed; the error carries the committed text.
        """
        if not options.logprobs:
            return result
        target, prompt = self.pair.target, TokenBuffer(request.prompt)
        ids, found = request.transcript.buffer.since(len(prompt)), list[TokenLogprob]()
        size = SCORED_TOKENS if "cached scores" in target.abilities or "samples" in target.abilities else len(ids)
        piece = target.tokenizer.piece
        for start in range(0, len(ids), max(1, size)):
            part = ids[start : start + size]
            try:
                seen = await target.verify(Verify(prompt, part, top=options.top_logprobs))
            except EngineError as error:
                committed = result.reasoning * result.thinks + result.answer
                raise TargetError(f"{error} The text was complete.", committed) from error
            tops = seen.top or ((),) * len(part)
            for id, logprob, top in zip(part, seen.logprobs or (), tops, strict=True):
                found.append(TokenLogprob(piece(id), logprob, tuple((piece(each), value) for each, value in top)))
            prompt.append(part)
        return replace(result, logprobs=tuple(found))

    async def _with_notes(self, result: Result, prompt: Sequence[int], request: Request) -> Result:
        """Add a note to the result if the question is unlike the pair's training data, or if the policy's certificate
        is not for this request."""
        notes: list[str] = []
        certificate, sampling = request.policy.certificate, request.sampling
        if certificate is not None:
            usual = Sampling(sampling.temperature, sampling.top_p, seed=sampling.seed)
            unusual = {
                each.name: "set"
                for each in fields(Sampling)
                if getattr(sampling, each.name) != getattr(usual, each.name)
            }
            known = {"temperature": sampling.temperature, "top_p": sampling.top_p, **unusual}
            notes += certificate.notes(self.pair.models, **known, template_sha256=self.pair.template_sha256)
        if self.pair.scope is not None:
            with suppress(EngineError):  # the answer is valid without a note
                note = await self.pair.scope.note(self.pair.target, TokenBuffer(prompt))
                notes += [] if note is None else [note]
        return replace(result, note=" ".join(notes) or None)

    def _request(self, prepared: _Prepared, options: RequestOptions, sampling: Sampling, ledger: Ledger) -> Request:
        target, toolbox, demands = self.pair.target, prepared.toolbox, prepared.demands
        policy, panel = next(each for bound, each in self._panels.items() if sampling.temperature <= bound)
        in_json = demands.json_schema is not None
        return Request(
            policy=policy,
            target=target,
            draft=prepared.draft,
            panel=panel,
            tags=prepared.tags,
            starts_thinking=prepared.prompt.thinks,
            sampling=sampling,
            ledger=ledger,
            prompt=prepared.prompt.ids,
            question=prepared.question,
            breaker=self.pair.breaker,
            pace=self._pace,
            demands=demands,
            answer=AnswerReader(
                options.stop,
                self._call_reader(toolbox, listed=in_json),
                only_call=not toolbox.parallel,
                marks=call_marks(target.tokenizer) if toolbox.tools and not in_json else "",
            ),
            spans=Spans(Asked(target.name, self.policy_name, options, sampling)),
            judges=self.pair.judges,
            judged_steps=[] if self._record else None,
        )

    def _demands(self, toolbox: Toolbox, options: RequestOptions) -> Demands:
        """Return the constraints of a request on the answer.

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
        opener = None
        if toolbox.tools and not self.thinks:
            opener = (call_format(self.pair.target.tokenizer) or HERMES).opener
        self._check_stop_ids(options.stop_token_ids)
        if options.logprobs and "scores" not in self.pair.target.abilities:
            raise UsageError(
                f"{self.pair.target.name} does not return {RETURNED['scores']}, so logprobs are not supported. Serve "
                "it with the torch engine, vLLM or SGLang, or leave out logprobs."
            )
        stop_ids = frozenset(options.stop_token_ids)
        return Demands(schema, opener, options.max_thinking_tokens, options.deadline_s, stop_ids)

    def _check_sampling(self, sampling: Sampling, demands: Demands) -> None:
        """Check that the model has the tokens of a bias, and that its engine counts the tokens of the whole output, if
        the request has penalties for them.

        An engine that counts only those of a call is right if one call writes everything.
        """
        engine = self._answering
        if sampling.named_ids and engine.tokenizer.num_ids is not None:
            check_range(sampling.named_ids, engine.tokenizer.num_ids, engine.name)
        if not (sampling.presence_penalty or sampling.frequency_penalty) or "penalties" in engine.abilities:
            return
        if self.policy.family != "target" or demands.separate_answer:
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

    def _prepared(
        self, messages: Sequence[Message], toolbox: Toolbox, demands: Demands, options: RequestOptions
    ) -> _Prepared:
        """Encode the request once for each model.

        Raises:
            UsageError: the target's chat template rejects the conversation, or does not have a variable of the request.
            ContextError: the conversation does not fit the target's context.
        """
        target, draft, tools = self.pair.target, self.pair.draft, list(toolbox.tools.values())
        given = options.template_variables(target)
        prompt = encode_prompt(target.tokenizer, messages, tools, Room(target.max_context, target.name), given)
        tags = target.tokenizer.thinking
        if tags is not None and prompt.thinks and options.turns_thinking_off(given, tags):
            demands = replace(demands, max_thinking_tokens=0)  # it ends where it begins
        if tags is not None and (not tools or demands.json_schema is not None):  # no token opens a call
            tags = replace(tags, implicit_ends=frozenset())
        if draft is not None and not self.pair.one_vocabulary:
            given = options.template_variables(draft, is_draft=True)
            draft_ids = encode_prompt(draft.tokenizer, messages, tools, arguments=given).ids
            draft = TranslatedDraft(draft, draft_ids, target.tokenizer, len(prompt.ids))
        elif options.draft_chat_template_kwargs:
            raise UsageError(
                "draft_chat_template_kwargs has no effect, because the draft reads the target's prompt. Set "
                "chat_template_kwargs."
            )
        asked = [message["content"] for message in messages if message["role"] == "user"]
        return _Prepared(toolbox, demands, prompt, tags, draft, asked[-1] if asked else "")

    @property
    def _answering(self) -> Engine:
        """The engine that generates answers."""
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

    @known_options
    async def generate(
        self, question: str | Sequence[Message], options: RequestOptions | None = None, **changes: Unpack[Options]
    ) -> Result:
        """Answer a question and return the result. Arguments and errors are those of `stream`."""
        async with aclosing(self.stream(question, options, **changes)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event.result
        raise AssertionError("a request ends with Done or an error")

    @known_options
    async def batch(
        self,
        questions: Sequence[str | Sequence[Message]],
        options: RequestOptions | None = None,
        **changes: Unpack[Options],
    ) -> list[Result]:
        """Answer questions concurrently, in shared forward passes. Arguments and errors are those of `stream`.

        Results are in the order of the questions. The first failure cancels the other questions.
        """
        return await side_by_side(*(self.generate(each, options, **changes) for each in questions))


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
