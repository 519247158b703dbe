"""Calibrations: the sequence of tests, the certificate, resuming, agreement without right answers, and bad input."""

import asyncio
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.cli import app
from stepspec.engines.protocol import Sampling
from stepspec.errors import UsageError
from stepspec.evaluation.calibrate import (
    Budget,
    Calibrated,
    CalibrationPlan,
    CalibrationWatcher,
    Sizes,
    calibrate,
    load_task,
)
from stepspec.evaluation.calibrate.fixed_sequence import (
    LossLimits,
    by_problem,
    certified_settings,
    problems_needed,
    status_of,
)
from stepspec.evaluation.calibrate.policy_file import calibration_split
from stepspec.evaluation.policy_files import policy_text
from stepspec.evaluation.records import PolicyRecord
from stepspec.evaluation.replay.path import changed_policy
from stepspec.evaluation.report.calibration import calibrations_block
from stepspec.evaluation.report.findings import findings
from stepspec.evaluation.run import Local, load_benchmark
from stepspec.evaluation.runs import iter_rows, read_run, read_summary
from stepspec.loop.certificate import CertifiedPolicy
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.policy_tables import SalvageTable
from stepspec.loop.result import Done

SMALL = Sizes(recorded=2, least_recorded=2, chunk=12, timed=1, timed_chunk=1)
SILENT = CalibrationWatcher(lambda title: None, lambda row, done, total: None, lambda words: None)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


async def calibrated(
    folder: Path, plan: CalibrationPlan, data: Path | None = None, at_most: float | None = None
) -> tuple[Calibrated, str]:
    """Calibrate `two-level` for the embedded pair."""
    async with Local(load_pair(notes=False)) as executor:
        name, split = ("gsm-mini", "calibration") if data is None else ("questions", None)
        benchmark = calibration_split(name, load_benchmark(name)[1], split)
        task = await load_task(name, benchmark, data, load_policy("two-level")[1], executor, plan)
        return await calibrate(task, executor, folder, Budget(None), SILENT, SMALL, at_most)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibrated, str]:
    """A calibration with a limit so large that it certifies something."""
    folder = tmp_path_factory.mktemp("calibration") / "run"
    plan = CalibrationPlan(max_loss=0.9, max_problems=20, concurrency=4)
    return folder, *asyncio.run(calibrated(folder, plan))


def test_a_calibration_writes_a_policy_with_a_certificate(found: tuple[Path, Calibrated, str], tmp_path: Path) -> None:
    folder, results, text = found
    assert results.certified
    chosen = next(each for each in results.path if each.setting.name == results.chosen)
    assert chosen.status == "certified"
    assert (chosen.loss_upper or 1) < 0.9
    assert [each.status for each in results.path[: results.path.index(chosen)]] == ["certified"] * results.path.index(
        chosen
    )
    file = tmp_path / "mine.toml"
    file.write_text(text)
    policy = load_policy(str(file))[0]
    certificate = policy.certificate
    assert certificate is not None
    assert (certificate.max_loss, certificate.num_problems) == (0.9, chosen.num_problems)
    assert certificate.speedup is not None
    assert policy.judges[0].model_dump()["threshold"] == chosen.setting.thresholds["likelihood.min"]
    assert "# Ours." in text, "comments of the file stay"
    assert Calibrated.model_validate_json((folder / "calibration.json").read_bytes()).sentences == results.sentences


def test_the_settings_of_one_temperature_leave_those_of_others(
    found: tuple[Path, Calibrated, str], tmp_path: Path
) -> None:
    text = found[2]
    changed = policy_text(text, ["Colder."], {"likelihood.min": -2.0}, -4.0, at_most=0.3)
    changed = policy_text(changed, ["Coldest."], {"likelihood.min": -1.0}, -3.0, at_most=0.0)
    changed = policy_text(changed, ["Colder now."], {"likelihood.min": -2.5}, -4.0, at_most=0.3)
    file = tmp_path / "mine.toml"
    file.write_text(changed)
    policy, given = load_policy(str(file))[0], Policy.model_validate(tomllib.loads(text))
    assert policy.at(0.6).model_copy(update={"temperatures": ()}) == given, "with its certificate"
    assert [policy.at(each).judges[0].model_dump()["threshold"] for each in (0.0, 0.2)] == [-1.0, -2.5]
    assert [f"# {each}\n" in changed for each in ("Coldest.", "Colder.", "Colder now.")] == [True, False, True]


def test_a_certificate_edited_by_hand_is_refused(found: tuple[Path, Calibrated, str], tmp_path: Path) -> None:
    text, file = found[2], tmp_path / "edited.toml"
    threshold = next(line for line in text.splitlines() if line.startswith("threshold = "))
    edits = {
        threshold: "threshold = -9.5",
        "max_loss = 0.9": "max_loss = 0.01",
        "temperature = 0.0": "temperature = 0.6",
    }
    for old, new in edits.items():
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(UsageError, match="the certificate does not belong to these settings"):
            load_policy(str(file))


def test_what_a_certificate_does_not_cover_is_named(found: tuple[Path, Calibrated, str]) -> None:
    certificate = CertifiedPolicy.read(found[2]).at(0.0)
    assert certificate is not None
    same = {name: dict(getattr(certificate, name)) for name in ("models", "dtypes", "engines")}
    own = {"benchmark": "gsm-mini", "data_sha256": "0" * 64, "max_tokens": 2 * certificate.max_tokens}
    assert certificate.notes(same, **own) == certificate.notes({"models": same["models"]}) == []
    longer = certificate.max_tokens
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"max_tokens": 8}, f"max tokens {longer}, not 8"),
        ({}, {"benchmark": "typed", "data_sha256": "0" * 64}, "other problems (gsm-mini)"),
        ({"dtypes": {**same["dtypes"], "draft": "bfloat16"}}, {}, "a draft in float32, not bfloat16"),
        ({"dtypes": {**same["dtypes"], "target": "float32, fp8"}}, {}, "a target in float32, not float32, fp8"),
        ({"engines": {**same["engines"], "target": "vLLM"}}, {}, "a target on torch, not vLLM"),
        ({}, {"min_p": "set"}, "no min p"),
        ({}, {"template_sha256": "0" * 64}, "another chat template"),
    ]
    for models, request, words in changes:
        ((_, note),) = certificate.notes({**same, **models}, **request)
        assert note == f"Certified for {words}. Run `stepspec calibrate`."
    other = {**same, "models": {"target": "0", "draft": "0"}}
    tuned = "Thresholds were tuned for the embedded pair. Run `stepspec calibrate`."
    assert certificate.notes(other, temperature=2.0) == [(("models",), tuned)]
    ((_, note),) = certificate.notes(same, 0.02)
    assert note.startswith("Certified without max_overhead. With 0.02 ")
    older = certificate.model_copy(update=dict.fromkeys(("pair", "dtypes", "engines", "max_overhead")))
    assert older.notes(same, 0.02) == []
    ((_, note),) = older.notes(other)
    assert note == "Thresholds were tuned for other models. Run `stepspec calibrate`."


def test_a_report_says_that_a_policy_is_certified_for_other_problems(found: tuple[Path, Calibrated, str]) -> None:
    folder, _, text = found
    run = read_run(folder / "tested")
    record = PolicyRecord(text=text, sha256="0", kind="step")
    run = run.model_copy(update={"policies": {**run.policies, "mine": record}, "temperature": 0.0})
    typed = run.model_copy(update={"benchmark": "typed", "data_sha256": "0" * 64})
    summary = read_summary(folder / "tested")
    for each, is_named in (run, False), (typed, True):
        warnings = findings(each, summary).warnings
        assert ("mine: Certified for other problems (gsm-mini). Run `stepspec calibrate`." in warnings) is is_named
        assert any(sentence.startswith("mine: Certified without max_overhead. ") for sentence in warnings)


def test_a_session_says_once_before_an_answer_that_its_certificate_does_not_hold(
    found: tuple[Path, Calibrated, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(found[2])
    asyncio.run(_notes_are_right(file, caplog))


async def _notes_are_right(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    question = "Vera has 40 books. Finn has 20 fewer books than Vera. How many books does Finn have?"
    pair = load_pair(notes=False)
    try:
        spec = StepSpec(policy=str(file), pair=pair)
        assert (await spec.generate(question, max_tokens=640)).note is None
        assert caplog.messages == []
        warm = [spec.stream(question, max_tokens=8, sampling=Sampling(each)) for each in (0.6, 0.61)]
        first = await anext(warm[0])
        assert not isinstance(first, Done)
        assert caplog.messages == ["Certified for temperature 0, not 0.6. Run `stepspec calibrate`."], (
            "before an answer"
        )
        async for each in warm[1]:
            assert not isinstance(each, Done) or each.result.note is None
        await warm[0].aclose()
        assert len(caplog.messages) == 1
        swapped = StepSpec(policy=str(file), pair=Pair(pair.draft, pair.draft, one_vocabulary=True))  # pyright: ignore
        for _ in range(2):
            await swapped.generate(question, max_tokens=8)
        tuned = "Thresholds were tuned for the embedded pair. Run `stepspec calibrate`."
        assert caplog.messages.count(tuned) == 1
    finally:
        await pair.aclose()


def test_a_finished_calibration_is_not_run_again(found: tuple[Path, Calibrated, str]) -> None:
    folder, results, _ = found
    before = {file: file.stat().st_size for file in folder.glob("*/rows.jsonl")}
    again = asyncio.run(calibrated(folder, CalibrationPlan(max_loss=0.9, max_problems=20, concurrency=4), at_most=0.3))
    policy = Policy.model_validate(tomllib.loads(again[1]))
    shipped = load_policy("two-level")[0]
    assert policy.at(0.3).certificate not in (None, shipped.at(0.3).certificate)
    assert policy.at(0.6).certificate == shipped.at(0.6).certificate
    assert {file: file.stat().st_size for file in folder.glob("*/rows.jsonl")} == before
    assert again[0].path == results.path
    with pytest.raises(UsageError, match="with another max_loss"):
        asyncio.run(calibrated(folder, CalibrationPlan(max_loss=0.2, max_problems=20, concurrency=4)))


def test_a_report_shows_the_path_with_its_bounds(found: tuple[Path, Calibrated, str], tmp_path: Path) -> None:
    folder, results, _ = found
    page, text = tmp_path / "page.html", tmp_path / "report.md"
    done = invoke("report", folder, "--html", page, "--markdown", text, "--no-traces")
    assert done.exit_code == 0, done.output
    setting = next(each for each in results.path if each.setting.name == results.chosen)
    for shown in (done.output, text.read_text(), page.read_text()):
        assert f"{100 * (setting.loss_upper or 0):.2f}%" in shown
    assert "What the settings cost" in page.read_text()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "embedded-t0.json").write_bytes((folder / "calibration.json").read_bytes())
    row = calibrations_block(tmp_path / "all").splitlines()[2]
    assert row.startswith("| embedded | gsm-mini | 0 | certified | likelihood.min ")
    assert "The threshold is" in page.read_text(), "where the threshold lies among the scores"


def test_the_tested_problems_are_not_the_recorded_ones(found: tuple[Path, Calibrated, str]) -> None:
    folder = found[0]
    recorded, tested = ({row.problem for row in iter_rows(folder / name)} for name in ("recorded", "tested"))
    assert len(recorded) == 2
    assert tested
    assert not recorded & tested


def test_agreement_needs_no_right_answers(tmp_path: Path) -> None:
    rng = random.Random(0)
    names = ("Ann", "Ben", "Vera", "Finn")
    lines: list[str] = []
    for _ in range(20):
        (first, second), a, b = rng.sample(names, 2), rng.randint(20, 60), rng.randint(2, 19)
        question = (
            f"{first} has {a} books. {second} has {b} fewer books than {first}. How many books does {second} have?"
        )
        lines.append(json.dumps({"question": question}))
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(lines))
    plan = CalibrationPlan(max_loss=0.9, max_problems=10, measure="agreement", max_tokens=96, concurrency=4)
    results, text = asyncio.run(calibrated(tmp_path / "run", plan, data))
    tested = results.path[0]
    assert tested.target_accuracy == 1.0, "at temperature 0 the target agrees with itself"
    assert results.identity.measure == "agreement"
    assert ("[certificate]" in text) == results.certified
    assert (tmp_path / "run" / "references.json").is_file()


def test_too_few_problems_and_bad_options_are_sentences(tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    lines = [f'{{"question": "What is 1 plus {n}?", "answer": "{1 + n}"}}\n' for n in range(5)]
    data.write_text("".join(lines + lines[:2]))  # repeated questions do not count
    folder = ["--output", tmp_path / "run", "--policy-file", tmp_path / "p.toml"]
    train = ["gsm-mini", "--split", "train"]
    policy = tmp_path / "mine.toml"
    policy.write_text(load_policy("two-level")[1])
    for arguments, message in [
        ([data, *folder], "A calibration needs at least 150 problems, got 5."),
        (["gsm-mini", "--max-loss", "0", *folder], "--max-loss must be above 0"),
        (["gsm-mini", "--confidence", "1", *folder], "--confidence must be above 0.5"),
        (["gsm-mini", *folder], "must not use the test split of gsm-mini, so that it stays unused. Add --split cal"),
        (["gsm-mini", "--split", "test", *folder], "must not use the test split"),
        (["gsm-mini", "--split", "tets", *folder], "no split 'tets'. Did you mean 'test'?"),
        (["gsm8k", *folder], "must not use the test split of gsm8k, so that it stays unused. Name a file of other"),
        (["typed", "--split", "train", *folder], "typed has no splits to choose from. --split is for gsm-mini."),
        ([data, "--split", "train", *folder], "All questions of a FILE are used."),
        (["gsm-mini", "--budget", "soon", *folder], "--budget takes a time"),
        (["gsm-mini", "--grader", "number", *folder], "--grader is for a FILE"),
        (
            [*train, "--policy", policy, "--policy-file", policy, "--force"],
            "must be another file than --policy",
        ),
        (
            [*train, "--temperature", "0.6", "--at-most", "0.3", *folder],
            "--at-most must be at least the temp",
        ),
        (
            [*train, "--policy", "token", *folder],
            "A calibration needs a policy of family 'score'",
        ),
    ]:
        refused = invoke("calibrate", *arguments)
        assert isinstance(refused.exception, UsageError), refused.output
        assert message in str(refused.exception)
    assert not (tmp_path / "p.toml").exists()
    assert not (tmp_path / "run").exists()


def test_the_sequence_ends_at_the_first_setting_that_is_not_certified() -> None:
    limits = LossLimits(0.05, 0.95, 300)
    good, bad = np.zeros(300), np.repeat([1.0, 0.0], 150)
    assert status_of(good, limits) == "certified"
    assert status_of(bad, limits) == "loses more"
    assert status_of(good[:20], limits) == "unknown"
    unclear = np.tile([1.0] + [0.0] * 19, 15)
    assert status_of(unclear, limits) == "unknown"
    assert certified_settings(np.array([good, bad, good]), limits) == 1
    assert certified_settings(np.array([good, unclear, good]), limits) == 1
    assert certified_settings(np.array([good, good, good]), limits) == 3


def test_the_number_of_problems_that_would_suffice_is_about_right() -> None:
    rng = np.random.default_rng(0)
    limits = LossLimits(0.01, 0.95, 6000)
    losses = rng.choice([1.0, 0.0, -1.0], 800, p=[0.01, 0.98, 0.01])
    needed = problems_needed(losses, limits)
    assert needed is not None
    more = rng.choice([1.0, 0.0, -1.0], (40, 4 * needed), p=[0.01, 0.98, 0.01])
    certified = [status_of(each, LossLimits(0.01, 0.95, needed)) == "certified" for each in more]
    assert np.mean(certified) > 0.7
    assert problems_needed(np.ones(10), limits) is None


def test_losses_of_repeats_are_averaged_by_problem() -> None:
    own, target = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[1.0, 1.0], [0.0, 1.0]])
    assert by_problem(own, target).tolist() == [0.5, -0.5]


def test_thresholds_by_temperature() -> None:
    given = load_policy("two-level")[0].model_copy(update={"salvage": SalvageTable(redraft=True)})
    table = changed_policy(given, {"likelihood.min": -3.0}, -1.0).model_dump() | {
        "temperatures": [{"at_most": 0.3, "thresholds": {"likelihood.min": -2.0}, "min_logprob": -4.0}]
    }
    policy = Policy.model_validate(table)
    cold, warm = policy.at(0.0), policy.at(0.6)
    for found, threshold, min_logprob in ((cold, -2.0, -4.0), (warm, -3.0, -1.0)):
        assert found.judges[0].model_dump()["threshold"] == threshold
        assert found.salvage == SalvageTable(min_logprob=min_logprob, redraft=True)
    for wrong, message in [
        ([{"at_most": 0.3, "thresholds": {"rating.short": 5.0}}], "no such judge"),
        ([{"at_most": 0.3, "thresholds": {"likelihood.min": 1.0}}], "threshold must be at most 0"),
        ([{"at_most": 0.6, "thresholds": {"likelihood.min": -1.0}}] * 2, "in the order of at_most"),
    ]:
        with pytest.raises(ValueError, match=message):
            Policy.model_validate(table | {"temperatures": wrong})
