"""Agents on a running service: tasks of three turns with tools, under several policies, through two clients.

A run of a task is one conversation. The model's own calls, right or wrong, decide what the tools return, and its own
answers stay in the conversation. The clients take turns after one task of each kind. Within a task its policies take
turns, in alternating order.

All runs share the prefix cache of the service. So that no run finds another one's prompt there, the system prompt
starts with a number of the run. Numbers go by the order of the runs and do not favor a policy.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_from
from typing import Literal, Protocol, get_args

import numpy as np
from rich.table import Table

from evals.bench.agent_tasks import KINDS, Call, Task, Turn
from evals.bench.speed import cells_table, with_interval
from stepspec.errors import UsageError, unknown_name
from stepspec.evaluation.records import BASELINE, Conditions, EngineRecord, Record
from stepspec.evaluation.report.cells import count, joined, percent, percent_with_interval
from stepspec.evaluation.report.conditions import models_in_words
from stepspec.evaluation.stats.ratios import ratio_of_sums
from stepspec.evaluation.stats.shares import Share

ToolChoice = Literal["auto", "required", "named"]
TOOL_CHOICES: Sequence[ToolChoice] = get_args(ToolChoice)
"""What the first request of each turn asks for. The requests after a tool result always ask for `auto`."""
TOKEN = "token"
"""The policy of the second baseline: the target with token-level speculation."""
MAX_REQUESTS = 3
"""Requests of a turn after which it ends, even without an answer."""
MAX_TOKENS = 160
"""Limit of one request."""
SYSTEM = "Session {}. Answer with the tools."
FIRST_SESSION = 10000
"""Number of the first run. All numbers have the same number of digits, and with that prompts of the same length."""


@dataclass(frozen=True)
class Reply:
    """What one request returned."""

    calls: Sequence[Call]
    text: str
    prompt_tokens: int
    cached_tokens: int


class Conversation(Protocol):
    """A conversation with the service through one client."""

    def ask(self, question: str, tool_choice: str) -> Sequence[Reply]:
        """Ask a question, run the tools that the model calls, and return the replies to all requests of the turn.

        Args:
            question: the user's message.
            tool_choice: `auto`, `required` or the name of a tool, for the first request.
        """
        ...


Begin = Callable[[Task, str, str], Conversation]
"""Begins a conversation for a task, with the name of a model and a system prompt."""


class TaskRun(Record):
    """One task under one policy, through one client."""

    task: int
    client: str
    policy: str
    seconds: float
    calls_right: list[bool]
    """By turn, whether the first request made the wanted call and no other."""
    answers_right: list[bool]
    num_requests: int
    extra_calls: int
    """Calls of later requests of a turn, which has its result by then."""
    prompt_tokens: int
    """Of the requests after the first turn."""
    cached_tokens: int
    first_cached_tokens: int
    """Of the first request, which has nothing but its system prompt's first words in common with earlier runs."""


@dataclass(frozen=True)
class AgentResult:
    """A policy on all tasks of a client."""

    client: str
    """`both` for the tasks of all clients."""
    policy: str
    seconds: float
    """Mean seconds of a task, tools and client included."""
    speedup: float | None
    """Seconds of the policy `target` over its own, through the same client; None if that policy did not run."""
    speedup_ci: tuple[float, float] | None
    speedup_vs_token: float | None
    speedup_vs_token_ci: tuple[float, float] | None
    calls_right: float
    """Share of the turns whose first request made the wanted call and no other."""
    calls_right_ci: tuple[float, float]
    calls_right_by_turn: Sequence[float]
    answers_right: float
    answers_right_ci: tuple[float, float]
    requests: float
    """Mean requests of a task."""
    extra_calls: int
    reuse: float
    """Share of the prompt tokens of the turns after the first that were cached."""
    first_cached_tokens: float
    """Mean cached tokens of the first request. A high number means that the runs found each other's prompts."""


class Agents(Conditions):
    """The file that `python -m evals.bench agent --json` writes after each task."""

    version: Literal[2] = 2
    service: str
    """The pair of the service, or its address if the benchmark did not start it."""
    clients: list[str]
    policies: list[str]
    tool_choice: ToolChoice
    seed: int
    temperature: float
    max_tokens: int = MAX_TOKENS
    engines: dict[str, EngineRecord | None]
    runs: list[TaskRun]
    """Of each task, all policies."""

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.runs) // len(self.policies)

    @property
    def results(self) -> list[AgentResult]:
        """The policies by client, and at last on all tasks."""
        each = [(client, [run for run in self.runs if run.client == client]) for client in self.clients]
        groups = [*each, ("both", self.runs)] if len(each) > 1 else each
        return [result for client, runs in groups if runs for result in results_of(client, self.policies, runs)]


def model_for(policy: str, served: Sequence[Mapping[str, str]]) -> str:
    """Return the first model of a service, as listed by `/v1/models`, that runs under a policy.

    Raises:
        UsageError: there is none.
    """
    for model in served:
        if model["policy"] == policy:
            return model["id"]
    raise UsageError(unknown_name("policy", policy, list(dict.fromkeys(model["policy"] for model in served))))


def run_task(
    task: Task, conversation: Conversation, tool_choice: ToolChoice, number: int, client: str, policy: str
) -> TaskRun:
    """Ask the questions of a task, and check calls and answers."""
    since = time.perf_counter()
    turns = [conversation.ask(turn.question, _choice(turn, tool_choice)) for turn in task.turns]
    seconds = time.perf_counter() - since
    later = [reply for replies in turns[1:] for reply in replies]
    both = list(zip(task.turns, turns, strict=True))
    return TaskRun(
        task=number,
        client=client,
        policy=policy,
        seconds=seconds,
        calls_right=[turn.is_right(replies[0].calls) for turn, replies in both],
        answers_right=[turn.is_answered(replies[-1].text) for turn, replies in both],
        num_requests=sum(len(replies) for replies in turns),
        extra_calls=sum(len(reply.calls) for replies in turns for reply in replies[1:]),
        prompt_tokens=sum(reply.prompt_tokens for reply in later),
        cached_tokens=sum(reply.cached_tokens for reply in later),
        first_cached_tokens=turns[0][0].cached_tokens,
    )


def _choice(turn: Turn, tool_choice: ToolChoice) -> str:
    return turn.tool.name if tool_choice == "named" else tool_choice


def compare(
    tasks: Sequence[Task],
    clients: Mapping[str, Begin],
    models: Mapping[str, str],
    tool_choice: ToolChoice,
    first: int = 0,
) -> Generator[list[TaskRun]]:
    """Run each task under all policies, through one of the clients, and yield its runs.

    Args:
        tasks: all tasks.
        clients: by name, what begins a conversation.
        models: by policy, the name of its model.
        tool_choice: what the first request of each turn asks for.
        first: number of the first task to run; those before it were run already.
    """
    sessions, names = count_from(FIRST_SESSION), list(clients)

    def begin(task: Task, client: str, policy: str) -> Conversation:
        return clients[client](task, models[policy], SYSTEM.format(next(sessions)))

    if first < len(tasks):
        for policy in models:  # the first request under a policy sets it up
            turn = tasks[first].turns[0]
            begin(tasks[first], names[0], policy).ask(turn.question, _choice(turn, tool_choice))
    for number, task in enumerate(tasks[first:], first):
        rounds, index = divmod(number // len(KINDS), len(names))  # each client gets all kinds of tasks
        client, order = names[index], list(models)[:: 1 if rounds % 2 == 0 else -1]
        yield [run_task(task, begin(task, client, policy), tool_choice, number, client, policy) for policy in order]


def results_of(client: str, policies: Sequence[str], runs: Sequence[TaskRun]) -> list[AgentResult]:
    """Return the figures of each policy, from runs of the same tasks under all of them."""
    by_policy = {
        policy: sorted((run for run in runs if run.policy == policy), key=lambda run: run.task) for policy in policies
    }
    baselines = by_policy.get(BASELINE), by_policy.get(TOKEN)
    return [_result(client, policy, own, *baselines) for policy, own in by_policy.items()]


def _result(
    client: str, policy: str, own: Sequence[TaskRun], target: Sequence[TaskRun] | None, token: Sequence[TaskRun] | None
) -> AgentResult:
    speedup, speedup_ci = _speedup(target, own)
    vs_token, vs_token_ci = _speedup(token, own)
    calls = np.array([run.calls_right for run in own], dtype=np.float64)  # [tasks, turns]
    answers = np.array([run.answers_right for run in own], dtype=np.float64)
    calls_share, answers_share = Share.of(calls), Share.of(answers)
    return AgentResult(
        client=client,
        policy=policy,
        seconds=float(np.mean([run.seconds for run in own])),
        speedup=speedup,
        speedup_ci=speedup_ci,
        speedup_vs_token=vs_token,
        speedup_vs_token_ci=vs_token_ci,
        calls_right=calls_share.value,
        calls_right_ci=calls_share.interval(),
        calls_right_by_turn=calls.mean(axis=0).tolist(),
        answers_right=answers_share.value,
        answers_right_ci=answers_share.interval(),
        requests=float(np.mean([run.num_requests for run in own])),
        extra_calls=sum(run.extra_calls for run in own),
        reuse=sum(run.cached_tokens for run in own) / sum(run.prompt_tokens for run in own),
        first_cached_tokens=float(np.mean([run.first_cached_tokens for run in own])),
    )


def _speedup(
    baseline: Sequence[TaskRun] | None, own: Sequence[TaskRun]
) -> tuple[float | None, tuple[float, float] | None]:
    if baseline is None:
        return None, None
    baseline_s, own_s = ([run.seconds for run in runs] for runs in (baseline, own))
    return ratio_of_sums(baseline_s, own_s, np.random.default_rng(0))


HEADS = ("client", "policy", "s a task", "speedup", "vs token", "calls right", "by turn", "answers right", "reuse")


def rows_of(found: Agents) -> list[list[str]]:
    """Return the cells of a table, by `HEADS`."""
    return [
        [
            each.client,
            each.policy,
            f"{each.seconds:.2f}",
            _speedup_cell(each, BASELINE, each.speedup, each.speedup_ci),
            _speedup_cell(each, TOKEN, each.speedup_vs_token, each.speedup_vs_token_ci),
            joined(percent_with_interval(each.calls_right, each.calls_right_ci)),
            ", ".join(f"{share:.0%}" for share in each.calls_right_by_turn),
            joined(percent_with_interval(each.answers_right, each.answers_right_ci)),
            percent(each.reuse),
        ]
        for each in found.results
    ]


def _speedup_cell(each: AgentResult, baseline: str, speedup: float | None, interval: tuple[float, float] | None) -> str:
    return "–" if speedup is None else with_interval(speedup, None if each.policy == baseline else interval)


CHOICES_IN_WORDS: Mapping[ToolChoice, str] = {
    "auto": 'tool_choice "auto"',
    "required": 'tool_choice "required" for the first request of a turn',
    "named": "tool_choice names the tool for the first request of a turn, so that only the arguments can be wrong",
}


def in_words(found: Agents) -> str:
    """Return what was measured."""
    about = f"{count(found.num_tasks, 'task')} of three turns, {CHOICES_IN_WORDS[found.tool_choice]}"
    models = models_in_words(found.engines)
    return f"{about}, temperature {found.temperature:g}, at most {found.max_tokens} tokens a request; {models}"


def agents_table(found: Agents) -> Table:
    """Return a terminal table of all clients and policies."""
    return cells_table(f"{count(found.num_tasks, 'task')} of three turns with tools", HEADS, rows_of(found))
