"""Files on disk as strict pydantic models, and TOML files with error messages in TOML terms."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from stepspec.base.file_problems import first_problem
from stepspec.errors import UsageError


class FileModel(BaseModel):
    """A table of a TOML file with strict validation. Unknown keys are errors, and "7", true and nan are not numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _whole_number(value: object) -> object:
    if type(value) is not int:  # true and 1.0 equal 1
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


Version = Annotated[Literal[1], BeforeValidator(_whole_number)]
"""Version of a file format."""

M = TypeVar("M", bound=FileModel)


def number_or_auto(value: object, most: int) -> object:
    """Return a setting that is "auto" or a whole number from 1 to `most`.

    Raises:
        ValueError: it is neither.
    """
    if value == "auto" or (type(value) is int and 1 <= value <= most):
        return value
    raise ValueError(f'it must be "auto" or a whole number from 1 to {most}')


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
