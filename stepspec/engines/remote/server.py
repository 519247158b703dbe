"""The features of a server, and the fields of calls that depend on them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stepspec.engines.protocol import Sampling, Stop
from stepspec.engines.remote.address import Address
from stepspec.errors import UsageError

USUAL = Sampling()
FURTHER = ("top_k", "min_p", "repetition_penalty")
"""Sampling fields that OpenAI's own API does not have."""

SCHEMA_FIELDS: Mapping[str, Callable[[str], Mapping[str, Any]]] = {
    "structured_outputs": lambda schema: {"structured_outputs": {"json": json.loads(schema)}},  # vLLM
    "json_schema": lambda schema: {"json_schema": json.loads(schema)},  # llama.cpp
    "json_schema as text": lambda schema: {"json_schema": schema},  # SGLang
}
"""The field that constrains a call to a JSON schema, by name."""


@dataclass(frozen=True)
class RemoteServer:
    """One model on a server, with the features that the server supports for it."""

    model: str
    folder: str
    """Folder or Hub name of the weights and tokenizer, if the server reports it; else the model's name."""
    kind: str
    """The server's name and version, if it reports them."""
    max_context: int | None
    extended: bool
    """Whether the server supports fields beyond OpenAI's API. Other servers may ignore unknown fields."""
    shows_special: bool
    """Whether it takes `skip_special_tokens`, without which it may leave tags out of the text."""
    takes_ids: bool
    gives_ids: bool
    num_logprobs: int
    """Maximum number of top tokens with log-probabilities; 0 if the server returns none."""
    written_logprobs: bool
    """Whether the server returns the log-probabilities of the tokens that it generates."""
    several_prompts: bool
    """Whether one call can have several prompts."""
    scores: str | None
    """How it scores a continuation, see `stepspec.engines.remote.dialects`; None if it does not."""
    schema_field: str | None
    """The field of a JSON schema, one of `SCHEMA_FIELDS`; None if it supports none."""
    relaxes: bool
    """Whether it has stepspec's plugin, and speculation that can relax tokens."""
    speculation: str | None
    """The server's built-in speculation; "none" if there is none, None if unknown."""
    takes_salt: bool
    may_take_salt: bool
    """See `ServerKind`, like the field before."""

    def streams(self, stop: Stop) -> bool:
        """Return whether to stream a text.

        A step is not streamed if the server can stop at its end, since users never see a part of a step.
        """
        return not (stop.delimiters and self.gives_ids)


def text_fields(
    address: Address, server: RemoteServer, sampling: Sampling, stop: Stop, position: int
) -> dict[str, Any]:
    """Return the fields of a call for text at a position, without the prompt.

    Most fields with default values are left out, since servers differ in their support.

    Raises:
        UsageError: the server does not support one of the sampling parameters.
    """
    fields: dict[str, Any] = {
        "model": server.model,
        "max_tokens": stop.max_tokens,
        "temperature": sampling.temperature,
    }
    if server.streams(stop):
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if server.shows_special:
        fields["skip_special_tokens"] = False
    if server.gives_ids:
        fields["return_token_ids"] = True
        fields |= {"stop": list(stop.delimiters), "include_stop_str_in_output": True}
        fields |= {"stop_token_ids": sorted(stop.token_ids)}
    if sampling.temperature > 0:
        fields["seed"] = sampling.seed_at(position)
    if sampling.top_p != 1.0:
        fields["top_p"] = sampling.top_p
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(sampling, name):
            fields[name] = getattr(sampling, name)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(id): amount for id, amount in sampling.logit_bias}
    further = {name: getattr(sampling, name) for name in FURTHER if getattr(sampling, name) != getattr(USUAL, name)}
    if sampling.allowed is not None:
        further["allowed_token_ids"] = sorted(sampling.allowed)
    if further and not server.extended:
        raise UsageError(
            f"{address.base} supports only OpenAI's fields, so it cannot sample with {', '.join(further)}."
        )
    return fields | further


def one_token_fields(model: str, num_logprobs: int, *, extended: bool, special: bool) -> dict[str, Any]:
    """Return the fields of a call for the argmax next token. `extended` and `special` are those of `RemoteServer`."""
    fields: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
    if num_logprobs:
        fields["logprobs"] = num_logprobs
    if extended:
        fields |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if special:
        fields["skip_special_tokens"] = False
    return fields
