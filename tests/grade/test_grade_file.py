"""`stepspec grade`: JSONL files of predictions and gold answers, and a one-sentence error for each invalid file."""

import json
from pathlib import Path
from typing import Any

import pytest

from stepspec.cli.grade import main as grade_file
from stepspec.errors import UsageError


def rows_file(folder: Path, rows: list[Any]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def test_predictions_are_graded_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"id": "a", "response": r"It is \boxed{\frac12}.", "answer": "0.5"},
        {"response": "The answer is $1+x$.", "answer": "x+1"},
        {"response": "I do not know.", "answer": r"\text{Monday}"},
        {"response": "The answer is 5", "answer": 5, "finish_reason": "length"},
        {"response": r"\boxed{9^{9^{9^9}}}", "answer": 12},
        {"response": r"\boxed{13}", "answer": 12},
    ]
    output = tmp_path / "grades.jsonl"
    grade_file(rows_file(tmp_path, rows), output=output, workers=2)
    printed = capsys.readouterr().out
    assert "Accuracy (flexible) 33.3% [9.7%, 70.0%], 2 of 6; accuracy (strict) 33.3%" in printed
    assert "pass@" not in printed
    grades = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    assert [each.get("id", each.get("row")) for each in grades] == ["a", 2, 3, 4, 5, 6]
    statuses = ["correct", "correct", "no_answer", "no_answer", "parse_error", "incorrect"]
    assert [each["status"] for each in grades] == statuses
    assert grades[0]["decided_by"] == "number"
    assert grades[5]["why"] == "The answer is 13, the gold answer 12."


def test_rows_with_the_same_id_count_as_one_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(num_runs: int, *, name_rows: bool) -> str:
        rows = [
            {"output": output, "gold": "7", "id": output} for output in ("7", "8", "9", "7.0") for _ in range(num_runs)
        ]
        if not name_rows:
            rows = [{key: row[key] for key in ("output", "gold")} for row in rows]
        grade_file(rows_file(tmp_path, rows), grader="number")
        return capsys.readouterr().out.splitlines()[-1]

    once = line(1, name_rows=True).split(",")[0:2]
    repeated = line(25, name_rows=True)
    assert "[15.0%, 85.0%]" in ",".join(once)
    assert repeated.startswith("Accuracy (flexible) 50.0% [15.0%, 85.0%], 50 of 100; ")
    assert "0 of 100, runs of 4 problems (Wilson's 95%)" in repeated
    assert line(25, name_rows=False).startswith("Accuracy (flexible) 50.0% [40.4%, 59.6%], 50 of 100; ")


def test_both_readings_and_samples_of_a_problem_are_summarized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [r"\boxed{7}", "That makes 7 eggs.", r"\boxed{8}", "Nothing."]
    file = rows_file(tmp_path, [{"id": 1, "output": text, "gold": "7"} for text in texts])
    grade_file(file, grader="number", output=tmp_path / "grades.jsonl")
    printed = capsys.readouterr().out
    assert "Accuracy (flexible) 50.0%" in printed
    assert "accuracy (strict) 25.0%" in printed
    grades = [json.loads(line) for line in (tmp_path / "grades.jsonl").read_text("utf-8").splitlines()]
    assert [each["status"] for each in grades] == ["correct", "correct", "incorrect", "no_answer"]
    assert [each["strict_status"] for each in grades] == ["correct", "no_answer", "incorrect", "no_answer"]
    figures = {words[0]: words[2] for line in printed.splitlines() if "@" in line and (words := line.split())}
    # Of the six pairs, one has no correct sample and two are ties of right and wrong.
    expected = {"pass@1": "50.0%", "maj@1": "50.0%", "pass@2": "83.3%", "maj@2": "66.7%", "pass@4": "100.0%"}
    assert figures == expected | {"maj@4": "100.0%", "avg@4": "50.0%"}
    grade_file(file, grader="integer")
    integers = capsys.readouterr().out
    assert "Accuracy (strict) 25.0%" in integers
    assert "flexible" not in integers


def test_options_name_the_keys_and_the_grader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows_file(tmp_path, [{"said": "#### 7", "right": "7"}, {"said": "8", "right": "<<3+4=7>>7\n#### 7"}])
    grade_file(file, grader="number", prediction="said", gold="right")
    assert "1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "options", "complaint"),
    [
        (['{"output": "7", "gold": "7"}', "nonsense"], {}, "line 2 is not JSON"),
        (["[1]"], {}, "line 1 is not a JSON object"),
        (['{"output": NaN, "gold": "7"}'], {}, "line 1 is not JSON: NaN is not a number"),
        (['{"output": "7", "gold": "7"}', '{"output": 1e999, "gold": "7"}'], {}, "line 2 is not JSON"),
        (['{"gold": "7"}'], {}, "line 1 has no key for the prediction (prediction, output, response, text)"),
        (['{"output": "7"}'], {}, "line 1 has no key for the gold answer"),
        (['{"output": "7", "gold": "7"}'], {"gold": "right"}, "has no key 'right'; its keys are 'output', 'gold'"),
        (['{"output": ["7"], "gold": "7"}'], {}, "key 'output' must be text or a number"),
        (
            ['{"output": "7", "gold": "lots"}'],
            {"grader": "number"},
            "line 1: The gold answer 'lots' is not a number",
        ),
        (['{"output": "7", "gold": "7"}'], {"grader": "maths"}, "no grader 'maths'. Did you mean 'math'?"),
        ([], {}, "has no rows"),
    ],
)
def test_an_invalid_row_is_a_one_sentence_error(
    tmp_path: Path, lines: list[str], options: dict[str, str], complaint: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines), "utf-8")
    with pytest.raises(UsageError) as caught:
        grade_file(file, **options)
    assert complaint in str(caught.value)


def test_an_unusable_file_is_a_one_sentence_error(tmp_path: Path) -> None:
    file = rows_file(tmp_path, [{"output": "7", "gold": "7"}])
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(file.read_bytes() * 2 + '{"output": "é", "gold": "7"}'.encode("latin-1"))
    with pytest.raises(UsageError, match="Cannot read"):
        grade_file(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="Cannot write"):
        grade_file(file, output=tmp_path / "no" / "such")
    with pytest.raises(UsageError, match="would overwrite"):
        grade_file(file, output=file)
    with pytest.raises(UsageError, match="line 3 is not UTF-8"):
        grade_file(latin)
