"""What commands print: the answer and the rest of `run`, `--json`, tables in narrow terminals, and no tracebacks."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from scripted_runs import Script, answer_right, make_problems, make_run, play
from test_cli import COMMANDS
from typer.testing import CliRunner, Result

from stepspec.api.pairs import EMBEDDED
from stepspec.base import extras
from stepspec.base.extras import install_command
from stepspec.base.files import package_folder
from stepspec.cli import app
from stepspec.cli.output import check_json_file, show
from stepspec.errors import UsageError

QUESTION = "Ann has 3 apples. Ben has 4 more apples than Ann. How many apples has Ben?"
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


@pytest.mark.parametrize("no_colour", [False, True])
def test_a_terminal_without_colors_shows_who_wrote_each_step(no_colour: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm", **({"NO_COLOR": "1"} if no_colour else {})}
    words = " ".join(f"'{word}'" for word in command("run", QUESTION))
    shown = subprocess.run(["script", "-qec", words, os.devnull], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout
    assert ("\x1b[" in shown.stdout) != no_colour
    assert bool(LABEL.search(shown.stdout)) == no_colour


def test_json_is_one_option_with_one_meaning() -> None:
    options = [(name, option) for name, each in COMMANDS.items() for option in each.params if "--json" in option.opts]
    assert {name.removeprefix("stepspec ") for name, _ in options} >= {
        *("run", "models", "compare", "size", "advise", "replay"),
        *("bench agent", "bench service streams"),
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


CELLS = st.one_of(
    st.from_regex(r"\A[0-9]{1,2}\.[0-9]{2}× \[[0-9]\.[0-9]{2}, [0-9]\.[0-9]{2}\]\Z"),
    st.from_regex(r"\A[0-9]{1,3}(,[0-9]{3}){0,2}\Z"),
    st.sampled_from(["", "–", "a sentence of several words that wraps", "[bold]not markup[/bold]"]),
)


@given(st.lists(st.lists(CELLS, min_size=9, max_size=9), min_size=1, max_size=4), st.sampled_from([40, 60, 80, 160]))
def test_a_table_loses_nothing_at_any_width(rows: list[list[str]], width: int) -> None:
    table = Table(*(f"column {number}" for number in range(9)), title=Text("A title of the table"))
    for row in rows:
        table.add_row(*row)
    text = shown(table, width)
    assert max(map(len, text.splitlines())) <= width
    found = Counter(text.replace("│", " ").split())
    assert found >= Counter(word for row in rows for cell in row for word in cell.split())
    assert all(f"column {number}" in " ".join(text.split()) or width == 160 for number in range(9))


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


def test_the_tables_of_commands_fit_60_columns(tmp_path: Path) -> None:
    problems, policies = make_problems(30), ("target", "token", "stepspec", "look-ahead-with-a-long-name", "draft")
    script = Script(answer_right, policies)
    play(tmp_path / "run", script, problems, make_run(problems, policies))
    for arguments in (("report", tmp_path / "run"), ("compare", tmp_path / "run", tmp_path / "run")):
        wide, narrow = (invoke(*arguments, env={"COLUMNS": width}).stdout for width in ("200", "60"))
        narrow = narrow.partition("Wrote")[0]
        assert max(map(len, narrow.splitlines())) <= 60
        missing = numbers(wide.partition("Wrote")[0]) - numbers(narrow)
        assert not missing, arguments


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d.,]*\d[×%]?|\d[×%]?", text))


def test_a_closed_pipe_and_ctrl_c_print_no_traceback(tmp_path: Path) -> None:
    for arguments in (["run", QUESTION], ["run", QUESTION, "--json", "-"], ["models"], ["policies", "specreason"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(command(*arguments), stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writing)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
    interrupts = [(("run", QUESTION), seconds) for seconds in (0.1, 0.3, 0.6, 1.0, 1.5, 2.2)]
    interrupts += [(("eval", "gsm-mini", "--output", str(tmp_path / "run")), 1.8)]
    for arguments, seconds in interrupts:
        process = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode in (130, 0, -signal.SIGINT), "the last one is 130 for a shell"
        assert "Traceback" not in stderr


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
    assert "or a model's folder" in str(refused.exception)
