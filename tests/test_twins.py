"""The A/A test of the evaluation on the embedded pair: what it compares, and that it detects leftover state."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from evals.bench.twins import COPY, TwinRuns, Twins, TwinTest, policies_to_copy, simultaneous
from stepspec.api.models import Pair, load_pair
from stepspec.base.files import list_data_files
from stepspec.evaluation.records import ResultRow
from stepspec.evaluation.run import token_policy

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    loaded = load_pair()
    yield loaded
    await loaded.aclose()


@dataclass
class Remembering:
    """A system whose engines do not forget."""

    system: Any

    async def generate(self, question: str, **options: Any) -> Any:
        return await self.system.generate(question, **options)

    async def forget(self) -> None:
        """Do nothing, so that the engines keep their state."""


def suffix_test(pair: Pair, num_problems: int) -> TwinTest:
    return TwinTest(pair, {"suffix": token_policy("suffix", 8)}, 0.0, num_problems)


def passes(rows: list[ResultRow]) -> list[tuple[int, int]]:
    """Return for each problem the target passes of the copy that ran first, and those of the other copy."""
    return [(first.target_passes, second.target_passes) for first, second in zip(rows[::2], rows[1::2], strict=True)]


async def test_a_copy_sees_no_state_of_its_twin(pair: Pair) -> None:
    """With greedy decoding, both copies do exactly the same work. Without forgetting, the second copy does less."""
    test = suffix_test(pair, 4)
    honest = passes(await test.rows(test.systems()))
    assert all(first == second for first, second in honest)
    leaking = passes(await test.rows({name: Remembering(system) for name, system in test.systems().items()}))
    assert sum(second for _, second in leaking) < 0.8 * sum(first for first, _ in leaking)


@pytest.mark.soak
async def test_without_forgetting_the_suffix_twins_differ_in_speed(pair: Pair) -> None:
    test = suffix_test(pair, 40)
    systems = {name: Remembering(system) for name, system in test.systems().items()}
    found = test.compared(await test.rows(systems), simultaneous(26))
    assert not found[0].holds
    assert found[0].order_ratio < 0.9
    assert found[0].order_ci is not None
    assert found[0].order_ci[1] < 1


def test_every_shipped_policy_and_drafter_is_copied(pair: Pair) -> None:
    plain, with_fixed = policies_to_copy(pair, fixed_too=False), policies_to_copy(pair, fixed_too=True)
    assert plain.keys() == {*list_data_files("policies"), "suffix"} - {"rsd"}  # needs a judge
    online = {"token", "relaxed", "lookup", "two-level", "suffix"}
    online |= {"always", "exact", "lookahead", "glimprouter", "specreason-decode", "speculative-thinking"}
    assert with_fixed.keys() - plain.keys() == {f"{name}-4" for name in online}
    assert all(with_fixed[f"{name}-4"][0].token.num_tokens == 4 for name in online)
    assert not any(name.endswith(COPY) for name in with_fixed)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"copy_ratio": 1.04}, False),
        ({"copy_ratio": 1.04, "repeats": False}, True),
        ({"order_ratio": 0.96}, True),
        ({"copy_ci": (1.001, 1.02)}, False),
        ({"order_ci": (0.9, 0.999), "repeats": False}, False),
        ({"order_ci": None}, False),
    ],
)
def test_twins_hold_by_their_intervals_and_if_texts_repeat_by_their_ratios(
    changes: dict[str, Any], holds: bool
) -> None:
    same = {"policy": "p", "temperature": 0.0, "repeats": True, "copy_ratio": 1.01, "copy_ci": (0.9, 1.1)}
    same |= {"order_ratio": 1.0, "order_ci": (0.95, 1.05)}
    twins = Twins.model_validate(same | changes)
    assert twins.holds is holds
    run = {"benchmark": "b", "num_problems": 1, "seed": 0, "engines": {}, "versions": {}, "commit": None}
    run |= {"hardware": {}, "started": "", "results": [Twins.model_validate(same), twins]}
    assert TwinRuns.model_validate(run).holds is holds


def test_intervals_of_all_ratios_hold_together() -> None:
    assert simultaneous(1) == pytest.approx(0.975)
    assert simultaneous(25) == pytest.approx(0.999)
