"""A draft vocabulary: the tokens that a draft model scores, so that its head reads fewer weights (arXiv:2502.14856).

The file `draft_vocabulary.json` lies beside a model's weights: `{"version": 1, "ids": [2, 15, ...]}`. The model never
generates another token. Verification stays exact, since a token outside the vocabulary has draft probability 0.
Requests to vLLM carry the ids; vLLM applies them only where it does not draft tokens by itself.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepspec.engines.protocol import Sampling
from stepspec.errors import ModelError

FILE = "draft_vocabulary.json"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def load_draft_vocabulary(folder: str | Path, vocab_size: int) -> tuple[int, ...] | None:
    """Read the ids that the model in a folder scores, ascending; None if it scores all of them.

    Raises:
        ModelError: the file is not one, or has ids that the model has not.
    """
    file = Path(folder) / FILE
    if not file.exists():
        return None
    try:
        ids = sorted(set(_File.model_validate_json(file.read_bytes()).ids))
    except (OSError, ValidationError) as error:
        reason = error.errors(include_input=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ModelError(f"The draft vocabulary {file} cannot be read: {reason}.") from error
    if ids[-1] >= vocab_size:
        raise ModelError(f"The draft vocabulary {file} has the id {ids[-1]}; the model has {vocab_size:,} tokens.")
    return tuple(ids)


def within(sampling: Sampling, vocabulary: frozenset[int] | None) -> Sampling:
    """Restrict sampling to the vocabulary; return it unchanged where no allowed token would be left."""
    if vocabulary is None:
        return sampling
    allowed = vocabulary if sampling.allowed is None else vocabulary & sampling.allowed
    return replace(sampling, allowed=allowed) if allowed else sampling
