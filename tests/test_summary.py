"""The summary of a run's rows follows its definitions."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_runs import Script, answer_right, make_problems, make_result, make_run, play, rows_of

from evals.bench.certification import read_population
from stepspec.cli.report import main as report_runs
from stepspec.errors import UsageError
from stepspec.evaluation.grade import Grading
from stepspec.evaluation.records import Block, EngineRecord, Failure, PolicySummary, ResultRow, Throughput
from stepspec.evaluation.report.findings import failures_in_words
from stepspec.evaluation.run import summarise
from stepspec.evaluation.run.folder import what_differs
from stepspec.evaluation.stats import Share
from stepspec.loop.result import Result


def test_the_summary_follows_its_definitions(tmp_path: Path) -> None:
    summary = play(tmp_path / "run", Script(answer_right), make_problems(20))
    target, stepspec = summary.policies["target"], summary.policies["two-level"]
    assert (summary.n, target.n, target.accuracy, target.wall_s) == (20, 20, 1.0, 20.0)
    assert (target.step_acceptance, target.token_acceptance, target.accuracy_delta) == (None, None, None)
    assert (stepspec.step_acceptance, stepspec.token_acceptance) == (0.5, None)
    assert (stepspec.speedup_vs_target, stepspec.speedup_vs_token) == (2.0, 2.0)
    assert stepspec.length_ratio == pytest.approx(18 / 10)
    assert stepspec.tokens_per_s_ratio == pytest.approx(2 * 18 / 10)
    assert stepspec.tokens_per_target_pass == pytest.approx(1.8)
    assert stepspec.judge_controller_share == pytest.approx(0.25)
    assert stepspec.accuracy_delta == 0
    assert stepspec.accuracy_loss_upper95 is not None
    assert 0 < stepspec.accuracy_loss_upper95 < 0.2
    assert stepspec.tokens.committed == 20 * 18


def test_only_problems_finished_under_every_policy_are_compared(tmp_path: Path) -> None:
    problems = make_problems(12)
    play(tmp_path / "run", Script(answer_right), problems)
    rows = [row for row in rows_of(tmp_path / "run") if (row.policy, row.problem) != ("two-level", "p3")]
    slow = [row.model_copy(update={"wall_s": 1000.0}) if row.problem == "p3" else row for row in rows]
    summary = summarise(make_run(problems), slow)
    assert summary.n == 11
    assert (summary.policies["two-level"].n, summary.policies["target"].n) == (11, 12)
    assert summary.policies["two-level"].speedup_vs_target == 2.0


def test_a_run_without_the_policy_token_compares_only_with_the_target(tmp_path: Path) -> None:
    problems, policies = make_problems(3), ("target", "two-level")
    summary = play(tmp_path / "run", Script(answer_right, policies), problems, make_run(problems, policies))
    assert summary.policies["two-level"].speedup_vs_token is None
    assert summary.policies["two-level"].speedup_vs_target == 2.0


def test_a_policy_whose_requests_all_fail_is_reported_and_does_not_affect_the_others(tmp_path: Path) -> None:
    problems = make_problems(20)
    play(tmp_path / "run", Script(answer_right), problems)
    rows = [row for row in rows_of(tmp_path / "run") if row.policy != "token"]
    failures = [
        Failure(problem=problem.id, policy="token", error="It broke.", at="2000-01-01T00:00:00+00:00")
        for problem in problems
    ]
    summary = summarise(make_run(problems), rows, (), failures)
    assert (summary.n, list(summary.policies), summary.failed) == (20, ["target", "two-level"], {"token": 20})
    assert summary.policies["two-level"].speedup_vs_target == 2.0


def many_times(rows: Sequence[ResultRow], times: int) -> list[ResultRow]:
    """Return rows for so many times as many problems, each like one of those given."""
    num_problems = len({row.problem for row in rows})
    return [
        row.model_copy(update={"problem": f"p{int(row.problem[1:]) + number * num_problems}"})
        for number in range(times)
        for row in rows
    ]


def test_a_policy_does_not_pass_as_matched_by_failing_where_it_would_be_wrong(tmp_path: Path) -> None:
    problems = make_problems(400)
    play(tmp_path / "run", Script(answer_right), problems[:4])
    rows = many_times(rows_of(tmp_path / "run"), 100)
    assert (matched := summarise(make_run(problems), rows).matched) is not None
    assert matched.policy == "two-level"
    answered = [row for row in rows if row.policy != "two-level" or int(row.problem[1:]) >= 20]
    failures = [
        Failure(problem=f"p{number}", policy="two-level", error="Too long.", at="2000-01-01T00:00:00+00:00")
        for number in range(20)
    ]
    assert (matched := summarise(make_run(problems), answered, (), failures).matched) is not None
    assert matched.policy != "two-level"


def test_failed_requests_count_as_not_correct_and_the_accuracy_without_them_is_reported_too(tmp_path: Path) -> None:
    problems = make_problems(40)
    play(tmp_path / "run", Script(answer_right), problems)
    answered = [row for row in rows_of(tmp_path / "run") if row.policy != "two-level" or int(row.problem[1:]) >= 10]
    failures = [
        Failure(problem=f"p{number}", policy="two-level", error="Too long.", at="2000-01-01T00:00:00+00:00")
        for number in (*range(10), 20)  # the last one succeeded on a retry
    ]
    summary = summarise(make_run(problems), answered, (), failures)
    found = summary.policies["two-level"]
    assert failures_in_words(summary) == [
        "10 requests failed and count as not correct. two-level on p0: Too long. All errors are in failures.jsonl. "
        "'stepspec eval --retry-errors' repeats them."
    ]
    failures = [each.model_copy(update={"too_long": each.problem != "p4"}) for each in failures]
    assert "p4" in failures_in_words(summarise(make_run(problems), answered, (), failures))[0]
    failures = [each.model_copy(update={"too_long": True}) for each in failures]
    assert "--retry" not in failures_in_words(summarise(make_run(problems), answered, (), failures))[0]
    assert (found.n, found.num_rows, found.failed, found.unanswered) == (40, 30, 10, 10)
    assert (found.accuracy, found.accuracy_without_failed, found.accuracy_delta) == (0.75, 1.0, -0.25)
    assert found.accuracy_ci[1] < 1.0
    assert (found.answers_lost, found.answers_gained) == (10, 0)
    assert (found.lost, found.won, found.num_compared) == (10, 0, 40)
    assert found.no_speed == "the target answered 10 of the 40 requests that it did not"
    assert found.speedup_vs_target == 2.0  # over the problems that both policies answered


def garbage(policy: str, question: str, *, cut: bool) -> Result:
    """Answer right under `target` and `token`; the others write nothing, or a cut-off text, in almost no time."""
    if policy in ("target", "token"):
        return answer_right(policy, question)
    nothing = make_result("a a a" if cut else "", 0.1)
    return replace(nothing, finish_reason="length") if cut else nothing


@pytest.mark.parametrize(("cut", "num_problems"), [(False, 3), (True, 30)])
def test_a_policy_that_writes_garbage_quickly_is_never_the_headline(
    tmp_path: Path, cut: bool, num_problems: int, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, policies = make_problems(num_problems), ("target", "token", "two-level", "draft")
    run = make_run(problems, policies)
    exact = {name: policy.model_copy(update={"kind": "token"}) for name, policy in run.policies.items()}
    script = Script(lambda policy, question: garbage(policy, question, cut=cut), policies)
    # This holds even for policies that are declared exact, whose accuracy needs no proof.
    summary = play(tmp_path / "run", script, problems, run.model_copy(update={"policies": exact}))
    assert summary.matched is not None
    assert summary.matched.policy == "target"
    for name in ("two-level", "draft"):
        assert summary.policies[name].speedup_vs_target == pytest.approx(10)
        assert summary.policies[name].no_speed == f"it answered none of the {num_problems} requests"
        assert summary.policies[name].accuracy_kept == "not known"
    report = (tmp_path / "run" / "report.md").read_text("utf-8")
    title, found, *_ = report.split("\n\n")
    assert "10.00" not in title + found
    assert all(line.startswith("| tokens/s |") for line in report.splitlines() if "10.00×" in line)
    assert report.count("| not known | – | – |") == 2
    report_runs([tmp_path / "run"])
    assert "The speed of draft does not count" in " ".join(capsys.readouterr().out.split())


def test_if_no_policy_answers_anything_the_headline_says_so(tmp_path: Path) -> None:
    problems = make_problems(12)
    summary = play(tmp_path / "run", Script(lambda policy, question: make_result("", 0.1)), problems)
    kept = {name: each.accuracy_kept for name, each in summary.policies.items()}
    assert kept == {"target": None, "token": "exact up to rounding", "two-level": "not known"}
    report = (tmp_path / "run" / "report.md").read_text("utf-8")
    assert report.split("\n\n")[1].startswith("No policy answered anything: every text was cut off or has no answer")
    assert "| exact up to rounding | – | – |" in report


def test_rows_of_another_run_are_refused(tmp_path: Path) -> None:
    problems = make_problems(1)
    play(tmp_path / "run", Script(answer_right), problems)
    with pytest.raises(UsageError, match="'token', which this run does not have"):
        summarise(make_run(problems, ("target", "two-level")), rows_of(tmp_path / "run"))


def test_a_policy_without_rows_is_left_out(tmp_path: Path) -> None:
    problems = make_problems(2)
    play(tmp_path / "run", Script(answer_right), problems)
    summary = summarise(make_run(problems), [row for row in rows_of(tmp_path / "run") if row.policy == "target"])
    assert list(summary.policies) == ["target"]
    assert (summary.n, summary.policies["target"].speedup_vs_target) == (2, 1.0)
    assert summarise(make_run(problems), []).policies == {}


def test_repeats_count_as_one_problem(tmp_path: Path) -> None:
    rng = random.Random(0)

    def guess(policy: str, question: str) -> Result:
        return answer_right(policy, question) if rng.random() < 0.5 else make_result("no box")

    problems = make_problems(6)
    summary = play(tmp_path / "run", Script(guess), problems, make_run(problems, num_repeats=3))
    rows = [row for row in rows_of(tmp_path / "run") if row.policy == "target"]
    assert summary.policies["target"].n == 6
    assert summary.policies["target"].accuracy == pytest.approx(sum(row.status == "correct" for row in rows) / 18)
    assert summary.policies["target"].no_answer == sum(row.status == "no_answer" for row in rows) > 0


def test_repeats_have_pass_maj_and_avg(tmp_path: Path) -> None:
    """A request that ended in an error is a sample without an answer."""

    def answer(policy: str, question: str) -> Result:
        return answer_right(policy, question) if policy == "target" else make_result(r"\boxed{99}")

    problems = make_problems(2)
    play(tmp_path / "run", Script(answer), problems, run := make_run(problems, num_repeats=2))
    rows = [row for row in rows_of(tmp_path / "run") if row.key != ("p0", "target", 1)]
    failure = Failure(problem="p0", policy="target", repeat=1, error="It broke.", at="2000-01-01T00:00:00+00:00")
    target, token = (summarise(run, rows, (), [failure]).policies[name] for name in ("target", "token"))
    values = {"pass@1": 0.75, "maj@1": 0.75, "pass@2": 1.0, "maj@2": 1.0, "avg@2": 0.75}
    assert {name: each.value for name, each in target.at_k.items()} == values
    assert target.at_k["avg@2"].ci == target.accuracy_ci
    assert {each.value for each in token.at_k.values()} == {0.0}
    single = summarise(run, [row for row in rows if row.repeat == 0])
    assert all(not each.at_k for each in single.policies.values())


def test_rows_and_summary_have_both_readings(tmp_path: Path) -> None:
    """The status of a row is by the flexible reading, and the strict one is what grading without it gives."""
    texts = [r"\boxed{0}", "#### 1", "The answer is 2.", "That makes 3 eggs.", "That makes 5 eggs.", "Nothing."]
    problems = make_problems(6)
    by_question = {problem.question: text for problem, text in zip(problems, texts, strict=True)}

    def answer(policy: str, question: str) -> Result:
        return make_result(by_question.get(question, ""))

    run = make_run(problems, ("target",), grader="number").model_copy(update={"last_number": True})
    summary = play(tmp_path / "run", Script(answer, ("target",)), problems, run)
    with Grading("number", last_number=False) as grading:
        strict = [grading.grade(text, problem.gold).status for text, problem in zip(texts, problems, strict=True)]
    assert strict == [*["correct"] * 3, *["no_answer"] * 3]
    rows = rows_of(tmp_path / "run")
    assert [row.strict_status for row in rows] == strict
    assert [row.status for row in rows] == [*["correct"] * 4, "incorrect", "no_answer"]
    assert '"strict_status":"no_answer"' in (tmp_path / "run" / "rows.jsonl").read_text("utf-8")
    target = summary.policies["target"]
    assert (summary.reading, target.accuracy, target.strict_accuracy) == ("flexible", 4 / 6, 3 / 6)
    assert target.strict_accuracy_ci == pytest.approx(Share.of([1, 1, 1, 0, 0, 0]).interval())
    # Rows stored earlier do not have the field, and runs not the reading.
    older = [ResultRow.model_validate(row.model_dump(exclude={"strict_status"})) for row in rows]
    assert older == rows
    unknown = summarise(run.model_copy(update={"last_number": None}), older)
    assert (unknown.reading, unknown.policies["target"].strict_accuracy) == (None, 3 / 6)


def test_a_benchmark_without_the_last_number_has_only_the_strict_reading(tmp_path: Path) -> None:
    summary = play(tmp_path / "run", Script(answer_right), make_problems(2))
    assert (summary.reading, summary.policies["target"].strict_accuracy) == ("strict", None)
    of_numbers = make_run(make_problems(2), grader="number").model_copy(update={"last_number": False})
    assert of_numbers.reading == "strict"


def test_a_run_stored_without_the_reading_resumes(tmp_path: Path) -> None:
    run = make_run(make_problems(2), grader="number")
    flexible, strict = (run.model_copy(update={"last_number": each}) for each in (True, False))
    assert what_differs(run, flexible) == ""
    assert what_differs(flexible, strict) == "last_number (True there, False here)"


def test_what_differs_in_an_engine_is_named() -> None:
    run = make_run(make_problems(1))
    there, here = (
        run.model_copy(
            update={
                "engines": {"target": EngineRecord(name="one", weights=None, dtype=None, device="cpu", threads=number)}
            }
        )
        for number in (1, 2)
    )
    assert what_differs(there, here) == "engines.target.threads (1 there, 2 here)"


def test_stored_counts_of_last_numbers_still_load(tmp_path: Path) -> None:
    target = play(tmp_path / "run", Script(answer_right), make_problems(2)).policies["target"]
    assert PolicySummary.model_validate({**target.model_dump(), "by_last_number": 3}) == target


def test_groups_are_by_the_fields_in_which_problems_differ(tmp_path: Path) -> None:
    problems = make_problems(30)
    play(tmp_path / "run", Script(answer_right), problems)
    rows = [
        row.model_copy(
            update={
                "level": int(row.problem[1:]) % 3,
                "status": "incorrect" if row.policy == "two-level" and int(row.problem[1:]) % 3 == 2 else "correct",
            }
        )
        for row in rows_of(tmp_path / "run")
    ]
    groups = summarise(make_run(problems), rows).policies["two-level"].groups
    assert list(groups) == ["level", "length"]  # the problems have no subject
    assert [(group.name, group.n, group.accuracy) for group in groups["level"]] == [
        ("0", 10, 1.0),
        ("1", 10, 1.0),
        ("2", 10, 0.0),
    ]
    assert [(group.accuracy_delta, group.speedup_vs_target) for group in groups["level"]] == [(0, 2), (0, 2), (-1, 2)]
    assert [(group.name, group.n) for group in groups["length"]] == [("short", 10), ("middle", 10), ("long", 10)]


def test_the_best_exact_policy_is_the_baseline_and_the_fastest_that_keeps_accuracy_is_named(tmp_path: Path) -> None:
    problems, policies = make_problems(400), ("target", "token", "lookup", "two-level")
    walls = {"target": 1.0, "token": 0.8, "lookup": 0.7, "two-level": 0.4}

    def answer(policy: str, question: str) -> Result:
        return make_result(answer_right(policy, question).answer, walls[policy])

    run = make_run(problems, policies)
    exact = {"kind": "token"}
    run = run.model_copy(
        update={
            "policies": {
                name: policy.model_copy(update=exact if name == "lookup" else {})
                for name, policy in run.policies.items()
            }
        }
    )
    play(tmp_path / "run", Script(answer, policies), problems[:4], make_run(problems[:4], policies))
    rows = [
        row.model_copy(update={"status": "no_answer"}) if (row.policy, row.problem) == ("two-level", "p7") else row
        for row in many_times(rows_of(tmp_path / "run"), 100)
    ]
    summary = summarise(run, rows)
    assert summary.token_baseline == "lookup"
    assert summary.policies["two-level"].speedup_vs_token == pytest.approx(0.7 / 0.4)
    assert summary.matched is not None
    # One lost answer in 400 does not prove a loss below one point: the 95% bound is 1.2 points.
    assert (summary.matched.policy, summary.matched.speedup) == ("lookup", pytest.approx(1 / 0.7))
    assert summary.policies["two-level"].accuracy_p == 1.0
    assert summary.policies["two-level"].n_for_one_point is not None


def test_a_token_level_policy_that_leaves_answers_out_is_no_baseline(tmp_path: Path) -> None:
    problems, policies = make_problems(40), ("target", "token", "lookup", "two-level")
    walls = {"target": 1.0, "token": 0.8, "lookup": 0.1, "two-level": 0.4}

    def answer(policy: str, question: str) -> Result:
        cut = policy == "lookup" and question.endswith(("1?", "3?", "5?"))
        return make_result("no box" if cut else answer_right(policy, question).answer, walls[policy])

    run = make_run(problems, policies)
    kinds = {name: policy.model_copy(update={"kind": "token"}) for name, policy in run.policies.items()}
    run = run.model_copy(update={"policies": run.policies | {name: kinds[name] for name in ("token", "lookup")}})
    summary = play(tmp_path / "run", Script(answer, policies), problems, run)
    assert summary.policies["lookup"].no_speed is not None
    assert summary.token_baseline == "token"


@pytest.mark.parametrize("policies", [("target",), ("two-level",), ("two-level", "token")])
def test_a_run_with_nothing_to_compare_with_has_its_summary(tmp_path: Path, policies: tuple[str, ...]) -> None:
    problems = [replace(problem, level=number % 2) for number, problem in enumerate(make_problems(120))]
    summary = play(tmp_path / "run", Script(answer_right, policies), problems, make_run(problems, policies))
    assert {group.name: group.n for group in summary.policies[policies[0]].groups["level"]} == {"0": 60, "1": 60}


def test_a_population_of_outcomes_is_read_from_a_run(tmp_path: Path) -> None:
    play(tmp_path / "run", Script(answer_right), make_problems(4))
    found = read_population(tmp_path / "run")
    assert found.target.shape == (4, 1)
    assert found.losses.tolist() == [[0.0] * 4] * len(found.policies)


def test_stored_figures_of_energy_still_load() -> None:
    throughput = {"problems_per_s": 1.0, "tokens_per_s": 2.0, "speedup_vs_target": None, "speedup_vs_target_ci": None}
    assert Throughput.model_validate(throughput | {"joules_per_problem": 3.0}) == Throughput.model_validate(throughput)
    block = {"policy": "target", "jobs": [["p", 0]], "wall_s": 1.0, "committed_tokens": 3}
    assert Block.model_validate_json(json.dumps(block | {"joules": 5.0})) == Block.model_validate(block)


def test_stored_figures_of_other_programs_still_load() -> None:
    block = {"policy": "target", "jobs": [["p", 0]], "wall_s": 1.0, "committed_tokens": 3}
    assert Block.model_validate(block | {"others": 0.5}) == Block.model_validate(block | {"others_share": 0.5})
