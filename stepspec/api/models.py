"""Loads models by spec string or pair name: the name before the colon of a spec string selects the engine.

The engine's library loads when it is first used.
"""

import asyncio
import hashlib
import importlib
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepspec.api.pairs import EMBEDDED_NAME, pair_specs
from stepspec.api.scope import PairScope, PromptReader
from stepspec.base.extras import from_extra
from stepspec.engines.judge_model import JudgeModel
from stepspec.engines.protocol import Engine
from stepspec.errors import ModelError, StepSpecError, UsageError, unknown_name
from stepspec.loop.breaker import Breaker
from stepspec.loop.certificate import by_role

if TYPE_CHECKING:
    from langchain_core.decisions import BaseDecisionModel

JudgeSpecs: TypeAlias = Mapping[str, "str | BaseDecisionModel"]
"""Judge models by name: their spec strings, or decision models themselves."""

REMOTE = ("stepspec.engines.remote.replicas", "Replicas", "remote")
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
    "python": ("stepspec.engines.decision_model", "DecisionModel", "langchain"),
}
"""Engine kinds of judge models, like `ENGINES`."""

NO_DRAFT = (
    "The policy needs a draft model. Name one with --draft, or choose a policy that needs none: 'engine' for a target "
    "on vLLM or a server, else 'lookup' or 'target'."
)


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

    def __deepcopy__(self, _: Any) -> "Pair":
        """Copies of what holds a pair share its models."""
        return self

    @property
    def loaded(self) -> Mapping[str, Engine | JudgeModel]:
        """All models by role. Judge models have their names in policies."""
        draft = {} if self.draft is None else {"draft": self.draft}
        return {"target": self.target, **draft, **self.judges}

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
        return self.by_role["models"]

    @cached_property
    def by_role(self) -> Mapping[str, Mapping[str, str]]:
        """What certificates compare of the models, see `stepspec.loop.certificate.by_role`."""
        return by_role({role: model.describe() for role, model in self.loaded.items()})

    @cached_property
    def prompts(self) -> PromptReader:
        """What computes how probable prompts are under the target."""
        return PromptReader(self.target)

    @cached_property
    def template_sha256(self) -> str:
        """Hash of the target's chat template, as rendered for a question."""
        message = {"role": "user", "content": "QUESTION"}
        rendered = self.target.tokenizer.render([message], add_generation_prompt=True)
        return hashlib.sha256(rendered.encode()).hexdigest()

    async def forget(self) -> None:
        """Clear the caches of both models, see `Engine.forget`."""
        self.breaker.worked()
        for model in self.loaded.values():
            await model.forget()

    async def aclose(self) -> None:
        """Free all models."""
        for model in self.loaded.values():
            await model.aclose()


@dataclass(frozen=True)
class ModelSpecs:
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


def choose_models(target: str | None, draft: str | None, pair: str | None = None) -> ModelSpecs:
    """Choose models by spec strings or by the name of a pair. The default is the embedded pair.

    Raises:
        UsageError: only the draft is named, both models and a pair are named, or the pair is unknown.
    """
    if pair is not None and (target is not None or draft is not None):
        raise UsageError(f"The pair {pair!r} has its own target and draft. Name either a pair or the models.")
    if target is not None:
        return ModelSpecs(with_kind(target), draft and with_kind(draft))
    if draft is not None:
        raise UsageError("A draft was named without a target. Name both with --target and --draft, or neither.")
    name, _, options = (pair or EMBEDDED_NAME).partition("?")
    target, draft, folder = pair_specs(name, options)
    return ModelSpecs(target, draft, (f"{name} target", f"{name} draft"), folder)


def load_pair(
    target: str | None = None,
    draft: str | None = None,
    *,
    pair: str | None = None,
    needs_draft: bool = True,
    notes: bool = True,
    judges: JudgeSpecs | None = None,
    judge_names: Collection[str] = (),
) -> Pair:
    """Load target and draft by spec strings, or a pair by its name. The default is the embedded pair.

    A spec string is `torch:FOLDER_OR_NAME`, `torch:FILE.gguf`, `vllm:FOLDER_OR_NAME`, or a server address,
    `http://HOST:PORT/v1#MODEL`.
    The folder of a model, which has a `config.json`, is one for the torch engine.
    Several addresses of the same model are separated by spaces.
    Options follow after a question mark, as in `torch:FOLDER?dtype=bfloat16&threads=2`; those of a pair count for both
    models. The target loads first, because the draft may have to fit into the remaining memory.

    Args:
        target: spec string of the target.
        draft: spec string of the draft.
        pair: name of a pair, instead of target and draft.
        needs_draft: whether a target without a draft is an error.
        notes: whether results get a note if the question is unlike the pair's training data. The note takes another
            pass over the prompt after the answer, so measurements turn it off.
        judges: judge models by name, each `torch:FOLDER_OR_NAME`, a server address, a decision model
            (`langchain_core.decisions.BaseDecisionModel`), or `python:MODULE:NAME`, which names one or a function that
            returns one.
        judge_names: names of judge models that policies need. A named pair may have them.

    Raises:
        UsageError: a spec string is invalid, only the draft is named, or there is no pair of that name.
        ModelError: a model cannot be loaded or served.
    """
    models, judge_specs = check_models(
        target, draft, pair=pair, needs_draft=needs_draft, judges=judges, judge_names=judge_names
    )
    folder = models.folder
    scope = PairScope.find(folder) if notes else None
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
        close_now(*loaded)
        raise
    one_vocabulary = draft_engine is not None and target_engine.tokenizer.same_vocabulary(draft_engine.tokenizer)
    if hasattr(target_engine, "drafted_by") and type(draft_engine) is type(target_engine):
        target_engine = target_engine.drafted_by(draft_engine)
    for engine in (target_engine, draft_engine):
        if engine is not None and hasattr(engine, "capture"):
            engine.capture()
    if draft_engine is None:
        return Pair(target_engine, None, judges=judge_models)
    return Pair(target_engine, draft_engine, one_vocabulary, judges=judge_models, scope=scope, folder=folder)


def check_models(
    target: str | None = None,
    draft: str | None = None,
    *,
    pair: str | None = None,
    needs_draft: bool = True,
    judges: JudgeSpecs | None = None,
    judge_names: Collection[str] = (),
) -> tuple[ModelSpecs, JudgeSpecs]:
    """Check the models of a pair without loading them. Return them, and its judge models.

    Arguments are those of `load_pair`.

    Raises:
        UsageError: a spec string is invalid, only the draft is named, or there is no pair of that name.
        ModelError: a folder does not exist.
        MissingExtraError: the library of an engine is not installed.
    """
    models = choose_models(target, draft, pair)
    judge_specs = choose_judges(judges or {}, judge_names, models.folder)
    for spec in filter(None, (models.target, models.draft)):
        check_spec(spec, ENGINES)
        _engine_class(ENGINES, spec).check_options(_given(spec))
    for name, spec in judge_specs.items():
        check_judge_spec(name, spec)
        engine = _engine_class(JUDGE_ENGINES, spec)
        if _kind(spec) == "python":
            engine.found(_given(spec))
    if models.draft is None and needs_draft:
        raise UsageError(NO_DRAFT)
    return models, judge_specs


def close_now(*models: Any) -> None:
    """Close models that the caller has no reference to. Blocks, in a thread with its own event loop."""

    async def close() -> None:
        for model in models:
            await model.aclose()

    thread = threading.Thread(target=asyncio.run, args=(close(),))
    thread.start()
    thread.join()


def choose_judges(given: JudgeSpecs, wanted: Collection[str], folder: Path | None) -> JudgeSpecs:
    """Return the judge models to load: the given ones, and those of a named pair that are wanted.

    Args:
        given: judge models by name.
        wanted: names of judge models that policies need.
        folder: folder of the named pair, if there is one.
    """
    own = [name for name in wanted if folder is not None and (folder / name / "config.json").exists()]
    specs = {name: f"torch:{folder}/{name}" for name in own} | dict(given)
    return {name: with_kind(spec) if isinstance(spec, str) else spec for name, spec in specs.items()}


def load_judge(name: str, spec: Any) -> JudgeModel:
    """Load a judge model by its spec string, or a decision model; `name` is its name in policies.

    Raises:
        UsageError: the spec string is invalid.
        ModelError: the model cannot be loaded or served.
    """
    check_judge_spec(name, spec)
    return _load(JUDGE_ENGINES, spec, None)


def check_judge_spec(name: str, spec: Any) -> None:
    """Check the spec string of a judge model without loading the model. Errors are those of `check_spec`."""
    if isinstance(spec, str) and ":" in spec and _kind(spec) not in JUDGE_ENGINES:
        unknown = unknown_name("engine of judge models", _kind(spec), JUDGE_ENGINES)
        raise UsageError(f"The judge model {name!r} is {spec!r}. {unknown}")
    if isinstance(spec, str):
        check_spec(spec, JUDGE_ENGINES)


def with_kind(spec: str) -> str:
    """Return a spec string with its kind, which that of a model's folder may leave out."""
    return f"torch:{spec}" if os.path.isfile(os.path.join(spec.partition("?")[0], "config.json")) else spec


def check_spec(spec: str, engines: Mapping[str, Any]) -> None:
    """Check a spec string without loading the model.

    Raises:
        UsageError: the spec string is invalid.
        ModelError: its folder does not exist.
    """
    kind, separator, name = spec.partition(":")
    if not separator or not name:
        folder = f"There is no folder {spec!r} with a config.json"
        raise UsageError(f"{spec!r} does not name a model. {folder}. For a name, write KIND:NAME, such as torch:NAME.")
    if kind not in engines:
        raise UsageError(unknown_name("engine kind", kind, engines))
    path = name.partition("?")[0]
    # Such a name cannot be on the Hub. transformers would still request it, and retry without a network.
    is_place = kind not in ("http", "https") and (path.startswith(("/", "./", "../", "~")) or path.count("/") > 1)
    noun, exists = ("file", Path.is_file) if path.endswith(".gguf") else ("folder", Path.is_dir)
    if is_place and not exists(Path(path)):
        raise ModelError(f"There is no {noun} {path} to load a model from.")


def hub_name(spec: Any) -> str | None:
    """Return the name that a spec string has on the Hugging Face Hub; None if the model is local or on a server."""
    name = _given(spec).partition("?")[0] if _kind(spec) in ("torch", "vllm") else ""
    return name if name and not Path(name).exists() else None


def _load_engine(spec: str, title: str | None = None) -> Any:
    check_spec(spec, ENGINES)
    return _load(ENGINES, spec, title)


def _kind(spec: Any) -> str:
    return spec.partition(":")[0] if isinstance(spec, str) else "python"


def _engine_class(engines: Mapping[str, tuple[str, str, str]], spec: Any) -> Any:
    module, name, extra = engines[_kind(spec)]
    with from_extra(extra, f"The {_kind(spec)} engine"):
        return getattr(importlib.import_module(module), name)


def _load(engines: Mapping[str, tuple[str, str, str]], spec: Any, title: str | None) -> Any:
    with from_extra(engines[_kind(spec)][2], f"The {_kind(spec)} engine"):
        return _engine_class(engines, spec).load(_given(spec), title=title)


def _given(spec: Any) -> Any:
    """Return what an engine gets of a spec string, or a decision model. The scheme is part of an address."""
    return spec if not isinstance(spec, str) or _kind(spec) in ("http", "https") else spec.partition(":")[2]
