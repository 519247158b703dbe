"""Benchmarks: every shipped file, the sources and checks of their data, and the wording of questions."""

import csv
import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from stepspec.base.files import data_folder, list_data_files
from stepspec.chat.prompts import problem_prompt, prompt_version
from stepspec.errors import UsageError
from stepspec.evaluation.benchmark import Benchmark, asked, wording_version
from stepspec.evaluation.run import load_benchmark, load_problems
from stepspec.evaluation.run.data import SUFFIXES, content_line
from stepspec.evaluation.run.problem_reader import ProblemSet

ROOT = Path(__file__).parents[1]
GSM8K = ROOT / "evals" / "data" / "gsm8k-test.jsonl.gz"
GSM_MINI_RUN = ROOT / "evals" / "results" / "gsm-mini" / "t0" / "run.json"
ROWS = [
    {"question": "A\u2028b, \u201cc\u201d?", "answer": "It is 1,000 + 2.\n#### 1,002"},
    {"question": 'Two lines,\n"quoted"?', "answer": "#### -3"},
    {"question": "C?", "answer": "12.0"},
]


def make(data: dict[str, Any], **others: Any) -> Benchmark:
    """Return a benchmark with whole-number answers over the data."""
    return Benchmark.model_validate({"version": 1, "title": "Mine", "summary": "mine", "data": data} | others)


FROM_FILE = make({"kind": "file", "answer_from": "hashes"})


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the rows in the format of the file's suffix."""
    if path.suffix in (".jsonl", ".gz"):
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(content if path.suffix == ".jsonl" else gzip.compress(content))
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def content_hash(*rows: tuple[str, ...]) -> str:
    return hashlib.sha256(b"".join(content_line(*row) for row in rows)).hexdigest()


# The files in `evals/`.


@pytest.mark.parametrize("name", list_data_files("evals"))
def test_every_benchmark_loads_and_opens_with_a_comment_and_its_command(name: str) -> None:
    loaded_name, benchmark = load_benchmark(name)
    assert loaded_name == name
    text = list_data_files("evals")[name].read_text("utf-8")
    comment = text[: text.index("version = ")]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert f"stepspec eval {name}" in comment
    if benchmark.data.kind == "hub":
        assert benchmark.paper
        assert benchmark.data.rows
        assert all(file.sha256 for file in benchmark.data.files)


def test_the_hash_of_shipped_problems_is_that_of_the_problems_that_are_asked() -> None:
    _, benchmark = load_benchmark("gsm-mini")
    first = load_problems(benchmark, None, 5)
    assert len(first.problems) == 5
    assert load_problems(benchmark, None, 6).sha256 != first.sha256


def test_the_run_stored_in_the_repository_could_be_resumed() -> None:
    run = json.loads(GSM_MINI_RUN.read_text("utf-8"))
    _, benchmark = load_benchmark("gsm-mini")
    assert load_problems(benchmark, None, run["num_problems"]).sha256 == run["data_sha256"]
    assert (benchmark.prompt, wording_version(benchmark)) == (run["prompt_id"], run["prompt_version"])
    assert (benchmark.max_tokens, benchmark.sampling.temperature) == (run["max_tokens"], run["temperature"])


HEAD = 'version = 1\ntitle = "x"\nsummary = "x"\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD + 'prompts = "bare"\n[data]\nkind = "file"', "'prompts'.*Did you mean 'prompt'"),
        (HEAD + 'prompt = "bar"\n[data]\nkind = "file"', "'bar'.*Did you mean 'bare'"),
        (HEAD + 'grader = "maths"\n[data]\nkind = "file"', "grader 'maths' is unknown; did you mean 'math'"),
        (HEAD + '[data]\nkind = "gsm-mini"\nsplit = "tests"', "'tests' is unknown; did you mean 'test'"),
        (HEAD + '[data]\nkind = "file"\npth = "x"', "'pth'. Did you mean 'path'"),
        (HEAD + '[data]\nkind = "file"\n[data.columns]\nqestion = "x"', "'qestion'. Did you mean 'question'"),
        (HEAD + '[data]\nkind = "web"', "data.kind 'web' is unknown"),
        (HEAD + '[data]\nkind = "hub"\nrepository = "a/b"\nrevision = "main"', "revision: .*pattern"),
        (
            HEAD + f'[data]\nkind = "hub"\nrepository = "a/b"\nrevision = "{40 * "0"}"\nfiles = []',
            "files must not be empty",
        ),
        (HEAD, "data is missing"),
        (HEAD.replace("1", "2") + '[data]\nkind = "file"', "version"),
        ("version = ", "not valid TOML"),
    ],
)
def test_an_invalid_benchmark_file_is_refused_with_its_mistake(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=complaint):
        load_benchmark(str(file))


# The wording of a question.


def test_without_shots_a_question_stands_alone_in_its_prompt() -> None:
    benchmark = make({"kind": "file"}, prompt="boxed")
    assert asked(benchmark, "{How} many?") == problem_prompt("boxed").format(question="{How} many?")
    assert wording_version(benchmark) == prompt_version(problem_prompt("boxed"))


def test_shots_stand_in_front_each_with_its_answer() -> None:
    shots = [{"question": "{One}?", "answer": "1."}, {"question": "Two?", "answer": "2."}]
    in_a_line = make({"kind": "file"}, prompt="qa", shots=shots)
    assert asked(in_a_line, "Three?") == "Q: {One}?\nA: 1.\n\nQ: Two?\nA: 2.\n\nQ: Three?\nA:"
    apart = make({"kind": "file"}, prompt="bare", shots=shots)
    assert asked(apart, "Three?") == "{One}?\n\n1.\n\nTwo?\n\n2.\n\nThree?"


def test_other_shots_are_another_wording() -> None:
    def version(*answers: str) -> str:
        shots = [{"question": "One?", "answer": answer} for answer in answers]
        return wording_version(make({"kind": "file"}, prompt="qa", shots=shots))

    assert len({version(), version("1"), version("1."), version("1", "1")}) == 4


def test_the_eight_shots_of_gsm8k_reach_their_answers() -> None:
    _, benchmark = load_benchmark("gsm8k-8shot")
    text = asked(benchmark, "How many?")
    assert text.count("Q: ") == 9
    assert text.endswith("The answer is 8.\n\nQ: How many?\nA:")
    answers = [shot.answer.rpartition("The answer is ")[2] for shot in benchmark.shots]
    assert answers == ["6.", "5.", "39.", "8.", "9.", "29.", "33.", "8."]
    assert all("\n" not in shot.question + shot.answer for shot in benchmark.shots)


# The user's own data.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_problems_of_a_file_are_the_same_in_every_format(tmp_path: Path, suffix: str) -> None:
    loaded = load_problems(FROM_FILE, write(tmp_path / f"data{suffix}", ROWS), None)
    assert [problem.question for problem in loaded.problems] == [row["question"] for row in ROWS]
    assert [problem.gold for problem in loaded.problems] == ["1002", "-3", "12"]
    assert [problem.id for problem in loaded.problems] == ["row-1", "row-2", "row-3"]
    assert loaded.sha256 == content_hash(*((row["question"], row["answer"]) for row in ROWS))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_numbers_and_names_are_the_same_in_every_format(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": 7, "question": "A?", "answer": 12, "level": 3, "subject": "sums", "more": 1.5}]
    loaded = load_problems(FROM_FILE, write(tmp_path / f"data{suffix}", rows), None)
    (problem,) = loaded.problems
    assert (problem.id, problem.gold, problem.level, problem.subject) == ("7", "12", 3, "sums")
    assert loaded.sha256 == content_hash(("A?", "12", "7"))


def test_a_limit_takes_the_first_problems_of_the_same_data(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", ROWS)
    assert load_problems(FROM_FILE, file, 2).problems == load_problems(FROM_FILE, file, None).problems[:2]
    assert load_problems(FROM_FILE, file, 2).sha256 == load_problems(FROM_FILE, file, None).sha256


def test_blank_lines_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", ROWS)
    before = load_problems(FROM_FILE, file, None)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n\n"))
    assert load_problems(FROM_FILE, file, None) == before


def test_a_custom_benchmark_is_one_toml_with_one_data_file_beside_it(tmp_path: Path) -> None:
    text = list_data_files("evals")["questions"].read_text("utf-8")
    ours = '[data]\nkind = "file"\n'
    assert ours in text
    (tmp_path / "mine.toml").write_text(text.replace(ours, ours + 'path = "mine.jsonl"\n'), "utf-8")
    write(tmp_path / "mine.jsonl", ROWS)
    name, benchmark = load_benchmark(str(tmp_path / "mine.toml"))
    assert name == "mine"
    assert len(load_problems(benchmark, None, None).problems) == 3
    other = write(tmp_path / "other.csv", ROWS[:1])
    assert len(load_problems(benchmark, other, None).problems) == 1


def test_custom_questions_may_have_any_number_or_formula_as_their_answer(tmp_path: Path) -> None:
    golds = [r"\frac{1}{2}", "(1, 2]", "$1,200.50", r"\text{east}", "0.5", "1/2"]
    answers = [*golds[:4], 0.5, "It is half.\n#### 1/2"]
    rows = [{"question": f"{answer}?", "answer": answer} for answer in answers]
    loaded = load_problems(load_benchmark("questions")[1], write(tmp_path / "data.jsonl", rows), None)
    assert [problem.gold for problem in loaded.problems] == golds


GOOD = '{"question": "A?", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (GOOD + "{", "line 2 is not JSON"),
        (GOOD + "[1]", "line 2 is not a JSON object"),
        (GOOD + '{"answer": "1"}', "line 2: key 'question' is missing"),
        (GOOD + '{"question": "A?"}', "line 2: key 'answer' is missing"),
        (GOOD + '{"question": 1, "answer": "1"}', "line 2: key 'question' must be text"),
        (GOOD + '{"question": " ", "answer": "1"}', "line 2: key 'question' must be text"),
        (
            GOOD + '{"question": "A?", "answer": "one"}',
            "line 2: key 'answer': The gold answer 'one' is not a whole number",
        ),
        (GOOD + '{"question": "A?", "answer": "So it is\\n#### "}', "line 2: key 'answer' has no answer in it"),
        (GOOD + '{"question": "A?", "answer": true}', "line 2: key 'answer' must be text"),
        (GOOD + '{"question": "A?", "answer": null}', "line 2: key 'answer' must be text"),
        (GOOD + '{"question": "A?", "answer": NaN}', "line 2: key 'answer' must be text"),
        (GOOD + '{"question": "\\ud800", "answer": "1"}', "line 2: key 'question' contains a lone surrogate"),
        (GOOD + '{"question": ' + "[" * 100_000, "line 2 is not JSON"),
        ("\n" + GOOD + "\n\n{}", "line 5: key 'question' is missing"),
        ('{"id": 1, ' + GOOD[1:] + '{"id": "1", ' + GOOD[1:], "two problems have the id '1'"),
        ("", "has no problems"),
        ("\n\n", "has no problems"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_key(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content, "utf-8")
    with pytest.raises(UsageError, match=complaint):
        load_problems(FROM_FILE, file, None)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("question,answer\nA?,1\nB?\n", "row 2: key 'answer' must be text"),
        ("question,answer\nA?,1\nB?,2,3\n", "row 2 has more cells than the header"),
        ("question,reply\nA?,1\n", "row 1: key 'answer' is missing"),
        ('question,answer\nA?,1\n"B?,2\n', "row 2 is not CSV"),
        ("question,answer\nA?,1\nB?,two\n", "row 2: key 'answer': The gold answer 'two' is not a whole number"),
        ("question,answer\n", "has no problems"),
        ("", "has no problems"),
    ],
)
def test_a_bad_row_of_a_table_is_named_with_its_number(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "data.csv"
    file.write_text(content, "utf-8")
    with pytest.raises(UsageError, match=complaint):
        load_problems(FROM_FILE, file, None)


def test_a_bad_row_of_a_parquet_file_is_named_with_its_number(tmp_path: Path) -> None:
    rows = [{"question": "A?", "answer": ["1"]}]
    with pytest.raises(UsageError, match="row 1: key 'answer' must be text"):
        load_problems(FROM_FILE, write(tmp_path / "data.parquet", rows), None)
    with pytest.raises(UsageError, match="row 1: key 'question' is missing"):
        load_problems(FROM_FILE, write(tmp_path / "data.parquet", [{"answer": "1"}]), None)


def test_a_file_that_is_missing_unreadable_or_not_needed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9?", "answer": "1"}')
    (tmp_path / "latin.csv").write_bytes(b"question,answer\n\xe9?,1\n")
    (tmp_path / "text.parquet").write_text("PAR2")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "text.jsonl.gz").write_text("PAR2")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"question": "a?", "answer": "1"}')[:-9])
    missing = ("missing.jsonl", "missing.parquet", "latin.jsonl", "latin.csv")
    for name in (*missing, "text.parquet", "folder.jsonl", "text.jsonl.gz", "cut.jsonl.gz"):
        with pytest.raises(UsageError, match="Cannot read") as refusal:
            load_problems(FROM_FILE, tmp_path / name, None)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UsageError, match=r"read from \.jsonl, \.jsonl\.gz, \.csv and \.parquet files"):
        load_problems(FROM_FILE, tmp_path / "data.xlsx", None)
    with pytest.raises(UsageError, match="--data FILE"):
        load_problems(FROM_FILE, None, None)
    with pytest.raises(UsageError, match="leave out --data"):
        load_problems(load_benchmark("gsm-mini")[1], tmp_path / "latin.jsonl", None)


@pytest.mark.parametrize(("split", "number"), [("train", 1_000), ("calibration", 10_000), ("test", 10_000)])
def test_every_split_of_gsm_mini_ships_and_a_damaged_file_is_refused(
    split: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = make({"kind": "gsm-mini", "split": split})
    found = load_problems(benchmark, None, None).problems
    assert [each.id for each in found] == [f"gsm-mini-2/{split}/{place}" for place in range(number)]
    file = data_folder("evals") / "data" / f"gsm-mini-{split}.jsonl.gz"
    monkeypatch.setattr("stepspec.evaluation.run.problems.data_folder", lambda kind: tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / file.name).write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"is missing or damaged. Install stepspec again."):
        load_problems(benchmark, None, 1)


# Checks of the data.


@pytest.fixture(scope="module")
def gsm8k_rows() -> list[dict[str, str]]:
    with gzip.open(GSM8K, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-8shot"])
def test_the_test_split_of_gsm8k_is_recognized_in_every_format(
    tmp_path: Path, gsm8k_rows: list[dict[str, str]], name: str, suffix: str
) -> None:
    _, benchmark = load_benchmark(name)
    loaded = load_problems(benchmark, write(tmp_path / f"test{suffix}", gsm8k_rows), 20)
    assert loaded.sha256 == benchmark.data.sha256  # pyright: ignore[reportAttributeAccessIssue]
    assert len(loaded.problems) == 20
    assert [problem.gold for problem in loaded.problems[:3]] == ["18", "3", "70000"]


def test_another_order_a_part_or_another_split_of_gsm8k_is_refused(
    tmp_path: Path, gsm8k_rows: list[dict[str, str]]
) -> None:
    _, benchmark = load_benchmark("gsm8k")
    shuffled = random.Random(0).sample(gsm8k_rows, len(gsm8k_rows))
    with pytest.raises(UsageError, match=r"content hash begins \w{12}, the pinned one 3fb31cfaeb4e"):
        load_problems(benchmark, write(tmp_path / "test.jsonl", shuffled), 20)
    with pytest.raises(UsageError, match=r"has 20 rows, where GSM8K has 1,319; .*'questions'"):
        load_problems(benchmark, write(tmp_path / "test.jsonl", gsm8k_rows[:20]), 20)
    with pytest.raises(UsageError, match="has 7,473 rows"):
        load_problems(benchmark, GSM8K.with_name("gsm8k-train.jsonl.gz"), 20)


HUB = {"kind": "hub", "repository": "someone/sums", "revision": "0123456789" * 4, "answer_from": "hashes"}


def test_without_a_content_hash_the_published_file_hash_is_checked(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", ROWS)
    published = {"path": "data.jsonl", "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    benchmark = make(HUB | {"files": [published], "rows": 3})
    assert len(load_problems(benchmark, file, None).problems) == 3
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(UsageError, match=rf"file hash begins \w{{12}}, the pinned one {published['sha256'][:12]}"):
        load_problems(benchmark, file, None)


def test_one_of_several_published_files_is_not_the_whole_split(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", ROWS[:2])
    published = {"path": "data-1.jsonl", "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    benchmark = make(HUB | {"files": [published, {"path": "data-2.jsonl"}], "rows": 3})
    with pytest.raises(UsageError, match="has 2 rows, where Mine has 3"):
        load_problems(benchmark, file, None)
    assert len(load_problems(benchmark, write(tmp_path / "whole.csv", ROWS), None).problems) == 3


def test_without_any_hash_the_number_of_rows_is_checked(tmp_path: Path) -> None:
    benchmark = make(HUB | {"files": [{"path": "data.jsonl"}], "rows": 3})
    assert len(load_problems(benchmark, write(tmp_path / "data.csv", ROWS), None).problems) == 3
    with pytest.raises(UsageError, match="has 2 rows, where Mine has 3"):
        load_problems(benchmark, write(tmp_path / "data.csv", ROWS[:2]), None)


# Rows in the formats of MATH and AIME.


MATH = {"kind": "file", "answer_from": "boxed"}
MATH_COLUMNS = {"question": "problem", "answer": "solution", "level": "level", "subject": "type"}


def math_problem(tmp_path: Path, solution: str, level: str = "Level 3") -> ProblemSet:
    row = {"problem": "What is $x$?", "level": level, "type": "Algebra", "solution": solution}
    benchmark = make(MATH | {"columns": MATH_COLUMNS}, grader="math")
    return load_problems(benchmark, write(tmp_path / "data.parquet", [row]), None)


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        (r"First $\boxed{1}$ is a guess, so $x = \boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        (r"Thus $x = \boxed{\left\{1, \sqrt{2}\right\}}.$", r"\left\{1, \sqrt{2}\right\}"),
        (r"Half of it is $\boxed 17$.", "17"),
        (r"Half of it is $\boxed 17.$", "17"),
        (r"It is \fbox{B}.", "B"),
    ],
)
def test_the_gold_answer_of_math_is_in_the_last_box_of_the_solution(tmp_path: Path, solution: str, gold: str) -> None:
    (problem,) = math_problem(tmp_path, solution).problems
    assert (problem.gold, problem.level, problem.subject) == (gold, 3, "Algebra")


@pytest.mark.parametrize("solution", ["So $x = 3$.", r"So $x = \boxed{}$."])
def test_a_solution_without_an_answer_is_named(tmp_path: Path, solution: str) -> None:
    with pytest.raises(UsageError, match="row 1: key 'solution' has no answer in it"):
        math_problem(tmp_path, solution)


def test_rows_without_an_answer_are_left_out_where_the_benchmark_says_so(tmp_path: Path) -> None:
    rows = [{"question": "A?", "answer": answer} for answer in (r"$\boxed{1}$", r"$\boxed{}$", r"$\boxed{3}$")]
    benchmark = make(MATH | {"skip_unanswered": True, "rows": 3}, grader="math")
    loaded = load_problems(benchmark, write(tmp_path / "data.jsonl", rows), 2)
    assert [(problem.id, problem.gold) for problem in loaded.problems] == [("row-1", "1"), ("row-3", "3")]


@pytest.mark.parametrize(
    ("written", "level"), [("Level 3", 3), ("3", 3), (" 3 ", 3), ("Level ?", None), ("hard", None), ("-1", None)]
)
def test_a_level_that_is_no_number_is_not_known(tmp_path: Path, written: str, level: int | None) -> None:
    (problem,) = math_problem(tmp_path, r"$\boxed{1}$", level=written).problems
    assert problem.level == level


def test_the_columns_that_a_benchmark_names_must_exist(tmp_path: Path) -> None:
    file = write(tmp_path / "data.jsonl", [{"problem": "What is x?", "answer": "1", "unique_id": "a/1.json"}])
    columns = {"question": "problem", "id": "unique_id"}
    (problem,) = load_problems(make({"kind": "file", "columns": columns}), file, None).problems
    assert (problem.id, problem.level, problem.subject) == ("a/1.json", None, None)
    with pytest.raises(UsageError, match="line 1: key 'grade' is missing"):
        load_problems(make({"kind": "file", "columns": columns | {"level": "grade"}}), file, None)


def test_answers_of_aime_lose_their_leading_zeros(tmp_path: Path) -> None:
    rows = [{"id": 60, "problem": "What is x?", "answer": "025"}, {"id": 61, "problem": "And y?", "answer": 204}]
    data = {"kind": "file", "columns": {"question": "problem", "id": "id"}}
    loaded = load_problems(make(data), write(tmp_path / "data.jsonl", rows), None)
    assert [(problem.id, problem.gold) for problem in loaded.problems] == [("60", "25"), ("61", "204")]


# The Hugging Face hub, through the real client in a separate process.


PROGRAM = """
import sys
from stepspec.errors import UsageError
from stepspec.evaluation.run import load_benchmark, load_problems
for name in sys.argv[1:]:
    try:
        loaded = load_problems(load_benchmark(name)[1], None, 2)
        print(len(loaded.problems), loaded.sha256)
    except UsageError as error:
        print(error)
"""


def fetch(*benchmarks: str | Path, home: Path, **environment: str) -> str:
    """Return what loading each benchmark's problems prints, with the cache folder `home`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = inherited | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    command = [sys.executable, "-c", PROGRAM, *map(str, benchmarks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TO_DOWNLOAD = (
    "download main/test-00000-of-00001.parquet of the dataset openai/gsm8k, revision "
    "740312add88f781978c0658806c59bc2815b9866, from the Hugging Face hub, and give it with --data FILE."
)


@pytest.fixture(scope="module")
def without_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the benchmark's file without the data beside it, as in a wheel."""
    return Path(shutil.copy(ROOT / "evals" / "gsm8k.toml", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory, without_copy: Path) -> tuple[list[str], list[str]]:
    """What loading prints: from a hub a file, then those that it refuses; offline the file, then both of gsm8k."""
    folder = tmp_path_factory.mktemp("hub")
    file = hub_benchmark(folder / "mine.toml", sha256=hashlib.sha256(CONTENT).hexdigest())
    refused = (
        hub_benchmark(folder / "a.toml", sha256="0" * 64),
        hub_benchmark(folder / "b.toml", content_sha256="0" * 64),
        hub_benchmark(folder / "c.toml", rows=4),
        hub_benchmark(folder / "d.toml", repository="someone/else"),
        hub_benchmark(folder / "e.toml", repository="some/gated"),
    )
    with hub() as endpoint:
        online = fetch(file, *refused, home=folder / "home", HF_ENDPOINT=endpoint)
    offline = fetch(file, "gsm8k", without_copy, home=folder / "home", HF_HUB_OFFLINE="1")
    return online.splitlines(), offline.splitlines()


def test_a_checkout_has_its_own_copy_of_gsm8k(fetched: tuple[list[str], list[str]]) -> None:
    _, (_, output, _) = fetched
    assert output == f"2 {load_benchmark('gsm8k')[1].data.sha256}"  # pyright: ignore[reportAttributeAccessIssue]


def test_offline_one_sentence_says_how_to_get_the_data(fetched: tuple[list[str], list[str]]) -> None:
    _, (*_, output) = fetched
    assert output == (
        "The data of GSM8K cannot be fetched: it is not in the cache, and HF_HUB_OFFLINE disables downloads; "
        + TO_DOWNLOAD
    )


def test_without_a_connection_one_sentence_says_how_to_get_the_data(tmp_path: Path, without_copy: Path) -> None:
    output = fetch(without_copy, home=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert output.startswith("The data of GSM8K cannot be fetched: the download failed (")
    assert output.endswith(TO_DOWNLOAD)
    assert "\n" not in output


CONTENT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PATH = f"/datasets/{HUB['repository']}/resolve/{HUB['revision']}/data/test.jsonl"


class _Hub(BaseHTTPRequestHandler):
    """Serves one file, and otherwise the errors of the real hub."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        body = CONTENT if self.path == PATH else b""
        self.send_response(200 if body else 401 if "gated" in self.path else 404)
        if body:
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", str(HUB["revision"]))
        else:
            self.send_header("X-Error-Code", "GatedRepo" if "gated" in self.path else "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub() -> Generator[str]:
    """Run a hub on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def hub_benchmark(
    path: Path, *, repository: str = "someone/sums", sha256: str = "", content_sha256: str = "", rows: int = 3
) -> Path:
    pinned, content = (f'sha256 = "{each}"\n' if each else "" for each in (sha256, content_sha256))
    path.write_text(
        f'{HEAD}[data]\nkind = "hub"\nrepository = "{repository}"\nrevision = "{HUB["revision"]}"\nrows = {rows}\n'
        f'answer_from = "hashes"\n{content}[[data.files]]\npath = "data/test.jsonl"\n{pinned}',
        "utf-8",
    )
    return path


def test_a_file_of_the_hub_is_fetched_once_and_then_taken_from_the_cache(
    fetched: tuple[list[str], list[str]],
) -> None:
    (online, *_), (offline, *_) = fetched
    assert online == offline == f"2 {content_hash(*((row['question'], row['answer']) for row in ROWS))}"


def test_files_from_the_hub_are_checked(fetched: tuple[list[str], list[str]]) -> None:
    (_, *outputs), _ = fetched
    other, content, longer, absent, gated = outputs
    assert "does not match its pinned hash" in other
    assert "does not match the pinned hash" in content
    assert "has 3 rows instead of 4" in longer
    assert "the hub has no such file at this revision" in absent
    assert "the hub restricts access to it" in gated
    assert all("--data FILE" in output for output in outputs), "one sentence each"
