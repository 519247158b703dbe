"""`stepspec serve`: serve models through OpenAI's API."""

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from stepspec.api.models import check_models, hub_name
from stepspec.api.pairs import PAIRS
from stepspec.base.extras import from_extra
from stepspec.base.printable import printable
from stepspec.base.strict_json import MAX_BODY_BYTES
from stepspec.cli.options import DraftOption, JudgeOption, PolicyOption, TargetOption, judge_specs
from stepspec.cli.sockets import check_exposure, check_origins, check_proxies, check_tls, listening_sockets
from stepspec.errors import StepSpecError
from stepspec.loop.policy import load_policy

T = TypeVar("T")

SWITCH_S = 0.001
"""Thread switch interval of the interpreter. The event loop shares the interpreter with threads that parse long
messages. With Python's default of 5 ms, `/health` took 109 ms at p99 while many such messages arrived."""


class LogFormat(StrEnum):
    """Format of the log's lines."""

    text = "text"
    json = "json"


def main(
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            "--pair",
            metavar="NAME|NAME=MODELS",
            help=f"A pair by name ({' or '.join(PAIRS)}), or NAME=PAIR, NAME=TARGET or NAME=TARGET,DRAFT to name it "
            "yourself; repeat it to serve several. Requests choose one by `model`.",
        ),
    ] = None,
    judge: JudgeOption = None,
    policy: PolicyOption = "two-level",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 accepts connections from everywhere.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free one.")] = 8000,
    max_running: Annotated[int, typer.Option(min=1, help="Answers that are generated concurrently.")] = 128,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that wait; further ones return 503.")] = 128,
    max_queued_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens that wait; further requests return 503. Default: no limit.")
    ] = None,
    max_wait: Annotated[
        float | None,
        typer.Option(min=0.001, help="Seconds that a request may wait before it returns 503. Default: no limit."),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Largest request body in bytes; larger ones return 413.")
    ] = MAX_BODY_BYTES,
    drain: Annotated[
        float, typer.Option(min=0, max=86_400, help="Seconds for running requests to end after SIGTERM or Ctrl-C.")
    ] = 30.0,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of API keys, see `stepspec key`. SIGHUP reads it again."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address outside this machine without API keys.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Further host name in addresses of the service; repeat it for several. By default, a service with API "
            "keys answers to all names, and one without to those of this machine.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain in PEM format, to serve HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web origin whose pages may use the service; repeat it for several."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Proxy whose X-Forwarded headers count; repeat it for several."),
    ] = None,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log.")] = LogFormat.text,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log prompts, too.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Load and serve nothing; only say what would be wrong.")
    ] = False,
) -> None:
    """Serve models over HTTP until stopped."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service reads the keys again at this signal
    with from_extra("serve", "stepspec serve"):
        from stepspec.serve import Keys, ServiceLimits, Settings, create_app
        from stepspec.serve.hosts import LOCAL, answered_hosts
        from stepspec.serve.log import configure_logs
        from stepspec.serve.pairs import load_pairs, wanted_pairs
        from stepspec.serve.server import Serving

    problems: list[StepSpecError] = []

    def checked(work: Callable[[], T]) -> T | None:
        """Return what the work returns. With --check, collect its error instead of raising it."""
        try:
            return work()
        except StepSpecError as error:
            if not check:
                raise
            problems.append(error)
            return None

    keys = checked(lambda: Keys(api_keys, os.environ))
    has_keys = keys is None or keys.are_needed  # invalid keys are a problem of their own
    checked(lambda: check_exposure(host, has_keys=has_keys, insecure=insecure))
    checked(lambda: check_tls(tls_cert, tls_key))
    checked(lambda: check_origins(cors_origin or ()))
    checked(lambda: check_proxies(trusted_proxy or ()))
    chosen, specs = checked(lambda: load_policy(policy)[0]), checked(lambda: judge_specs(judge))
    wanted = checked(lambda: wanted_pairs(pair or [], target, draft)) or {}
    found = [checked(lambda each=each: check_models(**each.arguments(chosen, specs))) for each in wanted.values()]
    with ExitStack() as stack:
        sockets = [stack.enter_context(each) for each in checked(lambda: listening_sockets(host, port)) or ()]
        if check:
            named = [(models.target, models.draft, *judges.values()) for models, judges in filter(None, found)]
            _report(problems, {name for each in named for spec in each if (name := hub_name(spec)) is not None})
            return
        assert keys is not None
        assert chosen is not None
        configure_logs(as_json=log_format == LogFormat.json)
        sys.setswitchinterval(SWITCH_S)
        settings = Settings(
            limits=ServiceLimits(max_running, max_queued, max_queued_tokens, max_wait),
            keys=keys,
            max_body_bytes=max_body_bytes,
            hosts=answered_hosts((*LOCAL, host), allowed_host or (), is_open=keys.are_needed or insecure),
            cors_origins=cors_origin or (),
            drain_s=drain,
            log_prompts=log_prompts,
        )
        pairs = load_pairs(wanted, chosen, specs)
        serving = Serving(settings, tls_cert, tls_key, trusted_proxy or ())
        serving.run(create_app(pairs, policy, settings), sockets)


def _report(problems: Sequence[StepSpecError], hub_names: Collection[str]) -> None:
    """Print what is wrong.

    Args:
        problems: what was found.
        hub_names: models that are not folders here, so that they must be on the Hub.

    Raises:
        typer.Exit: something is.
    """
    for problem in problems:
        print(printable(str(problem)))
    if problems:
        raise typer.Exit(2)
    for name in sorted(hub_names):
        print(printable(f"There is no folder {name}, so it must be a name on the Hugging Face Hub."))
    print("Nothing is wrong. Models and their servers were not tried.")
