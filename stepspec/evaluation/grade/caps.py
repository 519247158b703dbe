"""Reject formulas that could take a computer algebra system hours, before it reads them.

Most rejected formulas would run into the time limit. This check takes microseconds instead of seconds and a worker
process. Formulas that pass are not trusted: time and memory are still limited (`grade.workers`).
"""

import math
import re
from collections.abc import Iterator

from stepspec.evaluation.grade.words import GradingLimits, shortened

_CODE = re.compile(
    r"__|(?<!\\)\b(?:lambda|import|exec|eval|compile|globals|locals|getattr|setattr|system|popen|subprocess|builtins)\b"
    r"|\b(?:open|print|input|exit|quit|breakpoint|type|vars|dir|chr|range)\s*\(|\b(?:os|sys|io|re)\s*\.\s*[a-z]|:=|=>|@|`",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"[\d,]*\d[\d,]*")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_COMMAND = re.compile(r"\\(?:begin\{[^}]*\}|end\{[^}]*\}|[a-zA-Z]+)")
_REPEATED = re.compile(
    r"!\s*!|\|\s*\||'{3}|_\s*\{?\s*\w*\s*\}?\s*_|\^\s*\^|[<=>]\s*[<=>]\s*[<=>]"
    r"|\\end\{\w*\}\s*(?:!|\^\s*\{?\s*\d)|[\d.]\s*[eE]\s*[-+]?\d{4}"
)
_RELATION = re.compile(r"[<>=]|\\(?:leq|geq|neq|in|lt|gt)(?![a-zA-Z])")
_FUNCTION = re.compile(r"\\(?:a?r?c?(?:sin|cos|tan|cot|sec|csc)h?|l[ng]|log|exp|sqrt|max|min|gcd|lcm)(?![a-zA-Z])")
_POWER_OF_BRACKET = re.compile(r"[)}\]]\s*\^\s*\{?\s*(\d+)")

# Measured with the hostile texts of `evals.bench.hostile`: above these limits, most formulas time out.
MAX_PARENTHESES_DEPTH = 4
MAX_RELATIONS = 3
MAX_BARS = 8
MAX_FUNCTIONS = 8
MAX_SUM_OF_POWERS = 40
"""Maximum sum of the exponents of bracketed terms, because computer algebra expands these powers."""

# The commands that answers use. All others are rejected, because the parser also accepts integrals, limits, matrix
# decompositions and `\operatorname{ones}(100000)`.
_KNOWN = frozenset(
    re.findall(
        r"\w+",
        """
    frac sqrt binom cdot pm mp infty pi e i text left right overline bar hat vec tilde prime circ
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp max min gcd lcm
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
    leq geq neq lt gt approx equiv in notin cup cap setminus emptyset subset mathbb
    lfloor rfloor lceil rceil langle rangle land lor to mod bmod pmod triangle angle ell
    """,
    )
)
_MATRICES = frozenset(f"{name}matrix" for name in ("", "p", "b", "B", "v", "V", "small")) | {"array", "cases"}


def refusal(formula: str, limits: GradingLimits) -> str | None:
    """Return why a cleaned answer may not go to computer algebra, as one sentence; None if it may."""
    if len(formula) > limits.max_formula_chars:
        return f"It is {len(formula):,} characters long; at most {limits.max_formula_chars:,} are read."
    if not formula.isascii() or not formula.isprintable():
        return "It holds characters that no formula has."
    if _CODE.search(formula):
        return "It looks like program code, which is not read."
    if _depth(formula, "([{", ")]}") > limits.max_depth or _depth(formula, "([", ")]") > MAX_PARENTHESES_DEPTH:
        return "Its brackets are nested too deep."
    if max((len(run) for run in _DIGITS.findall(formula)), default=0) > limits.max_digits_in_a_row:
        return f"It has more than {limits.max_digits_in_a_row} digits in a row."
    return _unknown_command(formula) or _odd_operators(formula) or _too_large(formula, limits)


def _depth(formula: str, opening: str, closing: str) -> int:
    depth = deepest = 0
    for sign in formula:
        depth += (sign in opening) - (sign in closing)
        deepest = max(deepest, depth)
    return deepest


def _unknown_command(formula: str) -> str | None:
    for match in _COMMAND.finditer(formula):
        name = match.group()[1:]
        if name.startswith(("begin{", "end{")):
            known = name[name.index("{") + 1 : -1] in _MATRICES
        else:
            known = name in _KNOWN
        if not known:
            return f"It uses {shortened(match.group(), 30)!r}, which is not read."
    return None


def _odd_operators(formula: str) -> str | None:
    if _REPEATED.search(formula) or formula.count("|") > MAX_BARS or ("&" in formula and "\\begin" not in formula):
        return "It uses operators as no formula does."
    if len(_RELATION.findall(formula)) > MAX_RELATIONS:
        return "It is a chain of too many relations."
    if len(_FUNCTION.findall(formula)) > MAX_FUNCTIONS:
        return "It uses too many functions."
    if sum(int(power) for power in _POWER_OF_BRACKET.findall(formula)) > MAX_SUM_OF_POWERS:
        return "Its powers of brackets are too high to be multiplied out."
    return None


def _too_large(formula: str, limits: GradingLimits) -> str | None:
    if _Magnitude(formula).of_all() > limits.max_digits_of_a_value:
        return f"Its value may have more than {limits.max_digits_of_a_value:,} digits."
    return None


_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d[\d,]*|\s+|.", re.DOTALL)
_HUGE = 1e12
_LETTER = math.log10(2)
"""Decimal digits of an unknown, which counts as 2: it has no value, but its powers are expanded."""


class _Magnitude:
    """An upper bound on the decimal digits of a formula's value, for any operators.

    Adjacent terms count as factors: log(a b) = log a + log b, and a + b <= (a+1)(b+1). A power a^b has b log a digits,
    a factorial n! at most n log n, a binomial at most n log 2.
    """

    def __init__(self, formula: str) -> None:
        self._tokens = [token for token in _TOKEN.findall(formula) if not token.isspace()]
        self._next = 0

    def of_all(self) -> float:
        total = 0.0
        while self._next < len(self._tokens):
            total += self._group()
        return total

    def _group(self) -> float:
        """Return the digits up to the closing bracket or the end."""
        total = 0.0
        while self._next < len(self._tokens):
            if self._tokens[self._next] in _CLOSING:
                self._next += 1
                break
            total = min(total + self._factor(), _HUGE)
        return total

    def _factor(self) -> float:
        digits = self._atom()
        for operator in self._operators():
            if operator == "!":
                digits = _value(digits) * max(digits, _LETTER)
            else:
                digits = max(digits, _LETTER) * _value(self._atom())
            digits = min(digits, _HUGE)
        return digits

    def _operators(self) -> Iterator[str]:
        while self._next < len(self._tokens) and self._tokens[self._next] in ("^", "!"):
            self._next += 1
            yield self._tokens[self._next - 1]

    def _atom(self) -> float:
        if self._next >= len(self._tokens):
            return 0.0
        token = self._tokens[self._next]
        if token in _CLOSING:
            return 0.0
        self._next += 1
        if token in _OPENING:
            return self._group()
        if token[0].isdigit():
            return math.log10(int(token.replace(",", "")) + 1)
        if token == r"\binom":
            return min(_value(self._atom()) * _LETTER + self._atom(), _HUGE)
        if token in ("-", "+"):
            return self._atom()
        return _LETTER if token.isalpha() or token[0] == "\\" else 0.0


def _value(digits: float) -> float:
    return min(10.0 ** min(digits, 12.0), _HUGE)
