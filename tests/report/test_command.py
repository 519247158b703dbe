"""`stepspec report`: tables on the terminal, output files and error messages."""

import json
from pathlib import Path

import pytest
import typer
from make_runs import make_run
from typer.testing import CliRunner, Result

from stepspec.cli.reporting import report_runs
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.running import summarise

STORED = Path(__file__).parents[2] / "evals" / "results" / "gsm-mini"
POLICIES = ["target", "token", "stepspec"]

app = typer.Typer()
app.command()(report_runs)


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_reports_are_written_beside_the_run_even_without_a_summary(tmp_path: Path) -> None:
    make_run(12, policies=POLICIES).write(tmp_path)
    stdout = report(tmp_path).stdout
    assert "made-up: 12 problems, 95% intervals" in stdout
    assert f"Wrote {tmp_path / 'report.html'}." in stdout
    assert (tmp_path / "report.md").read_text("utf-8").startswith("# made-up\n")
    assert "made-0011" not in (tmp_path / "report.html").read_text("utf-8"), "rows are packed"
    assert not (tmp_path / "summary.json").exists()


def test_an_existing_summary_is_reported(tmp_path: Path) -> None:
    made = make_run(12, policies=POLICIES)
    made.write(tmp_path)
    summary = summarise(made.run, made.rows).model_copy(update={"benchmark": "as-it-was"})
    (tmp_path / "summary.json").write_text(summary.model_dump_json(), "utf-8")
    assert "as-it-was: 12 problems" in report(tmp_path, "--no-traces").stdout


def test_a_sweep_gets_one_page_and_a_table_for_every_setting(tmp_path: Path) -> None:
    for concurrency in (16, 4):
        made = make_run(6, concurrency=concurrency, policies=POLICIES)
        made.write(tmp_path / f"c{concurrency}-t0.6")
    stdout = report(tmp_path).stdout
    assert stdout.index("made-up, concurrency 4: 6 problems") < stdout.index("made-up, concurrency 16: 6 problems")
    markdown = (tmp_path / "report.md").read_text("utf-8")
    assert [line for line in markdown.splitlines() if line.startswith("# ")] == [
        "# made-up, concurrency 4",
        "# made-up, concurrency 16",
    ]
    assert sorted(file.name for file in tmp_path.rglob("report.*")) == ["report.html", "report.md"]


def test_files_go_to_the_given_paths_and_all_include_prices(tmp_path: Path) -> None:
    make_run(6, policies=POLICIES).write(tmp_path / "run")
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\nper_machine_hour = 3', "utf-8")
    page, text = tmp_path / "page.html", tmp_path / "text.md"
    result = report(tmp_path / "run", "--html", page, "--markdown", text, "--prices", prices)
    assert "(on 100.0%)" in result.stdout
    assert all(
        "EUR per problem" in output for output in (result.stdout, page.read_text("utf-8"), text.read_text("utf-8"))
    )
    assert not list((tmp_path / "run").glob("report.*"))


def test_the_stored_runs_are_reported(tmp_path: Path) -> None:
    stdout = report(STORED, "--html", tmp_path / "page.html", "--markdown", tmp_path / "text.md").stdout
    for temperature in ("0", "0.6"):
        assert f"gsm-mini, temperature {temperature}: 300 problems, 95% intervals" in stdout
    accuracy = json.loads((STORED / "t0" / "summary.json").read_text())["policies"]["stepspec"]["accuracy"]
    assert f"{accuracy:.1%}" in (tmp_path / "text.md").read_text("utf-8")


def test_invalid_input_is_a_one_sentence_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        report(tmp_path)
    made = make_run(2, policies=POLICIES)
    made.rows = []
    made.write(tmp_path)
    with pytest.raises(UsageError, match="no finished row yet"):
        report(tmp_path)
    with pytest.raises(UsageError, match=r"none\.toml"):
        report(STORED, "--prices", tmp_path / "none.toml")
    (tmp_path / "file").touch()
    with pytest.raises(StepSpecError, match=r"Cannot write .*file"):
        report(STORED, "--html", tmp_path / "file" / "page.html", "--markdown", tmp_path / "text.md")
