"""What is kept of one request between its calls: the growing prompt as JSON, and the headers that hold it together."""

import json
import uuid
from collections.abc import Mapping, Sequence

from stepspec.engines.protocol import TokenBuffer, Tokenizer
from stepspec.engines.remote.address import Address
from stepspec.engines.text import TextReader


class Conversation:
    """One request. A prompt is written as JSON once, and then only what was appended."""

    def __init__(
        self,
        address: Address,
        tokenizer: Tokenizer,
        buffer: TokenBuffer,
        *,
        as_ids: bool,
        cache_salt: str | None = None,
    ) -> None:
        """`cache_salt`: divides the server's cached prefixes; only calls with the same one share them."""
        self.headers: dict[str, str] = {address.session_header: uuid.uuid4().hex}
        self._replayed = [name.strip() for name in address.replay_headers.split(",") if name.strip()]
        self._reader = TextReader(tokenizer, buffer)
        self._as_ids = as_ids
        self._salt = {"cache_salt": cache_salt} if cache_salt else {}
        self._json = bytearray()

    def replay(self, headers: Mapping[str, str]) -> None:
        """Takes from an answer what a router wants to have back; what is not ASCII could not be sent."""
        found = {name: headers[name] for name in self._replayed if name in headers}
        self.headers |= {name: value for name, value in found.items() if value.isascii()}

    def body(
        self,
        buffer: TokenBuffer,
        fields: Mapping[str, object],
        furthers: Sequence[Sequence[int]] = ((),),
        name: str = "prompt",
    ) -> bytes:
        """The body of a call: under that name the prompt with further ids behind it, and other fields.

        For several `furthers` it is as many prompts.
        """
        open_, close = (b"[", b"]") if self._as_ids else (b'"', b'"')
        if self._as_ids:
            if new := buffer.since(self._reader.position):
                self._json += b"".join((b"," if self._json else b"", _listed(new)))
                self._reader.position += len(new)
            comma = b"," if self._json else b""
            behind = [comma + _listed(further) if further else b"" for further in furthers]
        else:
            self._json += _escaped(self._reader.read(len(buffer), to_the_end=False))
            behind = [_escaped(self._reader.rest(further)) for further in furthers]
        prompts = b",".join(b"".join((open_, self._json, each, close)) for each in behind)
        if len(behind) > 1:
            prompts = b"[" + prompts + b"]"
        return b"".join((b'{"', name.encode(), b'":', prompts, b",", json.dumps({**fields, **self._salt})[1:].encode()))


def _listed(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


def _escaped(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode()
