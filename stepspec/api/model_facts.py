"""What models are to stepspec: their thinking, templates, vocabularies and abilities, and whether a draft fits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepspec.api.models import Pair
from stepspec.api.policy_support import fit_policy
from stepspec.base.files import list_data_files
from stepspec.chat.prompts import encode_prompt
from stepspec.chat.tools import FORMATS as CALL_FORMATS
from stepspec.chat.tools import call_format
from stepspec.engines.protocol import Engine
from stepspec.errors import UsageError
from stepspec.loop.calibrated import proposing, settings_of
from stepspec.loop.policy import load_policy

QUESTION = ({"role": "user", "content": "QUESTION"},)


@dataclass(frozen=True)
class Thinking:
    """How a model thinks.

    Attributes:
        format: name of the format.
        opening: text that begins the thinking.
        opened_by: "template" or "stepspec", which appends the opening to the prompt.
        ending: text that ends it.
        implicit_ends: tokens of the model that end it too, in requests with tools.
        on: template arguments that turn it on, which stepspec passes.
        off: template arguments that turn it off.
        starts_open: whether the template leaves the thinking open for a plain question.
    """

    format: str
    opening: str
    opened_by: str
    ending: str
    implicit_ends: Sequence[str]
    on: Mapping[str, Any]
    off: Mapping[str, Any]
    starts_open: bool


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model.

    Attributes:
        name: its name in results.
        engine: where it runs.
        dtype: data type of its weights; None if unknown.
        context: most tokens of a prompt and its continuation together.
        vocabulary: number of token ids; None if unknown.
        has_template: whether it has a chat template that renders a question.
        thinking: how it thinks; None if it does not mark its thinking.
        tool_calls: formats in which its tool calls are read; empty without a chat template. `json` is an answer that is
            nothing but calls in JSON.
        sampling: the sampling that its files recommend.
        abilities: optional features of its engine.
        drafters: token-level drafters of its engine.
        own_speculation: speculation that the engine does by itself.
        memory_bytes: memory by use; empty if unknown.
    """

    name: str
    engine: str | None
    dtype: str | None
    context: int
    vocabulary: int | None
    has_template: bool
    thinking: Thinking | None
    tool_calls: Sequence[str]
    sampling: Mapping[str, float]
    abilities: Sequence[str]
    drafters: Sequence[str]
    own_speculation: str | None
    memory_bytes: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class PairFacts:
    """What is known of a target, and of a draft beside it.

    Attributes:
        target: the target.
        draft: the draft, if there is one.
        one_vocabulary: whether both give every token the same id.
        policies: by name of a policy that ships with stepspec, why it cannot run; None if it can.
        notes: by name, what a policy uses in place of what the models do not support.
    """

    target: ModelFacts
    draft: ModelFacts | None
    one_vocabulary: bool
    policies: Mapping[str, str | None]
    notes: Mapping[str, str]


def pair_facts(pair: Pair) -> PairFacts:
    """Return what is known of loaded models. Nothing is generated."""
    policies: dict[str, str | None] = {}
    notes: dict[str, str] = {}
    for name in list_data_files("policies"):
        policies[name] = None
        try:
            policy = load_policy(name)[0]
            pair.target.tokenizer.render(QUESTION, add_generation_prompt=True)
            if pair.draft is None and policy.needs_draft:
                raise UsageError("It needs a draft.")
            settings = settings_of(policy, pair.hash)
            wanted = proposing(policy, settings)
            note = fit_policy(wanted, pair)[1]
            without_steps = None if wanted is policy else settings[0].sentences[0]
        except UsageError as error:
            policies[name] = str(error)
        else:
            notes |= {name: " ".join(found)} if (found := [*filter(None, (note, without_steps))]) else {}
    draft = None if pair.draft is None else model_facts(pair.draft)
    return PairFacts(model_facts(pair.target), draft, pair.one_vocabulary, policies, notes)


def model_facts(engine: Engine) -> ModelFacts:
    """Return what is known of a loaded model."""
    tokenizer, described = engine.tokenizer, engine.describe()
    try:
        form = call_format(tokenizer)
        tokenizer.render(QUESTION, add_generation_prompt=True)
        has_template = True
    except UsageError:
        form, has_template = None, False
    if form is None:
        named = "hermes, as described in the system turn"
    else:
        named = next((name for name, each in CALL_FORMATS.items() if each is form), "of its response template")
    return ModelFacts(
        name=engine.name,
        engine=_text(described.get("device")),
        dtype=_text(described.get("dtype")),
        context=engine.max_context,
        vocabulary=tokenizer.num_ids,
        has_template=has_template,
        thinking=_thinking(engine) if has_template else None,
        tool_calls=(named, "json") if has_template else (),
        sampling=engine.default_sampling,
        abilities=sorted(engine.abilities),
        drafters=[*engine.drafters],
        own_speculation=engine.own_speculation,
        memory_bytes=engine.metrics().memory_bytes,
    )


def _thinking(engine: Engine) -> Thinking | None:
    tokenizer, tags = engine.tokenizer, engine.tokenizer.thinking
    if tags is None:
        return None
    rendered = tokenizer.render(QUESTION, add_generation_prompt=True, arguments=tags.format.on)
    return Thinking(
        format=tags.format.name,
        opening=tags.format.opening,
        opened_by="template" if tags.is_open_in(rendered) else "stepspec",
        ending=tags.format.ending,
        implicit_ends=sorted(tokenizer.piece(id) for id in tags.implicit_ends),
        on=tags.format.on,
        off=tags.format.off,
        starts_open=encode_prompt(tokenizer, QUESTION).thinks,
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
