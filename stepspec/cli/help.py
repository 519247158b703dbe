"""Help that is complete: a list of commands with their whole first sentences, however many lines these take."""

from typing import Any

from typer.core import TyperGroup

WHOLE = 10_000
"""Characters of a command's sentence before it would be cut."""


class WholeHelp(TyperGroup):
    """A group of commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(WHOLE)) for name, each in commands if each and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
