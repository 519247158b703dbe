"""What a policy file says: how steps are proposed and judged and what follows, read from commented TOML."""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from stepspec.errors import UsageError, unknown_name
from stepspec.files import find_data_file
from stepspec.prompts import RATING_PROMPTS


class FileModel(BaseModel):
    """A table of a file that people write: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


M = TypeVar("M", bound=FileModel)


class RatingSpec(FileModel):
    """The target rates the step with a digit from 0 to 9; accepted from `threshold` on."""

    kind: Literal["rating"]
    prompt: str = "short"
    """A name in `stepspec.prompts.RATING_PROMPTS`."""
    readout: Literal["greedy", "expected"] = "greedy"
    """The most likely token if it is a digit, or the expectation over the digits, renormalised."""
    threshold: float = Field(7.0, ge=0, le=9)

    @model_validator(mode="after")
    def _known_prompt(self) -> "RatingSpec":
        if self.prompt not in RATING_PROMPTS:
            raise ValueError(unknown_name("rating prompt", self.prompt, RATING_PROMPTS))
        return self


class LikelihoodSpec(FileModel):
    """The step's own log-probability under the target, in nats per token; accepted when both bounds hold."""

    kind: Literal["likelihood"]
    min_logprob: float = Field(le=0)
    """Least log-probability that any token of the step may have."""
    mean_logprob: float = Field(-1e9, le=0)
    """Least mean log-probability of the step's tokens."""


JudgeSpec = Annotated[RatingSpec | LikelihoodSpec, Field(discriminator="kind")]


class StepTable(FileModel):
    """Where a step ends."""

    delimiter: str = Field("\n\n", min_length=1)
    max_step_tokens: int = Field(512, ge=1)


class TokenTable(FileModel):
    """Token-level speculation inside whatever the target writes. Exact."""

    drafter: Literal["none", "draft-model"] = "none"
    num_tokens: int = Field(4, ge=1, le=64)


class SalvageTable(FileModel):
    """How much of a rejected step is kept: its longest prefix in which every token is the target's own choice or has
    at least this log-probability under the target, in nats; at 0 only the target's own choices count."""

    min_logprob: float = Field(0.0, le=0)


class Policy(FileModel):
    """One policy file. `family` says who writes: the target alone, the draft alone, or (score) the draft with the
    target judging every finished step."""

    version: Literal[1]
    summary: str
    paper: str | None = None
    family: Literal["target", "draft", "score"]
    first_target_steps: int = Field(0, ge=0)
    salvage: SalvageTable | None = None
    """Keep the part of a rejected step that the target agrees with, and regenerate only the rest."""
    step: StepTable = StepTable()
    token: TokenTable = TokenTable()
    judges: tuple[JudgeSpec, ...] = ()
    """All must accept; the first that refuses decides. They are read from one pass of the target."""

    @model_validator(mode="after")
    def _judges_where_judged(self) -> "Policy":
        if (self.family == "score") != bool(self.judges):
            raise ValueError("family 'score' needs at least one [[judges]] table, and the other families take none")
        return self

    @property
    def needs_draft(self) -> bool:
        """Whether any of it uses the draft model."""
        return self.family != "target" or self.token.drafter == "draft-model"


def load_policy(name_or_file: str) -> tuple[Policy, str]:
    """A policy by name or from a file of the user's, with the text it was read from.

    Raises:
        UsageError: there is no such policy, or the file says something that a policy cannot.
    """
    path = find_data_file("policies", name_or_file)
    return load_toml(path, Policy)


def load_toml(path: Path, model: type[M]) -> tuple[M, str]:
    """Reads a TOML file into its model, with the text.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has a key or value that the model does not take.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return model.model_validate(tomllib.loads(text)), text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_problem(error, model)}") from error


def _first_problem(error: ValidationError, model: type[FileModel]) -> str:
    problem: Any = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return unknown_name("key", str(problem["loc"][-1]), _keys_beside(problem["loc"], model)) + f" (at {where})"
    return f"{where or 'file'}: {problem['msg']}."


def _keys_beside(location: tuple[Any, ...], model: type[FileModel]) -> list[str]:
    """The keys known in the table where an unknown one stands; those of the whole file if that cannot be told."""
    fields = model.model_fields
    for part in location[:-1]:
        annotation = fields[part].annotation if part in fields else None
        if isinstance(annotation, type) and issubclass(annotation, FileModel):
            fields = annotation.model_fields
        else:
            known: set[str] = set().union(*(spec.model_fields for spec in (RatingSpec, LikelihoodSpec)))
            return sorted(known) if location[0] == "judges" else sorted(model.model_fields)
    return sorted(fields)
