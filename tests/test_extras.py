"""Without the packages of an extra, imports and commands fail with one sentence that says what to install."""

import json
import os
import subprocess
import sys

import pytest

from stepspec.base.extras import from_extra, install_command
from stepspec.errors import MissingExtraError, StepSpecError

MODULES = {
    "stepspec.langchain": "langchain",
    "stepspec.serve": "serve",
    "stepspec.engines.remote": "remote",
    "stepspec.client": "remote",
    "stepspec.engines.torch_engine": "torch",
    "stepspec.engines.vllm_engine": "vllm",
    "stepspec.evaluation.stats": "eval",
    "stepspec.evaluation.run": "eval",
    "stepspec.evaluation.advise": "eval",
    "stepspec.evaluation.compare": "eval",
    "stepspec.capacity.simulation": "size",
    "stepspec.capacity.measurement": "size",
}
COMMANDS = {
    "run What? --target torch:x --policy target": "torch",
    "run What? --target http://127.0.0.1:9 --policy target": "remote",
    "eval gsm-mini": "eval",
    "advise --data x.jsonl": "eval",
    "report x": "eval",
    "compare x y": "eval",
    "merge x --output y": "eval",
    "grade x.jsonl": "eval",
    "serve": "serve",
    "size --agents 10 --costs x.json": "size",
    "costs models": "eval",
    "costs service": "eval",
}
PROGRAM = """
import contextlib, importlib, io, json, sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
import stepspec
from stepspec.cli import main
messages = {}
for module in MODULES:
    try:
        importlib.import_module(module)
    except ImportError as error:
        messages[module] = str(error)
for command in COMMANDS:
    sys.argv = ["stepspec", *command.split()]
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.suppress(SystemExit):
        main()
    messages[command] = stderr.getvalue().removeprefix("stepspec: ").strip()
print(json.dumps(messages))
"""
BLOCKED = ["torch", "transformers", "vllm", "httpx", "fastapi", "uvicorn", "langchain_core", "numpy", "scipy", "jinja2"]
BLOCKED += ["matplotlib", "pyarrow", "simpy"]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    names = f"BLOCKED, MODULES, COMMANDS = {BLOCKED}, {list(MODULES)}, {list(COMMANDS)}"
    done = subprocess.run([sys.executable, "-c", names + PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("what", "extra"), [*MODULES.items(), *COMMANDS.items()])
def test_a_missing_extra_is_named_in_one_sentence(said: dict[str, str], what: str, extra: str) -> None:
    assert f"which is not installed: {install_command(extra)}" in said[what]
    assert "\n" not in said[what]


def test_completion_is_silent_about_a_missing_extra() -> None:
    program = PROGRAM.partition("import stepspec\n")[0] + "from stepspec.cli import main; main()"
    typed = {"COMP_WORDS": "stepspec eval gsm", "COMP_CWORD": "2", "_STEPSPEC_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", f"BLOCKED = {BLOCKED}{program}"]
    done = subprocess.run(command, env=os.environ | typed, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_a_missing_extra_is_an_import_error_and_a_stepspec_error() -> None:
    with pytest.raises(MissingExtraError) as caught, from_extra("torch", "This"):
        import nobody_has_this  # pyright: ignore[reportMissingImports]  # noqa: F401
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, StepSpecError)
    assert caught.value.name == "nobody_has_this"


def test_a_missing_stepspec_module_is_not_taken_for_an_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"stepspec\.nowhere"), from_extra("torch", "This"):
        import stepspec.nowhere  # pyright: ignore[reportMissingImports]  # noqa: F401
