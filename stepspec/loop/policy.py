"""Policy files in TOML: how steps are proposed, judged and salvaged, and how tokens are drafted."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from stepspec.base.file_problems import first_problem
from stepspec.base.files import find_data_file
from stepspec.chat.prompts import RATING_PROMPTS
from stepspec.engines.protocol import MAX_DRAFTED, DrafterName, Drafting
from stepspec.errors import UsageError, unknown_name


class FileModel(BaseModel):
    """A table of a TOML file with strict validation. Unknown keys are errors, and "7", true and nan are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _whole_number(value: object) -> object:
    if type(value) is not int:  # true and 1.0 equal 1
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


Version = Annotated[Literal[1], BeforeValidator(_whole_number)]
"""Version of a file format."""

PolicyKind = Literal["target", "token", "draft", "step"]
"""The target alone, the target with token-level speculation, the draft alone, or step-level speculation."""

M = TypeVar("M", bound=FileModel)


class RatingSpec(FileModel):
    """The target rates the step with a digit from 0 to 9."""

    kind: Literal["rating"]
    """Selects this judge."""
    prompt: str = "short"
    """The question to the target: a name in `stepspec.chat.prompts.RATING_PROMPTS`."""
    readout: Literal["greedy", "expected"] = "greedy"
    """`greedy` takes the most likely token if it is a digit. `expected` takes the mean over the ten digits."""
    threshold: float = Field(default=7.0, ge=0, le=9)
    """Lowest rating that accepts a step."""

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return f"rating.{self.prompt}"

    @model_validator(mode="after")
    def _known_prompt(self) -> "RatingSpec":
        if self.prompt not in RATING_PROMPTS:
            raise ValueError(unknown_name("rating prompt", self.prompt, RATING_PROMPTS))
        return self


class LikelihoodSpec(FileModel):
    """The target's log-probability of the step's tokens, in nats."""

    kind: Literal["likelihood"]
    """Selects this judge."""
    statistic: Literal["min", "mean"] = "min"
    """The score of a step: its least probable token, or the mean over its tokens."""
    threshold: float = Field(le=0)
    """Lowest score that accepts a step."""

    @property
    def name(self) -> str:
        """Key of this judge's scores in results."""
        return f"likelihood.{self.statistic}"


JudgeSpec = Annotated[RatingSpec | LikelihoodSpec, Field(discriminator="kind")]


class StepTable(FileModel):
    """Where a step ends."""

    delimiter: str = Field(default="\n\n", min_length=1)
    """Text that ends a step."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Longest step, in tokens."""
    draft_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds for the draft to write a step. A slower draft is not used for the rest of the request."""


class TokenTable(FileModel):
    """Token-level speculation inside the target's own writing. Exact unless `tolerance` is above 0."""

    drafter: Literal[DrafterName, "auto"] = "none"
    """The drafter. `auto` selects the draft model if the target's engine can draft with it, else the engine's built-in
    speculation, else prompt lookup."""
    num_tokens: int | Literal["auto"] = "auto"
    """Tokens drafted in each round. `auto` chooses from measured acceptance and costs."""
    tolerance: float = Field(default=0.0, ge=0, le=1)
    """Above 0, also accepts drafted tokens that are merely typical of the target (arXiv:2401.10774). Not exact."""
    archive: str = ""
    """For the drafter `suffix`: names a collection of past outputs that policies share. Evaluations keep it from block
    to block."""

    @model_validator(mode="after")
    def _archive_of_suffix(self) -> "TokenTable":
        if self.archive and self.drafter != "suffix":
            raise ValueError(f"only the drafter 'suffix' has an archive of past outputs, not {self.drafter!r}")
        return self

    @field_validator("num_tokens", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if value == "auto" or (type(value) is int and 1 <= value <= MAX_DRAFTED):
            return value
        raise ValueError(f'it must be "auto" or a whole number from 1 to {MAX_DRAFTED}')

    @property
    def drafting(self) -> Drafting:
        """The table as the engine's `Drafting`. `session.fit_policy` must have replaced "auto" first."""
        assert self.drafter != "auto", "the policy was not fitted to its models"
        num_tokens = None if self.num_tokens == "auto" else self.num_tokens
        return Drafting(self.drafter, num_tokens, self.tolerance, self.archive)


class SalvageTable(FileModel):
    """Which part of a rejected step to keep."""

    min_logprob: float = Field(default=0.0, le=0)
    """Keeps the longest prefix in which every token is the target's own choice, or has at least this log-probability
    under the target, in nats. At 0 only the target's own choices count."""


class Policy(FileModel):
    """One policy file. `family` selects who writes: the target alone, the draft alone, or (`score`) the draft while
    the target judges every finished step."""

    version: Version
    """Version of the file format: 1."""
    summary: str
    """One line for `stepspec policies` and reports."""
    paper: str | None = None
    """The paper that the policy follows."""
    family: Literal["target", "draft", "score"]
    """Who writes: the target alone, the draft alone, or the draft with the target judging every finished step."""
    first_target_steps: int = Field(default=0, ge=0)
    """Steps that the target writes before the draft proposes any."""
    salvage: SalvageTable | None = None
    """Keeps the prefix of a rejected step that the target agrees with, and regenerates only the rest."""
    step: StepTable = StepTable()
    """Where a step ends."""
    token: TokenTable = TokenTable()
    """Token-level speculation inside what the target writes."""
    judges: Annotated[tuple[JudgeSpec, ...], Strict(False)] = ()
    """All judges must accept a step. They share one pass of the target."""

    @model_validator(mode="after")
    def _judges_where_judged(self) -> "Policy":
        if (self.family == "score") != bool(self.judges):
            raise ValueError("family 'score' needs at least one [[judges]] table, and the other families take none")
        names = [judge.name for judge in self.judges]
        if len(set(names)) < len(names):
            raise ValueError(f"two of the judges {', '.join(names)} are the same")
        return self

    @property
    def token_level_exact(self) -> bool:
        """Whether the target's own text follows the target's distribution."""
        return self.token.tolerance == 0

    def kind(self, own_speculation: str | None = None) -> PolicyKind:
        """Return the policy's kind for an engine with the given built-in speculation, see `Engine.own_speculation`."""
        if self.family == "target":
            alone = self.token.drafter == "none"
            alone |= self.token.drafter == "engine" and own_speculation in (None, "none")
            return "target" if alone else "token"
        return "draft" if self.family == "draft" else "step"

    @property
    def needs_draft(self) -> bool:
        """Whether the policy uses the draft model."""
        return self.family != "target" or self.token.drafter == "draft-model"

    @property
    def needs_scores(self) -> bool:
        """Whether the policy needs the target's log-probs of a proposed step's tokens."""
        return self.salvage is not None or any(judge.kind == "likelihood" for judge in self.judges)

    @property
    def needs_label_logprobs(self) -> bool:
        """Whether the policy needs the log-probs of a probe's labels, not only the target's choice."""
        return any(judge.kind == "rating" and judge.readout == "expected" for judge in self.judges)


def load_policy(name_or_file: str) -> tuple[Policy, str]:
    """Load a policy by name or path. Return it with the text of its file.

    Raises:
        UsageError: there is no such policy, or the file is invalid.
    """
    path = find_data_file("policies", name_or_file)
    return load_toml(path, Policy)


def load_toml(path: Path, model: type[M]) -> tuple[M, str]:
    """Load a TOML file into a model. Return the model with the file's text.

    Raises:
        UsageError: the file cannot be read, is not valid TOML, or has a key or value that the model rejects.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return model.model_validate(tomllib.loads(text)), text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply.") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {first_problem(error, model)}") from error
