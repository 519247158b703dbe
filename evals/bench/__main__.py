"""Run a measurement of stepspec itself, or what makes the documents: `python -m evals.bench NAME`, in a checkout.

Every module of this folder that has a `main`, a function with typer's annotations or a Typer app, is a command. Those
of the folder `service` are called `service.NAME`.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from stepspec.cli.program import run_program

FOLDER = Path(__file__).parent
SETTINGS: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


class Modules(TyperGroup):
    """A group whose commands are modules. It imports the one that runs, and reads the others for their docstrings."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(summaries())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name; None if there is none."""
        if cmd_name not in summaries():
            return None
        main = import_module(f"evals.bench.{cmd_name}").main
        if isinstance(main, typer.Typer):
            return typer.main.get_command(main)
        alone = typer.Typer(**SETTINGS)
        alone.command()(main)
        return typer.main.get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(summaries().items()))


def summaries() -> dict[str, str]:
    """Return the first line of each command's docstring, by name."""
    found: dict[str, str] = {}
    for file in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("service/*.py")]):
        tree = ast.parse(file.read_text("utf-8"))
        if file.name != "__main__.py" and any(map(_is_main, tree.body)):
            name = ".".join(file.relative_to(FOLDER).with_suffix("").parts)
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _is_main(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "main" for target in node.targets)
    return isinstance(node, ast.FunctionDef) and node.name == "main"


app = typer.Typer(
    cls=Modules, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, **SETTINGS
)


@app.callback()
def common() -> None:
    """Measure stepspec itself, or make what the documents show. Run it in a checkout."""


if __name__ == "__main__":
    run_program(app, "python -m evals.bench")
