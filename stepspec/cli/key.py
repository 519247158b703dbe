"""`stepspec key`: create an API key for the service."""

import json
import sys
from typing import Annotated

import typer

from stepspec.base.extras import from_extra
from stepspec.errors import UsageError

with from_extra("serve", "stepspec key"):
    from stepspec.serve.keys import MAX_NAME, KeyTable, key_hash, new_key


def main(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the client in logs.", show_default=False)],
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Limit of its requests.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Limit of its tokens, those of prompts included.")
    ] = None,
    priority: Annotated[
        int, typer.Option(help="Lowest priority number of its requests; requests with lower numbers run first.")
    ] = 0,
    group: Annotated[
        str | None, typer.Option(help="Name of keys that reuse each other's cached prompts. The default is none.")
    ] = None,
) -> None:
    """Create an API key. The key goes to stderr, once; its table for a file of keys goes to stdout.

    stepspec key ci >> keys.toml adds it to a file, whose first line must be `version = 1`.
    """
    if not 1 <= len(name) <= MAX_NAME:
        raise UsageError(f"The name of a key must have 1 to {MAX_NAME} characters, got {len(name)}.")
    if group is not None and not 1 <= len(group) <= MAX_NAME:
        raise UsageError(f"The group of a key must have 1 to {MAX_NAME} characters, got {len(group)}.")
    key = new_key()
    limits = {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    table = KeyTable(name=name, sha256=key_hash(key), priority=priority, group=group, **limits)
    print(f"The key of {name}, which is not stored: {key}", file=sys.stderr)
    print("[[keys]]")
    for field, value in table.model_dump(exclude_defaults=True).items():
        print(f"{field} = {json.dumps(value, ensure_ascii=False)}")
