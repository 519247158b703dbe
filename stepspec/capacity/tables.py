"""What `stepspec size` prints: a table, what to put where, and the assumptions."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from stepspec.capacity.costs import PASSING, Costs
from stepspec.capacity.plan import CORE_LOAD, MAX_AGENTS, MAX_SIMULATED, SCALED, STATION_LOAD, Plan, Sizing
from stepspec.capacity.simulation import replica_of
from stepspec.evaluation.report.cells import UNKNOWN, count, percent, significant
from stepspec.evaluation.report.conditions import hardware_in_words, models_in_words

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
    if sizing.for_gpus is not None:
        most, *rest = cells_of(sizing.for_gpus)
        columns.append([f"{_bound(sizing.for_gpus)} {most}", *rest])
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
    if sizing.gpus is not None and sizing.for_gpus is not None:
        sentences.append(_for_gpus(sizing.for_gpus, sizing.gpus))
        too_many = [each.simulated.agents for each in sizing.plans if each.gpus > sizing.gpus]
        sentences += [f"{agents:,} agents need more GPUs than there are, or a larger --p95." for agents in too_many]
    return sentences


def _bound(plan: Plan) -> str:
    return "about" if plan.simulated.agents < MAX_AGENTS else "at least"


def _for_gpus(plan: Plan, gpus: int) -> str:
    found, left = plan.simulated, gpus - plan.gpus
    over = f" {count(left, 'GPU')} {'is' if left == 1 else 'are'} too few for another replica." if left else ""
    return (
        f"{count(gpus, 'GPU')} can serve {_bound(plan)} {found.agents:,} agents within the p95, with "
        f"{count(found.replicas, 'replica')} and {found.requests_per_s:,.1f} requests/s.{over}"
    )


def _split(costs: Costs) -> list[str]:
    load = costs.busiest
    spent = load.seconds_per_1000
    target_s = spent.get("busy_target", 0.0) + spent.get("busy_judge", 0.0)
    draft_s = spent.get("busy_draft", 0.0)
    if not draft_s and not target_s:
        return []
    running = f"With {count(load.concurrency, 'concurrent request')}"
    if not draft_s or not target_s:
        used, unused = ("target", "draft") if target_s else ("draft", "target")
        return [f"{running}, the {unused} does not work: each replica needs the {used} alone."]
    share = draft_s / (draft_s + target_s)
    return [
        f"{running}, the target works {target_s:.2f} s for 1,000 committed tokens (judging included), the draft "
        f"{draft_s:.2f} s and the controller {spent.get('controller', 0.0):.2f} s.",
        _measured(costs),
        f"On GPUs of their own, {_apart(target_s / draft_s)}, as the draft has {percent(share)} of the models' work. "
        "The round trip of each draft step comes on top.",
    ]


def _measured(costs: Costs) -> str:
    """Return where the models were while costs were measured."""
    served = [role for role, each in costs.engines.items() if each is not None and each.device is None]
    if served:
        which = "both models were" if len(served) > 1 else f"the {served[0]} was"
        return f"While costs were measured, {which} on a server. A replica stands for its share of that server, too."
    weights = [each.weights_bytes for each in costs.memory.values()]
    known = sum(size for size in weights if size is not None)
    memory = f" Their weights take {known / GIB:.2f} GiB." if known and None not in weights else ""
    return f"While costs were measured, both models shared the hardware of one replica.{memory}"


def _apart(targets: float) -> str:
    if targets >= 1:
        return f"one GPU with drafts is enough for {targets:.1f} GPUs with targets"
    return f"a GPU with a target needs {1 / targets:.1f} GPUs with drafts"


def assumptions(sizing: Sizing) -> list[str]:
    """Return what the figures assume."""
    costs = sizing.costs
    most = costs.busiest.concurrency
    models, hardware = models_in_words(costs.engines), hardware_in_words(costs.hardware)
    requests = f"{costs.benchmark}, policy {costs.policy}, temperature {costs.temperature:g}"
    stated = [
        f"Requests are like those of the costs: {'; '.join(filter(None, (requests, models, hardware)))}.",
        f"Each replica is as fast as the measured one. {_curve(sizing)}",
        f"The speed is constant beyond {most} concurrent requests, the most that were measured.",
        "A replica shares its speed equally between its running requests; further ones wait in the order of arrival.",
        f"An agent waits for its answer, then thinks {sizing.think_s:g} s on average, exponentially distributed.",
        "A request goes to the less busy one of two random replicas. Sessions that stay with a replica, other prefix "
        "caches than the measured one, failures and restarts are not simulated.",
        f"A proxy or a front works on one request after the other, in at most {percent(STATION_LOAD)} of its time; "
        f"cores are used for at most {percent(CORE_LOAD)}. Network and machines have no further limits.",
        "Cache memory is that of all running requests of all replicas at their full length, without shared prefixes.",
        "By chance alone, a p95 of the table varies by about 1% between seeds (--seed), and those of the search by 1% "
        "to 3%, so a number near its limit may be one replica higher or lower.",
    ]
    most = max(plan.simulated.replicas for plan in filter(None, (*sizing.plans, sizing.for_gpus)))
    if most > SCALED:
        shown = "all" if most <= MAX_SIMULATED else f"{MAX_SIMULATED:,}"
        stated.append(
            f"More than {SCALED} replicas are looked for with {SCALED} of them and their share of the agents, to "
            f"within 1%. The figures are those of a simulation of {shown} of them."
        )
    return stated


def _curve(sizing: Sizing) -> str:
    replica = replica_of(sizing.costs, sizing.max_running)
    points = ", ".join(f"{speed:.2f}× with {number:.3g}" for number, speed in replica.speed.points[1:])
    return f"Its speed is 1× with one running request{', ' + points if points else ''}."
