"""What `stepspec size` prints: a table, what to put where, and the assumptions."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from stepspec.evaluation.report.cells import UNKNOWN, count, percent, significant
from stepspec.evaluation.report.conditions import hardware_in_words, models_in_words
from stepspec.sizing.costs import PASSING, Costs
from stepspec.sizing.planning import CORE_LOAD, SCALED, STATION_LOAD, Plan, Sizing
from stepspec.sizing.simulation import replica_of

GIB, MB = 2**30, 10**6
ROWS: Sequence[str] = (
    "agents",
    "replicas",
    "GPUs",
    "requests/s",
    "p50 latency",
    "p95 latency",
    "replicas busy",
    "running in a replica",
    "waiting at a replica",
    "service processes",
    "processor cores",
    "network",
    "GPU memory for caches",
    "bottleneck",
)
"""Rows of the table. A column is a number of agents."""


def cells_of(plan: Plan) -> list[str]:
    """Return the cells of a column, by `ROWS`."""
    found = plan.simulated
    memory = UNKNOWN if plan.cache_bytes is None else f"{plan.cache_bytes / GIB:,.2f} GiB"
    return [
        f"{found.agents:,}",
        f"{found.replicas:,}",
        f"{plan.gpus:,}",
        f"{found.requests_per_s:,.1f}",
        significant(found.p50_s, "s"),
        significant(found.p95_s, "s"),
        percent(found.busy),
        f"{found.running:.1f}",
        f"{found.waiting:.1f}",
        " + ".join(f"{number:,} {part}" for part, number in plan.processes.items()),
        f"{plan.cores:,}",
        significant(plan.network_bytes_per_s / MB, "MB/s"),
        memory,
        f"{plan.bottleneck} at {percent(plan.loads[plan.bottleneck])}",
    ]


def title_of(sizing: Sizing) -> str:
    """Return what was looked for."""
    return f"replicas for a p95 of at most {sizing.p95_s:.3g} s, agents that think {sizing.think_s:g} s"


def plan_rows(sizing: Sizing) -> list[list[str]]:
    """Return the cells of a table of all plans, whose first row has the numbers of agents."""
    columns = [cells_of(plan) for plan in sizing.plans]
    if sizing.carried is not None:
        most, *rest = cells_of(sizing.carried)
        columns.append([f"at most {most}", *rest])
    return [[name, *cells] for name, *cells in zip(ROWS, *columns, strict=True)]


def plans_table(sizing: Sizing) -> Table:
    """Return a terminal table of all plans."""
    table = Table(
        title=title_of(sizing), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    heads, *rows = plan_rows(sizing)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def placement(sizing: Sizing) -> list[str]:
    """Return sentences that say what to put where."""
    costs, gpus = sizing.costs, count(sizing.gpus_per_replica, "GPU")
    sentences = [
        f"Give each replica {gpus} and the models; it generates up to {sizing.max_running} answers concurrently."
    ]
    sentences += _split(costs)
    if passed := [part for part in PASSING if costs.passing_s(part)]:
        each = " and ".join(f"{1000 * costs.passing_s(part):.1f} ms in the {part}" for part in passed)
        sentences.append(f"A request takes {each} of processor time. Run a proxy on each machine that takes requests.")
    else:
        sentences.append("The costs are those of one service without a front. A router before several is not included.")
    if sizing.carried is not None:
        sentences.append(_carried(sizing.carried))
        too_many = [each.simulated.agents for each in sizing.plans if each.gpus > sizing.carried.gpus]
        sentences += [f"{agents:,} agents need more GPUs than there are, or a larger --p95." for agents in too_many]
    return sentences


def _carried(plan: Plan) -> str:
    found = plan.simulated
    return (
        f"{count(plan.gpus, 'GPU')} carry at most {found.agents:,} agents within the p95, with "
        f"{count(found.replicas, 'replica')} and {found.requests_per_s:,.1f} requests/s."
    )


def _split(costs: Costs) -> list[str]:
    spent, busy = costs.busiest.seconds_per_1000, costs.busiest.seconds_per_1000
    target_s = busy.get("busy_target", 0.0) + busy.get("busy_judge", 0.0)
    draft_s = busy.get("busy_draft", 0.0)
    controller_s = spent.get("controller", 0.0)
    if not draft_s or not target_s:
        return ["The policy does not use the draft: each GPU needs the target alone."]
    share = draft_s / (draft_s + target_s)
    weights = [each.weights_bytes for each in costs.memory.values()]
    known = sum(size for size in weights if size is not None)
    memory = f" Their weights take {known / GIB:.2f} GiB." if known and None not in weights else ""
    return [
        f"For 1,000 committed tokens, the target works {target_s:.2f} s (judging included), the draft {draft_s:.2f} s "
        f"and the controller {controller_s:.2f} s.",
        f"Together on each GPU, both models share it, as the costs were measured.{memory}",
        f"Apart, the draft has {percent(share)} of the models' work: {_apart(target_s / draft_s)}.",
    ]


def _apart(targets: float) -> str:
    if targets >= 1:
        return f"one GPU with drafts serves {targets:.1f} GPUs with targets"
    return f"one GPU with a target needs {1 / targets:.1f} GPUs with drafts"


def assumptions(sizing: Sizing) -> list[str]:
    """Return what the figures assume."""
    costs = sizing.costs
    most = costs.busiest.concurrency
    stated = [
        f"Requests are like those of the costs: {costs.benchmark}, policy {costs.policy}, temperature "
        f"{costs.temperature:g}; {models_in_words(costs.engines)}; {hardware_in_words(costs.hardware)}.",
        f"Each replica is as fast as the measured one. {_curve(sizing)}",
        f"The speed is constant beyond {most} concurrent requests, the most that were measured.",
        "A replica shares its speed equally between its running requests; further ones wait in the order of arrival.",
        f"An agent waits for its answer, then thinks {sizing.think_s:g} s on average, exponentially distributed.",
        "A request goes to the less busy one of two random replicas. Sessions that stay with a replica, other prefix "
        "caches than the measured one, failures and restarts are not simulated.",
        f"A proxy or a front works on one request after the other, in at most {percent(STATION_LOAD)} of its time; "
        f"cores are used for at most {percent(CORE_LOAD)}. Network and machines have no further limits.",
        "Cache memory is that of all running requests at their full length, without shared prefixes.",
    ]
    if any(plan.simulated.replicas > SCALED for plan in _all(sizing)):
        stated.append(
            f"Numbers above {SCALED} replicas were found, to within 1%, by simulations of {SCALED} of them with their "
            "share of the agents. The figures are those of a simulation of all of them."
        )
    return stated


def _all(sizing: Sizing) -> Iterable[Plan]:
    return [*sizing.plans, *([] if sizing.carried is None else [sizing.carried])]


def _curve(sizing: Sizing) -> str:
    replica = replica_of(sizing.costs, sizing.max_running)
    points = ", ".join(f"{speed:.2f}× with {number:.0f}" for number, speed in replica.speed.points[1:])
    return f"Its speed is 1× with one running request{', ' + points if points else ''}."
