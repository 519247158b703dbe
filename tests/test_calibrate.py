"""Calibrations: the sequence of tests, the certificate, resuming, agreement without right answers, and bad input."""

import asyncio
import json
import random
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from evals.bench.certification import certified_settings
from evals.bench.documents import calibrations_block
from evals.training.gsm_mini import load_split
from stepspec.api.models import Pair, load_pair
from stepspec.api.session import StepSpec
from stepspec.base.files import data_folder
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
from stepspec.evaluation.calibrate.calibration import CalibrationOutcome
from stepspec.evaluation.calibrate.fixed_sequence import (
    LossLimits,
    by_problem,
    problems_needed,
    status_of,
)
from stepspec.evaluation.calibrate.records import Planned, Speed
from stepspec.evaluation.calibrate.task import calibration_split
from stepspec.evaluation.calibrate.words import prospects, sentences
from stepspec.evaluation.records import PolicyRecord
from stepspec.evaluation.report.findings import findings
from stepspec.evaluation.run import Local, load_benchmark
from stepspec.evaluation.runs import iter_rows, policy_of, read_run, read_summary
from stepspec.loop.calibrated import (
    UNKNOWN,
    CalibratedSetting,
    others_from,
    proposing,
    setting_at,
    settings_of,
    store,
)
from stepspec.loop.policy import Policy, load_policy
from stepspec.loop.result import Done

SMALL = Sizes(recorded=2, least_recorded=2, chunk=12, timed=1, timed_chunk=1)
SILENT = CalibrationWatcher(lambda title: None, lambda row, done, total: None, lambda words: None)


Found = tuple[Path, Calibrated, CalibratedSetting]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


async def calibrated(
    folder: Path, plan: CalibrationPlan, data: Path | None = None
) -> tuple[Calibrated, CalibratedSetting]:
    """Calibrate `two-level` for the embedded pair."""
    async with Local(load_pair(notes=False)) as executor:
        name, split = ("gsm-mini", "calibration") if data is None else ("questions", None)
        benchmark = calibration_split(name, load_benchmark(name)[1], split)
        task = await load_task(name, benchmark, data, load_policy("two-level")[1], executor, plan)
        return await calibrate(task, executor, folder, Budget(None), SILENT, SMALL)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """A calibration with a limit so large that it certifies something."""
    folder = tmp_path_factory.mktemp("calibration") / "run"
    plan = CalibrationPlan(max_loss=0.9, max_problems=20, concurrency=4)
    results, setting = asyncio.run(calibrated(folder, plan))
    certificate = setting.certificate
    assert certificate is not None
    assert certificate.least_logprob is not None
    usual = {"least_logprob": -8.54}  # of 400 problems; one problem in twenty is below the bound that twenty give
    return folder, results, setting.model_copy(update={"certificate": certificate.model_copy(update=usual)})


def test_a_calibration_finds_a_setting_with_a_certificate(found: Found) -> None:
    folder, results, setting = found
    assert results.certified
    chosen = next(each for each in results.path if each.setting.name == results.chosen)
    assert chosen.status == "certified"
    assert (chosen.loss_upper or 1) < 0.9
    assert [each.status for each in results.path[: results.path.index(chosen)]] == ["certified"] * results.path.index(
        chosen
    )
    certificate = setting.certificate
    assert certificate is not None
    assert (certificate.max_loss, certificate.num_problems) == (0.9, chosen.num_problems)
    assert certificate.speedup is not None
    assert setting.steps == results.pays
    given = load_policy("two-level")[0]
    policy = setting.model_copy(update={"steps": True}).applied(given)
    assert policy.judges[0].model_dump()["threshold"] == chosen.setting.thresholds["likelihood.min"]
    assert Calibrated.model_validate_json((folder / "calibration.json").read_bytes()).sentences == results.sentences
    tokens = setting.model_copy(update={"steps": False}).applied(given)
    assert (tokens.kind(), tokens.token) == ("token", given.token)
    Policy.model_validate(tokens.model_dump())


def test_settings_are_found_by_policy_models_and_temperature(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    given, pair, own = load_policy("two-level")[0], found[1].identity.pair, found[2]
    shipped = settings_of(given, pair)
    assert [each.temperature for each in shipped] == [0.0, 0.6]
    warmer = own.model_copy(update={"temperature": 0.3})
    removed = own.model_copy(update={"temperature": 0.4, "thresholds": {"rating.short": 9.0}})
    for each in own, warmer, removed:  # the last one is for a question that judges no longer ask
        assert store(each, "two-level", pair).is_relative_to(tmp_path)
    assert settings_of(given, pair) == [own, warmer, shipped[1]], "those of the user count first"
    taken = {each: setting_at(settings_of(given, pair), each) for each in (0.0, 0.2, 0.4, 2.0)}
    assert taken == {0.0: own, 0.2: warmer, 0.4: shipped[1], 2.0: shipped[1]}
    (unknown,) = settings_of(given, "0" * 16)
    assert (unknown.applied(given).kind(), proposing(given, [unknown]).kind()) == ("token", "token")
    assert unknown.notes({}) == [(("steps",), UNKNOWN)]
    assert proposing(given, []) is proposing(given, shipped) is given
    slower = given.model_copy(update={"score": given.score.model_copy(update={"max_overhead": 0.5})})
    assert settings_of(slower, pair), "it accepts the same steps"
    edited = given.with_thresholds({"likelihood.min": -1.0}, -4.0)
    assert settings_of(edited, pair) == settings_of(edited, "0" * 16) == []
    (tmp_path / "stepspec" / "thresholds" / pair / "two-level-t0.json").write_text("{")
    with pytest.raises(UsageError, match=r"two-level-t0\.json is damaged, or of another version\. Delete it"):
        settings_of(given, pair)


def test_a_calibration_says_what_it_can_show() -> None:
    assert prospects(360, 0.95) == (
        "For a policy that answers 15% of the problems differently, 360 problems put the bound of the loss 3.4 points "
        "above the loss itself. Without a loss, a limit of 1, 2 or 5 points takes about 4,059, 1,015 or 163 problems."
    )


def test_several_certificates_from_the_same_problems_are_counted(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    _, results, setting = found
    identity, policy = results.identity, load_policy("two-level")[0]
    for number in range(9):
        store(setting.model_copy(update={"temperature": number / 10}), "two-level", identity.pair)
    other = setting.certificate and setting.certificate.model_copy(update={"data_sha256": "0" * 64})
    store(setting.model_copy(update={"certificate": other}), "two-level", "1" * 16)
    assert others_from(identity.data_sha256, identity.pair, policy, 0.0) == 8, "the one that is replaced is none"
    assert others_from(identity.data_sha256, identity.pair, policy, 2.0) == 9
    said = " ".join(sentences(results.model_copy(update={"num_certificates": 10})))
    assert "one of 10 certificates from these problems. With a probability of up to 40%" in said
    assert "certificates from these" not in " ".join(results.sentences)


def test_a_draft_that_is_as_good_as_the_target_is_named(found: Found) -> None:
    results = found[1]
    assert results.draft_accuracy is not None
    for draft, target, says in ((0.7, 0.9, False), (0.9, 0.9, True), (0.95, 0.9, True)):
        alone = {"draft_accuracy": draft, "recorded_target_accuracy": target}
        said = " ".join(sentences(results.model_copy(update=alone)))
        assert ("the policy 'draft' may be all that you need" in said) is says


def test_the_shipped_settings_are_those_of_a_shipped_policy() -> None:
    files = sorted((data_folder("policies") / "thresholds").glob("*/*.json"))
    assert {file.parent.name for file in files} >= {load_pair(notes=False).hash}
    for file in files:
        setting = CalibratedSetting.model_validate_json(file.read_bytes())
        policy = load_policy(file.name.split("-t")[0])[0]
        assert setting.policy_sha256 == policy.settings_sha256, f"{file.name} is of another policy"
        assert setting.steps == bool(setting.thresholds)
        assert setting.applied(policy).kind() == ("step" if setting.steps else "token")


@pytest.mark.parametrize(
    ("loss", "speeds", "predicted", "pays"),
    [
        (0.01, (2.0, 1.2), None, True),
        (0.02, (2.0, 1.2), None, False),
        (None, (2.0, 1.2), None, False),
        (0.0, (2.0, 0.9), None, False),
        (0.0, (0.9, None), None, False),
        (0.0, None, (2.0, 1.2), True),
        (0.0, None, (2.0, 0.8), False),
    ],
)
def test_steps_are_proposed_where_they_are_faster_within_the_loss(
    found: Found,
    loss: float | None,
    speeds: tuple[float, float | None] | None,
    predicted: tuple[float, float] | None,
    pays: bool,
) -> None:
    setting = found[1].path[0].setting
    if predicted is not None:
        setting = setting.model_copy(
            update=dict(zip(("predicted_speedup", "predicted_vs_token"), predicted, strict=True))
        )
    accuracies = {"accuracy": None if loss is None else 0.9 - loss, "target_accuracy": 0.9}
    tested = found[1].path[0].model_copy(update={"setting": setting, **accuracies})
    plan = Planned(identity=found[1].identity, num_recorded=2, num_planned=2, path=[setting])
    fields = {"num_problems": 1, "vs_target_ci": None, "vs_token_ci": None, "step_acceptance": 0.5}
    speed = None if speeds is None else Speed(vs_target=speeds[0], vs_token=speeds[1], **fields)
    assert CalibrationOutcome(plan, [tested], 0, True, speed, 0).pays(0.01 + 1e-9) is pays


def test_without_a_faster_setting_the_policy_is_token_level_and_says_so(found: Found) -> None:
    results = found[1].model_copy(update={"pays": False, "certified": False, "speed": None})
    (first,) = (each for each in results.path if each.setting.name == results.chosen)
    begins = "On these models the policy is token-level speculation at temperature 0, which costs no accuracy: "

    def said(**changes: object) -> str:
        changed = first.model_copy(update=changes)
        return sentences(results.model_copy(update={"path": [changed]}))[0]

    assert said(accuracy=0.5, target_accuracy=0.5) == f"{begins}the chosen setting is not faster."
    assert said(accuracy=0.0, target_accuracy=0.95).startswith(f"{begins}the most careful setting loses 95.00 points")
    untested = {"status": "not tested", "accuracy": None}
    assert "the budget ended before a setting was tested" in said(**untested)
    slow = first.setting.model_copy(update={"predicted_vs_token": 0.5})
    assert said(**untested, setting=slow) == f"{begins}by the recorded steps no setting is faster."


def test_what_a_certificate_does_not_cover_is_named(found: Found) -> None:
    certificate = found[2].certificate
    assert certificate is not None
    same = {name: dict(getattr(certificate, name)) for name in ("models", "dtypes", "engines")}
    own = {name: getattr(certificate, name) for name in ("temperature", "top_p", "template_sha256", "prompt_version")}
    own |= {"benchmark": "gsm-mini", "data_sha256": "0" * 64, "max_tokens": 2 * certificate.max_tokens}
    assert certificate.notes(same, **own) == certificate.notes({"models": same["models"]}) == []
    longer = certificate.max_tokens
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"max_tokens": 8}, f"max tokens {longer}, not 8"),
        ({}, {"benchmark": "typed", "data_sha256": "0" * 64}, "other problems (gsm-mini)"),
        ({"dtypes": {**same["dtypes"], "draft": "bfloat16"}}, {}, "a draft in float32, not bfloat16"),
        ({"dtypes": {**same["dtypes"], "target": "float32, fp8"}}, {}, "a target in float32, not float32, fp8"),
        ({"engines": {**same["engines"], "target": "vLLM"}}, {}, "a target on torch, not vLLM"),
        ({}, {"min_p": "set"}, "no min_p"),
        ({}, {"template_sha256": "0" * 64}, "another chat template"),
        ({}, {"prompt_version": "0" * 12}, "another prompt around the question"),
        ({}, {"temperature": 0.6}, "temperature 0, not 0.6"),
        ({}, {"top_p": 0.5}, "top p 1, not 0.5"),
        ({}, {"prompts": [-99.0]}, "another kind of problems (gsm-mini)"),
        ({}, {"prompts": [-99.0] * 6 + [-0.1] * 44, "benchmark": "typed"}, "another kind of problems (gsm-mini)"),
    ]
    for models, request, words in changes:
        ((_, note),) = certificate.notes({**same, **models}, **request)
        assert note == f"Certified for {words}. Run `stepspec calibrate`."
    for few in ([-0.1], [-99.0] * 5 + [-0.1] * 45):
        assert certificate.notes(same, prompts=few) == [], "no more than problems of the same kind would have"
    other = {**same, "models": {"target": "0", "draft": "0"}}
    tuned = "Thresholds were tuned with other models. Run `stepspec calibrate`."
    assert certificate.notes(other, temperature=2.0) == [(("models",), tuned)]
    ((_, note),) = certificate.notes(same, 0.02)
    assert note.startswith("Certified without max_overhead. With 0.02 ")
    tokens = found[2].model_copy(update={"steps": False, "sentences": ["Tokens."]})
    assert tokens.notes(other, temperature=2.0) == [(("steps",), "Tokens.")]


def test_a_run_says_what_its_calibration_does_not_cover(
    found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the terminal, in `run.json` and in the report, with the same words."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    _, results, setting = found
    store(setting.model_copy(update={"steps": True}), "two-level", results.identity.pair)
    taken = "With 0.02 the models take turns in other places, which depend on measured times."
    overhead = f"Certified without max_overhead. {taken} To be covered, leave it out."
    other = "Certified for another kind of problems (gsm-mini). Run `stepspec calibrate`."
    for name, expected in (("gsm-mini", [overhead]), ("typed", [other, overhead])):
        folder = tmp_path / name
        limits = ("--limit", "1", "--temperature", "0", "--max-tokens", "2000")
        done = invoke("eval", name, *limits, "--policy", "two-level", "--output", folder)
        assert done.exit_code == 0, done.output
        run = read_run(folder)
        assert [*run.policies["two-level"].notes] == expected
        assert "With calibrated thresholds: two-level." in done.stderr
        assert run.policies["target"].notes == ()
        warnings = findings(run, read_summary(folder)).warnings
        for note in expected:
            assert f"two-level: {note}" in done.stderr
            assert f"two-level: {note}" in warnings
        assert run.identity() == run.model_copy(update={"policies": without_notes(run.policies)}).identity()


def test_a_recording_has_steps_where_none_pay(found: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    store(found[2].model_copy(update={"steps": False}), "two-level", found[1].identity.pair)
    for options, judged in (([], False), (["--record"], True)):
        folder = tmp_path / f"recorded-{judged}"
        done = invoke("eval", "gsm-mini", "--limit", "1", "--policy", "two-level", "--output", folder, *options)
        assert done.exit_code == 0, done.output
        assert any(row.steps_judged for row in iter_rows(folder) if row.policy == "two-level") == judged


def without_notes(policies: Mapping[str, PolicyRecord]) -> dict[str, PolicyRecord]:
    return {name: each.model_copy(update={"notes": ()}) for name, each in policies.items()}


def test_a_session_says_once_before_an_answer_that_its_certificate_does_not_hold(
    found: Found, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "mine.toml"
    file.write_text(load_policy("two-level")[1].replace("-2.9942", "-2.99"))
    policy = load_policy(str(file))[0]
    setting = found[2].model_copy(update={"steps": True, "policy_sha256": policy.settings_sha256})
    store(setting, "mine", found[1].identity.pair)
    asyncio.run(_notes_are_right(file, caplog, setting))


async def _notes_are_right(file: Path, caplog: pytest.LogCaptureFixture, setting: CalibratedSetting) -> None:
    question = next(load_split("test")).question
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
        result = await spec.generate(question, max_tokens=8, sampling=Sampling(0.6))
        assert [*result.uncovered] == caplog.messages, "a result says it every time"
        assert (await spec.generate(question, max_tokens=640)).uncovered == ()
        endless = Sampling(logit_bias=dict.fromkeys(pair.target.tokenizer.end_ids, -100.0))
        ignoring = "Certified for no ignore_eos. Run `stepspec calibrate`."
        assert (await spec.generate(question, max_tokens=8, sampling=endless)).uncovered == (ignoring,)
        strange = "Write a function that reverses a list."
        kind = "Certified for another kind of problems (gsm-mini). Run `stepspec calibrate`."
        assert [(await spec.generate(strange, max_tokens=8)).uncovered for _ in range(2)] == [(kind,)] * 2
        assert caplog.messages.count(kind) == 1
        other = Pair(pair.draft, pair.draft, one_vocabulary=True)  # pyright: ignore
        swapped = StepSpec(pair=other)
        for _ in range(2):
            result = await swapped.generate(question, max_tokens=8)
            assert (result.uncovered, result.counts.steps_proposed) == ((UNKNOWN,), 0)
        assert caplog.messages.count(UNKNOWN) == 1
        store(setting.model_copy(update={"steps": False, "sentences": ["Tokens."]}), "mine", pair.hash)
        spec = StepSpec(policy=str(file), pair=pair)
        for _ in range(2):
            result = await spec.generate(question, max_tokens=640)
            assert (result.counts.steps_proposed, result.counts.token_drafted > 0) == (0, True)
        assert caplog.messages.count("Tokens.") == 1
    finally:
        await pair.aclose()


def test_a_certified_setting_is_not_replaced_by_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded pair has one. Too few problems certify nothing."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("stepspec.cli.calibrate.calibrate", partial(calibrate, sizes=SMALL))
    limits = ("--max-problems", "12", "--max-tokens", "640", "--output", tmp_path / "run")
    done = invoke("calibrate", "gsm-mini", "--split", "calibration", "--temperature", "0", *limits)
    assert done.exit_code == 0, done.output
    results = Calibrated.model_validate_json((tmp_path / "run" / "calibration.json").read_bytes())
    assert not results.certified
    assert len(results.path) > 1
    assert [each.status for each in results.path] == ["unknown", *["not tested"] * (len(results.path) - 1)]
    stored = [*tmp_path.glob("stepspec/thresholds/*/*.json")]
    assert bool(stored) is not results.pays
    assert ("Not stored, because these models have a certified setting" in done.output) is results.pays


def test_a_finished_calibration_is_not_run_again(found: Found) -> None:
    folder, results, setting = found
    before = {file: file.stat().st_size for file in folder.glob("*/rows.jsonl")}
    again = asyncio.run(calibrated(folder, CalibrationPlan(max_loss=0.9, max_problems=20, concurrency=4)))
    assert again[1].thresholds == setting.thresholds
    assert {file: file.stat().st_size for file in folder.glob("*/rows.jsonl")} == before
    assert again[0].path == results.path
    with pytest.raises(UsageError, match="with another max_loss"):
        asyncio.run(calibrated(folder, CalibrationPlan(max_loss=0.2, max_problems=20, concurrency=4)))


def test_a_report_shows_the_path_with_its_bounds(found: Found, tmp_path: Path) -> None:
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


def test_the_tested_problems_are_not_the_recorded_ones(found: Found) -> None:
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
    results, setting = asyncio.run(calibrated(tmp_path / "run", plan, data))
    tested = results.path[0]
    assert tested.target_accuracy == 1.0, "at temperature 0 the target agrees with itself"
    assert results.identity.measure == "agreement"
    assert (setting.certificate is not None) == results.certified
    assert (tmp_path / "run" / "references.json").is_file()


def test_too_few_problems_and_bad_options_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "few.jsonl"
    lines = [f'{{"question": "What is 1 plus {n}?", "answer": "{1 + n}"}}\n' for n in range(5)]
    data.write_text("".join(lines + lines[:2]))  # repeated questions do not count
    folder = ["--output", tmp_path / "run"]
    train = ["gsm-mini", "--split", "train"]
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
            [*train, "--policy", "token", *folder],
            "A calibration needs a policy of family 'score'",
        ),
    ]:
        refused = invoke("calibrate", *arguments)
        assert isinstance(refused.exception, UsageError), refused.output
        assert message in str(refused.exception)
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    refused = invoke("calibrate", *train)
    assert "cannot be created: Not a directory. Set XDG_CONFIG_HOME to another." in str(refused.exception)


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


def test_policy_files_of_earlier_versions_are_refused_and_their_runs_are_read(found: Found) -> None:
    text = load_policy("two-level")[1]
    former = '[[temperatures]]\nat_most = 0.3\nthresholds = { "likelihood.min" = -2.0 }\nmin_logprob = -1.0\n'
    for table in ('[certificate]\nmeasure = "accuracy"\n', former):
        with pytest.raises(ValueError, match="any more: remove it, and run 'stepspec calibrate'"):
            Policy.model_validate(tomllib.loads(text + table))
    record = PolicyRecord(text=text + former, sha256="0", kind="step")
    run = read_run(found[0] / "tested").model_copy(update={"policies": {"two-level": record}})
    given = load_policy("two-level")[0]
    assert policy_of(run, "two-level") == given.with_thresholds({"likelihood.min": -2.0}, -1.0)
    assert policy_of(run.model_copy(update={"temperature": 0.6}), "two-level") == given
    removed = text.replace("[step]", "[step]\nabort_entropy = 2.0") + "[compare]\nwidth = 1\n"
    old = run.model_copy(update={"policies": {"two-level": record.model_copy(update={"text": removed})}})
    assert policy_of(old, "two-level") == given
    for wrong in ("temperatures = 3", "temperatures = [{}]", "temperatures = [{at_most = 1.0}]"):
        broken = record.model_copy(update={"text": f"{wrong}\n{text}"})
        with pytest.raises(UsageError, match="cannot be read"):
            policy_of(run.model_copy(update={"policies": {"two-level": broken}}), "two-level")
