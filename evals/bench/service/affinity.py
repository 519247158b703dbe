"""What affinity is worth: the prefix-cache hit rate of two vLLM servers behind a router, against that of one server.

The load is conversations, in which the prompt of each turn contains the earlier turns. Each setting gets the same ones,
with fresh servers and services, and one server can hold all of them in its cache. The target is on the vLLM servers and
the draft in each service, so the counters of the servers are those of the target alone.

Two policies run, each on its own conversations. `target` makes one call in each turn, so a cache can only have the
earlier turns. `specreason` also asks the target for one token after each step of the draft, so most of what a cache has
was read in the same turn, and affinity is worth less. Neither policy depends on measured times, so all settings get the
same calls.

The replies of earlier turns are the reference answers, so that prompts do not depend on what the models write.
"""

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from evals.bench.conversation import REPLY
from evals.bench.service.client import CHAT, Address, Client, Exchange, http_request
from evals.bench.service.load import closed_loop
from evals.bench.service.process import healthy, started
from evals.bench.service.records import Check, Scenario, finish_scenario, scenario_table
from evals.bench.service.vllm_servers import PYTHON, VARIABLES, Routing, router_command, server_command, vllm_versions
from evals.bench.speed import cells_table
from evals.training.gsm_mini import Problem, load_split
from stepspec.cli.output import JsonOption
from stepspec.cli.progress import make_meter
from stepspec.errors import EngineError
from stepspec.evaluation.machine import conditions
from stepspec.evaluation.records import Record
from stepspec.evaluation.report.cells import UNKNOWN, percent
from stepspec.mini import WEIGHTS

POLICIES = ("target", "specreason")
CONCURRENCY = 4
MAX_TOKENS = 64
MIN_SHARE = 0.9
"""Least hit rate with affinity over that of one server."""
COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total\{.*\} (\S+)$", re.MULTILINE)
Progress = Callable[[None, int, int], None]


class Setting(NamedTuple):
    """An arrangement of services and servers."""

    name: str
    num: int
    """Number of services, and of vLLM servers."""
    routing: Routing | None = None
    """Routing of the router in front of the services; None for no router."""
    routes_servers: bool = False
    """Whether the servers have such a router, too. Otherwise each service has the addresses of all servers."""

    @property
    def sends_session(self) -> bool:
        """Whether requests have an `X-Session-ID`."""
        return self.routing != "round_robin"


ONE = Setting("one server", 1)
SETTINGS = (
    ONE,
    Setting("affinity, addresses", 2, "consistent_hash"),
    Setting("affinity, routers", 2, "consistent_hash", routes_servers=True),
    Setting("no affinity, routers", 2, "round_robin", routes_servers=True),
)
"""With addresses, a router chooses a service by session, and stepspec chooses a server. With routers, a second router
chooses a server, by the session as well, or in turn as the first one."""


class Reuse(Record):
    """What the prefix caches of all servers had, under one policy in one setting."""

    setting: str
    policy: str
    requests: int
    failed: int
    """Requests without an answer."""
    prompt_tokens: int
    """Tokens of the prompts, by the answers."""
    reported_tokens: int
    """Those that the first call of each request found in the cache, by the answers. It is 0 for a first call that asks
    for one token after a step."""
    queried_tokens: list[int]
    """Tokens of all calls, by server."""
    hit_tokens: list[int]
    """Those of them that were in its cache, by server."""

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of all calls that were in a cache."""
        return sum(self.hit_tokens) / sum(self.queried_tokens)

    @property
    def tokens_read(self) -> float:
        """Tokens of prompts that the servers computed for a request."""
        return (sum(self.queried_tokens) - sum(self.hit_tokens)) / self.requests

    @property
    def least_share(self) -> float | None:
        """Share of the tokens of all calls that went to the server with the fewest; None for one server."""
        return min(self.queried_tokens) / sum(self.queried_tokens) if len(self.queried_tokens) > 1 else None


class Affinity(Scenario):
    """The file that `python -m evals.bench service.affinity --json` writes."""

    conversations: int
    """Under each policy."""
    turns: int
    """Of a conversation."""
    results: list[Reuse]
    min_share: float = MIN_SHARE

    @property
    def title(self) -> str:
        """See `Scenario.title`."""
        return (
            f"Two services and two vLLM servers with the embedded target, {self.conversations} conversations of "
            f"{self.turns} turns under each policy, {CONCURRENCY} concurrent requests"
        )

    @property
    def checks(self) -> list[Check]:
        """See `Scenario.checks`. The settings in which requests go in turn have no limit."""
        limits = {each.name: self.min_share if each.sends_session else None for each in SETTINGS}
        over = [
            Check(
                name=f"{each.policy}: {each.setting}, over one",
                value=share,
                limit=limits[each.setting],
                bound="at least",
            )
            for each, share in self._over_one()
            if each.setting != ONE.name
        ]
        return [*over, Check(name="failed requests", value=sum(each.failed for each in self.results), limit=0)]

    @property
    def details(self) -> tuple[Sequence[str], list[list[str]]]:
        """See `Scenario.details`."""
        rows = [
            [
                each.policy,
                each.setting,
                f"{sum(each.queried_tokens):,}",
                percent(each.hit_rate),
                f"{share:.3f}",
                f"{each.tokens_read:,.0f}",
                percent(each.reported_tokens / each.prompt_tokens) if each.reported_tokens else UNKNOWN,
                percent(each.least_share),
            ]
            for each, share in self._over_one()
        ]
        return HEADS, rows

    def _over_one(self) -> list[tuple[Reuse, float]]:
        """Return the results, each with its hit rate over that of one server under the same policy."""
        of_one = {each.policy: each.hit_rate for each in self.results if each.setting == ONE.name}
        return [(each, each.hit_rate / of_one[each.policy]) for each in self.results]


HEADS = (
    "policy",
    "setting",
    "prompt tokens",
    "in the cache",
    "over one server",
    "computed a request",
    "by the answers",
    "on the less busy server",
)


def hit_rates(found: Affinity) -> tuple[Sequence[str], list[list[str]]]:
    """Return heads and rows of a table of the share of tokens in a cache, by setting and policy."""
    rates = {(each.setting, each.policy): percent(each.hit_rate) for each in found.results}
    return ("setting", *POLICIES), [
        [each.name, *(rates[each.name, policy] for policy in POLICIES)] for each in SETTINGS
    ]


def affinity_table(found: Affinity) -> Table:
    """Return a terminal table by policy and setting."""
    return cells_table("prefix caches of the target", *found.details)


Talks = Mapping[str, Sequence[Sequence[Problem]]]
"""The problems of each conversation, by policy."""


def conversations_of(number: int, turns: int) -> Talks:
    """Return conversations for each policy, without a problem in common."""
    problems = load_split("test")
    return {policy: [[*islice(problems, turns)] for _ in range(number)] for policy in POLICIES}


async def reuse(setting: Setting, python: Path, talks: Talks, progress: Progress) -> list[Reuse]:
    """Start services and servers, send the conversations, and return what was in the caches under each policy.

    Args:
        setting: arrangement of services and servers.
        python: a Python with vLLM and vllm-router.
        talks: the conversations.
        progress: called with None, and the numbers of finished and of all requests.

    Raises:
        EngineError: a server does not start, or no request is answered.
    """
    found: list[Reuse] = []
    done, number = 0, sum(map(len, chain.from_iterable(talks.values())))
    with arranged(setting, python) as (front, servers):
        for policy, conversations in talks.items():
            before = [await cache_counts(server) for server in servers]
            answers: list[Exchange] = []
            async with Client(front) as client:
                for requests in turns_of(conversations, policy, sends_session=setting.sends_session):
                    answers += await closed_loop(client, requests, CONCURRENCY)
                    progress(None, done + len(answers), number)
            done += len(answers)
            after = [await cache_counts(server) for server in servers]
            found.append(_reuse(setting, policy, answers, before, after))
    return found


@contextmanager
def arranged(setting: Setting, python: Path) -> Generator[tuple[Address, list[Address]]]:
    """Start services and servers, and yield where requests go and where the vLLM servers are.

    Raises:
        EngineError: one of them does not start.
    """
    with ExitStack() as stack:

        def routed(behind: Sequence[Address]) -> Sequence[Address]:
            if setting.routing is None:
                return behind
            return stack.enter_context(healthy([router_command(python, setting.routing, behind)], {}))

        target = server_command(python, WEIGHTS / "target", "target")
        servers = stack.enter_context(healthy([target] * setting.num, VARIABLES))
        command = service_command(routed(servers) if setting.routes_servers else servers)
        services = [stack.enter_context(started(command)).address for _ in range(setting.num)]
        (front,) = routed(services)
        yield front, servers


def service_command(targets: Sequence[Address]) -> list[str]:
    """Return the command of a service whose target is at some addresses and whose draft is in its process."""
    urls = " ".join(f"http://{host}:{port}/v1" for host, port in targets)
    command = [sys.executable, "-m", "stepspec", "serve", "--port", "0"]
    return [*command, "--target", urls, "--draft", f"torch:{WEIGHTS / 'draft'}"]


def turns_of(conversations: Sequence[Sequence[Problem]], policy: str, *, sends_session: bool) -> Generator[list[bytes]]:
    """Yield the requests of each turn. All conversations have a turn before any has the next one.

    Their order changes from turn to turn. Otherwise a router that chooses in turn could always choose the same server
    for a conversation.
    """
    order = [*range(len(conversations))]
    for turn in range(len(conversations[0])):
        random.Random(turn).shuffle(order)
        yield [
            _request(conversations[number][: turn + 1], policy, f"{policy}-{number}" if sends_session else None)
            for number in order
        ]


def _request(problems: Sequence[Problem], policy: str, session: str | None) -> bytes:
    """Return the request for the last of some problems, after the reference answers to the others."""
    messages = [
        {"role": role, "content": content}
        for each in problems
        for role, content in (("user", each.question), ("assistant", REPLY.format(each.answer)))
    ]
    headers = () if session is None else (f"X-Session-ID: {session}",)
    body = {"messages": messages[:-1], "temperature": 0, "max_tokens": MAX_TOKENS, "stepspec": {"policy": policy}}
    return http_request(CHAT, json.dumps(body).encode(), headers)


async def cache_counts(server: Address) -> tuple[int, int]:
    """Return the tokens of which a vLLM server has looked whether its prefix cache has them, and those that it had."""
    async with Client(server) as client:
        counts = {name: int(float(value)) for name, value in COUNTER.findall(await client.get("/metrics"))}
    return counts["queries"], counts["hits"]


def _reuse(
    setting: Setting,
    policy: str,
    answers: Sequence[Exchange],
    before: Sequence[tuple[int, int]],
    after: Sequence[tuple[int, int]],
) -> Reuse:
    usages = [each.json()["usage"] for each in answers if each.answered]
    if not usages:
        raise EngineError(
            f"No request was answered. The first one got: {answers[0].failure or answers[0].body.decode()}"
        )
    queried, hits = ([new[at] - old[at] for old, new in zip(before, after, strict=True)] for at in (0, 1))
    return Reuse(
        setting=setting.name,
        policy=policy,
        requests=len(answers),
        failed=len(answers) - len(usages),
        prompt_tokens=sum(each["prompt_tokens"] for each in usages),
        reported_tokens=sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages),
        queried_tokens=queried,
        hit_tokens=hits,
    )


def main(
    conversations: Annotated[int, typer.Option(min=2, help="Conversations under each policy.")] = 8,
    turns: Annotated[int, typer.Option(min=2, max=16, help="Turns of a conversation.")] = 6,
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Python with vLLM and vllm-router. Default: that of .venv-vllm."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compare the prefix caches of two vLLM servers behind a router with that of one, with affinity and without."""
    python, about, results = vllm or PYTHON, conditions(), list[Reuse]()
    about["versions"] |= vllm_versions(python)
    talks = conversations_of(conversations, turns)
    with make_meter() as meter:
        for setting in SETTINGS:
            meter.begin(setting.name)
            results += asyncio.run(reuse(setting, python, talks, meter.show))
    about |= {"conversations": conversations, "turns": turns}
    found = Affinity.model_validate({**about, "results": results})
    finish_scenario([affinity_table(found), scenario_table(found)], found, json_file)
