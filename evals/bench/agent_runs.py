"""Agents on a running service: tasks with real tools, under several policies, through two clients.

A run of a task is one conversation. The model's own calls, right or wrong, decide what the tools return, and its own
answers stay in the conversation. Within a task the policies take turns, in alternating order.

All runs share the prefix cache of the service. So that no run finds another one's prompt there, the system prompt
starts with a number of the run. Numbers go by the order of the runs and do not favor a policy.
"""

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from rich.table import Table

from evals.bench.agent_tasks import SLOW_S, Call, Task, World, is_right
from evals.bench.speed import UNKNOWN, cells_table, with_interval
from stepspec.evaluation.records import BASELINE, Conditions, EngineRecord, Record
from stepspec.evaluation.report.cells import count, joined, percent, percent_with_interval
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.stats.intervals import Interval
from stepspec.evaluation.stats.paired import Paired
from stepspec.evaluation.stats.ratios import ratio_of_sums
from stepspec.evaluation.stats.shares import Share
from stepspec.langchain.early_tools import EarlyCounts

TOKEN, TWO_LEVEL = "token", "two-level"
"""The policy of the second baseline, the target with token-level speculation, and the default."""
EARLY = "two-level, early tools"
"""The default policy with the middleware `EarlyTools`, for tasks with slow tools."""
POLICIES = (TWO_LEVEL, EARLY, TOKEN, BASELINE)
CLIENTS = ("langchain", "anthropic")
MAX_REQUESTS = 3
"""Requests of a turn after which it ends, even without an answer."""
MAX_TOKENS = 120
"""Limit of one request."""
SYSTEM = "Session {}. Call the function that the user names, then answer in one short sentence."
FIRST_SESSION = 10000
"""Number of the first run. All numbers have the same number of digits, and with that prompts of the same length."""


@dataclass(frozen=True)
class Reply:
    """What one request returned, and when. Times are those of one clock, in seconds."""

    calls: Sequence[Call]
    results: Sequence[str]
    """What the tools returned."""
    text: str
    num_tokens: int
    began_at: float
    first_token_s: float
    """Seconds until the service had the first token, in which it read the prompt."""
    text_at: float
    """When the last text came; `began_at` if none did."""
    ended_at: float

    @property
    def reading_s(self) -> float:
        """Seconds until the first token."""
        return min(self.first_token_s, self.ended_at - self.began_at)

    @property
    def text_s(self) -> float:
        """Seconds of thinking and answers."""
        until = self.text_at if self.calls else self.ended_at
        return max(0.0, until - self.began_at - self.reading_s)

    @property
    def calls_s(self) -> float:
        """Seconds of calls."""
        return self.ended_at - self.began_at - self.reading_s - self.text_s


class Conversation(Protocol):
    """A conversation with the service through one client."""

    @property
    def early(self) -> EarlyCounts | None:
        """What early tools have brought so far; None without them."""
        ...

    def ask(self, question: str) -> Sequence[Reply]:
        """Ask a question, run the tools that the model calls, and return the replies to all requests of the turn."""
        ...


Begin = Callable[[Task, World, str, str], Conversation]
"""Begins a conversation for a task in a world, with the name of a policy and a system prompt."""


class EarlyRecord(Record):
    """Early tools in one task, see `EarlyCounts`."""

    predicted: int
    started: int
    used: int
    wasted: int
    saved_s: float


class TaskRun(Record):
    """One task under one policy, through one client."""

    task: int
    client: str
    policy: str
    delay_s: float
    """Seconds that its slow tools wait."""
    seconds: float
    reading_s: float
    """Until the first token of each request, in which prompts and results are read."""
    text_s: float
    """Of thinking and answers."""
    calls_s: float
    tools_s: float
    """Between the requests of a turn."""
    solved: bool
    calls_right: list[bool]
    """By turn, whether the first request made one call, and it did what the wanted one does."""
    num_requests: int
    num_tokens: int
    early: EarlyRecord | None = None


@dataclass(frozen=True)
class AgentResult:
    """A policy on the tasks of a client. Every figure but the first three is over the tasks of both sides."""

    client: str
    policy: str
    num_tasks: int
    seconds: float
    """Mean seconds of a task, tools and client included."""
    speedup: tuple[float, Interval | None] | None
    """Seconds of the policy `target` over its own; None if that policy did not run."""
    speedup_vs_token: tuple[float, Interval | None] | None
    speedup_vs_two_level: tuple[float, Interval | None] | None
    solved: Share
    solved_difference: Paired | None
    """The share of solved tasks minus that under `target`."""
    calls_right: Share
    shares: Mapping[str, float]
    """Of the time, by part."""

    @property
    def resolution(self) -> float | None:
        """The difference in time from `target`, as a share, that the interval can tell from none: half its width."""
        if self.speedup is None or self.speedup[1] is None or self.policy == BASELINE:
            return None
        low, high = self.speedup[1]
        return exp((log(high) - log(low)) / 2) - 1


PARTS: Mapping[str, Callable[[TaskRun], float]] = {
    "reading": lambda run: run.reading_s,
    "text": lambda run: run.text_s,
    "calls": lambda run: run.calls_s,
    "tools": lambda run: run.tools_s,
}
"""Parts of a task's time."""


class Agents(Conditions):
    """The file that `python -m evals.bench agent --json` writes after each run."""

    version: Literal[3] = 3
    pair: str
    seed: int
    temperature: float
    max_tokens: int = MAX_TOKENS
    engines: dict[str, EngineRecord | None]
    runs: list[TaskRun]

    @property
    def results(self) -> list[AgentResult]:
        """The policies by client."""
        found = {(run.client, run.policy): None for run in self.runs}
        order = sorted(found, key=lambda each: (CLIENTS.index(each[0]), POLICIES.index(each[1])))
        return [self._result(client, policy) for client, policy in order]

    def of(self, client: str, policy: str) -> dict[int, TaskRun]:
        """Return the runs of a policy by task."""
        return {run.task: run for run in self.runs if (run.client, run.policy) == (client, policy)}

    def speedup(self, client: str, policy: str, baseline: str) -> tuple[float, Interval | None] | None:
        """Return the seconds of a baseline over a policy's own, on the tasks of both; None if there are none."""
        own, other = self.of(client, policy), self.of(client, baseline)
        if not (tasks := sorted(own.keys() & other.keys())):
            return None
        above, below = ([runs[task].seconds for task in tasks] for runs in (other, own))
        return ratio_of_sums(above, below, np.random.default_rng(0))

    def _result(self, client: str, policy: str) -> AgentResult:
        own, target = self.of(client, policy), self.of(client, BASELINE)
        both = sorted(own.keys() & target.keys())
        ours, theirs = ([[float(runs[task].solved)] for task in both] for runs in (own, target))
        seconds = sum(run.seconds for run in own.values())
        calls = [[float(right) for right in run.calls_right] for run in own.values()]
        return AgentResult(
            client=client,
            policy=policy,
            num_tasks=len(own),
            seconds=seconds / len(own),
            speedup=self.speedup(client, policy, BASELINE),
            speedup_vs_token=self.speedup(client, policy, TOKEN),
            speedup_vs_two_level=self.speedup(client, policy, TWO_LEVEL),
            solved=Share.of([[float(run.solved)] for run in own.values()]),
            solved_difference=Paired.of(ours, theirs) if both else None,
            calls_right=Share.pooled([sum(each) for each in calls], [len(each) for each in calls]),
            shares={name: sum(map(part, own.values())) / seconds for name, part in PARTS.items()},
        )


def run_task(
    task: Task, conversation: Conversation, world: World, wanted: tuple[list[str], object], about: tuple[int, str, str]
) -> TaskRun:
    """Ask the questions of a task, and check the calls, the state of the world, and the last answer.

    Args:
        task: the task.
        conversation: a new one.
        world: a new one, which the conversation's tools change.
        wanted: what `Task.wanted` returns.
        about: number of the task, client and policy.
    """
    since = time.perf_counter()
    turns = [conversation.ask(turn.question) for turn in task.turns]
    seconds, early = time.perf_counter() - since, conversation.early
    replies = [reply for turn in turns for reply in turn]
    gaps = [later.began_at - reply.ended_at for turn in turns for reply, later in pairwise(turn)]
    results, state = wanted
    number, client, policy = about
    return TaskRun(
        task=number,
        client=client,
        policy=policy,
        delay_s=task.delay_s,
        seconds=seconds,
        reading_s=sum(reply.reading_s for reply in replies),
        text_s=sum(reply.text_s for reply in replies),
        calls_s=sum(reply.calls_s for reply in replies),
        tools_s=sum(gaps),
        solved=world.state() == state and task.is_answered(turns[-1][-1].text),
        calls_right=[
            len(own[0].calls) == 1 and is_right(turn, result, own[0].calls[0], own[0].results[0])
            for turn, result, own in zip(task.turns, results, turns, strict=True)
        ],
        num_requests=len(replies),
        num_tokens=sum(reply.num_tokens for reply in replies),
        early=None if early is None else EarlyRecord(**vars(early)),
    )


def compare(
    tasks: Sequence[Task], clients: Mapping[str, Begin], left: Sequence[tuple[int, str, str]]
) -> Generator[TaskRun]:
    """Yield runs.

    Args:
        tasks: all tasks.
        clients: by name, what begins a conversation.
        left: number of the task, client and policy of each run, see `runs_left`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a wasted early tool may still run
        for policy in dict.fromkeys(policy for _, _, policy in left):  # the first request under a policy sets it up
            client = next(client for _, client, each in left if each == policy)
            world = tasks[0].world(Path(folder) / f"first {policy}")
            first = clients[client](tasks[0], world, policy, SYSTEM.format(FIRST_SESSION))
            first.ask(tasks[0].turns[0].question)
        for session, (number, client, policy) in enumerate(left, FIRST_SESSION + 1):
            task, own = tasks[number], Path(folder) / str(session)
            wanted, world = task.wanted(own / "wanted"), task.world(own)
            conversation = clients[client](task, world, policy, SYSTEM.format(session))
            yield run_task(task, conversation, world, wanted, (number, client, policy))


def runs_left(
    tasks: Sequence[Task], clients: Sequence[str], policies: Sequence[str], done: Sequence[TaskRun] = ()
) -> list[tuple[int, str, str]]:
    """Return number of the task, client and policy of each run that is not done, in order."""
    found = {(run.task, run.client, run.policy) for run in done}
    return [
        each
        for number, task in enumerate(tasks)
        for client in clients
        for policy in policies[:: 1 if number % 2 == 0 else -1]
        if (each := (number, client, policy)) not in found
        and (policy != EARLY or (client == "langchain" and task.early))
    ]


HEADS = (
    *("client", "policy", "tasks", "s a task", "speedup", "resolution", "vs token", "solved", "solved, to target"),
    *("calls right", *PARTS),
)


def rows_of(found: Agents) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.client,
            each.policy,
            str(each.num_tasks),
            f"{each.seconds:.1f}",
            _speedup_cell(each.speedup, is_own=each.policy == BASELINE),
            UNKNOWN if each.resolution is None else f"{each.resolution:.0%}",
            _speedup_cell(each.speedup_vs_token, is_own=each.policy == TOKEN),
            joined(percent_with_interval(each.solved.value, each.solved.interval())),
            _difference(each),
            joined(percent_with_interval(each.calls_right.value, each.calls_right.interval())),
            *(percent(share) for share in each.shares.values()),
        ]
        for each in found.results
    ]


def _speedup_cell(speedup: tuple[float, Interval | None] | None, *, is_own: bool) -> str:
    return UNKNOWN if speedup is None else with_interval(speedup[0], None if is_own else speedup[1])


def _difference(each: AgentResult) -> str:
    paired = each.solved_difference
    if paired is None or each.policy == BASELINE:
        return UNKNOWN
    return joined(percent_with_interval(paired.difference, paired.interval(), sign="+"))


def lines_of(found: Agents) -> list[str]:
    """Return at most five sentences on where the time of the first client's tasks goes, and what early tools save."""
    results = {each.policy: each for each in found.results if each.client == found.results[0].client}
    lines = [f"Under `{policy}`, {_largest(results[policy])}." for policy in (BASELINE, TWO_LEVEL) if policy in results]
    early = results.get(EARLY)
    if early is None or early.speedup_vs_two_level is None:
        return lines
    counts = [run.early for run in found.of(early.client, EARLY).values() if run.early]
    started, used, saved = (sum(getattr(each, name) for each in counts) for name in ("started", "used", "saved_s"))
    ratio, interval = early.speedup_vs_two_level
    slow = f"On the {count(early.num_tasks, 'task')} whose tools take {SLOW_S * 1000:g} ms or more"
    ends = interval and (1 / interval[1] - 1, 1 / interval[0] - 1)
    change = joined(percent_with_interval(1 / ratio - 1, ends, sign="+"))
    return [
        *lines,
        f"{slow}, early tools change the time under `{TWO_LEVEL}` by {change}.",
        f"Of {count(started, 'early call')}, {used} were used and {started - used} dropped.",
        f"The tools of a task had run for {saved / len(counts):.2f} s when the target called them.",
    ]


def _largest(each: AgentResult) -> str:
    shares = sorted(each.shares.items(), key=lambda item: -item[1])
    words = {"reading": "reading prompts and results", "text": "thinking and answers"}
    parts = [f"{words.get(name, name)} {share:.0%}" for name, share in shares]
    return f"a task takes {each.seconds:.1f} s: {', '.join(parts)}"


def in_words(found: Agents) -> str:
    """Return what was measured."""
    tasks = count(len({run.task for run in found.runs}), "task")
    about = f"{tasks} of three to five turns, temperature {found.temperature:g}"
    return f"{about}, at most {found.max_tokens} tokens a request; {models_in_words(found.engines)}"


def agents_table(found: Agents) -> Table:
    """Return a terminal table of all clients and policies."""
    return cells_table("tasks with tools", HEADS, rows_of(found))
