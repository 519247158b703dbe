"""Logs one line for each request: id, address, method, path, status, seconds; for texts also tokens and policy."""

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepspec.base.printable import printable
from stepspec.errors import StepSpecError
from stepspec.loop.result import Result
from stepspec.loop.tracing import caller
from stepspec.serve.errors import BusyError, error_body, error_response, public_error, truncated
from stepspec.serve.fields import ID_PATTERN

logger = logging.getLogger("stepspec.serve")

KEY = "stepspec.log"
"""Key in a request's ASGI scope for its log entry."""

MAX_PATH, MAX_PARAM = 200, 64
TRACE = (b"traceparent", b"tracestate")
"""Headers with the span of the client. Not `baggage`: nothing reads it, and a bad one would write many lines."""
POLLED = ("/health", "/ready", "/load", "/version", "/metrics")
"""Paths that load balancers, Prometheus and the page ask for again and again. Their successes are not logged."""


class LineFormatter(logging.Formatter):
    """Formats the entries of the text log. What a client or a server has sent cannot begin a line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line, with control characters escaped, and the prompt if prompts are logged."""
        record.message = printable(record.message)
        prompt = getattr(record, "prompt", None)
        return super().formatMessage(record) + ("" if prompt is None else f" prompt {prompt!r}")

    def formatException(self, ei: Any) -> str:
        """Return the indented lines of a traceback."""
        return "\n".join(f"    {printable(line)}" for line in super().formatException(ei).splitlines())


class _JsonFormatter(JsonFormatter):
    """Formats the entries of the structured log."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the time in the format of RFC 3339."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def line_formatter(*, as_json: bool) -> logging.Formatter:
    """Return what formats the entries of the log, each as one line, or tracebacks in text as several."""
    if not as_json:
        return LineFormatter()
    hidden = [*RESERVED_ATTRS, "color_message"]  # of uvicorn, with escapes for a terminal
    return _JsonFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", reserved_attrs=hidden)


def configure_logs(*, as_json: bool) -> None:
    """Send the log of the whole process to stderr, with warnings and what libraries log."""
    handler = logging.StreamHandler()
    handler.setFormatter(line_formatter(as_json=as_json))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)
    for name in ("uvicorn", "stepspec"):
        logging.getLogger(name).setLevel(logging.INFO)


@dataclass
class LogEntry:
    """What the log says about a request. Prompts, answers and keys are not part of it."""

    request_id: str
    client_ip: str | None = None
    """Address of the client, as a trusted proxy gives it."""
    trace_id: str | None = None
    session_id: str | None = None
    client: str | None = None
    """Name of its key."""
    model: str | None = None
    policy: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    """Seconds until the first output."""
    num_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """Further tokens and passes of texts, for structured logs."""
    finish_reason: str | None = None
    ignored: Sequence[str] = ()
    note: str | None = None
    unfamiliar: str | None = None
    """The part of the note on a question unlike the training data, which is logged once."""
    error: str | None = None
    """The kind of an error, and the field that it is about or the reason. Its message may quote the prompt."""
    prompt: str | None = None
    """The prompt, if the service logs prompts."""
    status: int = 500
    complete: bool = False
    since: float = field(default_factory=time.monotonic)

    def failed(self, error: StepSpecError) -> None:
        """Add an error."""
        found = error_body(error)["error"]
        detail = error.reason if isinstance(error, BusyError) else found["param"]
        shown = "" if detail is None else f" {truncated(repr(detail), MAX_PARAM)}"
        self.error = f"{found['code'] or found['type']}{shown}"

    def done(self, result: Result) -> None:
        """Add the result of an answer."""
        counts = result.counts
        self.note = result.note
        self.finish_reason = ", ".join(filter(None, (self.finish_reason, result.finish_reason)))
        self.counts["drafted"] += counts.drafted + counts.token_drafted
        self.counts["accepted"] += counts.accepted + counts.token_accepted
        self.counts["target_passes"] += counts.target_passes

    def words(self) -> str:
        """Return the part of the line about the text; empty for other requests."""
        error = "" if self.error is None else f" {self.error}"
        if self.policy is None:
            return error
        queued = "" if self.queue_s is None else f" queued {self.queue_s:.3f} s"
        words = f" {self.num_tokens} tokens model {self.model!r} policy {self.policy} client {self.client!r}{queued}"
        if self.session_id:
            words += f" session {self.session_id!r}"
        if self.ignored:
            words += f" ignored {', '.join(map(repr, self.ignored))}"
        return words + " (with a note)" * (self.note is not None) + error

    def fields(self) -> dict[str, Any]:
        """Return the entry for structured logs."""
        left_out = {"since", "unfamiliar", "counts"}
        values = {name: value for name, value in vars(self).items() if value not in (None, ()) and name not in left_out}
        return {**values, **self.counts, "seconds": round(time.monotonic() - self.since, 6)}


class RequestLog:
    """Middleware that gives each request an id, and logs its line when the response has been sent or has failed.

    It also responds to errors that no other part of the service expects, so that their responses have an id, too.
    """

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        """`count` is called with the status of each response."""
        self._app, self._count = app, count
        self._noted: set[str] = set()  # notes on questions unlike the training data; each pair has one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = scope[KEY] = LogEntry(_request_id(scope), (scope.get("client") or [None])[0])

        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun, entry.status = True, message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", entry.request_id.encode())]
            await send(message)
            entry.complete |= message["type"] == "http.response.body" and not message.get("more_body", False)

        parents = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in TRACE}
        try:
            with caller(parents) as entry.trace_id:
                await self._app(scope, receive, watched_send)
        except Exception as error:
            if has_begun:
                raise
            public = public_error(error, entry.request_id)
            entry.failed(public)
            await error_response(scope["path"], public, entry.request_id)(scope, receive, watched_send)
        finally:
            entry.complete &= entry.error is None or entry.status >= 400  # an error may end a stream
            self._count(entry.status)
            self._log(scope, entry)

    def _log(self, scope: Scope, entry: LogEntry) -> None:
        # The raw path is still percent-encoded, so it cannot contain line breaks.
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:MAX_PATH]
        if entry.unfamiliar is not None and entry.unfamiliar not in self._noted:
            self._noted.add(entry.unfamiliar)
            logger.warning("%s", entry.unfamiliar)
        seconds = time.monotonic() - entry.since
        cut_off = "" if entry.complete else " (response incomplete)"
        is_poll = scope["path"] in POLLED and entry.status < 400 and entry.complete
        logger.log(
            logging.DEBUG if is_poll else logging.INFO,
            "%s %s %s %s %d %.3f s%s%s",
            entry.request_id,
            entry.client_ip or "-",
            scope["method"],
            path,
            entry.status,
            seconds,
            entry.words(),
            cut_off,
            extra={"method": scope["method"], "path": path, **entry.fields()},
        )


def _request_id(scope: Scope) -> str:
    given = header(scope, b"x-request-id")
    return given if given is not None and re.fullmatch(ID_PATTERN, given) else uuid.uuid4().hex


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of a request with a name in lower case."""
    found = next((value for key, value in scope["headers"] if key == name), None)
    return None if found is None else found.decode("latin-1")


def entry_of(scope: Scope) -> LogEntry:
    """Return the log entry of a request."""
    return cast("LogEntry", scope[KEY])
