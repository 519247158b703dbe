"""Command help that never truncates the first sentence of a command."""

from typing import Any

from typer.core import TyperGroup

WHOLE = 10_000
"""Maximum characters of a command's first sentence, high enough that none is truncated."""


class WholeHelp(TyperGroup):
    """A command group that lists its commands with untruncated sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(WHOLE)) for name, each in commands if each and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
