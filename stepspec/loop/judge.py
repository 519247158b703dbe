"""Judges: what each of them sees and decides, where they are found, and how a policy asks them.

A judge is one class in one module of `stepspec.loop.judges`, or of an installed package that names it in the entry
point group `stepspec.judges`. Its fields are its settings in a policy file.
"""

import asyncio
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast, get_args

from pydantic import PlainValidator, SerializeAsAny, ValidationError, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError
from pydantic_core.core_schema import ErrorType

from stepspec.base.file_model import FileModel
from stepspec.engines.judge_model import JudgeAbility, JudgeModel
from stepspec.engines.protocol import Ability, Probe, Tokenizer, Verification
from stepspec.errors import reason_of
from stepspec.loop import judges
from stepspec.loop.step import Proposal, Step, Verdict

Decision = Literal["accept", "reject", "undecided"]
GROUP = "stepspec.judges"
"""Entry point group in which an installed package names its judges."""
REMOVED = {"arithmetic": "likelihood", "numbers": "likelihood", "learned": "likelihood", "random": "always"}
"""What to use instead of judges of earlier versions."""


class Answer(NamedTuple):
    """The target's answer to a probe."""

    choice: int
    """Its most likely token."""
    label_logprobs: tuple[float, ...]
    """Log-probs of the probe's labels; empty if the engine returns none."""


@dataclass(frozen=True)
class Evidence:
    """What a judge sees of a proposed step.

    Attributes:
        question: text of the last user turn.
        committed: the steps before it, in order.
        step: text of the step.
        ids: its ids, without the tag that ends it.
        own_choices: whether each token of the step is the target's own choice, see `Verification`; None without the
            target's pass, or if the engine does not return its choices.
        draft_logprobs: log-probabilities of the draft's own tokens of the step, at temperature 1; None unless a judge
            needs them. With another vocabulary, their number differs from that of the target's.
        verification: the target's pass over the step, with the log-probs of its tokens if the judge needs `scores`;
            None for a judge with `asks_target` false.
        choice: the target's most likely token after the judge's probe; None without a probe.
        probe: the judge's probe.
        label_logprobs: log-probs of the probe's labels.
        tokenizer: the target's.
        own_step: in family `compare`, the step that the target has written at the same place.
        models: the judge models by name.
        ask: in family `compare`, asks the target a question before both steps.
        group: see `TokenBuffer`. Judge models need it.
    """

    question: str
    committed: Sequence[Step]
    step: str
    ids: Sequence[int] = ()
    draft_logprobs: tuple[float, ...] | None = None
    verification: Verification | None = None
    own_choices: Sequence[bool] | None = None
    probe: Probe | None = None
    choice: int | None = None
    label_logprobs: tuple[float, ...] = ()
    tokenizer: Tokenizer | None = None
    own_step: str = ""
    models: Mapping[str, JudgeModel] = field(default_factory=dict[str, JudgeModel])
    ask: Callable[[Probe], Awaitable[Answer]] | None = None
    group: str | None = None

    @classmethod
    def of(
        cls,
        step: Proposal,
        question: str,
        committed: Sequence[Step],
        models: Mapping[str, JudgeModel],
        group: str | None = None,
    ) -> "Evidence":
        """Return what is known of a draft's step before the target has read it."""
        return cls(question, committed, step.text, step.written, step.logprobs, models=models, group=group)


class Judge(FileModel, ABC):
    """A judge of proposed steps, with its settings."""

    asks_target: ClassVar[bool] = True
    """Whether the judge needs the target's pass over the step."""
    exact: ClassVar[bool] = False
    """Whether the judge accepts only steps that the target would have written itself, token by token."""
    families: ClassVar[Sequence[str]] = ("score",)
    """The families of policies that the judge is for. In `compare`, it sees the target's own step, and no pass."""
    is_probability: ClassVar[bool] = False
    """Whether the score is a probability that the step is right. `stepspec judge-bench` checks its calibration then."""
    model_needs: ClassVar[JudgeAbility | None] = None
    """What the judge needs of the judge model that its setting `model` names; None without such a model."""
    without_score: ClassVar[Decision] = "reject"
    """What follows if the judge has no score, fails or is too slow."""

    kind: Any
    """Selects this judge. A subclass narrows it to one literal."""

    @property
    def name(self) -> str:
        """Key of this judge's scores in results. Two judges of one policy have different names."""
        return self.kind

    @property
    def needs(self) -> frozenset[Ability]:
        """Abilities that the target needs for this judge."""
        return frozenset()

    @property
    def draft_needs(self) -> frozenset[Ability]:
        """Abilities that the draft needs for this judge: `logprobs` or none."""
        return frozenset()

    def probe(self, tokenizer: Tokenizer) -> Probe | None:
        """Return what the target is asked after the step; None if the judge asks nothing.

        Raises:
            ModelError: the judge does not work with this tokenizer.
        """
        return None

    @abstractmethod
    async def score(self, evidence: Evidence) -> float | None:
        """Return the step's score, higher is better; None if there is none. An exception counts as None."""

    @abstractmethod
    def decide(self, score: float) -> Decision:
        """Return the decision for a score."""


class ThresholdJudge(Judge):
    """A judge that accepts from a threshold on."""

    threshold: float
    """Lowest accepted score."""
    reject_below: float | None = None
    """From here up to the threshold, the next judge of a cascade decides."""

    @model_validator(mode="after")
    def _in_order(self) -> "ThresholdJudge":
        if self.reject_below is not None and self.reject_below >= self.threshold:
            raise ValueError(f"reject_below must be below the threshold, {self.threshold:g}")
        return self

    def decide(self, score: float) -> Decision:
        if score >= self.threshold:
            return "accept"
        return "undecided" if self.reject_below is not None and score >= self.reject_below else "reject"


def share_of_yes(logprobs: Sequence[float]) -> float | None:
    """Return p(yes) / (p(yes) + p(no)) from their log-probs; None if neither has a probability above 1e-6."""
    yes, no = map(math.exp, logprobs)
    return yes / (yes + no) if yes + no > 1e-6 else None


def judge_kinds() -> list[str]:
    """Return the kinds of all judges: of stepspec, then of installed packages."""
    return [*shipped_judges(), *_installed()]


def find_judge(kind: str) -> type[Judge]:
    """Load the judge of a kind. The judges of stepspec come first.

    Raises:
        KeyError: there is no such judge.
        ImportError: its module cannot be imported.
        TypeError: an installed package names something else than a judge.
    """
    if kind not in shipped_judges():
        found = _installed()[kind].load()
        if not (isinstance(found, type) and issubclass(found, Judge)):
            raise TypeError(f"{found!r} is not a subclass of stepspec.loop.judge.Judge")
        return found
    module = importlib.import_module(f"{judges.__name__}.{kind.replace('-', '_')}")
    classes = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Judge))
    return next(each for each in classes if each.__module__ == module.__name__)


@cache
def shipped_judges() -> Sequence[str]:
    """Return the kinds of the judges that ship with stepspec."""
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(judges.__path__)]


@cache
def _installed() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _as_judge(value: Any) -> Judge:
    """Validate one `[[judges]]` table by the class of its kind."""
    if isinstance(value, Judge):
        return value
    if not isinstance(value, Mapping):
        raise PydanticKnownError("model_type", {"class_name": "Judge"})
    table = cast("Mapping[str, Any]", value)
    known, kind = ", ".join(map(repr, judge_kinds())), table.get("kind")
    if kind is None:
        raise PydanticCustomError("kind_missing", "needs a kind. Known: {known}", {"known": known})
    if isinstance(kind, str) and kind in REMOVED:
        context = {"kind": kind, "other": REMOVED[kind]}
        raise PydanticCustomError("judge_removed", "the judge {kind} was removed in 0.2.0; use {other}", context)
    if kind not in judge_kinds():
        context = {"discriminator": "'kind'", "tag": str(kind), "expected_tags": known}
        raise PydanticKnownError("union_tag_invalid", context)
    try:
        return find_judge(kind).model_validate(table)
    except ValidationError as error:
        problems: list[Any] = error.errors()
        raise ValidationError.from_exception_data(error.title, [_located(kind, each) for each in problems]) from None
    except Exception as error:  # of an installed package
        reason = {"kind": kind, "error": f"{type(error).__name__}: {error}"}
        raise PydanticCustomError("judge_load", "the judge {kind} cannot be loaded: {error}", reason) from error


def _located(kind: str, problem: dict[str, Any]) -> Any:
    """Return a problem of a table with the kind in its location, as in a union of tables."""
    located = problem | {"loc": (kind, *problem["loc"])}
    if problem["type"] not in get_args(ErrorType):  # of a validator in an installed package
        located["type"] = PydanticCustomError("judge_setting", "{message}", {"message": problem["msg"]})
    return located


AnyJudge = Annotated[SerializeAsAny[Judge], PlainValidator(_as_judge, json_schema_input_type=dict[str, Any])]
"""A judge in a policy file: a table whose `kind` selects the class."""


Verifier = Callable[[Sequence[Probe]], Awaitable[Verification]]
"""Makes a pass of the target over a step, with probes."""


class Panel:
    """The judges of a policy, ready to be asked.

    Args:
        judges: the judges in the order of the policy.
        tokenizer: the target's.
        cascade: whether the first decision ends the judging.
        deadline_s: seconds for each judge, besides the target's pass.

    Raises:
        ModelError: a judge does not work with the tokenizer.
    """

    def __init__(
        self, judges: Sequence[Judge], tokenizer: Tokenizer, *, cascade: bool = False, deadline_s: float = 10.0
    ) -> None:
        self._cascade, self._deadline_s = cascade, deadline_s
        self._judges = [(judge, judge.probe(tokenizer)) for judge in judges]
        self.probes = tuple(probe for _, probe in self._judges if probe is not None)
        self.with_models = frozenset(judge.name for judge in judges if judge.model_needs is not None)
        """Names of the judges that ask a judge model."""

    async def judge(self, evidence: Evidence, verify: Verifier, deadline: float | None = None) -> Verdict:
        """Return the verdict on a step. A step needs an acceptance and no rejection.

        Args:
            evidence: the step, without the target's pass.
            verify: makes a pass of the target over the step, with probes. Judges share one pass. In a cascade, a judge
                whose probe was not in it gets another, in which the target reads only the probe.
            deadline: the request's deadline in the event loop's time. A judge that is still working then has no score.
        """
        scores: dict[str, float | None] = {}
        decisions: list[Decision] = []
        seen: Verification | None = None
        answers: dict[Probe, Answer] = {}
        errors: dict[str, str] = {}
        for judge, probe in self._judges:
            if judge.asks_target and (seen is None or (probe is not None and probe not in answers)):
                probes = self.probes if not self._cascade else () if probe is None else (probe,)
                found = await verify(probes)
                seen = seen or found
                answers |= _answers(probes, found)
            known = evidence
            if judge.asks_target and seen is not None:
                known = replace(evidence, verification=seen, own_choices=own_choices(evidence.ids, seen))
            if judge.asks_target and probe is not None:
                choice, labels = answers[probe]
                known = replace(known, probe=probe, choice=choice, label_logprobs=labels)
            scores[judge.name], decision, error = await self._ask(judge, known, deadline)
            if error is not None:
                errors[judge.name] = error
            decisions.append(decision)
            if self._cascade and decisions[-1] != "undecided":
                break
        return Verdict("accept" in decisions and "reject" not in decisions, scores, errors)

    async def _ask(
        self, judge: Judge, evidence: Evidence, deadline: float | None
    ) -> tuple[float | None, Decision, str | None]:
        """Return a judge's score, its decision, which is `without_score` if there is no number, and its error."""
        own_end, request_end = asyncio.timeout(self._deadline_s), asyncio.timeout_at(deadline)
        try:
            async with own_end, request_end:
                score = await judge.score(evidence)
            if score is None or math.isnan(score):
                return None, judge.without_score, None
            decision = judge.decide(score)
            if decision not in get_args(Decision):
                raise ValueError(f"decide returned {decision!r}")
            return float(score), decision, None
        except Exception as raised:  # a judge may come from another package
            if own_end.expired() or request_end.expired():
                error = None if request_end.expired() else f"no score in {self._deadline_s:g} s"
            else:
                error = f"{type(raised).__name__}: {reason_of(raised)}"
            return None, judge.without_score, error


def own_choices(ids: Sequence[int], seen: Verification | None) -> tuple[bool, ...] | None:
    """Return whether each token of a step is the target's own choice; None if its choices are not known."""
    return None if seen is None or seen.choices is None else tuple(map(int.__eq__, ids, seen.choices))


def _answers(probes: Sequence[Probe], seen: Verification) -> dict[Probe, Answer]:
    labels = seen.probe_logprobs or ((),) * len(probes)
    return {
        probe: Answer(choice, logprobs)
        for probe, choice, logprobs in zip(probes, seen.probe_choices, labels, strict=True)
    }
