"""The required format of an answer, from the fields of OpenAI and vLLM that can set it."""

import reprlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from stepspec.base.strict_json import read_json
from stepspec.chat.tools import ANYTHING, schema_of
from stepspec.errors import UsageError, unknown_name
from stepspec.serve.errors import RefusedError


@dataclass(frozen=True)
class Form:
    """The required format of the answer.

    Attributes:
        schema: the JSON schema of the answer, or None.
        choices: the texts of which the answer must be one; empty if there is no choice.
        field: the request field that sets this format.
    """

    schema: Mapping[str, Any] | None = None
    choices: Sequence[str] = ()
    field: str = "response_format"

    @property
    def json_schema(self) -> Mapping[str, Any] | None:
        """The JSON schema that constrains the answer. With choices, the answer is a JSON string."""
        return {"type": "string", "enum": list(self.choices)} if self.choices else self.schema


def read_form(
    response_format: Mapping[str, Any] | None,
    guided_json: Mapping[str, Any] | str | None,
    guided_choice: Sequence[str] | None,
    structured_outputs: Mapping[str, Any] | None,
) -> Form:
    """Return the answer's format from all fields that can set it. Schemas given as strings are parsed.

    Raises:
        RefusedError: such a field is invalid, or more than one is set.
    """
    forms: list[Form] = []
    with attributed_to("response_format"):
        forms.append(Form(schema_of(response_format)))
    if guided_json is not None:
        forms.append(Form(_schema("guided_json", guided_json), field="guided_json"))
    if guided_choice is not None:
        forms.append(Form(None, _choices("guided_choice", guided_choice), "guided_choice"))
    if structured_outputs:
        forms += _structured(structured_outputs)
    found = [form for form in forms if form.json_schema is not None]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise RefusedError(second, f"{first} and {second} both set the answer's format. Leave out one.")
    return found[0] if found else Form()


def _structured(outputs: Mapping[str, Any]) -> list[Form]:
    """Return the formats that vLLM's `structured_outputs` sets."""
    forms: list[Form] = []
    for name, value in outputs.items():
        field = f"structured_outputs.{name}"
        if value is None or value is False:
            continue
        if name == "json":
            forms.append(Form(_schema(field, value), field=field))
        elif name == "json_object":
            if value is not True:
                raise RefusedError(field, f"{field} must be true or false, got {reprlib.repr(value)}.")
            forms.append(Form(ANYTHING, field=field))
        elif name == "choice":
            forms.append(Form(None, _choices(field, value), field))
        elif name in ("regex", "grammar", "structural_tag", "whitespace_pattern", "disable_any_whitespace"):
            raise RefusedError(field, f"{field} is not supported. Use json, json_object or choice.")
        else:
            raise RefusedError(
                field, unknown_name("kind of structured output", name, ("json", "json_object", "choice"))
            )
    return forms


def _schema(field: str, value: Any) -> Mapping[str, Any]:
    try:
        schema = read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise RefusedError(field, f"{field} is not valid JSON: {error}.") from None
    if not isinstance(schema, dict):
        raise RefusedError(field, f"{field} must be a JSON schema, which is an object.")
    return cast("Mapping[str, Any]", schema)


def _choices(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in cast("list[Any]", value)):
        raise RefusedError(field, f"{field} must be a list of at least one string.")
    return cast("list[str]", value)


@contextmanager
def attributed_to(param: str) -> Generator[None]:
    """Attributes an error to its field."""
    try:
        yield
    except UsageError as error:
        raise RefusedError(param, str(error)) from error
