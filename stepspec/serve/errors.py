"""Errors of the service, and the HTTP status and body of every error."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from stepspec.base.printable import printable
from stepspec.errors import ContextError, EngineError, StepSpecError, TargetError, UsageError, unknown_name

logger = logging.getLogger("stepspec.serve")

MAX_PARAM_CHARACTERS = 64
"""Maximum length of a field's name in an error, since the client may have chosen the name."""

MAX_MESSAGE_CHARACTERS = 300


class RefusedError(UsageError):
    """The request is invalid or not supported. `param` is the field that caused the error, or None."""

    status = 400
    code: str | None = None

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(truncated(message, MAX_MESSAGE_CHARACTERS))
        self.param = None if param is None else truncated(param, MAX_PARAM_CHARACTERS)


class TooLargeError(RefusedError):
    """The request body exceeds the size limit."""

    status, code = 413, "request_too_large"

    def __init__(self, max_bytes: int) -> None:
        super().__init__(None, f"The body must have at most {max_bytes} bytes. Send a shorter request.")


class TooSlowError(RefusedError):
    """The request body did not arrive in time."""

    status, code = 408, "request_timeout"

    def __init__(self, seconds: float) -> None:
        super().__init__(None, f"The body must arrive within {seconds:g} s. Send the request again.")


class TooLongError(RefusedError):
    """The prompt does not fit the model's context."""

    code = "context_length_exceeded"


class HostError(RefusedError):
    """The request is sent to a host that the service does not know as its own."""

    status, code = 403, "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            None,
            f"The service does not answer to the host {truncated(host, 64)!r}. Use another address of it, or add the "
            "name with --allowed-host.",
        )


class ExposedError(RefusedError):
    """The request comes from another machine, and the service has no keys."""

    status, code = 403, "no_api_keys"

    def __init__(self) -> None:
        super().__init__(
            None,
            "Without API keys, the service answers only to its own machine. Set api_keys or the environment variable "
            "STEPSPEC_API_KEYS, or allow it with insecure=true.",
        )


class NoSuchModelError(RefusedError):
    """The request names a model that is not served."""

    status, code = 404, "model_not_found"

    def __init__(self, name: str, known: list[str], message: str | None = None) -> None:
        """`message`: what the client should use instead, if that is known."""
        super().__init__("model", message or unknown_name("model", name, known))


class NoKeyError(RefusedError):
    """The request has no valid API key."""

    status, code = 401, "invalid_api_key"

    def __init__(self) -> None:
        super().__init__(None, "The API key is missing or unknown. Send it as 'Authorization: Bearer KEY'.")


class RateError(RefusedError):
    """The client has used up one of the limits of its key."""

    status, code = 429, "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(None, message)
        self.retry_after_s = retry_after_s


class BusyError(EngineError):
    """The service cannot take the request now."""

    status, code = 503, "service_overloaded"

    def __init__(self, message: str, retry_after_s: float, reason: str) -> None:
        """`reason`: a label for the metrics."""
        super().__init__(message)
        self.retry_after_s, self.reason = retry_after_s, reason


class LostError(BusyError):
    """The replica that answered a request has died."""

    code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("The replica that answered has died. Send the request again.", 1.0, "lost")


def truncated(text: str, most: int) -> str:
    """Return a text of at most `most` characters, with its end replaced by dots if it is longer.

    Halves of surrogate pairs, which a client may send and no response may have, are escaped.
    """
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return short.encode("utf-8", "backslashreplace").decode()


def public_error(error: Exception, request_id: str) -> StepSpecError:
    """Return the error for the client, and log one that the client cannot act on.

    What a model's server says goes only to the log, because it may have the server's address.
    """
    if isinstance(error, ContextError):  # from a server, as requests are checked before
        logger.error("%s failed: %s", request_id, printable(str(error)))
        return TooLongError(None, "The prompt does not fit the model's context. Send a shorter one.")
    if isinstance(error, UsageError | BusyError):
        return error
    if not isinstance(error, StepSpecError):
        logger.error("%s failed with an internal error.", request_id, exc_info=error)
        return EngineError(f"The service failed. See request {request_id} in the service's log.")
    cause = (error.__cause__ or error) if isinstance(error, TargetError) else error  # its own text quotes the answer
    logger.error("%s failed: %s", request_id, printable(str(cause)))
    return EngineError(f"A model failed. See request {request_id} in the service's log.")


def status_of(error: StepSpecError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RefusedError | BusyError):
        return error.status
    return 400 if isinstance(error, UsageError) else 500


def error_body(error: StepSpecError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    param, code = None, None
    if isinstance(error, RefusedError):
        param, code = error.param, error.code
    elif isinstance(error, BusyError):
        code = error.code
    kind = "server_error" if isinstance(error, EngineError) else "invalid_request_error"
    if isinstance(error, RateError):
        kind = "rate_limit_error"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


MESSAGES_ROUTES = "/v1/messages"
"""Beginning of the routes of Anthropic's API."""
MESSAGES_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Types of errors of Anthropic's API by HTTP status; others are invalid requests."""
OVERFLOW = re.compile(r"(\d+) tokens, but .* has a context of (\d+)")


def messages_error(error: StepSpecError, request_id: str | None = None, status: int | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    kind, message = MESSAGES_ERRORS.get(status or status_of(error), "invalid_request_error"), str(error)
    if isinstance(error, TooLongError) and (found := OVERFLOW.search(message)):  # Claude Code compacts at these words
        message = f"prompt is too long: {found[1]} tokens > {found[2]} maximum. {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def error_response(
    path: str,
    error: StepSpecError,
    request_id: str | None = None,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the response of a route to an error, in the route's format. Status and headers are by default its own."""
    body = messages_error(error, request_id, status) if path.startswith(MESSAGES_ROUTES) else error_body(error)
    return JSONResponse(body, status or status_of(error), headers_of(error) if headers is None else headers)


def headers_of(error: StepSpecError) -> Mapping[str, str]:
    """Return the headers that tell a client when to try again, or how to authenticate."""
    if isinstance(error, RateError | BusyError):
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    if isinstance(error, TooSlowError):  # else the server would wait for the rest of the body
        return {"Connection": "close"}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, NoKeyError) else {}
