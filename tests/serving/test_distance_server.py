"""The draft on a real vLLM behind a delaying relay: the way is measured, and every policy runs at every distance."""

import asyncio
from typing import Any

import pytest
from servers import needs_vllm

from evals.bench.delay import far
from evals.bench.distance import Distances, distances, engines_of, places, rows_of
from stepspec.api.models import close_now, load_pair
from stepspec.engines.protocol import Distant
from stepspec.errors import UsageError
from stepspec.evaluation.advise.measurements import load_costs
from stepspec.evaluation.run import RunSettings, load_benchmark, load_problems
from stepspec.mini import WEIGHTS

WAY_S = 0.05
TEXT = "Ann has 12 apples. Ben has 5 more apples than Ann. How many apples does Ben have?"


@needs_vllm
def test_the_way_to_a_draft_is_a_part_of_what_advice_measures(draft_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.evaluation.advise.measurements.TURNS", 3)
    with far(f"http://127.0.0.1:{draft_port}/v1", WAY_S) as address:
        pair = load_pair(f"torch:{WEIGHTS / 'target'}", address, notes=False)
        try:
            costs = asyncio.run(load_costs(pair, [TEXT, TEXT[::-1]], 1, widths=(1,)))
        finally:
            close_now(pair)
    assert not isinstance(pair.target, Distant)
    assert costs.target.round_trip_s is None
    assert costs.draft is not None
    assert costs.draft.round_trip_s is not None
    assert WAY_S <= costs.draft.round_trip_s < WAY_S + 0.05
    assert costs.draft.write_s < WAY_S, "a token of a stream does not take the way"


@needs_vllm
def test_all_policies_run_in_process_and_those_with_a_draft_at_each_distance(draft_port: int) -> None:
    benchmark = load_benchmark("gsm-mini")
    names, settings = ("target", "token", "two-level"), RunSettings(temperature=0.0, max_tokens=24)
    with places(None, f"http://127.0.0.1:{draft_port}/v1", [0.0, 20.0]) as found:
        run = distances(found, names, benchmark, load_problems(benchmark[1], None, 1), settings)
        results, engines = asyncio.run(run), engines_of(found)
    assert [(each.policy, each.round_trip_ms) for each in results] == [
        *((name, None) for name in names),
        *(("two-level", trip) for trip in (0.0, 20.0)),
    ]
    ways = [each.measured_ms for each in results if each.measured_ms is not None]
    assert min(ways) < 20.0 < max(ways)
    assert all(each.speedup > 0 and each.problems == 1 for each in results)
    assert engines["distant draft"] is not None
    about: dict[str, Any] = {"versions": {}, "commit": None, "hardware": {}, "started": "", "benchmark": "gsm-mini"}
    about |= {"temperature": 0.0, "seed": 0, "engines": engines, "results": results}
    assert len(rows_of(Distances.model_validate(about))) == len(results)


@pytest.mark.parametrize("address", ["torch:nowhere", "https://host/v1"])
def test_a_draft_that_is_no_server_with_a_port_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="cannot be put at a distance"), places(None, address, [1.0]):
        pass
