"""The documentation examples run on the embedded pair."""

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import nbformat
import pytest
from nbclient import NotebookClient

from stepspec.loop.step import Origin

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
PRINTED: Mapping[str, str] = {
    "agent_with_tools": r"call: count\(.*\)\nresult: \d+\nanswer: [^$]*\ntokens: \{.*\}",
    "compare_policies": r"policy .*\ntarget .* 3/3\ntoken .* 3/3\nspecreason .* \d/3\ntwo-level .* \d/3\n",
    "custom_judge": r"^(step \d: \w+, known-numbers \d\.\d\d.*\n)*step \d: accepted, known-numbers 1\.00, like",
    "judge_scores": r"likelihood\.min: \d+ steps.*\nrating.*: \d+ steps.*\n(\d of \d steps accepted: .*\n){3}",
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PRINTED)
    assert [path.name for path in FOLDER.glob("*.ipynb")] == ["getting_started.ipynb"]


@pytest.mark.parametrize("name", PRINTED)
def test_a_script_prints_what_its_readers_expect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(PRINTED[name], printed), printed


def test_the_notebook_runs_and_is_committed_without_outputs(tmp_path: Path) -> None:
    notebook = nbformat.read(FOLDER / "getting_started.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "text/html" in cells[0].outputs[-1].data, "a result has its own HTML rendering"
    assert cells[2].outputs[0].text.split()[0] in get_args(Origin)
    assert cells[3].outputs[-1].data["text/plain"].count("boxed") == 3
