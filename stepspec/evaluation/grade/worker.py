"""Worker program that compares formulas by computer algebra, with one line of JSON per question and per reply.

It imports nothing from stepspec, so that it starts fast. Formulas are read with the LaTeX grammar of math-verify alone:
sympy's own parser, which evaluates its input as Python, is disabled. Time and memory are limited.
"""

import json
import os
import re
import resource
import signal
import sys
from functools import partial
from typing import Any


def main() -> None:
    """Answer questions until the input ends. The arguments are the address space in bytes and the seconds to start."""
    memory_bytes, start_seconds = int(sys.argv[1]), float(sys.argv[2])
    signal.setitimer(signal.ITIMER_REAL, start_seconds)  # the signals of timers end the process
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries must not be mistaken for a reply

    def reply(line: str) -> None:
        replies.write(json.dumps(line) + "\n")
        replies.flush()

    try:
        algebra = _Algebra()
    except ImportError as error:
        reply(str(error))
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file is written
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    sys.addaudithook(_forbid)
    signal.setitimer(signal.ITIMER_REAL, 0)
    reply("ready")
    for line in sys.stdin:
        gold, found, processor_seconds, clock_seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_VIRTUAL, processor_seconds)
        signal.setitimer(signal.ITIMER_REAL, clock_seconds)
        try:
            verdict = algebra.compare(gold, found)
        except MemoryError:
            verdict = "Comparing the answer took too much memory."
        except Exception as error:
            verdict = f"The formulas could not be compared ({type(error).__name__})."
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(verdict)


def _forbid(event: str, _: object) -> None:
    """Forbid what only executable code in an answer could do. Imports list folders."""
    acts = event.startswith(("os.", "subprocess.", "socket.", "shutil.", "ctypes."))
    if acts and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(f"A grading worker is not allowed to perform {event}.")


def _disable_eval() -> None:
    """Make numbers the only text that sympy parses, because its parser ends in `eval`."""
    import sympy.physics.units  # noqa: F401  # parses text during its import, which `simplify` would cause later
    from sympy import Rational
    from sympy.parsing import sympy_parser

    def read_number(text: str, *_: Any, **__: Any) -> Any:
        if not re.fullmatch(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", text):
            raise ValueError("Text is not evaluated.")
        return Rational(text)  # exact, so that 1.414214 is not equal to the root of 2

    sympy_parser.parse_expr = sympy_parser.eval_expr = read_number


class _Algebra:
    """math-verify 0.9, restricted to code that evaluates nothing as Python, with exact comparison of values."""

    def __init__(self) -> None:
        from latex2sympy2_extended import NormalizationConfig
        from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
        from math_verify import LatexExtractionConfig, grader, parse, parser, verify

        _disable_eval()
        # Keep the case and the units: `R` is not `r`, so `R - r` is not 0, and the `m` of `5x + m` is not a unit.
        parser.latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))
        grader.sympy_numeric_eq = lambda gold, found, *_: _same_value(gold, found)
        grader.sympy_symbolic_eq = lambda gold, found: False  # `_same_value` has decided
        normalization = NormalizationConfig(units=False, malformed_operators=True, boxed="none")
        self._config = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)]
        self._parse, self._verify = parse, verify
        for formula in (r"\frac{1}{2}", r"x^{2}<\sqrt{3}", r"[1,\infty)"):  # the grammar builds its tables on demand
            self.compare(formula, f"{formula}+0")

    def compare(self, gold: str, found: str) -> str:
        """Return `same`, `different` or why they cannot be compared."""
        expected, answer = self._read(gold), self._read(found)
        if expected is None or answer is None:
            return f"The {'gold ' if expected is None else ''}answer cannot be read as a formula."
        # The gold answer goes first, because math-verify's comparison is not symmetric.
        same = self._verify(expected, answer, allow_set_relation_comp=True, timeout_seconds=0, raise_on_error=True)
        return "same" if same else "different"

    def _read(self, formula: str) -> Any:
        """Parse a formula; None if it cannot be read. The dollar signs make math-verify read the complete formula."""
        from sympy import I, Symbol

        read = self._parse(f"${formula}$", self._config, "no_fallback", "first_match", parsing_timeout=0)
        if not read:
            return None
        # One assumption for every unknown: `i` is read as real or not, by what stands around it.
        return read[0].xreplace(
            {each: I if each.name == "i" else Symbol(each.name, real=True) for each in read[0].free_symbols}
        )


def _same_value(gold: Any, found: Any) -> bool:
    """Return whether two values are equal, exactly: sympy proves that their difference is 0, or bounds it away."""
    gold, found = gold.doit(), found.doit()
    if hasattr(gold, "shape"):
        return gold.equals(found) is True
    return gold == found or bool((gold - found).equals(0))


if __name__ == "__main__":
    main()
