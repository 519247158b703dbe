"""Code lines of the package and of evals, by folder: without blanks, comments and docstrings.

The strings below attributes count as docstrings, too.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

from rich.table import Table

from stepspec.base.files import package_folder
from stepspec.cli.output import JsonOption, finish

ROOTS = ("stepspec", "evals")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of code lines of a module."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def sizes(root: Path) -> Counter[str]:
    """Return the code lines of a folder's own modules and of each of its folders, by path."""
    found = Counter[str]()
    for file in root.rglob("*.py"):
        found["/".join([root.name, *file.relative_to(root).parts[:-1][:1]])] += code_lines(file.read_text("utf-8"))
    return found


def main(json_file: JsonOption = None) -> None:
    """Count code lines by folder."""
    found = {root: sizes(package_folder().parent / root) for root in ROOTS}
    table = Table("folder", "code lines")
    table.columns[1].justify = "right"
    for root, folders in found.items():
        for folder, count in folders.most_common():
            table.add_row(folder, f"{count:,}")
        table.add_row(f"{root}, all", f"{folders.total():,}", end_section=True)
    finish([table], found, json_file)
