"""Variants of policies, `--policy NAME:KEY=VALUE,VALUE`: their names, keys and values, and a run with them."""

import csv
import json
import re
from pathlib import Path

import pytest
from commands import stepspec
from test_cli import refused

from stepspec.base.file_model import parse_toml
from stepspec.base.files import find_data_file
from stepspec.errors import UsageError
from stepspec.evaluation.records import RunRecord
from stepspec.evaluation.run import calibrated_settings, load_policies
from stepspec.evaluation.run.variants import load_variants
from stepspec.evaluation.runs import policy_of, read_run
from stepspec.loop.judge import ThresholdJudge
from stepspec.loop.policy import Policy, load_policy

EMBEDDED = "6941da3e7042f40d"
"""Hash of a pair for which calibrated settings of `two-level` ship with stepspec."""


def test_a_variant_is_the_policy_with_another_value_and_has_a_text_that_says_so() -> None:
    found = load_variants("specreason:judges.0.threshold=5,7.5")
    assert list(found) == ["specreason:judges.0.threshold=5", "specreason:judges.0.threshold=7.5"]
    base = load_policy("specreason")[0]
    for threshold, (policy, text) in zip((5, 7.5), found.values(), strict=True):
        assert policy == base.with_threshold(threshold)
        assert text.startswith(f"# specreason with judges.0.threshold = {threshold}\n")
        assert Policy.model_validate(parse_toml(text)) == policy


def test_several_keys_give_their_product_and_values_are_those_of_toml() -> None:
    found = load_variants('token:token.num_tokens=2,"auto":step.delimiter="\\n","a:b=c,d"')
    assert list(found) == [
        'token:token.num_tokens=2:step.delimiter="\\n"',
        'token:token.num_tokens=2:step.delimiter="a:b=c,d"',
        'token:token.num_tokens="auto":step.delimiter="\\n"',
        'token:token.num_tokens="auto":step.delimiter="a:b=c,d"',
    ]
    assert [policy.token.num_tokens for policy, _ in found.values()] == [2, 2, "auto", "auto"]


def test_a_table_that_the_file_does_not_have_is_added() -> None:
    ((policy, text),) = load_variants('specreason:salvage.min_logprob=-1:judging="cascade"').values()
    assert policy.salvage is not None
    assert (policy.salvage.min_logprob, policy.judging) == (-1, "cascade")
    assert Policy.model_validate(parse_toml(text)) == policy


def test_the_path_of_a_file_may_contain_colons_and_equal_signs(tmp_path: Path) -> None:
    text = find_data_file("policies", "token").read_text("utf-8")
    for name in ("runs:1/my:own.toml", "lr:a=3/mine.toml"):
        file = tmp_path / name
        file.parent.mkdir()
        file.write_text(text, "utf-8")
        assert list(load_variants(str(file))) == [file.stem]
        assert list(load_variants(f"{file}:token.num_tokens=2")) == [f"{file.stem}:token.num_tokens=2"]


def test_calibrated_thresholds_do_not_replace_those_of_a_variant() -> None:
    shipped = {name: policy for name, (policy, _) in load_policies(["two-level"]).items()}["two-level"]
    assert calibrated_settings("two-level", shipped, EMBEDDED)
    own = next(judge.threshold for judge in shipped.judges if isinstance(judge, ThresholdJudge))
    ((name, (policy, _)),) = load_variants(f"two-level:judges.0.threshold={own}").items()
    assert policy == shipped
    assert calibrated_settings(name, policy, EMBEDDED) == []
    ((name, (policy, _)),) = load_variants("two-level:score.depth=2").items()
    assert calibrated_settings(name, policy, EMBEDDED), "it has the thresholds of the policy"


@pytest.mark.parametrize(
    ("variants", "complaint"),
    [
        ("two-level:judges.0.thresold=-2", r"policy two-level with judges\.0\.thresold = -2: .*mean 'threshold'"),
        ("two-level:nonsense=1", "policy two-level with nonsense = 1: There is no key 'nonsense'"),
        ("two-level:threshold=-2", r"no key .threshold.*named by its path: judges\.0\.threshold\.$"),
        ("two-level:judges.1.threshold=-2", r"policy 'two-level' has no key 'judges\.1\.threshold'.*index from 0"),
        ("two-level:judges.threshold=-2", r"policy 'two-level' has no key 'judges\.threshold'"),
        ("two-level:judges.-1.threshold=-2", r"policy 'two-level' has no key 'judges\.-1\.threshold'"),
        ("two-level:family.name=1", r"policy 'two-level' has no key 'family\.name'"),
        ("two-level:judges.0.threshold=3", r"two-level with judges\.0\.threshold = 3: .*threshold must be at most 0"),
        ("token:token.num_tokens=2,0", r"token with token\.num_tokens = 0: .*whole number from 1"),
        ("token:token.num_tokens=", "No part may be empty"),
        ("token:token.num_tokens=2,", "No part may be empty"),
        ("token:token.num_tokens=2,,4", r"token\.num_tokens has the values '2,,4', which are not valid"),
        ("token:token.drafter=none", r"token\.drafter has the values 'none', which are not valid.*quotes"),
        ("token:token.num_tokens=2]\nx = [1", "No part may be empty"),
        ("token:=2", "No part may be empty"),
        ("token:token.num_tokens=2,2", r"two variants that are the same: 'token:token\.num_tokens=2' and"),
        ("two-level:judges.0.threshold=-2,-2.0", "two variants that are the same"),
        ("token:token.num_tokens=2:token.num_tokens=4", "has a key twice"),
        ("tokn:token.num_tokens=2", "no policy 'tokn'. Did you mean 'token'"),
        ("token:token.num_tokens=" + "2," * 400, "No part may be empty"),
    ],
)
def test_what_is_wrong_with_a_variant_is_named_with_the_policy_and_the_key(variants: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        load_variants(variants)


def test_a_wrong_variant_is_refused_before_a_model_loads() -> None:
    arguments = ("eval", "gsm-mini", "--target", "torch:no-such-folder", "--policy")
    assert "'thresold'" in refused(*arguments, "two-level:judges.0.thresold=-2")
    twice = ("token:token.num_tokens=2", "--policy", "token:token.num_tokens=2,4")
    assert "two policies called 'token:token.num_tokens=2'" in refused(*arguments, *twice)


VARIANTS = [f"specreason:judges.0.threshold={threshold}" for threshold in (5, 9)]
ARGUMENTS = ("eval", "gsm-mini", "--limit", "3", "--policy", "specreason:judges.0.threshold=5,9")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "variants"
    figures = folder.parent / "figures"
    files = ("--csv", figures / "run.csv", "--plots", figures)
    done = stepspec(*ARGUMENTS, "--record", "--output", folder, *files)
    assert done.returncode == 0, done.stderr
    assert "On the front of accuracy and speed" in done.stdout
    return folder


def test_a_run_records_variants_as_policies_and_resumes(run: Path) -> None:
    record = RunRecord.model_validate_json((run / "run.json").read_bytes())
    assert set(record.policies) == {"target", "token", *VARIANTS}
    thresholds = [
        judge.threshold
        for name in VARIANTS
        for judge in policy_of(record, name).judges
        if isinstance(judge, ThresholdJudge)
    ]
    assert thresholds == [5, 9]
    with (run.parent / "figures" / "run.csv").open() as stream:
        assert {row["policy"] for row in csv.DictReader(stream)} == set(record.policies)
    plots = {file.name for file in (run.parent / "figures").glob("*.svg")}
    assert "all-policies-accuracy-against-speed.svg" in plots
    assert all(re.fullmatch(r"[\w.,+-]+", name) for name in plots)
    before = (run / "rows.jsonl").read_bytes()
    assert stepspec(*ARGUMENTS, "--record", "--output", run).returncode == 0
    assert (run / "rows.jsonl").read_bytes() == before


def test_variants_are_reported_compared_exported_and_replayed(run: Path, tmp_path: Path) -> None:
    assert stepspec("report", run).returncode == 0
    markdown = (run / "report.md").read_text("utf-8")
    assert all(name in markdown for name in VARIANTS)
    assert "On the front of accuracy and speed, by the measured values alone: " in markdown
    done = stepspec("export", run, "--output", tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    logs = {file.name for file in (tmp_path / "logs").iterdir()}
    assert len(logs) == len(read_run(run).policies)
    assert not any(set(':="') & set(name) for name in logs)
    file = tmp_path / "comparison.json"
    for named in (VARIANTS[0], f"{VARIANTS[0]}={VARIANTS[1]}", f"target={VARIANTS[1]}"):
        done = stepspec("compare", run, run, "--policy", named, "--json", file)
        assert done.returncode == 0, done.stderr
        assert len(json.loads(file.read_text())["policies"]) == 1
    done = stepspec("replay", run, "--policy", "specreason:judges.0.threshold=5,7", "--json", file)
    assert done.returncode == 0, done.stderr
    names = [each["name"] for each in json.loads(file.read_text())["policies"]]
    assert names == ["specreason:judges.0.threshold=5", "specreason:judges.0.threshold=7"]
