"""`stepspec report`: tables on the terminal, output files and error messages."""

import csv
import json
import re
from pathlib import Path

import pytest
import typer
from commands import stepspec
from make_runs import POLICIES as ALL_POLICIES
from make_runs import make_run
from markdown_it import MarkdownIt
from typer.testing import CliRunner, Result

from stepspec.cli.report import main as report_runs
from stepspec.errors import StepSpecError, UsageError
from stepspec.evaluation.report.figures import GROUPS
from stepspec.evaluation.run import summarise
from stepspec.evaluation.runs import read_run

STORED = Path(__file__).parents[2] / "evals" / "results" / "gsm-mini"
POLICIES = ["target", "token", "two-level"]

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


def test_figures_are_written_as_csv_and_plots_as_svg(tmp_path: Path) -> None:
    for concurrency in (4, 16):
        make_run(40, concurrency=concurrency).write(tmp_path / "runs" / f"c{concurrency}")
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\nper_machine_hour = 3', "utf-8")
    file, folder = tmp_path / "new" / "figures.csv", tmp_path / "plots"
    stdout = report(tmp_path / "runs", "--csv", file, "--plots", folder, "--prices", prices).stdout
    assert f"Wrote {file}." in stdout
    with file.open(newline="") as stream:
        rows = {(row["concurrency"], row["policy"]): row for row in csv.DictReader(stream)}
    row = next(iter(rows.values()))
    run = read_run(tmp_path / "runs" / "c4")
    assert [row[name] for name in ("max_tokens", "commit")] == [str(run.max_tokens), run.commit or ""]
    assert float(row["temperature"]) == run.temperature
    names = {role: engine.name if engine else "" for role, engine in run.engines.items()}
    assert {role: row[role] for role in ("target", "draft")} == names
    assert len(rows) == 2 * len(ALL_POLICIES)
    titles = {column.title for columns in GROUPS.values() for column in columns}
    apart = {"lost, won", "latency", "to the first thought", "to the first answer", "longest gap"}
    heads = {*rows["4", "token"]}
    assert titles - apart <= heads
    assert {"lost", "won", "latency p99", "accuracy low", "speedup high", "EUR per problem"} <= heads
    made = make_run(40, concurrency=4)
    for name, policy in summarise(made.run, made.rows, made.blocks).policies.items():
        row = rows["4", name]
        assert float(row["accuracy"]) == policy.accuracy
        assert (float(row["accuracy low"]), float(row["accuracy high"])) == policy.accuracy_ci
        assert float(row["speedup"]) == policy.speedup_vs_target
        assert row["steps accepted"] == ("" if policy.step_acceptance is None else str(policy.step_acceptance))
        assert float(row["EUR per problem"]) > 0
    assert {row["front"] for row in rows.values()} == {"True", "False"}
    plots = {each.name for each in folder.iterdir()}
    assert f"Wrote {len(plots)} plots to {folder}." in stdout
    assert {"concurrency-4-all-policies-accuracy-against-speed.svg", "throughput.svg"} <= plots
    assert all(each.read_text("utf-8").startswith("<svg") for each in folder.iterdir())


@pytest.mark.parametrize("command", [["report", STORED], ["eval", "gsm-mini"], ["judge-bench", "x"], ["replay", "x"]])
def test_a_path_for_figures_that_cannot_be_written_is_refused_before_the_work(
    command: list[str | Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    policy = [] if command[0] == "report" else ["--policy", "two-level"]
    for option, path, complaint in (
        ("--csv", tmp_path, f"{tmp_path} is a folder. Give the path of a file."),
        ("--csv", tmp_path / "file" / "figures.csv", f"{tmp_path / 'file'} is not a folder."),
        ("--csv", tmp_path / "link", "it is a symbolic link"),
        ("--csv", "--plots", "--csv takes a path, got '--plots'"),
        ("--plots", tmp_path / "file", f"{tmp_path / 'file'} is not a folder."),
        ("--plots", tmp_path / "file" / "plots", f"{tmp_path / 'file'} is not a folder."),
    ):
        done = stepspec(*command, *policy, option, path)
        assert (done.returncode, done.stdout) == (2, "")
        assert complaint in done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"file", "link"}


def test_the_stored_runs_are_reported(tmp_path: Path) -> None:
    stdout = report(STORED, "--html", tmp_path / "page.html", "--markdown", tmp_path / "text.md").stdout
    assert "gsm-mini: 300 problems, 95% intervals" in stdout
    accuracy = json.loads((STORED / "t0" / "summary.json").read_text())["policies"]["stepspec"]["accuracy"]
    assert f"{accuracy:.1%}" in (tmp_path / "text.md").read_text("utf-8")


HOSTILE = "<img src=x onerror=alert(1)>![a](http://b)`\x1b]0;owned\x07\x9b2J\n# B |"


def test_names_from_elsewhere_are_neither_markup_nor_terminal_codes(tmp_path: Path) -> None:
    made = make_run(6, policies=POLICIES)
    rows = [row.model_copy(update={"subject": HOSTILE}) for row in made.rows]
    made.rows = [row.model_copy(update={"policy": HOSTILE}) if row.policy == "two-level" else row for row in rows]
    policies = {HOSTILE if name == "two-level" else name: each for name, each in made.run.policies.items()}
    engine = made.run.engines["target"]
    assert engine is not None
    engines = {"target": engine.model_copy(update={"name": HOSTILE})}
    made.run = made.run.model_copy(update={"policies": policies, "benchmark": HOSTILE, "engines": engines})
    made.blocks, made.traces = [], []
    made.write(tmp_path)
    stdout = report(tmp_path).stdout
    assert "\\x1b]0" in stdout
    assert stdout.replace("\n", "").isprintable()
    markdown = (tmp_path / "report.md").read_text("utf-8")
    assert markdown.count("onerror") >= 4
    assert markdown.replace("\n", "").isprintable()
    html = MarkdownIt("commonmark").enable("table").render(markdown)
    assert "onerror" in html
    assert not re.search(r"<(img|a|code)\b", html)
    assert [line for line in markdown.splitlines() if line.startswith("# B")] == []
    assert "<img" not in (tmp_path / "report.html").read_text("utf-8")


def test_a_report_does_not_follow_a_link_over_another_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious", "utf-8")
    for number, name in enumerate(("report.md", "report.html")):
        make_run(6, policies=POLICIES).write(run := tmp_path / f"run{number}")
        (run / name).symlink_to(mine)
        with pytest.raises(StepSpecError, match="it is a symbolic link; remove it"):
            report(run)
        (run / f".{name}.tmp").symlink_to(mine)
        assert mine.read_text("utf-8") == "precious"


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
