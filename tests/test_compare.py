"""Comparisons find known differences, refuse runs that cannot be compared, and list what else differs."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from stepspec.cli.compare import main as compare_runs
from stepspec.errors import UsageError
from stepspec.evaluation.compare import Comparison, PolicyComparison, compare
from stepspec.evaluation.compare.tables import differences_table, policy_table
from stepspec.evaluation.records import EngineRecord, PolicyRecord, ResultRow, RunRecord, TimeRecord, TokenRecord

POLICIES = ("target", "two-level")


def make_run(policies: Sequence[str] = POLICIES, **changed: object) -> RunRecord:
    """Return the conditions of a run, with `changed` applied."""
    run = RunRecord(
        benchmark="sums",
        data_sha256="1234567890abcdef",
        num_problems=40,
        prompt_id="boxed",
        prompt_version="aaaaaaaaaaaa",
        policies={policy: PolicyRecord(text=policy, sha256=f"hash of {policy}", kind="step") for policy in policies},
        engines={"target": EngineRecord(name="big", weights="1", dtype="float32", device="cpu"), "draft": None},
        pair="pair",
        temperature=0.0,
        top_p=1.0,
        max_tokens=640,
        seed=0,
        concurrency=1,
        versions={"python": "3.11"},
        commit=None,
        hardware={"cpu": "A Processor"},
        started="2000-01-01T00:00:00+00:00",
    )
    return run.model_copy(update=changed)


def make_row(
    problem: str, policy: str = "target", repeat: int = 0, *, correct: bool = True, **changed: object
) -> ResultRow:
    """Return a row of one second and a hundred tokens, with `changed` applied."""
    row = ResultRow(
        problem=problem,
        policy=policy,
        repeat=repeat,
        status="correct" if correct else "incorrect",
        answer="1",
        gold="1",
        finish_reason="stop",
        output_sha256="0",
        wall_s=1.0,
        tokens=TokenRecord(committed=100),
        time_s=TimeRecord(),
        num_prompt_tokens=10,
        steps_judged=0,
        steps_accepted=0,
        token_drafted=0,
        token_accepted=0,
        target_passes=100,
    )
    return row.model_copy(update=changed)


def make_rows(n: int = 40, policies: Iterable[str] = POLICIES, seed: int = 0) -> list[ResultRow]:
    """Return rows that differ from problem to problem; about three in four are correct."""
    rng = random.Random(seed)
    return [
        make_row(
            f"p{index}",
            policy,
            correct=rng.random() < 0.75,
            wall_s=rng.uniform(0.5, 1.5),
            tokens=TokenRecord(committed=rng.randrange(50, 150)),
        )
        for index in range(n)
        for policy in policies
    ]


def of_target(rows_a: Iterable[ResultRow], rows_b: Iterable[ResultRow]) -> PolicyComparison:
    return compare(make_run(), rows_a, make_run(), rows_b, ["target"]).policies[0]


# Figures.


def test_a_run_compared_with_itself_differs_in_nothing() -> None:
    comparison = compare(make_run(), make_rows(), make_run(), make_rows())
    assert comparison.differences == []
    assert comparison.warning is None
    assert "from chance alone" in comparison.conclusions[0]
    assert "alternate" not in " ".join(comparison.conclusions)
    another = compare(make_run(), make_rows(), make_run(started="2001-01-01T00:00:00+00:00"), make_rows())
    assert "The runs did not alternate" in another.conclusions[-1]
    assert [(each.a.policy, each.b.policy) for each in comparison.policies] == [(name, name) for name in POLICIES]
    for each in comparison.policies:
        assert (each.num_problems, each.num_rows, each.a, each.b.num_unpaired) == (40, 40, each.b, 0)
        assert (each.accuracy_delta, each.accuracy_p) == (0, 1)
        assert each.accuracy_delta_ci[0] < 0 < each.accuracy_delta_ci[1]
        assert (each.speedup, each.length_ratio, each.tokens_per_s_ratio) == (1, 1, 1)
        assert each.speedup_ci == each.length_ratio_ci == each.tokens_per_s_ratio_ci == (1, 1)


def test_known_differences_are_found() -> None:
    rng = random.Random(1)
    rows_a = [make_row(f"p{index}", wall_s=rng.uniform(1, 3)) for index in range(200)]
    rows_b = [
        row.model_copy(
            update={
                "wall_s": row.wall_s / 2 * rng.uniform(0.8, 1.2),
                "tokens": TokenRecord(committed=rng.randrange(110, 131)),
                "status": "incorrect" if index < 30 else "correct",
            }
        )
        for index, row in enumerate(rows_a)
    ]
    found = of_target(rows_a, rows_b)
    assert found.accuracy_delta == pytest.approx(-0.15)
    assert found.accuracy_delta_ci[0] < -0.15 < found.accuracy_delta_ci[1] < 0
    assert found.accuracy_p < 1e-6
    assert found.speedup_ci is not None
    assert 1.9 < found.speedup_ci[0] < 2 < found.speedup_ci[1] < 2.1
    assert found.length_ratio_ci is not None
    assert 1.18 < found.length_ratio_ci[0] < 1.2 < found.length_ratio_ci[1] < 1.22
    assert found.tokens_per_s_ratio_ci is not None
    assert 2.25 < found.tokens_per_s_ratio_ci[0] < 2.4 < found.tokens_per_s_ratio_ci[1] < 2.55
    assert found.speedup is not None
    assert found.length_ratio is not None
    assert found.tokens_per_s_ratio == pytest.approx(found.speedup * found.length_ratio)


def test_swapping_the_runs_inverts_every_figure() -> None:
    there, back = of_target(make_rows(), make_rows(seed=1)), of_target(make_rows(seed=1), make_rows())
    assert (there.a, there.b) == (back.b, back.a)
    assert there.accuracy_delta == -back.accuracy_delta != 0
    assert there.accuracy_p == back.accuracy_p
    for name in ("speedup", "length_ratio", "tokens_per_s_ratio"):
        assert getattr(there, name) == pytest.approx(1 / getattr(back, name))


def test_the_figures_of_a_side_follow_their_definitions() -> None:
    rows = [
        make_row(
            "a",
            first_step_s=0.1,
            first_answer_s=0.5,
            longest_gap_s=0.2,
            steps_judged=3,
            steps_accepted=1,
            token_drafted=10,
        ),
        make_row("b", correct=False, first_step_s=0.4, steps_judged=1, steps_accepted=1, token_accepted=4),
        make_row("c", status="no_answer", first_step_s=0.3, finish_reason="length", wall_s=4.0),
    ]
    side = of_target(rows, rows).a
    assert (side.accuracy, side.no_answer, side.truncated) == (pytest.approx(1 / 3), 1, 1)
    assert (side.wall_s, side.tokens) == (6.0, 300)
    assert (side.first_step_s, side.first_answer_s, side.longest_gap_s) == (0.3, 0.5, 0.2)
    assert (side.step_acceptance, side.token_acceptance) == (0.5, 0.4)


def test_figures_that_were_not_measured_are_null() -> None:
    rows = [make_row(f"p{index}", tokens=TokenRecord()) for index in range(12)]
    found = of_target(rows, rows)
    assert (found.length_ratio, found.tokens_per_s_ratio, found.a.step_acceptance) == (None, None, None)
    assert (found.a.first_step_s, found.a.token_acceptance, found.speedup) == (None, None, 1)
    assert of_target(rows[:9], rows).speedup_ci is None  # too few problems for an interval


def test_repeats_are_paired_with_their_own_and_count_as_one_problem() -> None:
    rows_a = [make_row(f"p{index}", repeat=repeat, correct=repeat == 0) for index in range(20) for repeat in range(2)]
    rows_b = [row.model_copy(update={"status": "correct"}) for row in reversed(rows_a) if row.repeat == 1]
    found = of_target(rows_a, rows_b)
    assert (found.num_problems, found.num_rows, found.a.num_unpaired, found.b.num_unpaired) == (20, 20, 20, 0)
    assert (found.a.accuracy, found.b.accuracy) == (0, 1)
    both = of_target(rows_a, rows_a)
    assert (both.num_problems, both.num_rows, both.a.accuracy) == (20, 40, 0.5)


def test_rows_of_only_one_run_are_counted_and_left_out() -> None:
    rows_b = [*make_rows(30), make_row("elsewhere", wall_s=1000.0)]
    found = of_target(make_rows(40), rows_b)
    assert (found.num_problems, found.a.num_unpaired, found.b.num_unpaired) == (30, 10, 1)
    assert found.speedup == 1


# Which policies.


def test_the_common_or_the_named_policies_are_compared() -> None:
    a, b = make_run(("target", "token", "old")), make_run(("new", "token", "target"))
    rows = make_rows(12, ("target", "token", "old", "new"))

    def compared(*names: str) -> list[tuple[str, str]]:
        found = compare(a, rows, b, rows, names)
        return [(each.a.policy, each.b.policy) for each in found.policies]

    assert compared() == [("target", "target"), ("token", "token")]
    assert compared("token") == [("token", "token")]
    assert compared("old=new", "target") == [("old", "new"), ("target", "target")]


def test_a_policy_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(UsageError, match=r"run B called 'tokn'\. Did you mean 'token'"):
        compare(make_run(), [], make_run(("token",)), [], ["target=tokn"])
    with pytest.raises(UsageError, match=r"no policy in common.*NAME_IN_A=NAME_IN_B"):
        compare(make_run(("old",)), [], make_run(("new",)), [])
    with pytest.raises(UsageError, match="no problem that both runs have finished under target, two-level"):
        compare(make_run(), make_rows(), make_run(), [])


def test_a_policy_that_one_run_has_not_begun_is_left_out() -> None:
    comparison = compare(make_run(), make_rows(), make_run(), make_rows(policies=["target"]))
    assert [each.a.policy for each in comparison.policies] == ["target"]


# Other data.


def test_different_data_are_refused() -> None:
    other = make_run(data_sha256="fedcba0987654321", benchmark="products")
    with pytest.raises(UsageError, match=r"sums 1234567890ab with 40 problems and products fedcba098765.*--force"):
        compare(make_run(), make_rows(), other, make_rows())
    with pytest.raises(UsageError, match="--limit"):
        compare(make_run(), make_rows(), make_run(data_sha256="2", num_problems=20), make_rows(20))


def test_different_data_are_compared_by_force_where_the_right_answers_agree() -> None:
    rows_b = [row.model_copy(update={"gold": "2"}) if row.problem in ("p3", "p4") else row for row in make_rows(30)]
    comparison = compare(make_run(), make_rows(), make_run(data_sha256="2"), rows_b, force=True)
    found = comparison.policies[0]
    assert (found.num_problems, found.num_other_answers, found.a.num_unpaired, found.b.num_unpaired) == (28, 2, 10, 0)
    assert comparison.warning is not None
    assert "covers only the 28 problems" in comparison.warning
    assert "Left out: 2 with the same id but a different right answer." in comparison.warning


def test_the_same_data_with_two_prompts_needs_no_force() -> None:
    other = make_run(benchmark="sums-8shot", prompt_id="shots", prompt_version="bbbbbbbbbbbb")
    comparison = compare(make_run(), make_rows(), other, make_rows())
    assert {each.name for each in comparison.differences} == {"benchmark", "prompt_id", "prompt_version"}
    assert comparison.conclusions[0].startswith("Apart from chance, only the prompt can have changed")
    assert comparison.warning is None


# Differences and conclusions.


def test_differences_are_listed_by_name_with_hashes_cut_short() -> None:
    changed = make_run(
        commit="0123456789abcdef" * 2 + "-dirty",
        engines={"target": EngineRecord(name="big", weights="1", dtype="bfloat16", device="cpu"), "draft": None},
        started="2001-01-01T00:00:00+00:00",
    )
    changed.policies["two-level"] = PolicyRecord(text="other", sha256="f" * 64, kind="step")
    comparison = compare(make_run(), make_rows(), changed, make_rows())
    assert [(each.name, each.a, each.b) for each in comparison.differences] == [
        ("engines.target.dtype", "float32", "bfloat16"),
        ("commit", None, "0123456789ab-dirty"),
        ("policies.two-level", "hash of two-level", "f" * 12),
    ]
    assert "As the policy, the models and the software differ, changes" in comparison.conclusions[0]


@pytest.mark.parametrize(
    ("changed", "phrase"),
    [
        ({"hardware": {"cpu": "Another"}}, "The hardware differs"),
        ({"engines": {"target": EngineRecord(name="big", weights="1", dtype="float32", device="gpu")}}, "hardware"),
        ({"concurrency": 4}, "The concurrency differs"),
        ({"grader": "symbolic"}, "not graded by the same rule"),
        ({"seed": 1, "temperature": 0.7}, "but not the seed"),
    ],
)
def test_the_conclusions_say_what_cannot_be_concluded(changed: dict[str, object], phrase: str) -> None:
    sentences = " ".join(compare(make_run(), make_rows(), make_run(**changed), make_rows()).conclusions)
    assert phrase in sentences
    assert phrase not in " ".join(compare(make_run(), make_rows(), make_run(), make_rows()).conclusions)


def test_rows_that_ran_on_different_machines_of_a_cluster_are_counted() -> None:
    near, far = (
        [row.model_copy(update={"node": node}) for row in make_rows(4, ["target"])] for node in ("10.0.0.1", "10.0.0.2")
    )
    comparison = compare(make_run(), near, make_run(), [*near[:1], *far[1:]], ["target"])
    assert comparison.policies[0].num_apart == 3
    assert "3 of 4 pairs of rows ran on different machines" in " ".join(comparison.conclusions)
    same = compare(make_run(), near, make_run(), near, ["target"])
    assert "machines" not in " ".join(same.conclusions)


def test_a_seed_changes_nothing_at_temperature_0() -> None:
    comparison = compare(make_run(), make_rows(), make_run(seed=1), make_rows())
    assert [each.name for each in comparison.differences] == ["seed"]
    assert "from chance alone" in comparison.conclusions[0]
    assert not any("draws" in sentence for sentence in comparison.conclusions)


def test_an_unknown_machine_is_not_another_machine() -> None:
    for unknown, known in ({"machine": None}, {"machine": "a"}), ({"hardware": {}}, {"hardware": {"cpu": "A"}}):
        comparison = compare(make_run(**unknown), make_rows(), make_run(**known), make_rows())
        assert comparison.differences == []
        assert "from chance alone" in comparison.conclusions[0]
        assert "hardware" not in " ".join(comparison.conclusions)
    other = compare(make_run(machine="b"), make_rows(), make_run(machine="a"), make_rows())
    assert "only the hardware" in other.conclusions[0]


# At the command line.


def write_run(folder: Path, run: RunRecord, rows: Iterable[ResultRow]) -> Path:
    folder.mkdir()
    (folder / "run.json").write_text(run.model_dump_json(), "utf-8")
    (folder / "rows.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows), "utf-8")
    return folder


def test_the_command_prints_differences_then_figures_then_conclusions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_run(tmp_path / "a", make_run(("[x]",)), make_rows(policies=["[x]"]))
    b = write_run(tmp_path / "b", make_run(("[x]",), temperature=0.7), make_rows(policies=["[x]"], seed=1))
    compare_runs(a, b, json_file=tmp_path / "comparison.json")
    printed = capsys.readouterr().out
    positions = [
        printed.index(text)
        for text in ("A is ", "temperature", "[x]: 40 problems", "accuracy", "Apart from chance, only")
    ]
    assert positions == sorted(positions)
    stored = Comparison.model_validate_json((tmp_path / "comparison.json").read_bytes())
    assert stored == compare(
        make_run(("[x]",)), make_rows(policies=["[x]"]), stored.b, make_rows(policies=["[x]"], seed=1)
    )


def test_forced_comparisons_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", make_run(), make_rows())
    b = write_run(tmp_path / "b", make_run(data_sha256="2"), make_rows())
    compare_runs(a, b, force=True)
    assert capsys.readouterr().err.startswith(
        "Warning: The runs use different data. The comparison covers only the 40 problems"
    )


def test_folders_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", make_run(), make_rows())
    write_run(tmp_path / "b", make_run(), [])
    for folder in (tmp_path / "missing", run / "rows.jsonl"):
        with pytest.raises(UsageError, match="no run in"):
            compare_runs(run, folder)
    with pytest.raises(UsageError, match="several runs; give one of them"):
        compare_runs(run, tmp_path)
    with pytest.raises(UsageError, match="no problem that both"):
        compare_runs(run, tmp_path / "b")
    (tmp_path / "b" / "rows.jsonl").write_text("{}\n", "utf-8")
    with pytest.raises(UsageError, match="line 1 is not a valid ResultRow"):
        compare_runs(run, tmp_path / "b")


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_tables_fit_the_terminal(width: int) -> None:
    rows = [
        row.model_copy(update={"first_step_s": 0.5, "steps_judged": 4, "steps_accepted": 3, "token_drafted": 1})
        for row in make_rows()
    ]
    other = make_run(hardware={"cpu": "A Processor with a rather long name @ 3.00 GHz"})
    comparison = compare(make_run(), rows, other, make_rows(30, seed=1))
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(differences_table(comparison.differences), policy_table(comparison.policies[0]))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = " ".join(text.split())
    for part in ("target: 30 problems", "10 rows only in A left out", "hardware.cpu", "steps accepted", "as fast"):
        assert part in words


def test_a_run_with_missing_answers_has_no_speed_in_a_comparison() -> None:
    complete = [make_row(f"p{index}", "two-level") for index in range(40)]
    short = [
        make_row(f"p{index}", "two-level", wall_s=0.1, **({"finish_reason": "length"} if index < 10 else {}))
        for index in range(40)
    ]
    run = make_run(("two-level",))
    for a, b, slow, fast in ((complete, short, "A", "B"), (short, complete, "B", "A")):
        (compared,) = compare(run, a, run, b).policies
        reason = f"The speed of {fast} does not count: {slow} answered 10 of the 40 requests that it did not."
        assert compared.no_speed == reason
        console = Console(width=120, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
        console.print(policy_table(compared))
        text = console.export_text()
        assert reason in " ".join(text.split())
        assert next(line for line in text.splitlines() if line.startswith("time ")).rstrip().endswith(" –")
    assert compare(run, complete, run, complete).policies[0].no_speed is None
