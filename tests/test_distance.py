"""A model that is far away: what chains, look-ahead, salvage and the end of the thinking make of measured times."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import FarEngine, Opinion, Reply, ScriptedEngine, Stage

from evals.bench.distance import AtDistance, Distances, by_times, has_chains
from evals.bench.documents import measured_block
from stepspec.loop.depth import MAX_DEPTH, ChainDepth
from stepspec.loop.policy import Policy, load_policy

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


def measured(*, draft_s: float, pass_s: float, token_s: float = 0.0, accepted: float = 0.8) -> ChainDepth:
    """Return what is known after steps of 8 to 12 tokens and passes over one to three of them."""
    depth = ChainDepth()
    for number in range(100):
        depth.drafted(8 + number % 5, draft_s)
        depth.read(10 * (1 + number % 3), pass_s + token_s * 10 * (1 + number % 3))
        depth.replaced(0.1)
        depth.decided(accepted=number % 10 < 10 * accepted)
    return depth


def test_chains_grow_with_the_way_to_the_target() -> None:
    depths = [measured(draft_s=0.02, pass_s=0.005 + way_s, token_s=0.0005).best() for way_s in (0, 0.02, 0.1, 1.0)]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1] == MAX_DEPTH


def test_chains_do_not_grow_with_the_way_to_the_draft_which_every_step_takes() -> None:
    depths = [measured(draft_s=0.01 + way_s, pass_s=0.05).best() for way_s in (0, 0.02, 0.1, 1.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_the_draft_looks_ahead_where_both_models_take_long_enough() -> None:
    assert not ChainDepth().looks_ahead(), "nothing is known"
    assert not measured(draft_s=0.001, pass_s=0.1).looks_ahead(), "there is hardly anything to hide"
    assert measured(draft_s=0.02, pass_s=0.05).looks_ahead()
    assert not measured(draft_s=0.02, pass_s=0.05, accepted=0.1).looks_ahead(), "it would be dropped"
    assert not measured(draft_s=1.0, pass_s=0.01).looks_ahead(), "the pass hides too little of the way"


@pytest.mark.parametrize(("ahead_s", "expected"), [(0.08, True), (0.12, False)])
def test_what_overlaps_is_timed_as_both_models_may_share_a_processor(ahead_s: float, expected: bool) -> None:
    """The costs promise a gain."""
    depth, tries = measured(draft_s=0.02, pass_s=0.05), list[bool]()
    for _ in range(500):
        tries.append(depth.tries_ahead())
        depth.took(10, ahead_s if tries[-1] else 0.1, ahead=tries[-1])
    assert depth.looks_ahead() == expected
    assert sum(each == expected for each in tries) > 450
    assert {*tries[20:]} == {True, False}, "the slower way is tried now and then"


class Steps:
    """The script of a request of `NUM_STEPS` steps, of which the target rejects every eighth.

    Args:
        draft_s: seconds of each call of the draft.
        target_s: seconds of each pass of the target.
    """

    def __init__(self, draft_s: float, target_s: float, kind: type[ScriptedEngine], **score: Any) -> None:
        self.stage = Stage(chains(**score), (), (), self._written(), draft_kind=kind, max_tokens=2000)
        self._draft_s, self._target_s, self.num_ahead = draft_s, target_s, 0
        self.stage.draft._reply_to = self._draft  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        self.stage.target._opinion_on = self._opinion  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]

    def _draft(self, call: Any) -> Reply:
        self.num_ahead += self.stage.target.num_open > 0
        number = call.prompt.count("\n\n")
        text = END if number >= NUM_STEPS else f"Step {number} is {'wrong' if number % 8 == 7 else 'right'}.\n\n"
        return Reply(text, delay_s=self._draft_s)

    def _opinion(self, call: Any) -> Opinion:
        text = call.continuation.replace("wrong", "right").removesuffix(END)
        ends = (call.prompt + text).count("\n\n") >= NUM_STEPS
        return Opinion(text + END * ends, delay_s=self._target_s)

    def _written(self) -> Iterator[str]:
        for number in range(7, NUM_STEPS, 8):
            yield f"Step {number} is right.\n\n"
        yield ANSWER

    async def depth(self) -> int:
        """Play, and return how long the next chain would be."""
        play = await self.stage.play()
        assert len(play.steps) == NUM_STEPS
        return self.stage.request.pace.depth.best()


async def test_a_request_makes_longer_chains_for_a_target_that_is_far() -> None:
    near, far = [await Steps(0.004, target_s, ScriptedEngine, depth="auto").depth() for target_s in (0.001, 0.03)]
    assert 1 <= near < far


@pytest.mark.parametrize(("kind", "expected"), [(ScriptedEngine, False), (FarEngine, True)])
async def test_a_far_draft_writes_on_while_the_target_judges_and_one_in_process_does_not(
    kind: type[ScriptedEngine], expected: bool
) -> None:
    steps = Steps(0.01, 0.01, kind, look_ahead="auto")
    await steps.depth()
    assert (steps.num_ahead > 3) == expected
    assert expected or not steps.num_ahead


async def test_without_a_way_nothing_changes() -> None:
    plays = [await Stage(chains(look_ahead=way, draft_answer=True), *script()).play() for way in (False, "auto")]
    assert plays[0].steps == plays[1].steps
    assert plays[0].counted == plays[1].counted
    assert plays[0].draft.calls == plays[1].draft.calls


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
    stage.request.pace.depth = measured(draft_s=draft_s, pass_s=0.1)
    stage.request.pace.depth.proposed(ends=True)
    stage.request.pace.depth.proposed(ends=False)
    play = await stage.play()
    assert play.result.answer == "So 9."
    assert len(stage.draft.calls) == num_calls


@pytest.mark.parametrize(
    ("kind", "draft_s", "writer"),
    [(ScriptedEngine, 0.5, "draft"), (FarEngine, 0.5, "target"), (FarEngine, 0.001, "draft")],
)
async def test_a_far_draft_goes_on_behind_a_salvaged_part_only_where_the_target_is_slower(
    kind: type[ScriptedEngine], draft_s: float, writer: str
) -> None:
    policy = Policy.model_validate(chains().model_dump() | {"salvage": {"min_logprob": 0.0, "redraft": True}})
    goes_on = writer == "draft"
    drafted = [TWO, " ten.\n\n", END] if goes_on else [TWO, END]
    opinions = ["Three nine five.\n\n", " ten.\n\n", END] if goes_on else ["Three nine five.\n\n", END]
    written = [ANSWER] if goes_on else [".\n\n", ANSWER]
    stage = Stage(policy, drafted, opinions, written, draft_kind=kind)
    stage.request.pace.depth = measured(draft_s=draft_s, pass_s=0.001)
    stage.request.pace.wrote(64, 1.28)  # 20 ms a token
    play = await stage.play()
    assert [step[:2] for step in play.steps] == [("salvaged", "Three nine ten.\n\n" if goes_on else OTHER)]


def test_a_look_ahead_that_is_neither_a_switch_nor_auto_is_a_sentence() -> None:
    with pytest.raises(ValueError, match='it must be true, false or "auto"'):
        chains(look_ahead="often")


def row(policy: str, round_trip_ms: float | None, **changes: Any) -> AtDistance:
    fields: dict[str, Any] = {"measured_ms": round_trip_ms, "problems": 12, "seconds": 0.5, "speedup": 1.5}
    fields |= {"speedup_ci": (1.25, 1.75), "correct": 1.0, "steps_accepted": 0.9, "from_draft": 0.8}
    return AtDistance(policy=policy, round_trip_ms=round_trip_ms, **fields | {"depth": None, "ahead": None} | changes)


def test_the_table_has_each_policy_with_its_distances(tmp_path: Path) -> None:
    results = [row("target", None), row("stepspec", None), row("lookahead", 5.0), row("stepspec", 5.0, depth=2.5)]
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
    (tmp_path / "embedded.json").write_text(found.model_dump_json(), "utf-8")
    lines = measured_block("distance", tmp_path / "embedded.json").splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:6]] == [
        ["| target", "in this process"],
        ["| stepspec", "in this process"],
        ["| stepspec", "5 ms"],
        ["| lookahead", "5 ms"],
    ]
    assert "1.50× [1.25, 1.75]" in lines[4]
    assert lines[4].endswith("| 2.5 | – |")
    assert "12 problems, one request at a time" in lines[-1]


def test_the_benchmark_changes_only_how_fast_a_policy_is() -> None:
    policy, text = by_times(load_policy("stepspec")[1])
    own, given = load_policy("stepspec")[0], Policy.model_validate(tomllib.loads(text))
    assert policy == given
    assert policy.score == own.score.model_copy(update={"depth": "auto", "look_ahead": "auto"})
    assert policy.model_copy(update={"score": own.score}) == own
    assert [has_chains(load_policy(name)[0]) for name in ("stepspec", "lookahead", "target")] == [True, False, False]
