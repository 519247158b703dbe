"""Judges on labelled steps: figures of judges that are known, the same scores as in requests, and what is refused."""

import asyncio
import csv
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal
from zipfile import ZipFile

import pytest
import tomlkit
from typer.testing import CliRunner, Result

from evals.bench import champ, labels
from stepspec import SyncStepSpec
from stepspec.api.models import Pair, load_pair
from stepspec.cli import app
from stepspec.errors import UsageError
from stepspec.evaluation import judge_bench as bench
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.judge_bench import JudgeFigures, Judgment, LabelledSolution, read_labelled_steps
from stepspec.evaluation.run import EvalProblem
from stepspec.loop.judge import Decision, Evidence, Judge
from stepspec.loop.policy import Policy

QUESTION = "Ann has 3 pens. Ben has 4 more pens than Ann. How many pens does Ben have?"
LONGER = (
    "This happened at school. Vera has 40 books. Finn has 20 fewer books than Vera. Noah has 14 more books than Finn. "
    "Uma has 11 more books than Noah. How many books does Uma have?"
)
STEPS = ["Ann has 3 pens.\n\n", "Ben has 3 + 4 = 7 pens.\n\n", "So Ben has 7 pens.\n\n"]
JUDGES: Sequence[dict[str, Any]] = [
    {"kind": "likelihood", "threshold": -1000.0},
    {"kind": "likelihood", "statistic": "mean", "threshold": -1000.0},
    {"kind": "likelihood", "statistic": "log-ratio", "threshold": -1000.0},
    {"kind": "exact"},
    {"kind": "rating", "threshold": 0.0},
    {"kind": "yes-no", "threshold": 0.0},
    {"kind": "draft-confidence", "threshold": -1000.0},
]


def policy_of(*judges: Mapping[str, Any]) -> Policy:
    return Policy.model_validate({"version": 1, "summary": "x", "family": "score", "judges": judges})


def solution(labels: Sequence[float | bool], number: int = 0, **about: Any) -> LabelledSolution:
    steps = [f"{label:g} {step}" for step, label in enumerate(labels)]
    table = {"question": f"{QUESTION} {number}", "steps": steps, "labels": [*labels], "source": "a test"}
    return LabelledSolution.model_validate(table | about)


def write(file: Path, *lines: Any) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(notes=False)


class Scripted(Judge):
    """Scores a step by its text, which begins with its label."""

    asks_target: ClassVar[bool] = False
    is_probability = True

    kind: Literal["scripted"] = "scripted"
    how: Literal["label", "opposite", "same", "some", "fails"] = "label"
    seen: ClassVar[list[str]] = []

    async def score(self, evidence: Evidence) -> float | None:
        self.seen.append(evidence.step)
        label = float(evidence.step.split()[0])
        if self.how == "fails":
            raise RuntimeError("no such step")
        if self.how == "some":
            return None if label else 0.0
        return {"label": label, "opposite": 1 - label}.get(self.how, 0.5)

    def decide(self, score: float) -> Decision:
        return "accept"


def judged(
    pair: Pair, judges: Mapping[str, Judge], solutions: Sequence[LabelledSolution], file: Path
) -> tuple[dict[str, JudgeFigures], dict[str, str]]:
    figures, errors = asyncio.run(bench.judge_steps(pair, judges, solutions, file, lambda *_: None))
    return {each.judge: each for each in figures}, errors


def test_the_figures_of_known_judges(pair: Pair, tmp_path: Path) -> None:
    ways = ("label", "opposite", "same", "some")
    judges = {how: Scripted.model_validate({"how": how}) for how in ways}
    solutions = [solution([True, True, False], number) for number in range(30)]
    found, _ = judged(pair, judges, solutions, tmp_path / "judgments.jsonl")
    assert [found[how].area for how in ways] == [1.0, 0.0, 0.5, None]
    assert [found[how].num_scored for how in ways] == [90, 90, 90, 30]
    assert [found[how].brier for how in ways] == pytest.approx([0.0, 1.0, 0.25, 0.0])
    assert "separate" in (found["label"].why or "")
    assert (found["same"].area_low, found["same"].area_high) == (0.5, 0.5)
    assert found["some"].why == "there are not both right and wrong steps"
    assert found["label"].risks[65] == 0
    assert found["label"].risks[100] == pytest.approx(1 / 3)
    assert found["same"].risks == pytest.approx(dict.fromkeys(bench.SHARES, 1 / 3))
    assert found["opposite"].risks[30] == 1
    assert (found["label"].risk_area or 1) < 1 / 3 < (found["opposite"].risk_area or 0)
    assert [(each.mean_score, each.outcome.value) for each in found["label"].bins] == [(0.0, 0.0), (1.0, 1.0)]
    whole = bench.judge_bench({**about(), "judges": [*found.values()]}, solutions)
    assert (whole.num_questions, whole.num_steps, whole.best_area) == (30, 90, 1.0)


def about() -> dict[str, Any]:
    known = {"versions": {}, "commit": None, "hardware": {}, "started": "now", "engines": {}, "notes": {}}
    return known | {"data": "steps.jsonl", "data_sha256": ""}


def test_labels_may_be_probabilities_and_bound_the_area(pair: Pair, tmp_path: Path) -> None:
    solutions = [solution([0.75, 0.5, 0.25], number) for number in range(30)]
    found, _ = judged(pair, {"label": Scripted()}, solutions, tmp_path / "judgments.jsonl")
    whole = bench.judge_bench({**about(), "judges": [*found.values()]}, solutions)
    assert found["label"].area == whole.best_area == pytest.approx(0.722, abs=1e-3)
    assert found["label"].brier == pytest.approx((2 * 0.1875 + 0.25) / 3)
    assert whole.right == 0.5
    assert "the area is 0.72" in bench.in_words(whole)


def test_steps_after_the_first_wrong_one_are_not_judged(pair: Pair, tmp_path: Path) -> None:
    Scripted.seen.clear()
    solutions = [solution([True, False, True]), solution([0.5, 0.0, 0.5]), solution([True], steps=["1 a", "1 b"])]
    judged(pair, {"label": Scripted()}, solutions, tmp_path / "judgments.jsonl")
    assert Scripted.seen == ["1 0", "0 1", "0.5 0", "0 1", "1 a"]


def test_a_stopped_run_continues_after_the_last_judgment(pair: Pair, tmp_path: Path) -> None:
    file, judges = tmp_path / "new" / "judgments.jsonl", {"label": Scripted(), "same": Scripted(how="same")}
    solutions = [solution([True, True, False], number) for number in range(4)]

    def stop(_: None, done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(bench.judge_steps(pair, judges, solutions, file, stop))
    content = file.read_text()
    file.write_text(content[: content.rindex("{") + 20])  # as if killed while it wrote the last one
    Scripted.seen.clear()
    found, _ = judged(pair, judges, solutions, file)
    assert Scripted.seen == ["0 2"] + ["1 0", "1 0", "1 1", "1 1", "0 2", "0 2"] * 2
    assert (found["label"].area, found["same"].area, found["same"].num_steps) == (1.0, 0.5, 12)
    Scripted.seen.clear()
    again, _ = judged(pair, judges, solutions, file)
    assert Scripted.seen == []
    assert again == found


def test_judgments_are_of_one_judge_and_one_step(pair: Pair, tmp_path: Path) -> None:
    """Other settings, other steps before it or another question make another judgment, and another threshold none."""
    file = tmp_path / "judgments.jsonl"
    likelihood = policy_of(JUDGES[0]).judges[0]
    first = LabelledSolution(question=QUESTION, steps=STEPS, labels=[1, 1, 1], source="a test")

    def num_stored(judge: Judge, *solutions: LabelledSolution) -> int:
        judged(pair, {"judge": judge}, solutions, file)
        return sum(line.startswith("{") for line in file.read_text().splitlines())

    assert num_stored(likelihood, first) == 3
    assert num_stored(likelihood.model_copy(update={"threshold": -1.0}), first) == 3
    assert num_stored(likelihood.model_copy(update={"statistic": "mean"}), first) == 6
    assert num_stored(likelihood, first.model_copy(update={"steps": [STEPS[0], *STEPS[:2]]})) == 8
    assert num_stored(likelihood, first.model_copy(update={"question": "Why?"})) == 11


def test_a_judge_that_fails_is_asked_again_by_the_next_run(pair: Pair, tmp_path: Path) -> None:
    file, solutions = tmp_path / "judgments.jsonl", [solution([True, False])]
    found, errors = judged(pair, {"fails": Scripted(how="fails")}, solutions, file)
    assert errors == {"fails": "not able to judge some steps. The last error: RuntimeError: no such step"}
    assert (found["fails"].num_steps, found["fails"].why) == (0, "no step has a score")
    long = LabelledSolution(question=QUESTION, steps=["7 " * 3000], labels=[1], source="a test")
    assert "context" in judged(pair, {"likelihood": policy_of(JUDGES[0]).judges[0]}, [long], file)[1]["likelihood"]
    assert not file.read_text().strip()


def test_scores_are_those_of_a_request(pair: Pair, tmp_path: Path) -> None:
    accepting = [judge for judge in JUDGES if judge["kind"] != "exact"]
    policy = policy_of(*accepting).model_copy(update={"first_target_steps": 0})
    file = tmp_path / "all.toml"
    file.write_text(tomlkit.dumps(policy.model_dump(mode="json", exclude_none=True)), "utf-8")
    with SyncStepSpec(policy=str(file)) as spec:
        steps = spec.generate(LONGER).steps
    written = [*takewhile(lambda step: step.origin == "draft" and step.scores, steps)]
    own = pair.target.tokenizer
    ids = [own.encode_text(step.text) for step in written]
    assert len(written) > 1
    about = {"question": LONGER, "source": "draft", "ids": ids, "labels": [1.0] * len(ids)}
    labelled = LabelledSolution.model_validate(about | {"steps": [step.text for step in written]})
    judges, notes = bench.choose_judges({"all": policy}, pair, [labelled])
    assert notes == {}
    judged(pair, judges, [labelled], tmp_path / "judgments.jsonl")
    lines = (tmp_path / "judgments.jsonl").read_text().split()
    found = [Judgment.model_validate_json(line) for line in lines]
    for index, step in enumerate(written):
        own_scores = {each.judge: each.score for each in found[index * len(judges) : (index + 1) * len(judges)]}
        assert own_scores.keys() == step.scores.keys()
        for name, score in step.scores.items():
            assert own_scores[name] == pytest.approx(score, abs=1e-3), (index, name)
    assert {each.passes for each in found if not each.judge.startswith("draft")} == {1}
    assert {each.passes for each in found if each.judge.startswith("draft")} == {0}


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["judge-bench", *map(str, arguments)])


def test_the_command_writes_table_plot_csv_and_json(tmp_path: Path) -> None:
    lines = [
        {"question": f"{QUESTION} {number}", "steps": STEPS, "labels": labels, "source": "people"}
        for number, labels in enumerate([[True, True, True], [True, False], [0.5]])
    ]
    data = tmp_path / "steps.jsonl.gz"
    data.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    found = invoke(data, "--output", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "6 steps of 3 solutions to 3 questions, 25.0% of them wrong" in found.output
    for name in ("equivalence", "reward"):
        assert f"{name} is left out." in found.output
    stored = bench.JudgeBench.model_validate_json((tmp_path / "out" / "judges.json").read_bytes())
    assert [each.judge for each in stored.judges] == ["always", "exact", "rating.specreason", "likelihood.min"]
    assert [each.num_steps for each in stored.judges] == [6] * 4
    with (tmp_path / "out" / "judges.csv").open() as stream:
        rows = [*csv.DictReader(stream)]
    assert [row["judge"] for row in rows] == [each.judge for each in stored.judges]
    assert [*rows[0]] == [*bench.HEADS, "area low", "area high"]
    assert [float(row["area"]) for row in rows] == pytest.approx([each.area for each in stored.judges])
    seconds = [(each.ms or 0) / 1000 for each in stored.judges]
    assert [float(row["a judgment"]) for row in rows] == pytest.approx(seconds)
    assert [float(row["wrong in the best half"]) for row in rows] == [each.risks[50] for each in stored.judges]
    assert "1.5 of the problems have a bad outcome, and an interval needs at least 20." in found.output
    assert all(f">{each.judge}<" in (tmp_path / "out" / "judges.svg").read_text() for each in stored.judges)
    lines_before = (tmp_path / "out" / "judgments.jsonl").read_text().split()
    assert invoke(data, "--output", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "judgments.jsonl").read_text().split() == lines_before
    found = invoke(data, "--output", tmp_path / "other", "--csv", tmp_path / "j.csv", "--plots", tmp_path / "plots")
    assert found.exit_code == 0, found.output
    assert {file.name for file in (tmp_path / "other").iterdir()} == {"judges.json", "judgments.jsonl"}
    assert [file.name for file in (tmp_path / "plots").iterdir()] == ["judges.svg"]
    assert (tmp_path / "j.csv").read_text().splitlines()[0].startswith("judge,steps,area,Brier score,risk area,")


def test_results_of_different_data_are_in_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = invoke(write(tmp_path / "steps.jsonl", LINE), "--policy", "two-level")
    assert found.exit_code == 0, found.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-judge-bench", folder.name)


def test_without_a_wrong_step_there_is_no_area(tmp_path: Path) -> None:
    line = {"question": QUESTION, "steps": STEPS, "labels": [True, True, True], "source": "people"}
    found = invoke(write(tmp_path / "steps.jsonl", line), "--policy", "two-level", "--output", tmp_path / "out")
    assert found.exit_code == 0, found.output
    assert "No area or no interval: there are not both right and wrong steps." in found.output
    stored = bench.JudgeBench.model_validate_json((tmp_path / "out" / "judges.json").read_bytes())
    assert (stored.judges[0].area, stored.best_area, stored.judges[0].risks[100]) == (None, None, 0)


LINE = {"question": QUESTION, "steps": STEPS, "labels": [True, True, False], "source": "people"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not JSON", "line 2 is not JSON"),
        ([1], "line 2 is not a JSON object"),
        (LINE | {"labels": [True, 1.5]}, "line 2: labels.1 must be at most 1, got 1.5"),
        (LINE | {"labels": [-0.1]}, "line 2: labels.0 must be at least 0, got -0.1"),
        (LINE | {"labels": ["perhaps"]}, "line 2: labels.0"),
        (LINE | {"labels": []}, "line 2: labels must not be empty"),
        (LINE | {"labels": [1, 1, 1, 0]}, "line 2: each step needs a text, each label a step"),
        (LINE | {"steps": ["", "", ""]}, "line 2: each step needs a text"),
        (LINE | {"ids": [[1]]}, "each step its ids"),
        (LINE | {"question": ""}, "line 2: question must not be empty"),
        (LINE | {"answer": "7"}, "line 2: There is no key 'answer'"),
        ({"question": QUESTION}, "line 2: steps is missing"),
    ],
)
def test_a_line_that_is_no_labelled_solution_is_refused(line: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "steps.jsonl", LINE, line)
    with pytest.raises(UsageError) as refused:
        read_labelled_steps(file)
    assert message in str(refused.value)


def test_files_without_labelled_steps_are_refused(tmp_path: Path) -> None:
    for file, message in [
        (tmp_path / "none.jsonl", "Cannot read"),
        (write(tmp_path / "empty.jsonl"), "has no labelled steps"),
        (write(tmp_path / "steps.txt", LINE), "steps.txt is none of them"),
    ]:
        found = invoke(file, "--output", tmp_path / "out")
        assert isinstance(found.exception, UsageError)
        assert message in str(found.exception)
    assert not (tmp_path / "out").exists()


def test_judges_that_cannot_judge_labelled_steps_are_left_out(pair: Pair) -> None:
    compare = {"version": 1, "summary": "x", "family": "compare", "judges": [{"kind": "equivalence"}]}
    policies = {
        "mine": policy_of(*JUDGES, {"kind": "reward"}),
        "other": policy_of({"kind": "rating"}, JUDGES[0] | {"threshold": -1.0}),
        "compare": Policy.model_validate(compare),
    }
    judges, notes = bench.choose_judges(policies, pair, [LabelledSolution.model_validate(LINE)])
    assert [*judges] == ["likelihood.min", "likelihood.mean", "exact", "rating.specreason", "yes-no"]
    assert "no step has token ids of this draft" in notes["likelihood.log-ratio"]
    assert "no step has token ids of this draft" in notes["draft-confidence"]
    assert "the judge model 'reward'" in notes["reward"]
    assert notes["equivalence"] == "left out. Labelled steps do not have the target's own step."
    with pytest.raises(UsageError, match=r"equivalence is left out\."):
        bench.choose_judges({"compare": policies["compare"]}, pair, [LabelledSolution.model_validate(LINE)])
    ids = [pair.target.tokenizer.encode_text(step) for step in STEPS]
    for given, is_there in [(ids, True), ([[1], [2], [3]], False), ([[10**6], [2], [3]], False)]:
        labelled = LabelledSolution.model_validate(LINE | {"ids": given})
        assert ("likelihood.log-ratio" in bench.choose_judges(policies, pair, [labelled])[0]) is is_there


def test_steps_of_champ_are_wrong_from_the_marked_text_on(tmp_path: Path) -> None:
    text = "First\nof all.\n\nThen 2 + 2 = 5. Why not.\n\n\nSo it is 5.\n"
    marks = {"right": None, "first": 6, "second": text.index("2 + 2"), "blank": text.index("\n\nThen"), "last": 45}
    problems = {"P_1": {"_text": "How many?", "fws_annotations": {}}}
    for name, start in marks.items():
        problems["P_1"]["fws_annotations"][name] = {"text": text, "start_idx": start}  # pyright: ignore
    wheel = tmp_path / "champ.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr(champ.DATA, json.dumps({"problems": problems}))
    champ.main(wheel, tmp_path / "steps.jsonl", limit=150)
    found = {each.source.removeprefix("CHAMP, "): each for each in read_labelled_steps(tmp_path / "steps.jsonl")}
    assert {name: each.labels for name, each in found.items()} == {
        "right": [1, 1, 1],
        "first": [0],
        "second": [1, 0],
        "blank": [1, 0],
        "last": [1, 1, 0],
    }
    assert all("".join(each.steps) == text and each.question.startswith("How many?") for each in found.values())
    champ.main(wheel, tmp_path / "fewer.jsonl", limit=2)
    assert len(read_labelled_steps(tmp_path / "fewer.jsonl")) == 2
    for wrong in (tmp_path / "fewer.jsonl", tmp_path, tmp_path / "none.whl"):
        with pytest.raises(UsageError, match="is not CHAMP"):
            champ.main(wrong, tmp_path / "steps.jsonl", limit=1)


def test_steps_are_labelled_by_rollouts_of_the_target(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    given = {"pair": None, "benchmark": "gsm-mini", "data": None, "rollouts": 3, "batch": 64, "max_tokens": 400}
    labels.main(file, limit=4, **given)
    found = read_labelled_steps(file)
    assert {each.source for each in found} == {"draft", "target"}
    for each in found:
        assert {round(3 * label, 6) for label in each.labels} <= {0, 1, 2, 3}
        assert 0 not in each.labels[:-1], "it ends at the first step after which no answer is right"
        assert all(step.endswith("\n\n") for step in each.steps[:-1])
        assert (each.ids is not None) == (each.source == "draft")
    assert sum(map(sum, (each.labels for each in found if each.source == "target"))) > 0
    content = file.read_text()
    file.write_text(content[: content.rindex("{") + 100])  # as if killed while it wrote the last one
    labels.main(file, limit=4, **given)
    again = read_labelled_steps(file)
    assert again == found, "greedy solutions and the seeds of rollouts are always the same"


def test_only_problems_that_the_target_solves_are_labelled(pair: Pair) -> None:
    asked: list[str] = []

    class Unsolved(labels.Labeller):
        async def label(self, question: str, problem: EvalProblem, source: str) -> LabelledSolution:
            asked.append(f"{problem.id} {source}")
            return LabelledSolution(question=question, steps=["a"], labels=[1.0], source=source)

    problems = [(LONGER, EvalProblem("right", LONGER, "45")), (LONGER + " ", EvalProblem("wrong", LONGER, "1234"))]
    output = StringIO()
    with Grading("integer") as grading:
        labeller = Unsolved(pair, grading, num_rollouts=2, max_tokens=400)
        asyncio.run(labels.label_all(labeller, problems, {(LONGER, "draft")}, output, 2, lambda *_: None))
    assert asked == ["right target"]
    assert len(output.getvalue().splitlines()) == 1
