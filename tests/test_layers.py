"""The layers of the package, held by reading every module's imports.

A core module imports from its own layer and those above it. The edge packages hold the heavy libraries; the
core loads them by name, when asked to, and never by an import statement.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "stepspec"

LAYERS = [
    {
        *("errors", "extras", "file_problems", "files", "step", "rendering", "loop_thread", "keywords"),
        *("strict_json", "workers", "template_trial"),
    },
    {
        "engine",
        "metrics",
        "policy",
        "benchmark",
        "prompts",
        "stops",
        "calls",
        "tools",
        "options",
        "scope",
        "draft_vocabulary",
        "pairs",
    },
    {"answer", "breaker", "judges", "ledger", "text", "tracing", "transcript", "translation"},
    {"controller"},
    {"session"},
    {"blocking"},
    {"records", "runs", "grade", "stats", "speed", "report", "energy", "machine"},
    {"evaluate", "overhead"},
    {"calibrate", "replay", "advise", "compare", "export"},
    {"stepspec"},  # the package's own `__init__`, which gathers the public names
    {"langchain", "serve", "cli"},
    {"__main__"},
]
DEPTH = {part: depth for depth, layer in enumerate(LAYERS) for part in layer}

FOR_EDGES = LAYERS[0] | LAYERS[1] | {"text"}
EDGES = {
    "hugging_face": FOR_EDGES,
    "torch_engine": FOR_EDGES | {"hugging_face"},
    "vllm_engine": FOR_EDGES | {"hugging_face"},
    "remote": FOR_EDGES | {"hugging_face"},
    "client": FOR_EDGES | {"remote", "session"},
    "mini": FOR_EDGES | {"torch_engine", "judges", "grade", "stats", "report"},
}
# The problem generators are plain Python, and benchmarks are made from them.
ALLOWED_BESIDES = {
    ("cli", "stepspec.mini.problems"),
    ("evaluate", "stepspec.mini.plain"),
    ("evaluate", "stepspec.mini.problems"),
}

HEAVY = ["torch", "transformers", "vllm", "langchain_core", "fastapi", "numpy", "scipy", "matplotlib", "httpx"]
HEAVY += ["opentelemetry", "llguidance", "uvicorn"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """`judges` for `stepspec.judges.digit`, and `stepspec` for the package itself."""
    return module.split(".")[1] if "." in module else module


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import below the node, inside functions too, but for those that only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif is_type_checking(child):
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield from import_statements(ast.Module([statement], []))
        else:
            yield from import_statements(child)


def imported_modules(source: str, module: str, is_package: bool, known: set[str]) -> set[str]:
    """The stepspec modules that the source imports; `from stepspec import __version__` is no module."""
    found: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]
    for statement in import_statements(ast.parse(source)):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
        origin = ".".join([*above, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            child = f"{origin}.{alias.name}"
            if child in known:
                found.add(child)
            elif child != "stepspec.__version__":
                found.add(origin)
    return {name for name in found if name.split(".")[0] == "stepspec"}


def violation(importer: str, imported: str) -> str | None:
    """What is wrong with one import between two modules, or `None`."""
    here, there = part_of(importer), part_of(imported)
    if here == there or (here, imported) in ALLOWED_BESIDES:
        return None
    if here in EDGES:
        return None if there in EDGES[here] else f"{importer} imports {imported}: not for an edge package"
    if there in EDGES:
        return f"{importer} imports {imported}: the core loads edge packages by name only"
    if here not in DEPTH or there not in DEPTH:
        return f"{importer} imports {imported}: one of them is in no layer"
    if DEPTH[there] > DEPTH[here]:
        return f"{importer} imports {imported}: from a layer below its own"
    return None


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_module_is_in_a_layer() -> None:
    forgotten = [module for module in MODULES if part_of(module) not in DEPTH.keys() | EDGES.keys()]
    assert forgotten == [], "add these to LAYERS or EDGES in tests/test_layers.py, and to the design"


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_layer_and_those_above(module: str) -> None:
    path = MODULES[module]
    imported = imported_modules(path.read_text("utf-8"), module, path.name == "__init__.py", set(MODULES))
    assert [wrong for name in sorted(imported) if (wrong := violation(module, name))] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stepspec.step", "from stepspec.controller import Controller"),
        ("stepspec.step", "from .controller import Controller"),
        ("stepspec.step", "from . import controller"),
        ("stepspec.step", "import stepspec.controller as loop"),
        ("stepspec.step", "def late():\n    import stepspec.controller"),
        ("stepspec.step", "try:\n    from stepspec import controller\nexcept ImportError:\n    pass"),
        ("stepspec.step", "from stepspec import StepSpec"),
        ("stepspec.judges.digit", "from ..controller import Controller"),
        ("stepspec.session", "def load():\n    from stepspec.torch_engine import TorchEngine"),
        ("stepspec.evaluate", "from stepspec.mini import load_pair"),
        ("stepspec.report", "from stepspec.mini.problems import make_problem"),
        ("stepspec.remote", "from stepspec.session import StepSpec"),
        ("stepspec.torch_engine.engine", "from stepspec.mini import load_pair"),
    ],
)
def test_an_import_across_the_layers_is_seen_however_it_is_written(module: str, source: str) -> None:
    imported = imported_modules(source, module, False, {"stepspec", "stepspec.controller"})
    assert len(imported) == 1
    assert violation(module, imported.pop())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stepspec.controller", "from stepspec.judges.digit import DigitJudge"),
        ("stepspec.judges.digit", "from . import cascade"),
        ("stepspec.judges.digit", "from stepspec.ledger import Ledger"),
        ("stepspec.evaluate", "def make():\n    from stepspec.mini.problems import make_problem"),
        ("stepspec.cli", "from stepspec import StepSpec"),
        ("stepspec.records", "from stepspec import __version__"),
        ("stepspec.mini.pair", "from stepspec.torch_engine import TorchEngine"),
        ("stepspec.step", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import stepspec.cli"),
        ("stepspec.step", "import stepspecific"),
    ],
)
def test_an_import_along_the_layers_is_allowed(module: str, source: str) -> None:
    imported = imported_modules(source, module, False, {"stepspec", "stepspec.mini.problems"})
    assert [wrong for name in imported if (wrong := violation(module, name))] == []


@pytest.mark.parametrize(
    ("library", "parts"),
    [
        ("langchain_core", {"langchain"}),
        ("fastapi", {"serve"}),
        ("opentelemetry", {"tracing"}),
        ("vllm", {"vllm_engine"}),
        ("llguidance", {"torch_engine"}),
    ],
)
def test_a_library_of_an_edge_is_imported_there_alone(library: str, parts: set[str]) -> None:
    found: set[str] = set()
    for module, path in MODULES.items():
        for statement in import_statements(ast.parse(path.read_text("utf-8"))):
            names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            names += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            if any(name.split(".")[0] == library for name in names):
                found.add(part_of(module))
    assert found == parts


def test_importing_stepspec_loads_no_heavy_library() -> None:
    program = f"import sys, stepspec; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, cwd=PACKAGE.parent, stdout=subprocess.PIPE, text=True, check=True)
    assert loaded.stdout.split() == []
