"""Every Python program of the README runs. Models that cannot be had here are played by scripted ones."""

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
from stepspec.langchain import sharing

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
PROGRAMS: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SERVED = "http://localhost:8000/v1"
START, PYTHON, AGENT, STREAM, GRAPH, SERVICE = range(6)

Run = Callable[[str], str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program as its own file would, and gives what it printed."""
    name_engines("vllm", monkeypatch)
    monkeypatch.setattr(sharing, "_pairs", {})

    def ran(program: str) -> str:
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return ran


def test_these_are_all() -> None:
    assert len(PROGRAMS) == 6


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_use_what_the_package_exports(program: str) -> None:
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module == "stepspec":
            assert all(alias.name in stepspec.__all__ for alias in node.names)


def test_the_first_program_streams_the_steps_of_a_solution(run: Run) -> None:
    assert re.search(r"^(draft|salvaged|target) .*17", run(PROGRAMS[START]), re.MULTILINE)


def test_the_python_api(run: Run) -> None:
    printed = run(PROGRAMS[PYTHON])
    assert "\\boxed" in printed
    assert "Usage(prompt_tokens=" in printed
    assert printed.splitlines()[-1].count("boxed") == 2


def test_the_agent_multiplies(run: Run) -> None:
    assert run(PROGRAMS[AGENT]).strip() == "It is 144."  # of all numbers the scripted model knows the first


def test_the_diff_is_the_whole_difference(run: Run) -> None:
    diff = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)[0].splitlines()
    before = [line[1:] for line in diff if line.startswith("-")]
    after = [line[1:] for line in diff if line.startswith("+")]
    theirs = PROGRAMS[AGENT]
    for ours, replaced in zip(after, before, strict=True):
        assert f"\n{ours}\n" in theirs
        theirs = theirs.replace(ours, replaced)
    assert "stepspec" not in theirs
    with serving(following_pair(name="Qwen/Qwen3-32B")) as address:
        theirs = theirs.replace(f'base_url="{SERVED}"', f'base_url="{address}", api_key="none"')
        assert run(theirs) == run(PROGRAMS[AGENT])


def test_steps_are_streamed_and_a_form_is_kept_to(run: Run) -> None:
    printed = run(PROGRAMS[STREAM])
    assert printed.startswith("draft What is asked is clear.\ndraft Nothing else is needed.\n")
    assert printed.endswith("factors=[12] product=12\n")


def test_the_graph_tells_every_step(run: Run) -> None:
    lines = run(PROGRAMS[GRAPH]).splitlines()
    assert lines[:3] == ["stepspec.step.proposed ", "stepspec.step.judged ", "stepspec.step.committed draft"]


def test_the_service_is_asked(run: Run) -> None:
    with serving(following_pair()) as address:
        printed = run(PROGRAMS[SERVICE].replace(SERVED, address))
    assert "Nothing else is needed." in printed
    assert "You said 1 things" in printed


def test_the_service_is_named_as_it_is_in_the_readme() -> None:
    import inspect

    from stepspec.cli.serving import serve_models

    defaults: dict[str, Any] = {name: each.default for name, each in inspect.signature(serve_models).parameters.items()}
    assert defaults["port"] == 8000
