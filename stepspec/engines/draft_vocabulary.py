"""Draft vocabulary: the subset of tokens that a draft model scores, so that its head reads fewer weights.

See arXiv:2502.14856. The file `draft_vocabulary.json` is next to the weights: `{"version": 1, "ids": [2, 15, ...]}`.
On the torch engine the model never generates another token. Verification stays exact, since other tokens have draft
probability 0. vLLM and servers score all tokens.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stepspec.errors import ModelError

FILE = "draft_vocabulary.json"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    version: Literal[1]
    ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def load_draft_vocabulary(folder: str | Path, vocab_size: int) -> tuple[int, ...] | None:
    """Load the token ids that the model in a folder scores, in ascending order; None if it scores all tokens.

    Raises:
        ModelError: the file is invalid, or has ids outside the model's vocabulary.
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
