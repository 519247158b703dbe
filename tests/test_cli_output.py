"""What commands print: the answer and the rest of `run`, `--json`, tables in narrow terminals, and no tracebacks."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import pytest
from commands import Terminal, stepspec
from rich.table import Table
from rich.text import Text
from scripted_runs import Script, answer_right, make_problems, make_run, play, rows_of
from test_cli import COMMANDS
from typer.testing import CliRunner, Result

from stepspec.api.pairs import EMBEDDED
from stepspec.base import extras
from stepspec.base.extras import install_command
from stepspec.base.files import package_folder
from stepspec.cli import app
from stepspec.cli.output import as_list, check_json_file, show
from stepspec.cli.program import run_program
from stepspec.cli.progress import make_meter
from stepspec.errors import UsageError
from stepspec.evaluation.compare import compare
from stepspec.evaluation.compare.tables import policy_table
from stepspec.evaluation.report.tables import full_table
from stepspec.evaluation.runs import read_run

QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"
LABEL = re.compile(r"^\[(draft|salvaged|target)\] ", re.MULTILINE)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "stepspec", *map(str, arguments)]


def invoke(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)), env=env)
    assert done.exit_code == 0, done.output
    return done


def test_the_answer_is_on_standard_output_and_the_rest_on_stderr() -> None:
    done = invoke("run", QUESTION)
    assert re.fullmatch(r"The answer is .*\n", done.stdout)
    assert LABEL.match(done.stderr), "each step has its author"
    assert " tokens per target pass" in done.stderr
    quiet = invoke("run", QUESTION, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_a_terminal_without_colors_shows_who_wrote_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    printed: dict[bool, str] = {}
    for coloured in (False, True):
        monkeypatch.setenv("NO_COLOR", "" if coloured else "1")
        printed[coloured] = stepspec("run", QUESTION, stream=Terminal).stderr
    assert "\x1b[" not in printed[False]
    assert LABEL.search(printed[False])
    assert "\x1b[" in printed[True]


def test_json_is_one_option_with_one_meaning() -> None:
    options = [(name, option) for name, each in COMMANDS.items() for option in each.params if "--json" in option.opts]
    assert {name.removeprefix("stepspec ") for name, _ in options} >= {
        *("run", "models", "compare", "size", "advise", "replay"),
        *("costs models", "costs service"),
    }
    for name, option in options:
        assert (option.metavar, option.help) == ("FILE", options[0][1].help), name
    assert options[0][1].help == "Also write all results to this file; - is standard output."


def test_json_goes_to_a_file_or_to_standard_output(tmp_path: Path) -> None:
    file = tmp_path / "new" / "result.json"
    done = invoke("run", QUESTION, "--json", file)
    assert done.stdout.startswith("The answer is ")
    assert f"Wrote {file}." in done.stderr
    written = json.loads(file.read_text("utf-8"))
    assert written["answer"].strip() == done.stdout.strip()
    printed = invoke("run", QUESTION, "--json", "-", "--logprobs")
    assert json.loads(printed.stdout)["answer"] == written["answer"]
    assert written["answer"] in printed.stderr
    facts = invoke("models", "--json", "-")
    assert json.loads(facts.stdout)["target"]["name"] == "embedded target"
    assert "Policies" in facts.stderr


@pytest.mark.parametrize("arguments", [["--json", "--policy"], ["--policy", "token", "--json", "--quiet"]])
def test_json_without_a_file_is_refused_with_what_it_takes(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["run", QUESTION, *arguments])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == f"--json takes a file, or - for standard output, got {arguments[-1]!r}."
    assert check_json_file(None, None) is None  # pyright: ignore[reportArgumentType]


CELLS = ["1.23× [1.10, 1.40]", "1,234,567", "12", "", "–", "a sentence of several words", "[bold]not markup[/bold]"]


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_a_table_loses_nothing_at_any_width(width: int) -> None:
    rng = random.Random(width)
    for _ in range(20):
        rows = [["name", *rng.choices(CELLS, k=8)] for _ in range(rng.randint(1, 4))]
        table = Table(*(f"column {number}" for number in range(9)), title=Text("A title of the table"))
        for row in rows:
            table.add_row(*row)
        text = shown(table, width)
        assert max(map(len, text.splitlines())) <= width
        found = Counter(re.sub("[│┃]", " ", text).split())
        assert found >= Counter(word for row in rows for cell in row for word in cell.split())
        assert "A title of the table" in " ".join(text.split())


def test_a_list_keeps_the_styles_of_rows() -> None:
    table = Table("policy", "speedup")
    table.add_row("token", "2×", style="bold")
    assert [row.style for row in as_list(table).rows] == ["bold", "bold"]


def test_a_long_line_is_whole_in_a_file() -> None:
    line = "word " * 60 + "end"
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("COLUMNS", raising=False)
        patched.setattr("sys.stdout", stream := _Text())
        show(line)
    assert "".join(stream.parts) == f"{line}\n"


def shown(table: Table, width: int) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(width))
        patched.setattr("sys.stdout", stream := _Text())
        show(table)
    return "".join(stream.parts)


class _Text:
    """A stream that is no terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.parts: list[str] = []

    def write(self, text: str) -> None:
        self.parts.append(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


def test_the_tables_of_runs_fit_60_columns(tmp_path: Path) -> None:
    problems, policies = make_problems(6), ("target", "token", "two-level", "look-ahead-with-a-long-name", "draft")
    summary = play(tmp_path / "run", Script(answer_right, policies), problems, make_run(problems, policies))
    run, rows = read_run(tmp_path / "run"), rows_of(tmp_path / "run")
    (compared, *_) = compare(run, rows, run, rows, ()).policies
    for table in (full_table(summary), policy_table(compared)):
        wide, narrow = shown(table, 200), shown(table, 60)
        assert max(map(len, narrow.splitlines())) <= 60
        assert numbers(wide) <= numbers(narrow)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d.,]*\d[×%]?|\d[×%]?", text))


def test_a_closed_pipe_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the request is still running."""
    reading, writing = os.pipe()
    os.close(reading)
    err = StringIO()
    monkeypatch.setattr(sys, "argv", ["stepspec", "run", QUESTION])
    with (
        suppress(BrokenPipeError),  # closing the stream writes what is left
        os.fdopen(writing, "w") as out,
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        run_program(app, "stepspec")
    assert end.value.code == 1, err.getvalue()
    assert "Traceback" not in err.getvalue()


@pytest.mark.parametrize("module", ["stepspec.cli.program", "stepspec.cli.run", "torch"])
def test_ctrl_c_while_a_command_loads_prints_no_traceback(module: str, tmp_path: Path) -> None:
    """The import of a module sends the signal, so that the time of the machine does not matter."""
    interrupting = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(interrupting)
    paths = [str(tmp_path), str(package_folder().parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command("run", QUESTION), env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_an_install_command_works_where_it_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout = package_folder().parent
    monkeypatch.chdir(checkout)
    assert install_command("torch") == 'pip install ".[torch]"'
    monkeypatch.chdir(tmp_path)
    assert install_command("torch") == f'pip install "{checkout}[torch]"'
    monkeypatch.setattr(extras, "package_folder", lambda: tmp_path / "site-packages" / "stepspec")
    assert install_command("torch") == 'pip install "stepspec[torch]"'


def test_a_folder_with_a_config_is_a_model_without_its_kind(tmp_path: Path) -> None:
    folders = {"--target": EMBEDDED / "target", "--draft": EMBEDDED / "draft"}
    models = [str(word) for each in folders.items() for word in each]
    assert invoke("run", QUESTION, "--quiet", *models).stdout.startswith("The answer is ")
    refused = CliRunner().invoke(app, ["run", QUESTION, "--policy", "target", "--target", str(tmp_path)])
    assert f"There is no folder '{tmp_path}' with a config.json." in str(refused.exception)


def test_lines_of_progress_say_how_many_seconds_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with redirect_stderr(StringIO()) as err, make_meter() as meter:
        meter.begin("settings")
        for done in (20, 40, 60):  # the first 20 were stored
            meter.show(None, done, 100)
            now += 30.0
    assert err.getvalue().splitlines() == [
        "settings: 20 of 100",
        "settings: 40 of 100 · about 90 s left",
        "settings: 60 of 100 · about 60 s left",
    ]
