"""The findings at the top of a report: the fastest accurate policy, exactness and warnings."""

import pytest
from make_runs import POLICIES, make_run
from test_tables import STEPSPEC, SUMMARY, TARGET

from stepspec.evaluation.records import EngineRecord, Matched, PolicyRecord, Summary
from stepspec.evaluation.report import closing_table
from stepspec.evaluation.report.findings import differing_conditions, findings, front

MADE = make_run(2).run
ALWAYS = PolicyRecord(text="", sha256="0", kind="step")
RUN = MADE.model_copy(update={"policies": {**MADE.policies, "always": ALWAYS}})


def summary(matched: str, **changes: object) -> Summary:
    step = STEPSPEC.model_copy(update=changes)
    found = Matched(loss=0.01, policy=matched, speedup=2.3, speedup_ci=(2.2, 2.5))
    return SUMMARY.model_copy(
        update={"policies": {"target": TARGET, "token": TARGET, "two-level": step}, "matched": found, "n": 1000}
    )


def test_the_headline_names_the_matched_policy_with_its_interval() -> None:
    found = findings(RUN, summary("two-level"))
    assert found.headline == (
        "The fastest policy that keeps the target's accuracy to within a point is two-level: 2.35× [2.20, 2.50] as "
        "fast as the target alone."
    )
    assert "two-level answers 92.5% [91.4, 94.5] correctly and the target 93.1%" in found.details[1]
    flexible = summary("two-level").model_copy(update={"reading": "flexible"})
    assert "keeps the target's accuracy (flexible) to within a point" in findings(RUN, flexible).headline


def test_the_headline_without_a_qualifying_policy_or_without_a_target() -> None:
    assert findings(RUN, summary("target")).headline.startswith("No policy that keeps")
    alone = summary("target").model_copy(update={"matched": None})
    assert findings(RUN, alone).headline == "Results of target, token and two-level on gsm-mini."


def test_a_faster_policy_is_named_with_its_loss_of_accuracy() -> None:
    details = " ".join(findings(RUN, summary("token")).details)
    assert (
        "Faster, but not known to keep the accuracy: two-level (2.35×, accuracy -0.6% [-1.7, +0.5], lost 30 and won 24 "
        "of 1,000 problems)." in details
    )
    old = " ".join(findings(RUN, summary("token", lost=None, won=None)).details)  # a summary from before they existed
    assert "lost – and won – of 1,000 problems" in old
    for changes in ({"speedup_vs_target_ci": (0.9, 3.1)}, {"no_speed": "it answered none of the 9 requests"}):
        assert "Faster" not in " ".join(findings(RUN, summary("token", **changes)).details)


def test_a_run_with_variants_says_which_policies_are_on_the_front() -> None:
    slow, fast = "token:token.num_tokens=2", "token:token.num_tokens=4"
    policies = {
        "target": TARGET,
        slow: TARGET.model_copy(update={"speedup_vs_target": 1.4}),
        fast: TARGET.model_copy(update={"speedup_vs_target": 1.5}),
        "two-level": STEPSPEC,
        "draft": STEPSPEC.model_copy(update={"speedup_vs_target": 9.0, "no_speed": "it answered nothing"}),
    }
    found = SUMMARY.model_copy(update={"policies": policies, "matched": None})
    assert front(found) == [fast, "two-level"]
    sentence = f"On the front of accuracy and speed, by the measured values alone: {fast} and two-level."
    assert sentence in findings(RUN, found).details
    assert closing_table(found).caption is not None
    assert sentence in str(closing_table(found).caption)
    without = {"target": TARGET, "two-level": STEPSPEC}
    assert "front" not in " ".join(findings(RUN, SUMMARY.model_copy(update={"policies": without})).details)
    assert front(SUMMARY.model_copy(update={"policies": {"target": TARGET}})) == []


@pytest.mark.parametrize(("dtype", "rounds"), [("float32", False), ("bfloat16", True), (None, True)])
def test_exact_policies_are_listed_separately_and_in_narrow_types_up_to_rounding(
    dtype: str | None, rounds: bool
) -> None:
    target = EngineRecord(name="big", weights=None, dtype=dtype, device=None)
    run = RUN.model_copy(update={"engines": {"target": target}})
    words = " up to rounding" if rounds else ""
    ties = ", except that near ties can resolve differently" if rounds else ""
    assert findings(run, summary("two-level")).exactness == (
        f"token: exact{words}. The output has the target's distribution{ties}. two-level: not exact. Answers can "
        "differ, and the measured accuracy includes this."
    )


def test_the_policy_exact_is_reported_as_exact() -> None:
    record = PolicyRecord(text="", sha256="0", kind="step", step_level_exact=True)
    run = RUN.model_copy(update={"policies": {**RUN.policies, "two-level": record}})
    assert findings(run, summary("two-level")).exactness.startswith("token and two-level: exact up to rounding.")
    tolerant = record.model_copy(update={"token_level_exact": False})
    assert not tolerant.exact


@pytest.mark.parametrize(
    ("interval", "kept", "words"),
    [
        ((-0.031, 0.025), "not known", "no loss is known, and at 95% it is at most 3.1%. If that is acceptable"),
        ((-0.3, 0.1), "not known", "no loss is known, and at 95% it is at most 30.0%. If that is acceptable"),
        ((-0.006, 0.004), "within a point", "keeps the target's accuracy to within a point, so the draft"),
        ((-0.034, -0.011), "not known", "it is less accurate than the target."),
    ],
)
def test_the_draft_alone_is_the_answer_by_the_rule_that_holds_for_every_policy(
    interval: tuple[float, float], kept: str, words: str
) -> None:
    found = summary("token")
    draft = STEPSPEC.model_copy(
        update={
            "accuracy_delta": sum(interval) / 2,
            "accuracy_delta_ci": interval,
            "accuracy_loss_upper95": -interval[0],
            "accuracy_kept": kept,
        }
    )
    found = found.model_copy(update={"policies": {**found.policies, "draft": draft}})
    (sentence,) = [each for each in findings(RUN, found).details if each.startswith("The draft alone")]
    assert sentence.startswith("The draft alone lost 30 and won 24 of 1,000 problems, a difference of ")
    assert words in sentence


def test_a_report_says_which_policies_without_a_judge_were_not_run() -> None:
    run = make_run(2, policies=("target", "token", "two-level")).run
    for each, names in ((run, "draft and always"), (MADE, "always")):
        words = f"Not run: {names}. So it is unknown whether the draft needs a judge, or the target."
        assert words in findings(each, summary("token")).warnings
    assert "Not run" not in " ".join(findings(RUN, summary("token")).warnings)


def test_an_unknown_policy_has_no_kind_and_is_not_exact() -> None:
    assert RUN.kind_of("nowhere") is None
    assert not RUN.is_exact("nowhere")
    assert not PolicyRecord(text="", sha256="0", kind="token", token_level_exact=False).exact


def test_problems_of_a_run_become_warnings() -> None:
    many = RUN.model_copy(update={"num_problems": 1000})
    assert findings(many, summary("two-level")).warnings == []
    bad = {"truncated": 100, "failed": 2, "strict_accuracy": 0.5, "parse_errors": 60, "token_level_exact": False}
    warnings = " ".join(findings(many, summary("two-level", **bad)).warnings)
    for words in (
        "two-level: 2 of 1,002 requests ended in an error",
        "10.0% of the answers were cut off",
        "45.9% of the accuracy is by the last number",
        "not be read",
        "accepted by a relaxed rule",
    ):
        assert words in warnings


def test_a_draft_that_proposed_hardly_any_steps_or_was_often_left_becomes_a_warning() -> None:
    slow, none = "the draft was too slow", "max_overhead"
    for why, steps in ({slow: 60}, 900), ({none: 900, slow: 10}, 3):
        changes = {"not_proposed": why, "steps_proposed": steps, "steps": 1000, "num_rows": 1000}
        sentences = [each for each in findings(RUN, summary("two-level", **changes)).warnings if "proposed" in each]
        assert len(sentences) == 1
        assert all(f"{reason} in {number}" in sentences[0] for reason, number in why.items())
    for why, steps in ({slow: 10, none: 500}, 900), ({"the policy proposes none": 1000}, 0), ({slow: 1000}, None):
        changes = {"not_proposed": why, "steps_proposed": steps, "steps": 1000, "num_rows": 1000}
        assert not [each for each in findings(RUN, summary("two-level", **changes)).warnings if "proposed" in each]


def test_with_missing_rows_the_difference_is_over_the_shared_problems() -> None:
    for num_rows in ({"n": 1200}, {"n": 1000, "num_rows": 990}):
        found = findings(RUN, summary("two-level", **num_rows))
        assert found.details[1] == (
            "The accuracy of two-level minus the target's is -0.6% [-1.7, +0.5] on the problems that have ended, with "
            "an answer or an error, under every policy in the tables. The accuracies in the tables are over all "
            "problems that have ended under each policy."
        )
    nothing_shared = findings(RUN, summary("two-level", accuracy_delta=None, accuracy_delta_ci=None))
    assert not any("accuracy of" in sentence or "difference" in sentence for sentence in nothing_shared.details)


def test_lost_and_won_problems_are_named_with_the_problems_that_were_compared() -> None:
    details = " ".join(findings(RUN, summary("token", num_compared=1020)).details)
    assert "lost 30 and won 24 of 1,020 problems" in details


def test_failed_requests_come_first_even_for_a_policy_without_rows() -> None:
    accuracies = {"accuracy_without_failed": 0.95, "accuracy_without_failed_ci": (0.9, 0.98)}
    failing = summary("two-level", failed=2, **accuracies).model_copy(
        update={"failed": {"two-level": 2, "draft": 7, "target": 0}, "n": 9}
    )
    assert list(findings(RUN, failing).warnings[:2]) == [
        "draft: 7 requests ended in an error and none was finished. The tables omit it.",
        "two-level: 2 of 1,002 requests ended in an error and count as not correct; of the others 95.0% [90.0, 98.0] "
        "are correct.",
    ]


def test_with_concurrency_a_warning_names_the_interval_to_use() -> None:
    many = RUN.model_copy(update={"num_problems": 1000})
    (warning,) = findings(many, summary("two-level").model_copy(update={"concurrency": 8})).warnings
    assert "Use the interval of the throughput, which is over blocks" in warning


def test_few_problems_unfinished_problems_and_a_missing_baseline_become_warnings() -> None:
    small = summary("two-level", n_for_one_point=4321, speedup_vs_target_ci=None).model_copy(update={"n": 8})
    run = RUN.model_copy(
        update={"num_problems": 20, "policies": {"target": RUN.policies["target"]}, "commit": "0-dirty"}
    )
    warnings = " ".join(findings(run, small).warnings)
    for words in (
        "8 of 20 problems",
        "run 4,321 problems",
        "no intervals",
        "token-level speculation alone",
        "uncommitted changes",
    ):
        assert words in warnings


def test_a_comparison_names_the_differing_conditions() -> None:
    other = RUN.model_copy(update={"hardware": {"cpu": "Another"}, "commit": None, "concurrency": 4})
    assert differing_conditions([RUN, RUN.model_copy(update={"concurrency": 4})]) == []
    (sentence,) = differing_conditions([RUN, other])
    assert "different hardware and different commits" in sentence


def test_every_made_up_policy_has_a_kind() -> None:
    assert {name: MADE.kind_of(name) for name in MADE.policies} == {
        name: policy.kind for name, policy in POLICIES.items()
    }
