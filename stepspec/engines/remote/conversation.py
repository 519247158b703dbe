"""State of one request between its calls: the growing prompt as JSON, and headers for routers."""

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence

from stepspec.engines.protocol import TokenBuffer, Tokenizer
from stepspec.engines.remote.address import Address
from stepspec.engines.text import TextReader
from stepspec.errors import UsageError


class Conversation:
    """One request. Each call encodes only the part of the prompt that was appended since the last call."""

    def __init__(
        self,
        address: Address,
        tokenizer: Tokenizer,
        buffer: TokenBuffer,
        *,
        as_ids: bool,
        cache_salt: str | None = None,
    ) -> None:
        """Create the state of a request.

        Args:
            address: the server.
            tokenizer: the model's tokenizer.
            buffer: the prompt of the request.
            as_ids: whether to send token ids; otherwise text.
            cache_salt: calls share cached prefixes on the server only if they have the same salt; None sends none.

        Raises:
            UsageError: as text, the prompt would have special tokens that its ids do not have.
        """
        if not as_ids:
            _check_special(tokenizer, buffer.since(0))
        self._routing = address.routing
        self.headers: dict[str, str] = {**self._routing.headers, self._routing.header: _header_safe(buffer.session)}
        self._reader = TextReader(tokenizer, buffer)
        self._as_ids = as_ids
        self._salt = cache_salt
        self._json = bytearray()

    def replay(self, headers: Mapping[str, str]) -> None:
        """Store the response headers to send back. Values that are not ASCII cannot be sent and are ignored."""
        found = {name: headers[name] for name in self._routing.replayed if name in headers}
        self.headers |= {name: value for name, value in found.items() if value.isascii()}

    def body(
        self,
        buffer: TokenBuffer,
        fields: Mapping[str, object],
        furthers: Sequence[Sequence[int]] = ((),),
        name: str = "prompt",
    ) -> bytes:
        """Return the JSON body of a call.

        Args:
            buffer: the prompt.
            fields: all other fields of the call.
            furthers: ids to append to the prompt; several sequences make a list of prompts.
            name: name of the field with the prompt.
        """
        open_, close = (b"[", b"]") if self._as_ids else (b'"', b'"')
        if self._as_ids:
            if new := buffer.since(self._reader.position):
                self._json += b"".join((b"," if self._json else b"", _joined(new)))
                self._reader.position += len(new)
            comma = b"," if self._json else b""
            suffixes = [comma + _joined(further) if further else b"" for further in furthers]
        else:
            self._json += _escaped(self._reader.read(len(buffer), to_the_end=False))
            suffixes = [_escaped(self._reader.rest(further)) for further in furthers]
        prompts = b",".join(b"".join((open_, self._json, each, close)) for each in suffixes)
        if self._routing.hints:
            fields = {**fields, "nvext": {"agent_hints": {"osl": fields.get("max_tokens", 1)}}}
        if len(suffixes) > 1:
            prompts = b"[" + prompts + b"]"
        if self._salt is not None:  # SGLang's own route has another name for it
            fields = {**fields, "extra_key" if name == "input_ids" else "cache_salt": self._salt}
        return b"".join((b'{"', name.encode(), b'":', prompts, b",", json.dumps(fields)[1:].encode()))


def _check_special(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    text, special = tokenizer.decode(ids), [*filter(tokenizer.is_special, ids)]
    if len(tokenizer.special_spans(text)) == len(special):
        return
    if [*filter(tokenizer.is_special, tokenizer.encode(text))] != special:
        raise UsageError(
            "The prompt contains the text of a special token, and the server takes only text, in which it would be "
            "the token. Remove it from the prompt, or use a server that takes token ids."
        )


def _header_safe(session: str | None) -> str:
    """Return the id of a conversation as the value of a header: a new one if there is none, and a hash if the id has
    characters that a header cannot have."""
    if session is None:
        return uuid.uuid4().hex
    is_safe = session.isascii() and session.isprintable() and session == session.strip() and session
    return session if is_safe else hashlib.sha256(session.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _joined(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


def _escaped(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode()
