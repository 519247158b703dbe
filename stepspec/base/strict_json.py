"""A strict parser for untrusted JSON that does not block other threads.

The C parser of the standard library holds the interpreter lock until it finishes: 0.25 s for 4 MB of empty lists. This
module uses its Python version for everything except strings, and limits the number of values.
"""

import json
import math
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, NoReturn

MAX_BODY_BYTES = 4_000_000
"""Default maximum size of a request body, in bytes."""

MAX_VALUES = 100_000
"""Maximum number of values in a text; strings, numbers, lists and all others count."""

MAX_DIGITS = 1_000
"""Maximum number of digits of a whole number."""

_Scan = Callable[[str, int], tuple[Any, int]]


class _Decoder(json.JSONDecoder):
    """Decodes one text."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite, parse_int=_whole, parse_constant=_reject_constant)
        self._num_values = 0
        # The Python scanner looks up these two names.
        self.parse_array = self._read_array
        self.parse_object = self._read_object
        self.scan_once: _Scan = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _read_array(self, start: Any, scan: _Scan) -> Any:
        return decoder.JSONArray(start, self._counted(scan))  # type: ignore[attr-defined]

    def _read_object(self, start: Any, strict: bool, scan: _Scan, *hooks: Any) -> Any:
        return decoder.JSONObject(start, strict, self._counted(scan), *hooks)  # type: ignore[attr-defined]

    def _counted(self, scan: _Scan) -> _Scan:
        def counted(text: str, start: int) -> tuple[Any, int]:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise ValueError(f"it holds more than {MAX_VALUES} values")
            return scan(text, start)

        return counted


def _whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def read_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, has a number that is not finite, is nested too deeply or has too many values.
            The message is a clause without a period.
    """
    try:
        text = content if isinstance(content, str) else content.decode()
        return _Decoder().decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
