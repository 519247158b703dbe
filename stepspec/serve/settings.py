"""Settings of the service."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepspec.base.strict_json import MAX_BODY_BYTES
from stepspec.serve.admission import ServiceLimits
from stepspec.serve.keys import Keys


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the service.

    Attributes:
        limits: how many requests run and wait.
        keys: who may use the service. Without keys, everybody may.
        max_body_bytes: limit of a request body. A larger body returns 413 and is not read further.
        hosts: names and addresses in Host headers that are answered; empty for all.
        cors_origins: web origins whose pages may use the service.
        drain_s: seconds for running requests to end after SIGTERM.
        log_prompts: whether the log has the prompts.
    """

    limits: ServiceLimits = field(default_factory=ServiceLimits)
    keys: Keys = field(default_factory=Keys)
    max_body_bytes: int = MAX_BODY_BYTES
    hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    drain_s: float = 30.0
    log_prompts: bool = False
