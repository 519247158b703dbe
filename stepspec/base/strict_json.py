"""JSON from strangers: strict, and in steps that leave other threads their turn.

The parser of the standard library holds the interpreter lock until it is done, which is a quarter of a second for 4 MB
of empty lists. Here its Python form is used for everything but strings, and what a text may hold is bounded.
"""

import json
import math
from collections.abc import Callable
from json import decoder, scanner
from typing import Any, NoReturn

MAX_BODY_BYTES = 4_000_000
"""Most bytes of a request's body unless the service is told otherwise."""

MAX_VALUES = 100_000
"""Most values that a text may hold: strings, numbers, lists and all else."""

_Scan = Callable[[str, int], tuple[Any, int]]


class _Decoder(json.JSONDecoder):
    """Reads one text."""

    def __init__(self) -> None:
        super().__init__(parse_float=_finite, parse_constant=_no_number)
        self._num_values = 0
        # Both are names that the scanner in Python looks for.
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


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def read_json(content: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, has numbers that are not finite, is nested too deeply or holds too much. The message
            is a clause that says so.
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
