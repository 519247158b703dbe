"""Replays of recorded steps: exact for the recorded policy, and clear about what they cannot know."""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import tomlkit
from typer.testing import CliRunner, Result

from stepspec.cli import app
from stepspec.errors import UsageError
from stepspec.evaluation.records import ResultRow
from stepspec.evaluation.replay import HardwareCosts, Recordings, front, read_recordings, replay
from stepspec.evaluation.replay.path import make_path, worth_testing
from stepspec.evaluation.runs import iter_rows
from stepspec.loop.policy import Policy, load_policy

NUM_PROBLEMS = 10
REDRAFT = {"min_logprob": -6.0, "redraft": True}


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run of the embedded pair under a policy, a bolder one, and one whose draft goes on."""
    folder, bolder, redrafts = (
        tmp_path_factory.mktemp("runs"),
        changed(judges=[likelihood(-8.0)]),
        changed(salvage=REDRAFT),
    )
    policies: list[str] = []
    for name, policy in (("given", changed()), ("bold", bolder), ("redraft", redrafts)):
        (folder / f"{name}.toml").write_text(tomlkit.dumps(policy.model_dump(mode="json", exclude_none=True)))
        policies += ["--policy", str(folder / f"{name}.toml")]
    arguments = ["eval", "gsm-mini", "--limit", NUM_PROBLEMS, "--temperature", 0.6, "--record", *policies]
    done = invoke(*arguments, "--output", folder / "run")
    assert done.exit_code == 0, done.output
    return folder / "run"


@pytest.fixture(scope="module")
def recordings(run: Path) -> Recordings:
    return read_recordings(run)


@pytest.fixture(scope="module")
def rows(run: Path) -> Mapping[str, list[ResultRow]]:
    found: dict[str, list[ResultRow]] = {}
    for row in iter_rows(run):
        found.setdefault(row.policy, []).append(row)
    return found


def changed(**settings: object) -> Policy:
    """Return the policy `two-level` without `redraft`, with another judge or other tables."""
    plain = load_policy("two-level")[0].with_thresholds({"likelihood.min": -3.0}, None)
    return Policy.model_validate(plain.model_dump() | {"salvage": {"min_logprob": -1.0}} | settings)


def likelihood(threshold: float, **settings: object) -> dict[str, object]:
    return {"kind": "likelihood", "threshold": threshold, **settings}


def test_a_recorded_policy_replays_as_it_ran(recordings: Recordings, rows: Mapping[str, list[ResultRow]]) -> None:
    for name in ("given", "bold", "redraft"):
        policy = next(each.policy for each in recordings.recordings if each.name == name)
        (found,) = replay({name: policy}, recordings)
        assert (found.recording, found.on_policy, found.num_requests) == (name, 1.0, NUM_PROBLEMS)
        assert found.wall_s == pytest.approx(sum(row.wall_s for row in rows[name]))
        accepted, judged = (sum(getattr(row, key) for row in rows[name]) for key in ("steps_accepted", "steps_judged"))
        assert found.step_acceptance == pytest.approx(accepted / judged)
        correct = sum(row.status == "correct" for row in rows[name]) / NUM_PROBLEMS
        assert found.likely_correct == pytest.approx(correct)
        target_s = sum(row.wall_s for row in rows["target"])
        assert found.speedup == pytest.approx(target_s / found.wall_s)
        assert found.speedup_vs_token == pytest.approx(sum(row.wall_s for row in rows["token"]) / found.wall_s)


def test_of_a_step_in_several_parts_the_draft_writes_again_what_is_not_kept(recordings: Recordings) -> None:
    (recording,) = (each for each in recordings.recordings if each.name == "redraft")
    parts = [
        (request.trace.steps[index], [step for step in request.trace.judged_steps if step.index == index])
        for request in recording.requests.values()
        for index in range(len(request.trace.steps))
    ]
    assert any(len(judged) > 1 for _, judged in parts)
    for whole, judged in parts:
        if judged and judged[-1].accepted:
            kept = sum(step.num_salvaged for step in judged[:-1]) + judged[-1].num_tokens
            assert whole.num_tokens == kept + len(judged) - 1, "each earlier part is followed by a token of the target"
    stricter = changed(salvage={"min_logprob": 0.0, "redraft": True})
    given, strict = replay({"given": recording.policy, "strict": stricter}, recordings)
    assert strict.wall_s > given.wall_s
    refusing = changed(judges=[likelihood(0.0)], salvage=stricter.model_dump()["salvage"])
    (refused,) = replay({"refusing": refusing}, recordings)
    assert refused.wall_s > given.wall_s


def test_a_policy_that_accepts_nothing_costs_more_and_answers_as_the_target(
    recordings: Recordings, rows: Mapping[str, list[ResultRow]]
) -> None:
    careful = changed(judges=[likelihood(0.0)], salvage=None)
    (found,) = replay({"careful": careful}, recordings)
    (given,) = replay({"given": changed()}, recordings)
    assert found.step_acceptance == 0.0
    assert found.departure == 0.0, "nothing of the draft is kept"
    assert (given.departure or 0) > 0
    assert found.wall_s > given.wall_s
    correct = sum(row.status == "correct" for row in rows["target"]) / NUM_PROBLEMS
    assert found.on_policy < 1
    assert found.likely_correct == pytest.approx(correct, abs=0.2)


def test_another_statistic_is_computed_from_recorded_log_probabilities(recordings: Recordings) -> None:
    by_mean = changed(judges=[likelihood(-0.2, statistic="mean")])
    by_draft = changed(judges=[{"kind": "draft-confidence", "threshold": -0.15}])
    for found in replay({"mean": by_mean, "draft": by_draft}, recordings):
        assert 0 < (found.step_acceptance or 0) < 1


def test_judges_that_ask_a_model_are_replayed_only_if_they_were_recorded(recordings: Recordings) -> None:
    rating = changed(judges=[{"kind": "rating"}], salvage=None)
    with pytest.raises(UsageError, match=r"its judge rating\.specreason was not recorded"):
        replay({"rating": rating}, recordings)
    longer = changed(step={"max_step_tokens": 100})
    with pytest.raises(
        UsageError, match=r"'longer' cannot be replayed: it differs from the recorded 'given' in step\."
    ):
        replay({"longer": longer}, recordings)
    without = replace(recordings, recordings=[each for each in recordings.recordings if each.name != "redraft"])
    with pytest.raises(UsageError, match=r"'redrafts' .* in salvage\.redraft"):
        replay({"redrafts": changed(salvage=REDRAFT)}, without)


def test_the_errors_of_a_replay_name_the_policy_that_they_mean(run: Path, tmp_path: Path) -> None:
    """Also in a sweep, in which each policy becomes several."""
    paths: list[Path] = []
    for name, policy in (("fine", changed()), ("odd", changed(step={"max_step_tokens": 100}))):
        paths.append(tmp_path / f"{name}.toml")
        paths[-1].write_text(tomlkit.dumps(policy.model_dump(mode="json", exclude_none=True)))
    for sweep in ([], ["--sweep"]):
        refused = invoke("replay", run, "--policy", paths[0], "--policy", paths[1], *sweep)
        assert isinstance(refused.exception, UsageError)
        assert str(refused.exception).startswith("'odd' cannot be replayed: it differs from the recorded 'given'")
        assert "settings of" not in refused.stderr, "it is refused before the sweep"


def test_the_table_of_a_replay_is_written_as_json_without_a_guess_of_the_accuracy(run: Path) -> None:
    done = invoke("replay", run, "--policy", "two-level", "--sweep", "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["benchmark"] == "gsm-mini"
    assert {each["name"].split()[0] for each in found["policies"]} == {"two-level"}
    assert any(each["on_front"] for each in found["policies"])
    assert all(each["departure"] >= 0 for each in found["policies"])
    assert not any("correct" in key or "accuracy" in key for each in found["policies"] for key in each)
    assert "speedup" in done.stderr, "the table"
    assert "accuracy" not in done.stderr


def test_a_sweep_shows_its_progress_and_is_written_as_csv_and_plotted(run: Path, tmp_path: Path) -> None:
    files = ("--csv", tmp_path / "replay.csv", "--plots", tmp_path / "plots")
    named = [part for name in ("given", "bold") for part in ("--policy", run.parent / f"{name}.toml")]
    done = invoke("replay", run, *named, "--sweep", *files)
    assert done.exit_code == 0, done.output
    assert re.search(r"settings of given: 0 of \d+\n", done.stderr)
    with (tmp_path / "replay.csv").open() as stream:
        rows = [*csv.DictReader(stream)]
    assert {"given", "bold"} < {row["policy"] for row in rows}
    settings = [row["policy"].partition(" ")[2] for row in rows if " " in row["policy"]]
    assert len(settings) == len(set(settings)) > 1, "policies that differ in their thresholds share a sweep"
    assert all(float(row["speedup"]) > 0 and row["departure"] for row in rows)
    on_front = [row["policy"] for row in rows if row["front"] == "True"]
    assert on_front
    assert [file.name for file in (tmp_path / "plots").iterdir()] == ["departure-against-speed.svg"]
    svg = (tmp_path / "plots" / "departure-against-speed.svg").read_text("utf-8")
    assert all(f"<title>{row['policy']}: " in svg for row in rows)


def test_a_replay_of_one_policy_has_no_plot(run: Path, tmp_path: Path) -> None:
    done = invoke("replay", run, "--policy", run.parent / "given.toml", "--plots", tmp_path / "plots")
    assert done.exit_code == 0, done.output
    assert "There is nothing to plot." in done.stderr
    assert not (tmp_path / "plots").exists()


def test_a_path_goes_from_careful_to_fast(recordings: Recordings) -> None:
    path = make_path("given", changed(), recordings)
    assert 1 < len(path) <= 6
    surprises = [each.replayed.departure or 0.0 for each in path]
    assert surprises == sorted(surprises)
    speeds = [each.replayed.speedup for each in path]
    assert speeds == sorted(speeds)
    assert {each.name for each in path} == {f"setting-{number}" for number in range(1, len(path) + 1)}


def test_settings_that_an_exact_policy_beats_are_not_tested(recordings: Recordings) -> None:
    (given,) = replay({"given": changed()}, recordings)

    def speeds(*values: tuple[float, float | None]) -> list[float]:
        settings = [replace(given, wall_s=1 / own, speedup=own, speedup_vs_token=token) for own, token in values]
        return [each.speedup for each in worth_testing(settings)]

    assert speeds((1.2, 0.8), (1.6, 1.1), (2.0, 1.3)) == [1.6, 2.0]
    assert speeds((0.9, 0.6), (1.2, 0.8)) == speeds((0.9, None), (1.2, None)) == [1.2]
    assert speeds((0.8, 0.6), (0.9, 0.7)) == [0.9]


def test_steps_that_were_recorded_on_models_without_thresholds_are_replayed(run: Path, tmp_path: Path) -> None:
    for file in ("rows.jsonl", "traces.jsonl"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    about = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(about | {"pair": "0" * 16}))
    done = invoke("replay", tmp_path, "--policy", "two-level", "--sweep")
    assert done.exit_code == 0, done.output


def test_the_front_leaves_out_what_is_beaten(recordings: Recordings) -> None:
    careful = changed(judges=[likelihood(0.0)], salvage=None)
    found = replay({"given": changed(), "careful": careful}, recordings)
    best = front(found)
    assert best
    assert {"careful"} <= set(best), "nothing is as close to the target"
    slow = replace(found[1], name="slow", speedup=found[1].speedup / 2)
    assert front([*found, slow]) == best


def test_the_front_compares_policies_in_one_unit(recordings: Recordings) -> None:
    (given,) = replay({"given": changed()}, recordings)
    careful = replace(given, name="careful", step_acceptance=0.1, departure=5.0)
    unknown = replace(given, name="unknown", step_acceptance=0.9, departure=None)
    assert front([careful, unknown]) == ["careful"], "0.9 accepted steps are not less than 5 nats"


def test_other_hardware_changes_the_times(recordings: Recordings, run: Path, tmp_path: Path) -> None:
    about = {"versions": {}, "commit": None, "hardware": {}, "started": "", "engines": {}}
    costs = HardwareCosts.model_validate(about | {"draft_token_s": 0.0002, "pass_s": {1: 0.02, 16: 0.02, 64: 0.025}})
    free_draft, slow_draft = costs, costs.model_copy(update={"draft_token_s": 0.05})
    (fast,), (slow,) = (replay({"given": changed()}, recordings, each) for each in (free_draft, slow_draft))
    assert fast.speedup > 1.5 > 1 > slow.speedup
    narrow = costs.model_copy(update={"pass_s": {1: 0.02, 4: 0.02}})
    (wide,) = replay({"given": changed()}, recordings, narrow)
    assert wide.extrapolated > 0.9
    file = tmp_path / "costs.json"
    file.write_text(costs.model_dump_json())
    shown = invoke("replay", run, "--policy", "two-level", "--costs", file, "--sweep")
    assert shown.exit_code == 0, shown.output
    assert "two-level" in shown.output
    file.write_text(costs.model_dump_json().replace('{"1":0.02,"16":0.02,"64":0.025}', "{}"))
    refused = invoke("replay", run, "--policy", "two-level", "--costs", file)
    assert refused.exit_code != 0
    assert isinstance(refused.exception, UsageError)
    assert "has no costs" in str(refused.exception)


def test_a_run_without_recorded_steps_is_refused(run: Path, tmp_path: Path) -> None:
    for file in ("run.json", "rows.jsonl"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    with pytest.raises(UsageError, match="has no recorded steps"):
        read_recordings(tmp_path)


def test_traces_from_before_recording_still_load(run: Path, tmp_path: Path) -> None:
    for file in ("run.json", "rows.jsonl"):
        (tmp_path / file).write_bytes((run / file).read_bytes())
    lines = [json.loads(line) for line in (run / "traces.jsonl").read_text().splitlines()]
    for line in lines:
        del line["judged_steps"]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match="has no recorded steps"):
        read_recordings(tmp_path)
