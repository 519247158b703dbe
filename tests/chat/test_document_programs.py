"""Every Python program in README.md and docs runs. Scripted models replace those that need a GPU."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from by_name import name_engines
from following import following_pair
from service import serving

import stepspec
from stepspec.langchain import ChatStepSpec, shared_models

ROOT = Path(__file__).parents[2]
PAGES = {page.stem: page.read_text("utf-8") for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
PROGRAMS: dict[str, list[str]] = {
    name: found for name, text in PAGES.items() if (found := re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
SERVED = "http://localhost:8000/v1"

Run = Callable[[str], str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a program as `__main__` and returns its output."""
    monkeypatch.setattr(shared_models, "_pairs", {})

    def ran(program: str) -> str:
        if "torch:Qwen/" in program:  # too large for a test
            name_engines("torch", monkeypatch)
        exec(compile(program, "a document", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return ran


def test_every_page_has_the_expected_number_of_programs() -> None:
    counts = {name: len(programs) for name, programs in PROGRAMS.items() if name != "examples"}  # test_examples
    assert counts == {"README": 2, "getting-started": 1, "langchain": 5, "service": 1}


@pytest.mark.parametrize(
    "program", [program for name, programs in PROGRAMS.items() if name != "examples" for program in programs]
)
def test_programs_use_what_the_package_exports(program: str) -> None:
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module == "stepspec":
            assert all(alias.name in stepspec.__all__ for alias in node.names)


def test_the_first_program_answers(run: Run) -> None:
    assert "17" in run(PROGRAMS["README"][0])


def test_the_python_api(run: Run) -> None:
    printed = run(PROGRAMS["getting-started"][0])
    assert "\\boxed" in printed
    assert "Usage(prompt_tokens=" in printed
    assert printed.splitlines()[-1].count("boxed") == 2


def test_the_agent_multiplies_and_differs_from_the_original_only_by_the_diff(run: Run) -> None:
    ours = PROGRAMS["langchain"][0]
    assert run(ours).strip() == "It is 144."  # the scripted model uses the first number for both arguments
    diff = re.findall(r"```diff\n(.*?)```", PAGES["langchain"], re.DOTALL)[0].splitlines()
    before = [line[1:] for line in diff if line.startswith("-")]
    after = [line[1:] for line in diff if line.startswith("+")]
    theirs = ours
    for new, old in zip(after, before, strict=True):
        assert f"\n{new}\n" in theirs
        theirs = theirs.replace(new, old)
    assert "stepspec" not in theirs
    with serving(following_pair(name="Qwen/Qwen3-8B")) as address:
        theirs = theirs.replace(f'base_url="{SERVED}"', f'base_url="{address}", api_key="none"')
        assert run(theirs) == run(ours)


def test_the_langchain_program_streams_steps_and_keeps_to_a_schema(run: Run) -> None:
    printed = run(PROGRAMS["langchain"][1])
    assert printed.startswith("What is asked is clear.\n\n(draft)\nNothing else is needed.\n\n(draft)\n")
    assert printed.endswith("factors=[12] product=12\n")


def test_the_graph_program_prints_step_events(run: Run) -> None:
    lines = run(PROGRAMS["langchain"][2]).splitlines()
    assert lines[:3] == ["stepspec.step.proposed ", "stepspec.step.judged ", "stepspec.step.committed draft"]


def test_the_program_for_servers_names_both_models() -> None:
    settings = PROGRAMS["langchain"][3].replace("ChatStepSpec(", "dict(")
    assert "base_url" not in settings
    assert re.findall(r'"(http\S+)"', settings) == [
        "http://localhost:8000/v1#Qwen/Qwen3-8B",
        "http://localhost:8001/v1#Qwen/Qwen3-0.6B",
    ]
    run_without_models: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(PROGRAMS["langchain"][3], "a document", "exec"), run_without_models)
    assert isinstance(run_without_models["model"], ChatStepSpec)


def test_the_service_program_gets_an_answer(run: Run) -> None:
    with serving(following_pair()) as address:
        printed = run(PROGRAMS["service"][0].replace(SERVED, address))
    assert "Nothing else is needed." in printed
    assert "You said 1 things" in printed


def test_the_default_port_is_that_of_the_documents() -> None:
    import inspect

    from stepspec.cli.serve import main as serve_models

    defaults: dict[str, Any] = {
        name: value.default for name, value in inspect.signature(serve_models).parameters.items()
    }
    assert defaults["port"] == 8000


def test_the_counts_of_early_tools_are_shown(run: Run) -> None:
    assert "EarlyCounts(predicted=" in run(PROGRAMS["langchain"][4])
