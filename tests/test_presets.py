"""The published methods on the embedded pair, and what is published about them."""

import inspect
import itertools
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_runs import Script, answer_right, make_problems, make_run, play

from evals.bench import presets
from evals.training.gsm_mini import load_split
from stepspec import Pair, Policy, Result, Sampling, StepSpec, load_policy
from stepspec.api.models import load_pair
from stepspec.cli.options import DEFAULT_POLICIES
from stepspec.errors import UsageError
from stepspec.evaluation.records import PolicySummary
from stepspec.loop.families import FAMILIES
from stepspec.loop.families.route import RouteTable
from stepspec.loop.families.score import ScoreTable

pytestmark = pytest.mark.anyio

QUESTIONS = [problem.question for problem in itertools.islice(load_split("calibration"), 2)]
PRESETS = ("specreason", "specreason-decode", "lookahead", "glimprouter", "speculative-thinking")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    loaded = load_pair()
    yield loaded
    await loaded.aclose()


@pytest.fixture(scope="module")
async def expected(pair: Pair) -> Sequence[Result]:
    """What the target alone writes."""
    return await StepSpec(pair=pair, policy="target").batch(QUESTIONS)


@pytest.mark.parametrize("policy", ["always", *PRESETS])
async def test_every_preset_answers_on_the_embedded_pair(pair: Pair, policy: str) -> None:
    for result in await StepSpec(pair=pair, policy=policy).batch(QUESTIONS, sampling=Sampling(temperature=0.6, seed=3)):
        result.counts.check()
        assert result.answer
        assert result.finish_reason == "stop"


@pytest.mark.parametrize(
    "tables",
    [
        {"family": "compare", "judges": [{"kind": "never"}]},
        {"family": "route", "route": {"threshold": 0.0}},
    ],
    ids=["compare", "route"],
)
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
async def test_without_lenient_decisions_a_greedy_text_is_the_target_s(
    pair: Pair, expected: Sequence[Result], tables: dict[str, Any], drafter: str
) -> None:
    """Then only steps with the words of the target's own stand, and only the target writes after a doubtful token."""
    table = {"version": 1, "summary": "a test", "token": {"drafter": drafter}} | tables
    policy = Policy.model_validate(table)
    found = await StepSpec(pair=pair, policy=policy).batch(QUESTIONS)
    for own, other in zip(expected, found, strict=True):
        assert (other.reasoning, other.answer) == (own.reasoning, own.answer)
        if policy.family == "compare":
            assert other.counts.accepted > 0


def test_lookahead_has_the_published_defaults() -> None:
    policy, _ = load_policy("lookahead")
    assert (policy.family, policy.compare.depth) == ("compare", 6)
    assert (policy.step.delimiter, policy.step.max_step_tokens, policy.first_target_steps) == ("\n\n", 100, 0)


def test_rsd_has_the_published_defaults() -> None:
    policy, _ = load_policy("rsd")
    (judge,) = policy.judges
    assert (policy.family, judge.model_dump()) == (
        "score",
        {"kind": "reward", "model": "reward", "threshold": 0.7, "reject_below": None},
    )
    assert (policy.step.delimiter, policy.step.max_step_tokens, policy.first_target_steps) == ("\n\n", 4096, 0)
    assert (policy.settings, policy.salvage) == (ScoreTable(), None)


def test_speculative_thinking_has_the_published_lengths() -> None:
    route = load_policy("speculative-thinking")[0].route
    assert (route.signal, route.opening_tokens, route.checking_tokens, route.doubts) == ("words", 20, 125, 15)


def test_glimprouter_decides_by_the_entropy_of_one_token_with_the_published_defaults() -> None:
    policy, _ = load_policy("glimprouter")
    assert (policy.family, policy.route.signal, policy.draft_needs) == ("route", "first-entropy", {"entropies"})
    assert (policy.route.threshold, policy.step.max_step_tokens) == (1.0, 512)


def test_specreason_decode_is_specreason_with_token_level_speculation() -> None:
    bare, decode = (
        load_policy(name)[0].model_dump(exclude={"summary"}) for name in ("specreason", "specreason-decode")
    )
    assert (bare.pop("token")["drafter"], decode.pop("token")["drafter"]) == ("engine", "auto")
    assert bare == decode


def test_always_is_the_draft_s_steps_without_a_judge() -> None:
    policy, _ = load_policy("always")
    assert (policy.family, [judge.name for judge in policy.judges]) == ("score", ["always"])
    assert {"draft", "always"} <= set(DEFAULT_POLICIES)


@pytest.mark.parametrize("name", [*PRESETS, "rsd"])
def test_a_preset_s_algorithm_is_one_short_function_that_names_its_paper(name: str) -> None:
    policy, _ = load_policy(name)
    function = FAMILIES[policy.family].run
    assert len(inspect.getsource(function).splitlines()) <= 40
    assert re.search(rf"{policy.paper}, section \d", function.__doc__ or "")
    assert "Departures:" in (function.__doc__ or "")


def test_published_methods_and_our_own_policies_are_ranked_by_one_rule(tmp_path: Path) -> None:
    """Those that keep the accuracy come first, and then the fastest. How well a signal decides is shown beside it."""
    names = ("target", "rsd", "specreason", "glimprouter", "two-level", "lookahead")
    problems = make_problems(2)
    run = make_run(problems, names)
    summary = play(tmp_path, Script(answer_right, names), problems, run)
    speeds = dict(zip(names, (1.0, 5.0, 2.0, 3.0, 4.0, 6.0), strict=True))
    kept = dict.fromkeys(names, "not known") | {"target": None, "specreason": "within a point"}
    policies = {
        name: each.model_copy(update={"speedup_vs_target": speeds[name], "accuracy_kept": kept[name]})
        for name, each in summary.policies.items()
    }
    texts = {name: load_policy(name)[1] for name in names}
    texts["rsd"] = texts["rsd"].replace("0.7\n", "0.6\n")
    texts["two-level"] += f'[certificate]\nsha256 = "{"0" * 64}"\n'  # as in policy files of 0.2
    records = {name: each.model_copy(update={"text": texts[name]}) for name, each in run.policies.items()}
    run = run.model_copy(update={"policies": records})
    presets.write_steps(tmp_path)
    assert json.loads((tmp_path / presets.STEPS_FILE).read_text())["rsd"] == {"steps": 0, "by_target": 0}
    areas = {
        "scores": {"rating.specreason": {"area": 0.9}, "likelihood.min": {"area": 0.7}},
        "equivalence": {"area": 0.6},
    }
    steps = {name: {"steps": 1000, "by_target": 5} for name in names}
    (tmp_path / presets.STEPS_FILE).write_text(json.dumps(steps))
    block = presets.methods_block(tmp_path, run, summary.model_copy(update={"policies": policies}), areas)
    rows = [line.split(" | ") for line in block.splitlines() if line.startswith("| ")][2:]
    assert [(row[0].lstrip("| "), row[-1].rstrip(" |")) for row in rows] == [
        ("target", "–"),
        ("specreason", "rating 0.90"),
        ("lookahead", "equivalence 0.60"),
        ("rsd", "reward ?"),
        ("two-level", "likelihood 0.70"),
        ("glimprouter", "target in 0.5% of the steps"),
    ]
    assert block.endswith("Ran with other settings than the policies of these names today: rsd.")


def test_a_sweep_picks_the_fastest_threshold_that_keeps_the_accuracy(tmp_path: Path) -> None:
    presets.write_sweep(tmp_path)
    names = {f"{name}-{value:g}" for name, values in presets.SWEPT.items() for value in values}
    assert {file.stem for file in tmp_path.iterdir()} == names
    swept = load_policy(str(tmp_path / "glimprouter-0.05.toml"))[0]
    assert swept.settings == RouteTable(threshold=0.05)
    assert swept.summary == "glimprouter with the threshold 0.05, and tokens drafted inside the target's steps"

    def row(accuracy: float, wall_s: float) -> PolicySummary:
        return PolicySummary.model_construct(accuracy=accuracy, wall_s=wall_s)

    found = {"target": row(0.80, 9.0), "rsd-0.3": row(0.70, 1.0), "rsd-0.5": row(0.78, 2.0), "rsd-0.7": row(0.9, 3.0)}
    assert presets.pick(found, "rsd") == 0.5
    assert presets.pick(found | {"target": row(0.95, 9.0)}, "rsd") == 0.7
    with pytest.raises(UsageError, match="lacks the policy"):
        presets.pick(found, "lookahead")
