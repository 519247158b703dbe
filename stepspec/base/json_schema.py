"""Where a JSON schema holds schemas, and where names or values."""

from typing import Literal

Part = Literal["schema", "schemas by name", "value"]

VALUES = frozenset({"const", "enum", "default", "examples"})
NAMED = frozenset(
    {
        *("properties", "patternProperties", "$defs", "definitions"),
        *("dependentSchemas", "dependentRequired", "dependencies"),
    }
)


def part_at(key: str, parent: Part) -> Part:
    """Return what `parent` holds at a key. A property may have any name, `default` and `properties` too."""
    if parent == "schema":
        return "value" if key in VALUES else "schemas by name" if key in NAMED else "schema"
    return "value" if parent == "value" else "schema"
