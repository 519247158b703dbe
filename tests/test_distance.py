"""A model that is far away: what chains, look-ahead, salvage and the end of the thinking make of measured times."""

from pathlib import Path
from typing import Any

import pytest
from scripted import FarEngine, ScriptedEngine, Stage

from evals.bench.distance import AtDistance, Distances, rows_of
from evals.bench.documents import measured_block
from stepspec.loop.costs import ChainCosts
from stepspec.loop.policy import Policy

pytestmark = pytest.mark.anyio

LIKELIHOOD = {"kind": "likelihood", "threshold": -3.0}
ONE, TWO, OTHER = "One two.\n\n", "Three four five.\n\n", "Three nine.\n\n"  # 4, 5 and 4 tokens
END, ANSWER = "</think>", "So 9.<|end|>"
NUM_STEPS = 24


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def chains(**score: Any) -> Policy:
    table = {"version": 1, "summary": "a test", "family": "score", "judges": (LIKELIHOOD,), "score": score}
    return Policy.model_validate(table)


def measured(*, draft_s: float, pass_s: float) -> ChainCosts:
    """Return what is known after steps of 8 to 12 tokens and passes over one to three of them."""
    costs = ChainCosts()
    for number in range(100):
        costs.drafted(8 + number % 5, draft_s)
        costs.read(10 * (1 + number % 3), pass_s)
    return costs


def script() -> tuple[list[str], list[str], list[str]]:
    """Return replies and opinions: the draft is asked after each step if the thinking ends there."""
    return [ONE, TWO, TWO, END, ANSWER], [ONE, TWO + END + ANSWER], []


@pytest.mark.parametrize(("draft_s", "num_calls"), [(0.001, 5), (0.5, 4)])
async def test_a_far_draft_is_asked_for_the_end_where_that_saves_more_than_a_way(
    draft_s: float, num_calls: int
) -> None:
    """If it is not asked, it writes the end in a chain of its own, and the target makes one more pass."""
    asked = draft_s < 0.1
    drafted, opinions, _ = script() if asked else ([ONE, TWO, END, ANSWER], [ONE, TWO, END + ANSWER], [])
    stage = Stage(chains(draft_answer=True), drafted, opinions, draft_kind=FarEngine)
    stage.request.choice.costs = measured(draft_s=draft_s, pass_s=0.1)
    stage.request.choice.costs.proposed(ends=True)
    stage.request.choice.costs.proposed(ends=False)
    play = await stage.play()
    assert play.result.answer == "So 9."
    assert len(stage.draft.calls) == num_calls


@pytest.mark.parametrize(
    ("kind", "draft_s", "writer"),
    [(ScriptedEngine, 0.5, "draft"), (FarEngine, 0.5, "target"), (FarEngine, 0.001, "draft")],
)
async def test_a_far_draft_goes_on_behind_a_salvaged_part_only_where_the_target_is_slower(
    kind: type[ScriptedEngine], draft_s: float, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.model_validate(chains().model_dump() | {"salvage": {"min_logprob": 0.0, "redraft": True}})
    goes_on = writer == "draft"
    drafted = [TWO, " ten.\n\n", END] if goes_on else [TWO, END]
    opinions = ["Three nine five.\n\n", " ten.\n\n", END] if goes_on else ["Three nine five.\n\n", END]
    written = [ANSWER] if goes_on else [".\n\n", ANSWER]
    stage = Stage(policy, drafted, opinions, written, draft_kind=kind)
    stage.request.choice.costs = measured(draft_s=draft_s, pass_s=0.001)
    stage.request.choice._levels[0].target_s.note(0.02, 64)
    continues, weighed = stage.request.choice.continues, list[int]()
    monkeypatch.setattr(stage.request.choice, "continues", lambda num: weighed.append(num) or continues(num))
    play = await stage.play()
    assert weighed == ([] if kind is ScriptedEngine else [3])
    assert [step[:2] for step in play.steps] == [("salvaged", "Three nine ten.\n\n" if goes_on else OTHER)]


def row(policy: str, round_trip_ms: float | None, **changes: Any) -> AtDistance:
    fields: dict[str, Any] = {"measured_ms": round_trip_ms, "problems": 12, "seconds": 0.5, "speedup": 1.5}
    fields |= {"speedup_ci": (1.25, 1.75), "correct": 1.0, "steps_accepted": 0.9, "from_draft": 0.8}
    return AtDistance(policy=policy, round_trip_ms=round_trip_ms, **fields | changes)


def test_the_tables_have_each_policy_with_its_distances(tmp_path: Path) -> None:
    results = [row("target", None), row("two-level", None), row("lookahead", 5.0), row("two-level", 5.0)]
    found = Distances(
        versions={},
        commit=None,
        hardware={},
        started="",
        benchmark="gsm-mini",
        temperature=0.0,
        seed=0,
        engines={},
        results=results,
    )
    rows = rows_of(found)
    assert [each[:2] for each in rows] == [
        ["target", "in this process"],
        ["two-level", "in this process"],
        ["two-level", "5 ms"],
        ["lookahead", "5 ms"],
    ]
    assert rows[2][4] == "1.50× [1.25, 1.75]"
    assert rows[2][-1] == "80%"
    (tmp_path / "embedded.json").write_text(found.model_dump_json(), "utf-8")
    lines = measured_block("distance", tmp_path / "embedded.json").splitlines()
    assert lines[2:4] == ["| two-level | 1.50× [1.25, 1.75] | – | 1.50× [1.25, 1.75] | – |", ""]
    assert "12 problems, one request at a time" in lines[-1]
