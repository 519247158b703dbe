"""Reports show every figure with its interval and conditions, and the command updates the blocks of a README."""

import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evals.bench.readme import ACCURACIES, accuracy_block, headline, overview_block
from evals.bench.results import read_results, with_block
from stepspec.errors import UsageError
from stepspec.evaluation.records import (
    EngineRecord,
    Estimate,
    Matched,
    PolicyRecord,
    PolicySummary,
    RunRecord,
    Summary,
    TimeRecord,
    TokenRecord,
)
from stepspec.evaluation.report import (
    COLUMNS,
    UNKNOWN,
    closing_table,
    conditions_sentence,
    markdown_report,
    readme_table,
)
from stepspec.evaluation.report.cells import times
from stepspec.evaluation.report.conditions import pair_in_words
from stepspec.evaluation.report.figures import SPEEDUP
from stepspec.evaluation.report.tables import MAX_POLICIES
from stepspec.evaluation.stats import MatchedPolicy, fastest

TARGET = PolicySummary(
    n=1000,
    accuracy=0.931,
    accuracy_ci=(0.9136, 0.9452),
    accuracy_delta=None,
    accuracy_delta_ci=None,
    accuracy_loss_upper95=None,
    wall_s=100.0,
    speedup_vs_target=1.0,
    speedup_vs_target_ci=(1.0, 1.0),
    speedup_vs_token=0.8,
    speedup_vs_token_ci=(0.75, 0.85),
    length_ratio=1.0,
    tokens_per_s_ratio=1.0,
    step_acceptance=None,
    token_acceptance=None,
    tokens_per_target_pass=1.0,
    judge_controller_share=0.012,
    tokens=TokenRecord(),
    time_s=TimeRecord(),
    truncated=3,
    no_answer=2,
)
STEPSPEC = TARGET.model_copy(
    update={
        "accuracy": 0.925,
        "accuracy_delta": -0.006,
        "accuracy_delta_ci": (-0.0171, 0.0049),
        "accuracy_loss_upper95": 0.0152,
        "lost": 30.0,
        "won": 24.0,
        "accuracy_kept": "not known",
        "speedup_vs_target": 2.345,
        "speedup_vs_target_ci": (2.2, 2.5),
        "step_acceptance": 0.815,
        "token_acceptance": 0.7,
    }
)
MATCHED = Matched(loss=0.01, policy="two-level", speedup=2.345, speedup_ci=(2.2, 2.5))
SUMMARY = Summary(
    benchmark="gsm-mini",
    n=1000,
    temperature=0.0,
    concurrency=1,
    pair="cafe",
    policies={"target": TARGET, "step|spec [x]": STEPSPEC},
)
RUN = RunRecord(
    benchmark="gsm-mini",
    data_sha256="0",
    num_problems=1000,
    prompt_id="bare",
    prompt_version="0",
    policies={},
    engines={
        "target": EngineRecord(name="big", weights="1", dtype="float32", device="cpu"),
        "draft": EngineRecord(name="small", weights=None, dtype=None, device=None),
    },
    pair="cafe",
    temperature=0.0,
    top_p=1.0,
    max_tokens=1024,
    seed=0,
    concurrency=1,
    versions={"python": "3.11.2", "torch": "2.13.0"},
    commit="0123456789" * 4 + "-dirty",
    hardware={"cpu": "A Processor", "cores": 2, "memory_bytes": 8 * 2**30},
    started="2000-01-01T00:00:00+00:00",
)


def rendered(width: int, summary: Summary = SUMMARY) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(closing_table(summary))
    return console.export_text()


def test_both_tables_have_every_column_and_value() -> None:
    for text in (rendered(160), readme_table(RUN, SUMMARY)):
        words = " ".join(text.split())
        assert all(column.title in words for column in COLUMNS)
        for value in (
            "93.1%",
            "[91.4, 94.5]",
            "-0.6%",
            "[-1.7, +0.5]",
            "30, 24",
            "not known",
            "2.35×",
            "[2.20, 2.50]",
            "81.5%",
            "70.0%",
        ):
            assert value in words


def test_values_that_were_not_measured_are_a_dash() -> None:
    target = readme_table(RUN, SUMMARY).splitlines()[2]
    assert target.count(UNKNOWN) == 5  # three figures against itself, steps accepted, tokens accepted
    assert "1.00× |" in target  # no interval against itself


def test_policy_names_cannot_break_the_tables() -> None:
    table = readme_table(RUN, SUMMARY).splitlines()
    assert {line.replace("\\|", "").count("|") for line in table} == {len(COLUMNS) + 2}
    assert "step|spec [x]" in rendered(200)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_closing_table_fits_the_terminal(width: int) -> None:
    text = rendered(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_the_conditions_are_one_complete_sentence() -> None:
    sentence = conditions_sentence(RUN, SUMMARY)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    for part in (
        "gsm-mini, 1,000 problems",
        "temperature 0, concurrency 1, seed 0",
        "at most 1,024 tokens",
        "target big float32 on cpu",
        "draft small",
        "A Processor, 2 cores, 8 GiB",
        "torch 2.13.0",
        "commit 012345678901-dirty",
    ):
        assert part in sentence


def test_the_report_bounds_the_loss_and_explains_its_columns() -> None:
    report = markdown_report(RUN, SUMMARY)
    assert report.startswith("# gsm-mini\n\nResults of target and step|spec [x] on gsm-mini.")
    assert readme_table(RUN, SUMMARY) in report
    assert conditions_sentence(RUN, SUMMARY) in report
    assert "| accuracy lost, at most | – | +1.5% |" in report
    assert "| truncated | 3 of 1,000 | 3 of 1,000 |" in report
    assert "| no answer | 2 of 1,000 | 2 of 1,000 |" in report
    assert all(f"**{column.title}**: {column.meaning}" in report for column in COLUMNS)


def test_tables_name_the_reading_of_the_accuracy() -> None:
    strict = SUMMARY.model_copy(update={"reading": "strict"})
    lower = {"strict_accuracy": 0.9, "strict_accuracy_ci": (0.88, 0.92)}
    flexible = SUMMARY.model_copy(
        update={"reading": "flexible", "policies": {"target": TARGET.model_copy(update=lower), "two-level": STEPSPEC}}
    )
    for text in (rendered(160, strict), markdown_report(RUN, strict), readme_table(RUN, strict)):
        assert "accuracy (strict)" in text
        assert "accuracy (flexible)" not in text
    for text in (rendered(160, flexible), markdown_report(RUN, flexible)):
        assert "accuracy (flexible)" in text
        assert "90.0%" in text[text.index("accuracy (strict)") :]
    assert "accuracy (" not in rendered(160)


def test_the_report_has_the_figures_of_repeats() -> None:
    at_k = {"pass@4": Estimate(value=0.5, ci=(0.4, 0.6)), "avg@4": Estimate(value=0.25, ci=(0.2, 0.3))}
    policies = {"target": TARGET.model_copy(update={"at_k": at_k}), "two-level": STEPSPEC}
    report = markdown_report(RUN, SUMMARY.model_copy(update={"policies": policies}))
    assert "| pass@4 | 50.0% [40.0, 60.0] | – |" in report
    assert "| avg@4 | 25.0% [20.0, 30.0] | – |" in report
    assert "**pass@4**: probability that at least one of 4 samples of a problem is correct" in report
    assert "pass@" not in markdown_report(RUN, SUMMARY)


NO_SPEED = STEPSPEC.model_copy(
    update={"no_speed": "the target answered 700 of the 1,000 requests that it did not", "truncated": 700, "failed": 5}
)
WITHOUT = SUMMARY.model_copy(update={"policies": {"target": TARGET, "two-level": NO_SPEED}})
REASON = "The speed of two-level does not count: the target answered 700 of the 1,000 requests that it did not."


def test_a_speed_that_does_not_count_is_a_dash_with_a_reason() -> None:
    for report in (markdown_report(RUN, WITHOUT), overview_block([(RUN, WITHOUT)])):
        assert REASON in report
        assert "2.35×" not in report
        assert "| not known | – | – |" in report
    assert "2.35× [2.20, 2.50] | 0.80× [0.75, 0.85]" in markdown_report(RUN, SUMMARY)
    assert SPEEDUP.numbers(NO_SPEED) == {"speedup": None, "speedup low": None, "speedup high": None}
    assert SPEEDUP.numbers(STEPSPEC)["speedup"] == 2.345


def test_the_terminal_has_a_dash_for_the_speed_and_counts_texts_without_an_answer() -> None:
    rows = {line.split("  ")[0].strip(): line for line in rendered(160, WITHOUT).splitlines()}
    assert rows["speedup"].split()[1:] == ["1.00×", "–"]
    assert "700 of 1,000" in rows["truncated"]
    assert "2 of 1,000" in rows["no answer"]
    assert REASON in " ".join(rendered(160, WITHOUT).split())


def test_a_table_of_many_policies_has_a_row_for_each() -> None:
    names = [f"token:token.num_tokens={number}" for number in range(MAX_POLICIES)]
    many = SUMMARY.model_copy(update={"policies": {"target": TARGET} | dict.fromkeys(names, STEPSPEC)})
    rows = {line.split("  ")[0].strip(): line.split() for line in rendered(160, many).splitlines()}
    for name in names:
        assert rows[name][1:] == ["92.5%", "-0.6%", "30,", "24", "not", "known", "2.35×", "0.80×", "81.5%", "70.0%"]
    few = many.model_copy(update={"policies": dict.fromkeys(names, STEPSPEC)})
    assert "truncated" in rendered(300, few)
    assert "truncated" not in rendered(300, many)


def test_the_title_counts_the_problems_that_only_some_policies_finished() -> None:
    assert "gsm-mini: 1,000 problems, 95% intervals" in rendered(160)
    fewer = SUMMARY.model_copy(update={"n": 999})
    assert "gsm-mini: 1,000 problems, 999 finished under every policy, 95%" in " ".join(rendered(160, fewer).split())


POLICIES = st.lists(
    st.tuples(st.floats(1.01, 9), st.sampled_from(["exact", "within a point", "not known"])), max_size=6
)


@given(policies=POLICIES)
def test_a_headline_has_no_speed_of_a_policy_that_is_not_known_to_keep_the_accuracy(
    policies: list[tuple[float, Literal["exact", "within a point", "not known"]]],
) -> None:
    made: dict[str, PolicySummary] = {"target": TARGET}
    for number, (speed, kept) in enumerate(policies):
        speeds = {"speedup_vs_target": speed, "speedup_vs_target_ci": (speed - 0.001, speed + 0.001)}
        made[f"p{number}"] = STEPSPEC.model_copy(update=speeds | {"accuracy_kept": kept, "lost": float(number)})
    claims = [
        MatchedPolicy(name, each.speedup_vs_target, each.speedup_vs_target_ci, exact=each.accuracy_kept != "not known")
        for name, each in made.items()
        if name != "target"
    ]
    found = fastest(claims, 0.01)
    name = found.name if found else "target"
    matched = Matched(loss=0.01, policy=name, speedup=None, speedup_ci=None)
    text = headline([(RUN, SUMMARY.model_copy(update={"policies": made, "matched": matched}))])
    speeds = re.findall(r"\d+\.\d\d×", text)
    assert speeds == ([times(made[name].speedup_vs_target)[0]] if found else [])
    assert ("No policy that keeps the target's accuracy" in text) == (found is None)
    for number, (speed, _) in enumerate(policies):
        faster = speed > (made[name].speedup_vs_target or 0)
        assert (f"`p{number}` lost {number} and won 24 of 1,000 problems" in text) == faster


def test_a_pair_of_stepspec_has_one_name_and_other_models_have_theirs() -> None:
    def named(target: str, draft: str) -> str:
        names = {"target": target, "draft": draft}
        engine = EngineRecord(name="", weights=None, dtype=None, device=None)
        return pair_in_words({role: engine.model_copy(update={"name": name}) for role, name in names.items()})

    assert named("embedded target", "embedded draft") == "the embedded pair"
    assert named("embedded target", "small") == "the target embedded target and the draft small"


def test_a_headline_needs_the_verdict_of_its_run() -> None:
    with pytest.raises(UsageError, match="needs a run of the policy target"):
        headline([(RUN, WITHOUT)])


def test_policies_that_every_table_shows_are_rows_even_if_they_did_not_run() -> None:
    record = PolicyRecord(text="", sha256="0", kind="step")
    run = RUN.model_copy(update={"policies": {"specreason": record}})
    rows = readme_table(run, SUMMARY).splitlines()
    assert rows[-1].startswith("| draft, always, specreason-decode | not run | – |")
    rows = readme_table(run, SUMMARY, "66.9% of 1,000 problems").splitlines()
    assert rows[-2].startswith("| draft | 66.9% of 1,000 problems | – |")
    assert rows[-1].startswith("| always, specreason-decode | not run | – |")
    assert {line.replace("\\|", "").count("|") for line in rows} == {len(COLUMNS) + 2}
    complete = run.model_copy(update={"policies": dict.fromkeys(("draft", "always"), record)})
    alone = run.model_copy(update={"engines": {**run.engines, "draft": None}})
    for each in (complete, alone):
        assert "not run" not in readme_table(each, SUMMARY)


def test_a_readme_shows_runs_at_two_temperatures_and_its_headline_names_both() -> None:
    ours = SUMMARY.model_copy(update={"policies": {"target": TARGET, "two-level": STEPSPEC}, "matched": MATCHED})
    warm = RUN.model_copy(update={"temperature": 0.6}), ours.model_copy(update={"temperature": 0.6})
    first, rest = headline([(RUN, ours), warm]), overview_block([(RUN, ours), warm])
    for words in ("point at temperature 0 is `two-level`", "point at temperature 0.6 is `two-level`"):
        assert words in first
    assert rest.index(f"| {RUN.benchmark}, 0 |") < rest.index(f"| {RUN.benchmark}, 0.6 |")
    other_problems = warm[0].model_copy(update={"data_sha256": "1"}), warm[1]
    with pytest.raises(UsageError, match="the same problems"):
        headline([(RUN, ours), other_problems])


def test_accuracies_of_several_runs_are_one_table_without_speeds() -> None:
    other = RUN.model_copy(update={"benchmark": "gsm8k", "temperature": 0.6})
    block = accuracy_block([(RUN, SUMMARY), (other, WITHOUT)])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines() if line.startswith("|")]
    (heads, _), rows = lines[:2], lines[2:]
    assert len(heads) == 3 + len(ACCURACIES)
    expected = ["gsm-mini, 0"] * len(SUMMARY.policies) + ["gsm8k, 0.6"] * len(WITHOUT.policies)
    assert [row[0] for row in rows] == expected
    assert [rows[0][2], *(row[2] for row in rows[-2:])] == ["target", "target", "two-level"]
    assert "2.35×" not in block
    assert block.count("\n- ") == 2


def test_an_overview_has_the_policies_of_every_run_and_each_sentence_once() -> None:
    ours = SUMMARY.model_copy(update={"policies": {"target": TARGET, "two-level": STEPSPEC}})
    warm = RUN.model_copy(update={"temperature": 0.6})
    other = RUN.model_copy(update={"benchmark": "gsm8k"})
    table = overview_block([(RUN, ours), (warm, ours), (other, WITHOUT)])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [row[:3] for row in rows if "not run" in row] == [
        [about, "draft, always", "not run"] for about in ("gsm-mini, 0", "gsm-mini, 0.6", "gsm8k, 0")
    ]
    rows = [row for row in rows if "not run" not in row]
    names = [("gsm-mini, 0", "target"), ("gsm-mini, 0", "two-level"), ("gsm-mini, 0.6", "target")]
    names += [("gsm-mini, 0.6", "two-level"), ("gsm8k, 0", "target"), ("gsm8k, 0", "two-level")]
    assert [(row[0], row[1]) for row in rows[2:]] == names
    assert rows[3][4:7] == ["30, 24", "not known", "2.35× [2.20, 2.50]"]
    assert rows[7][6] == "–"
    assert table.count("gsm-mini: 1,000 problems, at most 1,024 tokens each, concurrency 1") == 1
    assert table.count(REASON) == 1


README = "# Title\n\n<!-- results:gsm-mini -->\nold\n<!-- /results -->\n\nThe rest.\n"


def test_only_the_block_is_replaced() -> None:
    once = with_block(README, "results", "gsm-mini", "new")
    assert once == README.replace("old", "new")
    assert with_block(once, "results", "gsm-mini", "new") == once


@pytest.mark.parametrize("text", ["", "<!-- results:gsm-mini -->", "<!-- results:other -->\n<!-- /results -->"])
def test_a_readme_without_the_markers_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="results:gsm-mini"):
        with_block(text, "results", "gsm-mini", "new")


def test_a_folder_without_a_finished_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_results(tmp_path)
    (tmp_path / "run.json").write_text(RUN.model_dump_json(), "utf-8")
    with pytest.raises(UsageError, match=r"summary.json is missing"):
        read_results(tmp_path)
    (tmp_path / "summary.json").write_text(SUMMARY.model_dump_json(), "utf-8")
    assert read_results(tmp_path) == [(RUN, SUMMARY)]
