"""Advice on the user's own prompts: the rule on synthetic findings, the formula, and the command on real models."""

import asyncio
import itertools
import json
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from commands import command_of
from scripted import FarEngine, ScriptedEngine, WordTokenizer

from evals.training.gsm_mini import load_split
from stepspec.api.models import Pair, load_pair
from stepspec.base.files import package_folder
from stepspec.cli.advise import main as advise
from stepspec.cli.advise import policy_text, settling_command
from stepspec.cli.run import main as answer_question
from stepspec.engines.protocol import Sampling
from stepspec.errors import ContextError, EngineError, StepSpecError, UsageError
from stepspec.evaluation.advise import Findings, Prompts, choose_prompts, read_prompts
from stepspec.evaluation.advise.candidates import make_candidates, token_policy
from stepspec.evaluation.advise.distance import step_costs
from stepspec.evaluation.advise.findings import (
    Advice,
    Candidate,
    LoadFindings,
    Measured,
    Memory,
    ModelCosts,
    PairCosts,
    PromptCounts,
    Reason,
    Trial,
)
from stepspec.evaluation.advise.formula import RelativeCosts, best_num_tokens, ideal_speedup, needed_acceptance, speedup
from stepspec.evaluation.advise.loads import make_load
from stepspec.evaluation.advise.measurements import load_costs
from stepspec.evaluation.advise.policy_file import generated_comments, with_comments
from stepspec.evaluation.advise.references import NO_ANSWER, Agreement, texts_of
from stepspec.evaluation.advise.rule import PolicyChoice, choose, pays, reasons
from stepspec.evaluation.advise.words import sentences
from stepspec.evaluation.records import Percentiles, TimeRecord
from stepspec.evaluation.run import EvalProblem, Local
from stepspec.evaluation.run.summary import summarise
from stepspec.evaluation.runs import iter_rows, read_run
from stepspec.loop.counts import Counts, Times
from stepspec.loop.policy import load_policy
from stepspec.loop.result import Result

ONE_WIDTH = {1: 1.0, 8: 1.0, 64: 1.0}
"""Passes that cost the same at every width, as the paper assumes."""


def candidate(
    name: str = "token",
    speedup: float | None = 1.5,
    interval: tuple[float, float] | None = (1.2, 1.8),
    **changes: Any,
) -> Candidate:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "token",
        "exact": True,
        "drafter": "draft-model",
        "num_tokens": "auto",
        "speedup": speedup,
        "speedup_ci": interval,
        "throughput": speedup,
        "accuracy": 0.9,
        "accuracy_ci": (0.7, 0.97),
        "accuracy_delta": 0.0,
        "accuracy_delta_ci": (-0.1, 0.1),
        "loss_upper": None,
        "num_to_know": None,
        "token_acceptance": None,
        "step_acceptance": None,
        "length_ratio": 1.0,
        "num_cut_short": 0,
        "time_s": TimeRecord(),
    }
    return Candidate(**fields | changes)


def steps(speedup: float = 2.0, *, loss: float | None = 0.16, **changes: Any) -> Candidate:
    """Return a step-level candidate, which is not exact."""
    interval = (0.8 * speedup, 1.2 * speedup)
    return candidate("two-level", speedup, interval, kind="step", exact=False, loss_upper=loss, **changes)


TARGET = candidate("target", 1.0, (1.0, 1.0), kind="target", drafter="none")


def load(
    *others: Candidate, reading: float | None = 0.05, widths: Mapping[int, float] = ONE_WIDTH, concurrency: int = 1
) -> LoadFindings:
    costs = ModelCosts(read_s=1e-4, write_s=1e-2, pass_over_one=dict(widths))
    percentiles = Percentiles(p50=100, p90=200, p99=300)
    return LoadFindings(
        costs=PairCosts(concurrency=concurrency, target=costs, draft=None),
        num_prompts=20,
        num_failed=0,
        prompt_tokens=percentiles,
        output_tokens=percentiles,
        reading_share=reading,
        candidates=[TARGET, *others],
    )


def trial(acceptance: float = 0.8, cost: float = 0.1) -> Trial:
    """Return a trial of the draft whose predictions follow the formula."""
    costs = RelativeCosts(cost, ONE_WIDTH)
    best, predicted = best_num_tokens(acceptance, costs)
    return Trial(
        drafter="draft-model",
        num_tokens=4,
        acceptance=acceptance,
        coverage=1.0,
        cost=cost,
        best_num_tokens=best,
        predicted=predicted,
        ideal=ideal_speedup(costs),
    )


UNKNOWN = Memory(target_bytes=None, draft_bytes=None)


def kinds(*trials: Trial, at: LoadFindings | None = None, memory: Memory | None = None) -> list[str]:
    return [reason.kind for reason in reasons(at or load(candidate()), trials, memory or UNKNOWN)]


def test_the_fastest_exact_policy_whose_interval_is_above_one_is_chosen() -> None:
    slow, fast = candidate("lookup", 1.3, drafter="prompt-lookup"), candidate("token", 1.6)
    assert choose(load(slow, fast)) == PolicyChoice("token", None)


def test_a_policy_that_may_be_slower_is_not_chosen() -> None:
    assert choose(load(candidate(speedup=1.5, interval=(0.9, 2.4)))) == PolicyChoice("target", None)


def test_a_policy_with_less_throughput_is_not_chosen_even_if_its_requests_are_faster() -> None:
    assert not pays(candidate(throughput=0.9), concurrency=4)
    assert pays(candidate(throughput=1.1), concurrency=4)
    [reason] = reasons(load(candidate(throughput=0.9), concurrency=4), [], UNKNOWN)
    assert reason.sentence.endswith("but of all requests together it gets less done in a second (0.90×).")


def test_at_concurrency_1_only_the_speedup_counts() -> None:
    assert pays(candidate(throughput=0.99), concurrency=1)


def test_a_faster_policy_whose_accuracy_is_not_known_is_named_and_the_exact_one_chosen() -> None:
    assert choose(load(candidate("token", 1.5), steps(2.0))) == PolicyChoice("token", "two-level")
    assert choose(load(steps(2.0))) == PolicyChoice("target", "two-level")
    assert choose(load(candidate("token", 2.5, (2.0, 3.0)), steps(2.0))) == PolicyChoice("token", None)


def test_a_policy_that_is_known_to_keep_the_accuracy_is_chosen() -> None:
    assert choose(load(candidate("token", 1.5), steps(2.0, loss=0.009))) == PolicyChoice("two-level", None)


def test_a_policy_that_is_known_to_lose_accuracy_is_not_even_named() -> None:
    losing = steps(2.0, accuracy_delta=-0.3, accuracy_delta_ci=(-0.5, -0.1))
    assert choose(load(losing)) == PolicyChoice("target", None)


def test_without_an_interval_or_without_answers_no_policy_is_chosen() -> None:
    assert choose(load(candidate(speedup=5.0, interval=None))) == PolicyChoice("target", None)
    assert choose(load(candidate(speedup=None, interval=None))) == PolicyChoice("target", None)
    empty = candidate(speedup=5.0, interval=(4.0, 6.0), no_speed="it answered none of the 20 requests")
    assert choose(load(empty)) == PolicyChoice("target", None)
    assert choose(load(steps(5.0, no_speed="it answered none of the 20 requests"))) == PolicyChoice("target", None)
    [reason] = reasons(load(empty), [], UNKNOWN)
    assert reason.sentence.endswith("which does not count: it answered none of the 20 requests.")
    assert "The speed of token does not count: it answered none" in advice_text(advice("target"), load(empty))


@pytest.mark.parametrize(("fixed", "chosen"), [(1.55, "token"), (1.8, "token-4")])
def test_a_fixed_number_of_tokens_is_chosen_only_where_it_is_clearly_faster_than_auto(
    fixed: float, chosen: str
) -> None:
    assert choose(load(candidate(), candidate("token-4", fixed, num_tokens=4))).policy == chosen


def test_the_reason_is_a_slow_draft_where_not_even_perfect_guesses_would_help() -> None:
    [reason] = reasons(load(candidate()), [trial(acceptance=0.9, cost=1.2)], UNKNOWN)
    assert reason == Reason(
        kind="slow draft",
        sentence="The draft is too slow: a drafted token takes 1.20 times as long as one that the target "
        "writes, so even if every one were accepted, the speed would be 0.91× the target's.",
    )


def test_the_reason_is_low_acceptance_where_better_guesses_would_help() -> None:
    [reason] = reasons(load(), [trial(acceptance=0.1, cost=0.3)], UNKNOWN)
    assert reason == Reason(
        kind="low acceptance",
        sentence="Too few of the tokens from the draft are right: 10.0% of those that are checked are accepted; at "
        "this drafting cost, a gain of 10% would need 43%.",
    )


def test_the_reason_is_few_drafts_where_not_even_perfect_guesses_come_often_enough() -> None:
    seldom = trial(cost=0.0).model_copy(update={"drafter": "prompt-lookup", "coverage": 0.004, "predicted": 1.03})
    [reason] = reasons(load(), [seldom], UNKNOWN)
    assert reason.kind == "few drafts"
    assert "prompt-lookup has tokens to propose in 0.4% of the rounds" in reason.sentence


def test_the_reason_is_short_answers_where_reading_takes_most_of_the_time() -> None:
    assert kinds(trial(), at=load(candidate(), reading=0.7)) == ["short answers"]


def test_the_reason_is_full_passes_where_wide_ones_cost_as_much_as_many() -> None:
    assert kinds(trial(), at=load(candidate(), widths={1: 1.0, 8: 6.0, 64: 50.0})) == ["full passes"]


def test_the_reason_is_memory_where_the_draft_takes_more_than_the_target() -> None:
    assert kinds(trial(), memory=Memory(target_bytes=100, draft_bytes=150)) == ["memory"]


def test_without_a_known_reason_the_interval_is_given() -> None:
    [reason] = reasons(
        load(candidate(speedup=1.1, interval=(0.9, 1.3))), [trial()], Memory(target_bytes=1, draft_bytes=0)
    )
    assert reason.kind == "not shown"
    assert "[0.90, 1.30]" in reason.sentence


def test_the_formula_is_the_paper_s_where_passes_of_every_width_cost_the_same() -> None:
    """Theorem 3.8 of arXiv:2211.17192, in its closed form."""
    for acceptance, cost, count in ((0.8, 0.05, 5), (0.5, 0.2, 2), (0.9, 0.0, 16)):
        expected = (1 - acceptance ** (count + 1)) / ((1 - acceptance) * (cost * count + 1))
        assert speedup(acceptance, RelativeCosts(cost, ONE_WIDTH), count) == pytest.approx(expected)
    assert speedup(1.0, RelativeCosts(0.5, ONE_WIDTH), 4) == pytest.approx(5 / 3)


def test_the_best_number_of_tokens_falls_with_acceptance_and_with_the_cost_of_wide_passes() -> None:
    free, full = RelativeCosts(0.05, ONE_WIDTH), RelativeCosts(0.05, {1: 1.0, 8: 3.0, 64: 24.0})
    assert best_num_tokens(0.9, free)[0] > best_num_tokens(0.6, free)[0] > 0
    assert best_num_tokens(0.9, full)[0] < best_num_tokens(0.9, free)[0]
    assert best_num_tokens(0.3, RelativeCosts(0.9, ONE_WIDTH)) == (0, 1.0)


def test_a_drafter_that_seldom_has_something_to_propose_gains_less() -> None:
    often, seldom = (speedup(0.8, RelativeCosts(0.0, ONE_WIDTH), 4, coverage) for coverage in (1.0, 0.2))
    assert often > seldom > 1
    assert speedup(0.8, RelativeCosts(0.0, ONE_WIDTH), 4, 0.0) == 1


def test_the_acceptance_that_is_needed_gives_the_wanted_speedup() -> None:
    costs = RelativeCosts(0.3, ONE_WIDTH)
    needed = needed_acceptance(costs, 1.1)
    assert needed is not None
    assert best_num_tokens(needed, costs)[1] >= 1.1 > best_num_tokens(needed - 0.01, costs)[1]
    assert needed_acceptance(RelativeCosts(2.0, ONE_WIDTH), 1.1) is None


@pytest.mark.parametrize(
    ("reference", "other", "status"),
    [
        (r"So \boxed{12}.", "The answer is 12.", "correct"),
        ("That makes 12 apples.", "It is 13.", "incorrect"),
        ("Paris, of course.", "paris,  of course.", "correct"),
        ("Paris, of course.", "London.", "incorrect"),
        ("That makes 12 apples.", " ", "no_answer"),
    ],
)
def test_answers_agree_by_box_or_number_or_else_by_the_full_text(reference: str, other: str, status: str) -> None:
    with Agreement() as agreement:
        gold = agreement.reference(reference, cut_short=False)
        assert agreement.grade(other, gold).status == status


@pytest.mark.parametrize("answer", ["none", "sha256:0123456789abcdef"])
def test_an_answer_is_never_taken_for_the_marker_of_no_answer(answer: str) -> None:
    with Agreement() as agreement:
        gold = agreement.reference(rf"So \boxed{{\text{{{answer}}}}}", cut_short=False)
        assert gold != NO_ANSWER
        assert agreement.grade(rf"It is \boxed{{\text{{{answer}}}}}", gold).status == "correct"
        plain = agreement.reference(rf"So \boxed{{{answer}}}", cut_short=False)
        assert agreement.grade(rf"It is \boxed{{{answer}}}", plain).status == "correct"


class Target:
    """A target that fails on some prompts and answers the others."""

    def __init__(self, failures: Mapping[str, Exception]) -> None:
        self._failures = failures

    async def generate(
        self, question: str, *, prompt: str = "bare", sampling: Sampling = Sampling(), max_tokens: int = 9
    ) -> Result:
        if question in self._failures:
            raise self._failures[question]
        return Result("", "It is 12.", (), Counts(), Times(), "stop", 1)

    async def forget(self) -> None:
        """Do nothing: this target has no state."""


def texts_with(failures: Mapping[str, Exception]) -> list[tuple[str, bool]]:
    problems = [EvalProblem(each, each, "") for each in ("A?", "B?", "C?")]
    return asyncio.run(texts_of(Target(failures), problems, Sampling(), 9, 2))


def test_a_prompt_without_context_for_an_answer_has_no_reference_and_the_others_do() -> None:
    texts = texts_with({"B?": ContextError("Too long.")})
    with Agreement() as agreement:
        found = [agreement.reference(text, cut_short=cut_short) for text, cut_short in texts]
    assert found == ["12", NO_ANSWER, "12"]


def test_an_engine_failure_while_references_are_generated_is_one_engine_error() -> None:
    with pytest.raises(EngineError, match="is gone"):
        texts_with(dict.fromkeys(("A?", "B?", "C?"), EngineError("The server is gone.")))


def test_nothing_agrees_with_an_answer_that_was_cut_short() -> None:
    with Agreement() as agreement:
        gold = agreement.reference("So 12", cut_short=True)
        assert gold == NO_ANSWER
        assert agreement.grade("So 12", gold).status == "no_answer"
        assert (
            agreement.grade("So 12", agreement.reference("So 12", cut_short=False), cut_short=True).status != "correct"
        )


def write(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_prompts_are_questions_prompts_or_the_last_message_of_the_user(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "D?"}, {"type": "image_url", "image_url": "x"}]
    talk = [
        {"role": "user", "content": "A?"},
        {"role": "assistant", "content": "B."},
        {"role": "user", "content": "C?"},
    ]
    rows = [
        {"question": "Q?", "answer": 5},
        {"prompt": "P?", "gold": "so #### 7"},
        {"messages": talk},
        {"prompt": [{"role": "user", "content": parts}], "answer": ["x"]},
    ]
    found = list(read_prompts(write(tmp_path / "prompts.jsonl", rows)))
    assert [each.question for each in found] == ["Q?", "P?", "C?", "D?"]
    assert [each.gold for each in found] == ["5", "7", None, None]
    assert [each.shortened for each in found] == [False, False, True, False]
    assert found[3].why_no_gold


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"text": "x"}\n', "line 1: there is no key 'question', 'prompt' or 'messages'"),
        ('{"question": " "}\n', "key 'question' must be text"),
        ('{"messages": []}\n', "no message of the user"),
        ('{"messages": [{"role": "user", "content": null}]}\n', "must be text"),
        ("what?\n", "line 1 is not JSON"),
        ("", "has no prompts"),
    ],
)
def test_bad_prompts_are_refused_before_a_model_loads(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=complaint):
        advise(file, target="torch:no/such/model", policy_file=tmp_path / "advised.toml")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"data": Path("missing.jsonl")}, "Cannot read missing.jsonl"),
        ({"concurrency": "0"}, "at least 1"),
        ({"concurrency": "4", "limit": 3}, "needs at least as many prompts"),
        ({"concurrency": "many"}, "--concurrency takes one number"),
        ({"temperature": -1.0}, "temperature must be between 0 .greedy. and 10, got -1"),
        ({"policy_file": Path("advised.txt")}, "--policy-file advised.toml"),
        ({"policy_file": Path("no/such/folder/advised.toml")}, "is not writable"),
    ],
)
def test_invalid_options_are_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path / "prompts.jsonl", [{"question": "Q?"}] * 4)
    with pytest.raises(UsageError, match=complaint):
        advise(**{"data": data, "target": "torch:no/such/model"} | options)


def test_neither_a_policy_file_nor_an_unrelated_folder_is_overwritten(tmp_path: Path) -> None:
    data = write(tmp_path / "prompts.jsonl", [{"question": "Q?"}])
    mine, thesis = tmp_path / "mine.toml", tmp_path / "work" / "thesis.tex"
    mine.write_text("mine")
    thesis.parent.mkdir()
    thesis.write_text("mine")
    with pytest.raises(UsageError, match="--force"):
        advise(data, policy_file=mine)
    with pytest.raises(UsageError, match="not empty"):
        advise(data, policy_file=tmp_path / "advised.toml", output=thesis.parent)
    assert (mine.read_text(), thesis.read_text()) == ("mine", "mine")


class Server(ScriptedEngine):
    """A server whose drafter is fixed, and that returns no log-probs."""

    drafters = ("engine",)
    own_speculation = None


def scripted_pair(max_context: int = 1000, *, draft: bool = True) -> Pair:
    tokenizer = WordTokenizer()
    engine = Server(tokenizer, [], name="target", max_context=max_context, abilities=frozenset())
    return Pair(engine, ScriptedEngine(tokenizer, [], name="draft") if draft else None)


def chosen_prompts(file: Path, pair: Pair, limit: int) -> Prompts:
    return asyncio.run(choose_prompts(file, Local(pair), limit))


def test_prompts_that_do_not_fit_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = [{"question": "word " * length} for length in (10, 500, 20, 30)]
    chosen = chosen_prompts(write(tmp_path / "prompts.jsonl", rows), scripted_pair(max_context=200), limit=2)
    assert [each.id for each in chosen.problems] == ["row-1", "row-3"]
    assert (chosen.asked.num_rows, chosen.asked.num_asked, chosen.asked.num_too_long) == (3, 2, 1)
    with pytest.raises(UsageError, match="longer than the 6 tokens"):
        chosen_prompts(tmp_path / "prompts.jsonl", scripted_pair(max_context=70), limit=2)


@pytest.mark.parametrize(
    ("answers", "graded", "why"),
    [([1, 2], True, None), ([None, None], False, "without right answers"), ([1, None], False, "1 of 2 prompts")],
)
def test_right_answers_count_only_where_all_prompts_have_one(
    tmp_path: Path, answers: list[int | None], graded: bool, why: str | None
) -> None:
    rows = [{"question": "Q?", "answer": answer} for answer in answers]
    asked = chosen_prompts(write(tmp_path / "prompts.jsonl", rows), scripted_pair(), limit=9).asked
    assert asked.graded == graded
    assert (asked.why_not_graded or "").find(why or "") >= 0


def test_a_server_without_log_probs_is_tried_with_policies_that_need_none() -> None:
    found = make_candidates([], scripted_pair())
    assert list(found.policies) == ["target", "specreason-decode"]
    assert "log-probabilities of proposed tokens" in found.left_out["two-level"]
    assert "stepspec cannot change it" in found.left_out["token-level"]


def test_with_nothing_to_compare_there_is_no_advice() -> None:
    with pytest.raises(UsageError, match=r"nothing to compare target with.*--draft"):
        make_candidates([], scripted_pair(draft=False))


def test_the_written_policy_equals_the_one_that_was_run(tmp_path: Path) -> None:
    _, text = token_policy("suffix", 3)
    written = tmp_path / "advised.toml"
    written.write_text(with_comments(text, ["Because it pays.", "Here."]), encoding="utf-8")
    assert generated_comments(written.read_text("utf-8")) == ["Because it pays.", "Here."]
    assert tomllib.loads(written.read_text(encoding="utf-8")) == tomllib.loads(text)
    assert load_policy(str(written))[0].token.num_tokens == 3


def gsm_mini(count: int, *, answers: bool) -> list[dict[str, Any]]:
    problems = islice(load_split("test"), count)
    return [{"question": each.question} | ({"answer": each.answer} if answers else {}) for each in problems]


@pytest.fixture(scope="module")
def unanswered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the advice on the embedded pair, for prompts without right answers."""
    folder = tmp_path_factory.mktemp("advice")
    data = write(folder / "prompts.jsonl", gsm_mini(2, answers=False))
    advise(
        data,
        max_tokens=64,
        output=folder / "runs",
        policy_file=folder / "advised.toml",
        json_file=folder / "found.json",
    )
    return folder


def found_in(folder: Path) -> Findings:
    return Findings.model_validate_json((folder / "found.json").read_bytes())


def test_the_findings_hold_costs_trials_and_every_policy(unanswered: Path) -> None:
    found = found_in(unanswered)
    [load] = found.loads
    assert load.costs.draft is not None
    assert load.costs.target.pass_over_one.keys() == {1, 8, 64}
    tried = {trial.drafter for trial in found.trials}
    assert tried == {"draft-model", "prompt-lookup", "suffix"}
    assert {"target", "draft-model", "two-level", "specreason-decode"} <= {each.name for each in load.candidates}
    assert {each.drafter for each in load.candidates} | found.left_out.keys() >= tried
    assert found.memory.draft_overhead is not None
    assert load.num_prompts == 2


def test_thresholds_are_chosen_for_the_models(unanswered: Path) -> None:
    measured = Measured.model_validate_json((unanswered / "runs" / "measured.json").read_bytes())
    run = read_run(unanswered / "runs" / "c1")
    assert {row.policy for row in iter_rows(unanswered / "runs" / "recorded")} == {"target", "two-level", "bold"}
    assert measured.step_policy is not None
    assert run.policies["two-level"].text == (measured.step_policy or load_policy("two-level")[1])
    if measured.step_policy:
        assert "not certified" in measured.step_policy


def test_the_advice_says_that_prompts_are_few_and_without_answers(unanswered: Path) -> None:
    found = found_in(unanswered)
    text = " ".join(found.advice.sentences)
    assert not found.prompts.graded
    assert "2 prompts are too few for intervals" in text
    assert "without right answers" in text
    # With greedy decoding at concurrency 1, the target repeats its answers, and exact policies give the same ones.
    exact = [each for each in found.loads[0].candidates if each.exact]
    assert len({each.accuracy for each in exact}) == 1
    assert all(each.speedup_ci is None for each in found.loads[0].candidates if each.name != "target")


QUESTION = "Some friends met. Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"


def test_the_advised_policy_is_the_one_that_was_run_and_runs(
    unanswered: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = found_in(unanswered)
    text = (unanswered / "advised.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text) == tomllib.loads(found.advice.policy_text)
    answer_question(QUESTION, policy=str(unanswered / "advised.toml"), max_tokens=20)
    assert "tokens" in capsys.readouterr().err


def test_what_is_said_of_chosen_thresholds_stays_in_the_advised_file(unanswered: Path) -> None:
    found = found_in(unanswered)
    chosen = with_comments(load_policy("two-level")[1], ["They are not certified."])
    advice = found.advice.model_copy(update={"policy_text": chosen})
    comments = generated_comments(policy_text(found.model_copy(update={"advice": advice})))
    assert comments[0].startswith("Advised by stepspec on ")
    assert comments[-1] == "They are not certified."


def test_finished_advice_is_repeated_without_measuring(unanswered: Path) -> None:
    rows, measured = unanswered / "runs" / "c1" / "rows.jsonl", unanswered / "runs" / "measured.json"
    before, found = (rows.read_bytes(), measured.read_bytes()), found_in(unanswered)
    asked: dict[str, Any] = {"data": unanswered / "prompts.jsonl", "output": unanswered / "runs"}
    files: dict[str, Any] = {"policy_file": unanswered / "again.toml", "json_file": unanswered / "again.json"}
    advise(**asked, max_tokens=64, **files)
    again = Findings.model_validate_json((unanswered / "again.json").read_bytes())
    assert (rows.read_bytes(), measured.read_bytes()) == before
    assert (again.loads, again.advice) == (found.loads, found.advice)
    with pytest.raises(UsageError, match="differs in max_tokens"):
        advise(**asked, max_tokens=65, policy_file=unanswered / "other.toml")


def test_the_suggested_command_for_more_prompts_is_valid(tmp_path: Path) -> None:
    asked = ["--target", "torch:my model", "--data", "prompts.csv", "--max-tokens", "64", "--temperature", "0.7"]
    first = settling_command(asked, 1234, tmp_path / "advised.toml")
    assert first == ["stepspec", "advise", *asked, "--limit", "1234", "--policy-file", str(tmp_path / "settled.toml")]
    (tmp_path / "settled.toml").touch()
    for there in ("advised.toml", "settled.toml"):
        *_, beside = settling_command(asked, 1234, tmp_path / there)
        assert not Path(beside).exists()
    parsed = command_of("advise").make_context("advise", first[2:]).params
    assert (parsed["limit"], parsed["max_tokens"], parsed["temperature"]) == (1234, 64, 0.7)


def test_measured_times_are_reused_if_the_references_are_incomplete(unanswered: Path, tmp_path: Path) -> None:
    runs = shutil.copytree(unanswered / "runs", tmp_path / "runs")
    before = json.loads((runs / "measured.json").read_bytes())
    (runs / "measured.json").write_text(json.dumps(before | {"references": {}}), encoding="utf-8")
    advise(unanswered / "prompts.jsonl", max_tokens=64, output=runs, policy_file=tmp_path / "advised.toml")
    assert before["references"]
    assert json.loads((runs / "measured.json").read_bytes()) == before


def test_without_an_answer_from_the_target_there_is_one_error_and_no_advice(unanswered: Path) -> None:
    run, costs = read_run(unanswered / "runs" / "c1"), load().costs
    rows = [row for row in iter_rows(unanswered / "runs" / "c1") if row.policy != "target"]
    with pytest.raises(StepSpecError, match="The target finished none of the prompts at concurrency 1"):
        make_load(costs, run, {}, summarise(run, rows), rows)


def test_a_draft_that_is_larger_than_its_target_is_advised_against(tmp_path: Path) -> None:
    """The embedded pair is reversed: the draft is several times as slow as the target."""
    weights = package_folder() / "mini" / "weights"
    data = write(tmp_path / "prompts.jsonl", gsm_mini(10, answers=True))
    advise(
        data,
        target=f"torch:{weights / 'draft'}",
        draft=f"torch:{weights / 'target'}",
        max_tokens=24,
        output=tmp_path / "runs",
        policy_file=tmp_path / "advised.toml",
        json_file=tmp_path / "found.json",
    )
    found = found_in(tmp_path)
    assert not load_policy(str(tmp_path / "advised.toml"))[0].needs_draft
    assert found.prompts.graded
    assert all(each.speedup_ci is not None for each in found.loads[0].candidates)
    assert any("cut short" in sentence for sentence in found.advice.sentences)


def test_without_a_draft_only_drafters_that_need_none_are_tried(tmp_path: Path) -> None:
    weights = package_folder() / "mini" / "weights"
    pair = load_pair(f"torch:{weights / 'target'}", needs_draft=False)
    trials = [trial().model_copy(update={"drafter": "suffix"})]
    found = make_candidates(trials, pair)
    assert [name.partition("-")[0] for name in found.policies] == ["target", "suffix", "suffix"]
    assert "--draft" in found.left_out["two-level"]


def advice_text(found: Advice, *loads: LoadFindings, trials: Iterable[Trial] = (), rereads: bool = False) -> str:
    asked = PromptCounts(num_rows=20, num_asked=20, num_too_long=2, num_shortened=0, graded=True, why_not_graded=None)
    memory = Memory(target_bytes=2**30, draft_bytes=2**29)
    return " ".join(sentences(found, loads, list(trials), memory, asked, rereads=rereads))


def advice(policy: str, **changes: Any) -> Advice:
    fields = dict.fromkeys(("speedup", "speedup_ci", "unproven", "pays_up_to"))
    return Advice(**{**fields, "policy": policy, "policy_text": "", "reasons": [], "sentences": []} | changes)


def distant(way_s: float, acceptance: float = 0.9, *, draft_s: float = 1e-3) -> LoadFindings:
    """Return a load whose steps have 10 tokens: the target writes one in 100 ms and reads it in 10 ms."""
    near = load(steps(step_acceptance=acceptance, step_tokens=10.0))
    draft = ModelCosts(read_s=None, write_s=draft_s, round_trip_s=way_s)
    return near.model_copy(update={"costs": near.costs.model_copy(update={"draft": draft})})


def test_a_distant_draft_pays_up_to_a_way_that_follows_from_the_costs() -> None:
    text = advice_text(advice("two-level"), distant(0.02))
    assert "The draft is 20.0 ms away. A step of 10 tokens takes it 30.0 ms with the way" in text
    assert "the target takes 10.0 ms to read the step and 100 ms to write it itself" in text
    assert "As 90% of the steps are accepted under two-level, steps pay by these costs up to about 70.0 ms." in text
    assert "distant draft" not in kinds(at=distant(0.02))


def test_a_draft_that_is_too_far_away_is_warned_of_and_is_a_reason() -> None:
    at = distant(0.08)
    text = advice_text(advice("target"), at)
    assert "steps do not pay by these costs. Put the draft nearer than about 70.0 ms, or use a policy" in text
    first, second = reasons(at, [], UNKNOWN)
    assert first == Reason(
        kind="distant draft",
        sentence="The draft is too far away: its server takes 80.0 ms for the smallest request, and steps pay up to "
        "about 70.0 ms.",
    )
    assert second.kind == "not shown", "policies without a draft may still pay"


def test_a_draft_whose_steps_never_pay_is_not_said_to_be_too_far_away() -> None:
    at = distant(0.02, acceptance=0.1)
    assert "steps would not pay by these costs without the way either" in advice_text(advice("target"), at)
    assert "distant draft" not in kinds(at=at)


def test_the_way_to_a_distant_target_is_a_part_of_each_pass() -> None:
    at = distant(0.02)
    target = at.costs.target.model_copy(update={"round_trip_s": 0.015})
    far = at.model_copy(update={"costs": at.costs.model_copy(update={"target": target})})
    near, way = step_costs(at), step_costs(far)
    assert near is not None
    assert way is not None
    assert way.max_way_s == pytest.approx(near.max_way_s - 0.015)


def test_nothing_is_said_of_a_way_where_both_models_are_in_this_process() -> None:
    assert step_costs(load(steps(step_acceptance=0.9, step_tokens=10.0))) is None
    assert " away. " not in advice_text(advice("token"), load(candidate()))


def test_the_round_trip_of_a_server_is_measured_with_its_costs() -> None:
    def engine(kind: type[ScriptedEngine]) -> ScriptedEngine:
        return kind(WordTokenizer(), itertools.repeat("One two three.<|end|>"), itertools.repeat("One"))

    pair = Pair(engine(ScriptedEngine), engine(FarEngine))
    found = asyncio.run(load_costs(pair, ["How many apples?", "How many pears?"], 1))
    assert found.draft is not None
    assert (found.target.round_trip_s, found.draft.round_trip_s) == (None, 0.02)
    stored = found.model_dump(exclude={"target": {"round_trip_s"}, "draft": {"round_trip_s"}})
    assert PairCosts.model_validate(stored).draft is not None, "files from before the round trip was measured"


def test_advice_for_several_loads_says_up_to_which_it_pays() -> None:
    many = load(candidate(speedup=0.9, interval=(0.8, 1.1)))
    many = many.model_copy(update={"costs": many.costs.model_copy(update={"concurrency": 16})})
    found = advice("token", speedup=1.5, speedup_ci=(1.2, 1.8), pays_up_to=1)
    text = advice_text(found, load(candidate()), many)
    assert "Speculation pays here: with token an answer comes 1.50× [1.20, 1.80]" in text
    assert "It is exact" in text
    assert "1 concurrent 1.50×, 16 concurrent 0.90×; above a concurrency of 1" in text
    assert "2 prompts did not fit" in text
    assert "512 MiB beside 1.00 GiB" in text


def test_advice_for_the_target_alone_gives_its_reasons_and_alternatives() -> None:
    reason = Reason(kind="memory", sentence="The draft is too large.")
    unproven = steps(2.0, num_to_know=1234, step_acceptance=0.8)
    text = advice_text(
        advice("target", unproven="two-level", reasons=[reason]), load(unproven), trials=[trial(0.1, 0.5)]
    )
    assert text.startswith(
        "Here exact speculation does not pay: use the target alone. The draft is too large. two-level is"
    )
    assert "its accuracy may be up to 16.0 points lower; about 1,234 prompts would show it to within a point" in text
    assert "no number of drafted tokens pays" in text
    assert "use the target alone." in advice_text(advice("target"), load())


def test_a_target_that_reads_the_whole_text_again_to_score_a_step_is_warned_of() -> None:
    text = advice_text(advice("token"), load(candidate()), rereads=True)
    assert "reads the whole text again, which takes" in text
    assert "reads the whole text again" not in advice_text(advice("token"), load(candidate()))
