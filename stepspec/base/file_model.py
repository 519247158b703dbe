"""Files on disk as strict pydantic models, and TOML files with error messages in TOML terms."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

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


MAX_TOML_BYTES = 1_000_000
TOO_LARGE = f"it has more than {MAX_TOML_BYTES:,} bytes"
MAX_DOTS = 100
"""Most periods in a key of TOML. The standard library's parser takes time with the square of a key's parts."""
STRING_OR_COMMENT = re.compile(
    r'''"""[^"\\]*+(?:(?:\\.?|"(?!""))[^"\\]*+)*+(?:"{3,5}|\Z)|"(?:\\.|[^"\\\n])*+"?'''
    r"""|'{3}[^']*+(?:'(?!'')[^']*+)*+(?:'{3,5}|\Z)|'[^'\n]*+'?|#[^\n]*+""",
    re.DOTALL,
)
"""A string of TOML or a comment. Also matches strings that never end, so that the search takes linear time."""


def load_toml(path: Path, model: type[M]) -> tuple[M, str]:
    """Load a TOML file into a model. Return the model with the file's text.

    Raises:
        UsageError: the file cannot be read, is not valid TOML, or has a key or value that the model rejects.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
        if len(data) > MAX_TOML_BYTES:
            raise UsageError(f"{path} is not valid TOML: {TOO_LARGE}.")
        text = data.decode().replace("\r\n", "\n")
        return model.model_validate(parse_toml(text)), text
    except ValidationError as error:
        raise UsageError(f"{path}: {first_problem(error, model)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text, in bounded time.

    Raises:
        ValueError: the text is not TOML, or too large. The message is a clause without a period.
        RecursionError: it is nested too deeply.
    """
    if len(text) > MAX_TOML_BYTES:
        raise ValueError(TOO_LARGE)
    plain = STRING_OR_COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(plain.split("\n"), 1):
        if any(part.count(".") > MAX_DOTS for part in re.split(r"[=,\[\]{}]", line)):
            raise ValueError(f"line {number} has more than {MAX_DOTS} periods in a row")
    return tomllib.loads(text)
