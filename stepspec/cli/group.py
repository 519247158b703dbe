"""Groups of commands, whose help truncates no sentence, and which import a command's module when the command runs."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from stepspec.errors import MissingExtraError, UsageError

SETTINGS: Mapping[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Settings of every group."""
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


class Modules(WholeHelp):
    """A command group whose commands are modules: the function or Typer app `main` of each. The module of `judge-bench`
    is `judge_bench`.

    A module is imported when its command runs, prints its help or completes its options. The help and the completion of
    the group need only names and sentences.
    """

    package: ClassVar[str]
    """The package with the modules."""
    sentences: ClassVar[Mapping[str, str]]
    """What each command does, by the name of its module."""
    removed: ClassVar[Mapping[str, str]] = {}
    """What to use in place of commands of earlier versions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, sentence in self.sentences.items():
            self.add_command(TyperCommand(name, help=sentence))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Import the command that the arguments start with.

        Raises:
            UsageError: it was removed.
            MissingExtraError: it needs a package that is not installed.
        """
        if args[0] in self.removed and not ctx.resilient_parsing:
            raise UsageError(self.removed[args[0]])
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            try:
                command = load(f"{self.package}.{name.replace('-', '_')}", name)
            except MissingExtraError:
                if not ctx.resilient_parsing:  # shell completion cannot show a message
                    raise
        return name, command, rest


def load(module: str, name: str) -> Any:
    """Import a module, and return its `main` as a command with this name."""
    main: typer.Typer | Callable[..., Any] = import_module(module).main
    if isinstance(main, typer.Typer):
        return typer.main.get_command(main)
    alone = typer.Typer(add_completion=False, **SETTINGS)
    alone.command(name)(main)
    return typer.main.get_command(alone)
