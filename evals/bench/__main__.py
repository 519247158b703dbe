"""Run a measurement of stepspec itself, or what makes the documents: `python -m evals.bench NAME`, in a checkout.

Every module of this folder that has a `main`, a function with typer's annotations or a Typer app, is a command. Those
of the folder `service` are called `service.NAME`.
"""

import ast
from pathlib import Path

import typer

from stepspec.cli.group import SETTINGS, Modules
from stepspec.cli.program import run_program

FOLDER = Path(__file__).parent


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


class Measurements(Modules):
    """The modules."""

    package = "evals.bench"
    sentences = summaries()


app = typer.Typer(cls=Measurements, add_completion=False, **SETTINGS)


@app.callback()
def common() -> None:
    """Measure stepspec itself, or make what the documents show. Run it in a checkout."""


if __name__ == "__main__":
    run_program(app, "python -m evals.bench")
