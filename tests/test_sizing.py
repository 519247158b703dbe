"""`stepspec size`: the simulation against exact results, the search for replicas, and the costs of a service."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from evals.bench.documents import sizing_block
from evals.bench.service.client import Client, chat_request
from evals.bench.service.process import scripted_command, started
from evals.bench.service.script import Script
from evals.bench.service.sizing import Compared, SizingCheck, use
from stepspec.capacity.costs import Costs, LoadCosts, read_costs
from stepspec.capacity.measurement import chat_body, load_costs, make_client, thinned
from stepspec.capacity.plan import Requirements, Sizing, alone_p95_s, plan_agents, plan_gpus
from stepspec.capacity.simulation import ReplicaSpeed, SimulatedReplica, SimulatedService, Station, replica_of, simulate
from stepspec.capacity.tables import _split, placement
from stepspec.cli import app
from stepspec.errors import UsageError

CONDITIONS: Mapping[str, Any] = {"versions": {}, "commit": None, "hardware": {}, "started": ""}
EXPONENTIAL = [-math.log(1 - (number + 0.5) / 1000) for number in range(1000)]
"""Seconds with mean 1."""
ALONE, SHARED = ((1.0, 1.0),), ((1.0, 1.0), (2.0, 1.5), (4.0, 2.0))


SLACK_S = 0.5
"""What a busy machine may add to a request."""


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.capacity.simulation.MIN_REQUESTS", 3000)
    monkeypatch.setattr("stepspec.capacity.plan.LAST_REQUESTS", 6000)


def exact_shares(agents: int, think_s: float, servers: int) -> list[float]:
    """Return the shares of time with 0, 1, ... requests of a mean of 1 s: the machine repair model."""
    weights = [1.0]
    for number in range(1, agents + 1):
        weights.append(weights[-1] * (agents - number + 1) / think_s / min(number, servers))
    return [weight / sum(weights) for weight in weights]


def exact_requests_per_s(agents: int, think_s: float, servers: int) -> float:
    """Return the throughput of agents that share servers."""
    return sum(share * min(number, servers) for number, share in enumerate(exact_shares(agents, think_s, servers)))


def load(concurrency: int, requests_per_s: float, durations_s: Sequence[float], **changes: Any) -> LoadCosts:
    about = {
        "concurrency": concurrency, "requests": 100, "failed": 0, "requests_per_s": requests_per_s,
        "durations_s": sorted(durations_s), "step_acceptance": 0.5, "committed_tokens": 100.0, "rejected_tokens": 10.0,
        "prompt_tokens": 90.0, "cached_share": 0.5, "cpu_ms": {"service": 5.0}, "request_bytes": 400.0,
        "response_bytes": 1600.0,
        "seconds_per_1000": {"controller": 0.1, "busy_target": 3.0, "busy_judge": 1.0, "busy_draft": 1.0},
    }  # fmt: skip
    return LoadCosts.model_validate({**about, **changes})


def costs(**changes: Any) -> Costs:
    loads = [load(1, 1.0, EXPONENTIAL), load(2, 1.5, EXPONENTIAL), load(4, 2.0, EXPONENTIAL)]
    memory = {role: {"weights_bytes": 2**30, "cache_bytes_per_token": 1000.0} for role in ("target", "draft")}
    about = {"policy": "two-level", "benchmark": "gsm-mini", "temperature": 0.0, "max_running": 4, "engines": {}}
    return Costs.model_validate({**CONDITIONS, **about, "memory": memory, "loads": loads, **changes})


def changed(**fields: Any) -> str:
    """Return a file of costs with other fields of its first load."""
    found = json.loads(costs().model_dump_json())
    found["loads"][0].update(fields)
    return json.dumps(found)


@pytest.mark.parametrize(("agents", "servers"), [(5, 1), (30, 1), (30, 4)])
def test_throughput_is_that_of_the_exact_model(agents: int, servers: int) -> None:
    speed = ReplicaSpeed([(float(number), float(number)) for number in range(1, servers + 1)])
    replica = SimulatedReplica(EXPONENTIAL, speed, max_running=servers if servers > 1 else agents)
    found = simulate(SimulatedService(agents, 10.0, 1, replica), seed=1, requests=30_000)
    assert found.requests_per_s == pytest.approx(exact_requests_per_s(agents, 10.0, servers), rel=0.02)
    assert found.mean_s == pytest.approx(agents / found.requests_per_s - 10.0, rel=0.1)  # Little's formula


def test_queue_and_percentiles_are_those_of_the_exact_model() -> None:
    """One request at a time in the order of arrival: one that finds n others takes n + 1 exponential times."""
    shares, found_by_arrivals = exact_shares(20, 20.0, 1), exact_shares(19, 20.0, 1)
    found = simulate(
        SimulatedService(20, 20.0, 1, SimulatedReplica(EXPONENTIAL, ReplicaSpeed(ALONE), 1)), seed=1, requests=60_000
    )
    assert found.busy == pytest.approx(1 - shares[0], rel=0.02)
    assert found.running == pytest.approx(1 - shares[0], rel=0.02)
    assert found.waiting == pytest.approx(sum((n - 1) * share for n, share in enumerate(shares) if n), rel=0.05)

    def longer(seconds: float) -> float:
        terms = [math.exp(-seconds) * seconds**k / math.factorial(k) for k in range(20)]
        return sum(share * sum(terms[: n + 1]) for n, share in enumerate(found_by_arrivals))

    for share, seconds in ((0.5, found.p50_s), (0.95, found.p95_s)):
        assert longer(seconds) == pytest.approx(1 - share, rel=0.08)


def test_figures_of_a_plan_follow_their_definitions() -> None:
    loads = [load(number, speed, EXPONENTIAL, cpu_ms={"service": 200.0}) for number, speed in SHARED]
    found, wanted = costs(loads=loads), Requirements(10.0, 6.0, 4)
    plan = plan_agents(found, wanted, 100)
    simulated = plan.simulated
    replica = replica_of(found, 4)
    assert simulated.busy < 1 < simulated.running  # means of one replica
    assert plan.loads["models"] == pytest.approx(simulated.requests_per_s / simulated.replicas / replica.most_per_s)
    assert plan.loads["controller"] == pytest.approx(simulated.requests_per_s * 0.2 / simulated.replicas)
    assert plan.cores == math.ceil(simulated.requests_per_s * 0.2 / 0.7)
    assert plan.network_bytes_per_s == pytest.approx(simulated.requests_per_s * 2000)
    assert plan_agents(found, Requirements(10.0, 6.0, 4, seed=5), 100).simulated.p95_s != simulated.p95_s
    unknown = costs(memory={"target": {"cache_bytes_per_token": 1000.0}, "draft": {}})
    assert plan_agents(unknown, wanted, 4).cache_bytes is None


def test_gpus_serve_more_agents_in_proportion_and_at_most_a_million(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (plan_gpus(costs(), Requirements(10.0, 6.0, 4), gpus).simulated for gpus in (8, 80))
    assert many.agents / few.agents == pytest.approx(10, rel=0.1)
    assert few.p95_s <= 6.0
    assert many.p95_s <= 6.0
    monkeypatch.setattr("stepspec.capacity.plan.MAX_AGENTS", 20)
    monkeypatch.setattr("stepspec.capacity.tables.MAX_AGENTS", 20)
    plan = plan_gpus(costs(), Requirements(10.0, 6.0, 4), 8)
    assert plan.simulated.agents == 20
    about = {"costs": costs(), "think_s": 10.0, "p95_s": 6.0, "max_running": 4, "gpus_per_replica": 1, "seed": 0}
    (sentence,) = (each for each in placement(Sizing(**about, plans=[], gpus=8, for_gpus=plan)) if "can serve" in each)
    assert "8 GPUs can serve at least 20 agents within the p95" in sentence


def test_huge_numbers_take_no_longer() -> None:
    found = costs()
    plan = plan_agents(found, Requirements(10.0, 6.0, max_running=10**12), 30)
    assert plan.simulated == plan_agents(found, Requirements(10.0, 6.0, max_running=30), 30).simulated
    assert plan_gpus(found, Requirements(0.0, 6.0, 4), 10**9).simulated.agents == 1_000_000


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "one GPU with drafts is enough for 4.0 GPUs with targets, as the draft has 20.0%"),
        ({"busy_draft": 8.0}, "a GPU with a target needs 2.0 GPUs with drafts"),
        ({"busy_draft": 0.0}, "the draft does not work: each replica needs the target alone"),
        ({"busy_target": 0.0, "busy_judge": 0.0}, "the target does not work: each replica needs the draft alone"),
    ],
)
def test_the_split_says_where_the_models_work(changes: dict[str, float], sentence: str) -> None:
    spent = {"controller": 0.1, "busy_target": 3.0, "busy_judge": 1.0, "busy_draft": 1.0} | changes
    found = costs(loads=[load(1, 1.0, EXPONENTIAL, seconds_per_1000=spent)])
    assert sentence in " ".join(_split(found))


def test_costs_with_a_model_on_a_server_say_so() -> None:
    engine = {"name": "draft", "weights": None, "dtype": None, "device": None}
    target = engine | {"name": "target", "device": "cuda"}
    assert "the draft was on a server" in " ".join(_split(costs(engines={"target": target, "draft": engine})))
    assert "shared the hardware of one replica" in " ".join(_split(costs(engines={"target": target})))


def test_replicas_split_the_requests_and_a_station_bounds_them() -> None:
    replica = SimulatedReplica([1.0], ReplicaSpeed(ALONE), 1)
    alone, many = (simulate(SimulatedService(8 * count, 1.0, count, replica)) for count in (1, 8))
    assert alone.requests_per_s == pytest.approx(1.0, rel=0.01)
    assert many.requests_per_s == pytest.approx(8.0, rel=0.02)
    slow = simulate(SimulatedService(64, 1.0, 8, replica, [Station(0.25, 1)]))
    assert slow.requests_per_s == pytest.approx(4.0, rel=0.01)


def test_more_agents_wait_longer_and_more_replicas_shorter() -> None:
    replica = SimulatedReplica(EXPONENTIAL, ReplicaSpeed(SHARED), 4)
    p95s = [simulate(SimulatedService(agents, 10.0, 2, replica)).p95_s for agents in (5, 15, 30, 60)]
    assert p95s == sorted(p95s)
    p95s = [simulate(SimulatedService(60, 10.0, replicas, replica)).p95_s for replicas in (2, 4, 8)]
    assert p95s == sorted(p95s, reverse=True)


def test_a_seed_gives_one_result() -> None:
    setting = SimulatedService(20, 5.0, 2, SimulatedReplica(EXPONENTIAL, ReplicaSpeed(SHARED), 4))
    assert simulate(setting, 1) == simulate(setting, 1)
    assert simulate(setting, 1) != simulate(setting, 2)


def test_speed_is_interpolated_and_then_constant() -> None:
    speed = ReplicaSpeed(SHARED)
    assert [speed.at(number) for number in (1, 2, 3, 4, 9)] == [1.0, 1.5, 1.75, 2.0, 2.0]


def test_the_simulation_of_the_measurement_gives_what_was_measured() -> None:
    cpu_ms = {"proxy": 10.0, "front": 10.0, "models": 10.0}
    loads = [load(number, speed, [1.0], cpu_ms=cpu_ms) for number, speed in ((1, 1.0), (2, 1.5), (4, 2.0))]
    found = costs(loads=loads)
    stations = [Station(found.passing_s(part), 1) for part in ("proxy", "front")]
    for each in loads:
        setting = SimulatedService(each.concurrency, 0.0, 1, replica_of(found, 4), stations)
        assert simulate(setting).requests_per_s == pytest.approx(each.requests_per_s, rel=0.02)


def test_costs_of_a_simulated_replica_give_its_speed() -> None:
    """Also while all requests run in it, which they do not while costs are measured: some are in the front."""
    works = [0.1 + 0.6 * (number + 0.5) / 500 for number in range(500)]
    speed, front = (
        ReplicaSpeed([(number, number / (1 + 0.25 * (number - 1))) for number in (1, 2, 3, 4)]),
        Station(0.02, 1),
    )
    loads: list[LoadCosts] = []
    for concurrency in (1, 2, 4):
        setting = SimulatedService(concurrency, 0.0, 1, SimulatedReplica(works, speed, 4), [front])
        found = simulate(setting, requests=40_000)
        loads.append(load(concurrency, found.requests_per_s, [0.02 + each for each in works], cpu_ms={"front": 20.0}))
    measured = replica_of(costs(loads=loads), 4).speed
    assert measured.at(4) == pytest.approx(speed.at(4), rel=0.006)


def test_a_plan_is_the_smallest_that_keeps_the_latency() -> None:
    found, wanted = costs(), Requirements(10.0, 6.0, 4, gpus_per_replica=2)
    plan = plan_agents(found, wanted, 60)
    assert plan.simulated.p95_s <= 6.0
    fewer = SimulatedService(60, 10.0, plan.simulated.replicas - 1, replica_of(found, 4))
    assert simulate(fewer).p95_s > 6.0
    assert plan.gpus == 2 * plan.simulated.replicas
    assert plan.bottleneck == "models"
    assert plan.cache_bytes == plan.simulated.replicas * 4 * 200 * 2000
    for_gpus = plan_gpus(found, wanted, plan.gpus)
    assert for_gpus.simulated.agents >= 60
    more = SimulatedService(for_gpus.simulated.agents + 4, 10.0, for_gpus.simulated.replicas, replica_of(found, 4))
    assert simulate(more).p95_s > 6.0


def test_one_agent_may_be_too_many() -> None:
    loads = [load(1, 1.0, [1.0], cpu_ms={"proxy": 2000.0})]
    with pytest.raises(UsageError, match="not met even for one agent"):
        plan_gpus(costs(loads=loads), Requirements(10.0, 1.5, 4), 1)


def test_many_replicas_are_found_with_their_share_of_the_agents() -> None:
    wanted = Requirements(10.0, 6.0, 4)
    small, large = (plan_agents(costs(), wanted, agents).simulated for agents in (400, 4000))
    assert large.replicas / small.replicas == pytest.approx(10, rel=0.1)
    assert large.p95_s <= 6.0


def test_fronts_are_as_many_as_the_requests_need() -> None:
    loads = [load(1, 1.0, EXPONENTIAL, cpu_ms={"proxy": 20.0, "front": 100.0, "models": 10.0})]
    plan = plan_agents(costs(loads=loads), Requirements(10.0, 6.0, 4), 200)
    assert plan.processes["proxy"] == 1
    assert plan.processes["front"] >= 4
    assert plan.loads["front"] <= 0.5
    assert plan.cores >= 3


@pytest.mark.parametrize(
    ("engines", "seconds"),
    [({}, 0.005), ({"target": {"name": "t", "weights": None, "dtype": None, "device": "cpu"}}, 0.01)],
)
def test_the_controller_is_the_process_unless_models_compute_in_it(engines: Any, seconds: float) -> None:
    assert costs(engines=engines).replica_cpu_s == pytest.approx(seconds)


def sized(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["size", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_command_prints_a_table_what_to_put_where_and_what_it_assumes(tmp_path: Path) -> None:
    file, output = tmp_path / "costs.json", tmp_path / "size.json"
    file.write_text(costs().model_dump_json())
    text = sized("--costs", str(file), "--agents", "10,40", "--gpus", "2", "--json", str(output))
    for row in ("replicas", "p95 latency", "GPU memory for caches", "bottleneck", "about"):
        assert row in text
    assert "one GPU with drafts is enough for 4.0 GPUs with targets, as the draft has 20.0% of the models' work" in text
    assert "constant beyond 4 concurrent requests" in text
    found = json.loads(output.read_text())
    assert [plan["simulated"]["agents"] for plan in found["plans"]] == [10, 40]
    assert found["for_gpus"]["gpus"] == 2
    assert (found["max_running"], found["p95_s"]) == (4, 2 * alone_p95_s(costs()))
    block = sizing_block(output)
    assert "| agents | 10 | 40 | about" in block
    assert "| p95 latency |" in block
    assert "agents that think 10 s. Requests are like those of the costs" in block


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agents", "0"], "between 1 and 1,000,000, got 0"),
        (["--agents", "1000000000"], "got 1,000,000,000"),
        (["--agents", "many"], "takes one number"),
        ([], "Give --agents N"),
        (["--agents", "10", "--p95", "0.5"], "cannot be met by more replicas"),
        (["--agents", "10", "--p95", "nan"], "--p95 must be a number of seconds above 0, got nan"),
        (["--gpus", "10", "--p95", "inf"], "--p95 must be a number of seconds above 0, got inf"),
        (["--agents", "10", "--think", "inf"], "--think must be between 0 and 3,600 seconds, got inf"),
        (["--agents", "10", "--think", "-1"], "--think must be between 0 and 3,600 seconds, got -1"),
        (["--agents", "10", "--json", "costs.json"], "--json must be another file than --costs"),
        (["--agents", "10", "--gpus", "1", "--gpus-per-replica", "2"], "A replica takes 2 GPUs"),
        (["--agents", "10", "--json", "."], "is a folder"),
        (["--agents", "10", "--json", f"{__file__}/size.json"], "test_sizing.py is not a folder"),
    ],
)
def test_what_cannot_be_sized_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text(costs().model_dump_json())
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, ["size", "--costs", "costs.json", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ("[]", "not a file of costs"),
        ('{"kind": "replicas"}', "not a file of costs"),
        ('{"kind": "costs"}', "Measure costs again"),
        (costs(loads=[load(2, 1.5, [1.0])]).model_dump_json(), "no costs at concurrency 1"),
        (costs(loads=[load(1, 1.0, [1.0], failed=2)]).model_dump_json(), "2 of 100 requests failed at concurrency 1"),
        (costs(loads=[load(1, 0.01, [1.0])]).model_dump_json(), "do not belong together"),
        (changed(durations_s=[math.nan]), r"loads.0.durations_s.0: Input should be"),
        (changed(durations_s=[0.0]), r"loads.0.durations_s.0: Input should be greater than 0"),
        (changed(cpu_ms={"front": -5.0}), r"loads.0.cpu_ms.front: Input should be greater"),
        (changed(requests_per_s=math.inf), r"loads.0.requests_per_s: Input should be a finite"),
        (
            json.dumps(json.loads(costs().model_dump_json()) | {"max_running": 0}),
            "max_running: Input should be greater",
        ),
    ],
)
def test_a_file_that_has_no_costs_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_costs(file)
    with pytest.raises(UsageError, match="Cannot read"):
        read_costs(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--concurrency", "2,4"], "must start with 1"),
        (["--concurrency", "1,8", "--requests", "20"], "at least 32"),
        (["--policy", "nothing"], "no policy 'nothing'"),
        (["--pair", "nothing"], "no pair 'nothing'"),
        (["--draft", "torch:x"], "without a target"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_service_starts(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, ["costs", "service", *options], catch_exceptions=False)


def test_costs_of_a_service_are_those_of_its_script() -> None:
    asked, body = chat_request("How many?"), chat_body("How many?")

    async def measure() -> tuple[list[LoadCosts], float]:
        async with make_client("http://{}:{}".format(*service.address)) as requests:
            loads = [
                await load_costs(requests, [body] * 15, number, lambda: {"service": service.cpu_s}) for number in (1, 3)
            ]
        async with Client(service.address) as client:
            measured, requests_per_s = await use(client, repeat(asked), 4, 0.2, 12, seed=0)
            assert all(each.answered for each in measured)
            return loads, requests_per_s

    with started(scripted_command(Script(2, 0.1, 0.1))) as service:
        for _ in range(3):  # a busy machine may stop one of them for seconds
            (one, three), used = asyncio.run(measure())
            ratio = three.requests_per_s / one.requests_per_s
            if 1.5 < ratio < 4.5 and one.requests_per_s > 1 / (0.2 + SLACK_S) and used > 2:
                break
    assert 0.2 <= one.durations_s[0] < 0.2 + SLACK_S
    assert 1 / (0.2 + SLACK_S) < one.requests_per_s <= 5.0
    assert 1.5 < ratio < 4.5
    assert 0.19 < one.seconds_per_1000["target"] * one.committed_tokens / 1000 < 0.2 + SLACK_S
    assert one.cpu_ms["service"] > 0
    assert len(json.dumps(body)) < one.request_bytes < len(asked) + 200
    assert one.response_bytes > 500
    assert 2 < used < 15


def test_a_script_slows_down_with_further_requests_and_varies_around_its_delay() -> None:
    script = Script(2, 0.1, 0.2, slowdown=0.25)
    assert [script.delay_s(part, running) for part, running in ((0, 1), (1, 1), (1, 5))] == [0.1, 0.2, 0.4]
    varied = Script(2, 0.1, 0.2, varies=True, slowdown=0.25)
    sampled = [varied.delay_s(1, 5) for _ in range(10_000)]
    assert sum(sampled) / len(sampled) == pytest.approx(0.4, rel=0.06)  # six standard deviations
    assert min(sampled) < 0.1 < 1.0 < max(sampled)


def test_a_sample_of_durations_is_evenly_spread() -> None:
    assert thinned(range(1000), 4) == [125, 375, 625, 875]
    assert thinned([1.0, 2.0], 4) == [1.0, 2.0]


@pytest.mark.parametrize(("change", "holds"), [({}, True), ({"simulated_p95_s": 1.2}, False), ({"failed": 1}, False)])
def test_a_simulation_that_differs_from_the_real_run_does_not_hold(change: Mapping[str, Any], holds: bool) -> None:
    good = Compared(
        load="near saturation", replicas=1, agents=8, requests=100, failed=0, requests_per_s=5.0,
        simulated_requests_per_s=5.5, p50_s=0.5, simulated_p50_s=0.5, p95_s=1.0, simulated_p95_s=0.9,
    )  # fmt: skip
    found = SizingCheck(**CONDITIONS, costs=costs(), think_s=1.0, results=[good.model_copy(update=change)])
    assert found.holds == holds
