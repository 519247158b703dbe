"""The layers of the package: the imports of every module follow the table in CONTRIBUTING.md."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "stepspec"


def table_of(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the parts and libraries of each layer, from the commands down."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    start = next(number for number, row in enumerate(rows) if row[0] == "layer")
    layers: list[tuple[list[str], list[str]]] = []
    for row in rows[start + 2 :]:
        if len(row) != len(rows[start]):
            break
        layers.append((re.findall(r"`(\w+)`", row[1]), [name.strip() for name in row[3].split(",") if name.strip()]))
    return layers


LAYERS = table_of((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
DEPTH = {part: len(LAYERS) - number for number, (parts, _) in enumerate(LAYERS) for part in parts}
OWNERS = {
    library: [part for parts, own in LAYERS if library in own for part in parts] for _, own in LAYERS for library in own
}

HEAVY = ["torch", "transformers", "vllm", "langchain_core", "fastapi", "numpy", "scipy", "matplotlib", "httpx"]
HEAVY += ["opentelemetry", "llguidance", "uvicorn"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """Return `loop` for `stepspec.loop.judges.rating`, and `__init__` for the package itself."""
    return module.split(".")[1] if "." in module else "__init__"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield every import below the node, also inside functions, except those for type checkers only."""
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
    """Return the stepspec modules that the source imports; `from stepspec import __version__` does not count."""
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
    """Return what is wrong with an import between two modules, or `None`."""
    here, there = part_of(importer), part_of(imported)
    if here == there or DEPTH[there] < DEPTH[here]:
        return None
    how = "from a layer above its own" if DEPTH[there] > DEPTH[here] else "from a folder of its own layer"
    return f"{importer} imports {imported}: {how}"


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {
    module: imported_modules(path.read_text("utf-8"), module, path.name == "__init__.py", set(MODULES))
    for module, path in MODULES.items()
}


def test_every_part_of_the_package_is_in_a_layer_and_there_are_few() -> None:
    parts = {part_of(module) for module in MODULES}
    assert parts == DEPTH.keys(), "the table in CONTRIBUTING.md must list every part"
    assert len(parts) <= 20
    packages = {tuple(module.split(".")[1:3]) for module, path in MODULES.items() if path.name == "__init__.py"}
    assert len([package for package in packages if package]) <= 30


@pytest.mark.parametrize("part", sorted(DEPTH))
def test_a_part_imports_from_itself_and_the_layers_below(part: str) -> None:
    wrong = [
        found
        for module, imported in IMPORTS.items()
        if part_of(module) == part
        for name in sorted(imported)
        if (found := violation(module, name))
    ]
    assert wrong == []


def test_the_package_imports_nothing_from_beside_it() -> None:
    for path in MODULES.values():
        for statement in import_statements(parsed(path)):
            imported = [alias.name for alias in statement.names]
            names = imported if isinstance(statement, ast.Import) else [statement.module or ""]
            assert not {"evals", "tests"} & {name.split(".")[0] for name in names}, path


def circle(imports: dict[str, set[str]]) -> Sequence[str]:
    """Return modules that import each other in a cycle, if there are any."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(IMPORTS) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


LOOP = {module: path for module, path in MODULES.items() if part_of(module) == "loop"}
LONGEST = {
    "controller": 120,
    "request": 150,
    "draft": 200,
    "target": 250,
    "review": 250,
    "commit": 180,
    "record": 250,
    "thinking": 150,
}
"""Most lines of the files of `stepspec.loop`. Families and judges have 120, and other files 350."""


def test_the_files_of_the_loop_are_short() -> None:
    too_long = {
        module: count
        for module, path in LOOP.items()
        for count in [len(path.read_text("utf-8").splitlines())]
        if count > (120 if path.parent.name in {"families", "judges"} else LONGEST.get(path.stem, 350))
    }
    assert too_long == {}


def test_no_circle_of_the_loop_is_hidden_from_the_interpreter() -> None:
    """Imports for type checkers count too."""
    sources = {
        module: path.read_text("utf-8").replace("if TYPE_CHECKING:", "if True:") for module, path in LOOP.items()
    }
    names = {*MODULES}
    found = {
        module: imported_modules(source, module, LOOP[module].name == "__init__.py", names)
        for module, source in sources.items()
    }
    assert circle(found) == []


PREDICATE = re.compile(r"_*(?:is|are|has|have|can|may|must|should|needs|wants|allows|pays|speculates|same)(?:_|$)")


def test_no_coroutine_of_the_loop_is_named_as_a_question() -> None:
    """What is awaited does something; its name says what."""
    names = [
        node.name for path in LOOP.values() for node in ast.walk(parsed(path)) if isinstance(node, ast.AsyncFunctionDef)
    ]
    assert [name for name in names if PREDICATE.match(name)] == []


def test_the_loop_awaits_no_engine_in_a_request_and_counts_in_one_file() -> None:
    assert "await " not in LOOP["stepspec.loop.request"].read_text("utf-8")
    counting = re.compile(r"ledger\.(?:add|add_target_call|waited|found_cached|shown)\(")
    assert [module for module, path in LOOP.items() if counting.search(path.read_text("utf-8"))] == [
        "stepspec.loop.record"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stepspec.loop.step", "from stepspec.api.session import StepSpec"),
        ("stepspec.loop.step", "from ..api.session import StepSpec"),
        ("stepspec.loop.step", "from ..api import session"),
        ("stepspec.loop.step", "import stepspec.api.session as api"),
        ("stepspec.loop.step", "def late():\n    import stepspec.api.session"),
        ("stepspec.loop.step", "try:\n    from stepspec.api import session\nexcept ImportError:\n    pass"),
        ("stepspec.loop.step", "from stepspec import StepSpec"),
        ("stepspec.evaluation.report.cells", "from stepspec.mini import WEIGHTS"),
        ("stepspec.engines.remote.engine", "from stepspec.api.session import StepSpec"),
        ("stepspec.serve.app", "from stepspec.langchain import ChatStepSpec"),
    ],
)
def test_an_import_against_the_layers_is_found_in_every_form(module: str, source: str) -> None:
    imported = imported_modules(source, module, False, {"stepspec", "stepspec.api.session"})
    assert len(imported) == 1
    assert violation(module, imported.pop())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("stepspec.loop.controller", "from stepspec.loop.judges.rating import RatingJudge"),
        ("stepspec.loop.judges.rating", "from . import likelihood"),
        ("stepspec.loop.judges.rating", "from stepspec.loop.ledger import Ledger"),
        ("stepspec.cli.run", "from stepspec import StepSpec"),
        ("stepspec.evaluation.records", "from stepspec import __version__"),
        ("stepspec.evaluation.runs", "from stepspec.engines.torch_engine import TorchEngine"),
        ("stepspec.loop.step", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import stepspec.cli"),
        ("stepspec.loop.step", "import stepspecific"),
    ],
)
def test_an_import_along_the_layers_is_allowed(module: str, source: str) -> None:
    imported = imported_modules(source, module, False, {"stepspec"})
    assert [wrong for name in imported if (wrong := violation(module, name))] == []


@pytest.mark.parametrize("library", sorted(OWNERS))
def test_a_library_is_imported_only_where_the_table_allows_it(library: str) -> None:
    found: set[str] = set()
    for module, path in MODULES.items():
        for statement in import_statements(parsed(path)):
            names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            names += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            if any(name.split(".")[0] == library for name in names):
                found.add(part_of(module))
    assert found
    assert found <= {*OWNERS[library]}


FIELD_WORDS = {"sampling", "tracing", "thinking"}


def test_files_are_named_with_nouns() -> None:
    for module, path in MODULES.items():
        judges = module.startswith("stepspec.loop.judges.")  # named by their `kind`
        assert judges or not path.stem.endswith("ing") or path.stem in FIELD_WORDS, path
        assert not path.parent.name.endswith("ing"), path


def test_a_class_name_is_unique() -> None:
    """Also without regard to case and a leading underscore."""
    found: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.strip("_").lower(), []).append(f"{module}.{node.name}")
    assert [names for names in found.values() if len(names) > 1] == []


ALLOWED = {
    "_replace": "namedtuple",
    "_asdict": "namedtuple",
    "_fields": "namedtuple",
    "_make": "namedtuple",
    "_exit": "os",
    "_modules": "torch: a copy of a module with other parts that shares the weights",
    "_reorder_linear_weight": "torch: packs a weight for oneDNN; there is no public operation",
    "_linear_pointwise": "torch: multiplies with a packed weight",
    "_is_vnni_supported": "torch: whether the CPU multiplies whole numbers without overflow",
    "_convert_weight_to_int4pack_for_cpu": "torch: packs a weight in 4 bits",
    "_weight_int4pack_mm_for_cpu": "torch: multiplies with a weight in 4 bits",
    "_aclassify": "langchain: whether a decision model has an asynchronous method of its own",
    "_validate_params": "vllm: checks a request when it arrives; the plugin wraps it",
    "_sample": "vllm: samples a round; the plugin wraps it",
    "_bookkeeping_sync": "vllm: stores the tokens of a round; the plugin wraps it",
    "_attn_implementation": "transformers: the attention that a configuration selects",
}
"""Attributes with an underscore of objects that are not stepspec's, and why they are used."""


def foreign_attributes(tree: ast.AST) -> set[str]:
    """Return the attributes with an underscore of other objects than `self`, `cls` and `super()`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and ast.unparse(node.value) not in {"self", "cls", "super()"}
    }


def test_no_attribute_with_an_underscore_of_another_object_is_touched() -> None:
    found = {module: foreign_attributes(parsed(path)) - ALLOWED.keys() for module, path in MODULES.items()}
    assert {module: names for module, names in found.items() if names} == {}
    assert foreign_attributes(ast.parse("other._a = self._b + self.c._d + super()._e + cls._f")) == {"_a", "_d"}


def test_importing_stepspec_loads_no_heavy_library() -> None:
    program = f"import sys, stepspec; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert loaded.stdout.split() == []
