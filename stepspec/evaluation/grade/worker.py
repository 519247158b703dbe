"""Worker program that compares formulas by computer algebra, with one JSON line per question and per reply.

The main process loads the libraries and forks a child that does all the work. If the child is killed, the main process
forks another. Forking takes milliseconds, while loading the libraries takes a second or more.

This file imports nothing from stepspec, so that it starts fast. It reads formulas only with the LaTeX grammar of
math-verify. Sympy's own parser evaluates its input as Python, so it is disabled. A child cannot start a process, open a
socket or open a file for writing.
"""

import json
import math
import os
import re
import resource
import sys
import time
from functools import partial
from typing import Any

# The grammar builds its tables on demand. These formulas build the common ones before the fork, for all children.
WARM_UP = (
    *(r"\frac{1}{2}", "(x+1)^{2}", r"2\sqrt{3}", r"\frac{\pi}{2}", "a+b-c", "x<3", r"[1,\infty)", "1,2"),
    *(r"\frac{x+1}{y-2}", r"\sin x", "y=2x-3", r"\log_{2} 3", "(1,2)"),
)


def main() -> None:
    """Serve until the input ends. The first input line holds the limits; each child first writes its process id."""
    # Unbuffered, because data that a child has buffered is lost when it is killed.
    questions = os.fdopen(0, "rb", buffering=0, closefd=False)
    limits = json.loads(questions.readline())
    replies = os.fdopen(os.dup(1), "w")
    # Library output must not be mistaken for a reply.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        algebra = _Algebra()
    except ImportError as error:
        _reply(replies, {"failed": str(error)})
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        child = os.fork()
        if child == 0:
            _serve(questions, replies, algebra, limits)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == _END_OF_INPUT:
            return


_END_OF_INPUT, _RETIRED = 0, 3


def _serve(questions: Any, replies: Any, algebra: "_Algebra", limits: dict[str, Any]) -> None:
    """Answer questions in the child, then exit the process."""
    status = _END_OF_INPUT
    try:
        _forbid_actions()
        memory = _AddressSpace(limits["memory_bytes"])
        _reply(replies, {"ready": os.getpid()})
        while line := questions.readline():
            _limit_cpu(limits["seconds"])
            try:
                question = json.loads(line)
            except ValueError:
                continue  # the rest of a line that a killed child had started to read
            reply = _answer(algebra, memory, question)
            _reply(replies, {"id": question["id"], **reply})
            if reply["retire"]:
                status = _RETIRED
                break
    except BrokenPipeError:
        pass
    finally:
        os._exit(status)


def _reply(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _answer(algebra: "_Algebra", memory: "_AddressSpace", question: dict[str, Any]) -> dict[str, Any]:
    try:
        verdict = algebra.compare(question["gold"], question["found"])
    except MemoryError:
        return {"verdict": "memory", "retire": True}
    except Exception as error:
        verdict = f"failed: {type(error).__name__}"
    # The libraries catch every exception, including MemoryError, and report the formulas as unequal.
    if memory.is_short():
        return {"verdict": verdict if verdict == "same" else "memory", "retire": True}
    return {"verdict": verdict, "retire": False}


_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def _disable_eval() -> None:
    """Make numbers the only text that sympy parses.

    `sympify` passes text to `parse_expr`, which ends in a call of `eval`. Even `sympy.Number("12")`, which the LaTeX
    grammar uses for its numbers, takes this path.
    """
    # `simplify` needs this module, which parses text during its import, so import it before disabling the parser.
    import sympy.physics.units  # noqa: F401
    from sympy import Integer, Rational
    from sympy.parsing import sympy_parser

    def read_number(text: str, **_: Any) -> Any:
        if _INTEGER.fullmatch(text):
            return Integer(int(text))
        if _DECIMAL.fullmatch(text):
            return Rational(text)  # exact, so that 1.414214 is not equal to the root of 2
        raise ValueError("Text is not evaluated.")

    def refuse(*_: Any) -> Any:
        raise ValueError("Text is not evaluated.")

    sympy_parser.parse_expr = read_number
    sympy_parser.eval_expr = refuse


class _Algebra:
    """math-verify 0.9, restricted to the code path that evaluates nothing as Python, with exact comparison of values."""

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
        for formula in WARM_UP:
            self._read(formula)

    def compare(self, gold: str, found: str) -> str:
        """Return `same`, `different`, `gold unreadable` or `answer unreadable`."""
        expected = self._read(gold)
        if expected is None:
            return "gold unreadable"
        answer = self._read(found)
        if answer is None:
            return "answer unreadable"
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
        return read[0].xreplace({each: I if each.name == "i" else Symbol(each.name, real=True) for each in read[0].free_symbols})


def _same_value(gold: Any, found: Any) -> bool:
    """Return whether two values are equal, exactly: sympy proves that their difference is 0, or bounds it away from it."""
    from sympy import MatrixBase

    gold, found = gold.doit(), found.doit()
    if isinstance(gold, MatrixBase) or isinstance(found, MatrixBase):
        shapes = getattr(gold, "shape", ()), getattr(found, "shape", ())
        return shapes[0] == shapes[1] and all(map(_same_value, gold.flat(), found.flat()))
    return gold == found or bool((gold - found).equals(0))


# Audit events that only an answer with executable code could cause. Python's documentation lists all events.
_FORBIDDEN = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.kill", "subprocess.Popen", "pty.spawn"),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown"),
    *("os.putenv", "shutil.", "socket.", "urllib.", "webbrowser.", "ctypes.", "sqlite3."),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _forbid_actions() -> None:
    def guard(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and len(arguments) > 2 and bool((arguments[2] or 0) & _WRITES)
        if writes or event.startswith(_FORBIDDEN):
            raise PermissionError(f"A grading worker is not allowed to perform {event}.")

    sys.dont_write_bytecode = True
    sys.addaudithook(guard)


class _AddressSpace:
    """Limit the address space to its current size plus `spare_bytes`, if the system reports the current size."""

    def __init__(self, spare_bytes: int) -> None:
        self._limit = _address_space_bytes("VmSize") + spare_bytes
        self._enough = self._limit - spare_bytes // 2
        self._known = self._limit > spare_bytes
        if self._known:
            resource.setrlimit(resource.RLIMIT_AS, (self._limit, self._limit))

    def is_short(self) -> bool:
        """Return whether peak usage exceeded half of the spare bytes."""
        return self._known and _address_space_bytes("VmPeak") > self._enough


def _address_space_bytes(field: str) -> int:
    """Return a size from `/proc/self/status` in bytes; 0 if it is not available."""
    try:
        with open("/proc/self/status", "rb") as file:
            line = next(line for line in file if line.startswith(field.encode()))
    except (OSError, StopIteration):
        return 0
    return int(line.split()[1]) * 1024


def _limit_cpu(seconds: float) -> None:
    """Limit the CPU time of the next question.

    This stops a worker whose parent is gone or too busy to stop it. Otherwise the parent's time limit applies first.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, hard))


if __name__ == "__main__":
    main()
