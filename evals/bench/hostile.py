"""Random texts that try to hang, crash or fool a grader, for tests and benchmarks.

    python -m evals.bench hostile 10 0

prints ten of them with seed 0, shortened.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

_FUNCTIONS = (r"\sin", r"\cos", r"\ln", r"\sqrt", r"\tan", r"\exp", r"\arctan", r"\log_2")


def hostile_texts(number: int, seed: int) -> Iterator[str]:
    """Yield `number` texts from all families in turn. One in ten is very long."""
    rng = random.Random(seed)
    for index in range(number):
        answer = FAMILIES[index % len(FAMILIES)](rng)
        yield _with_marker(rng, answer)


def _with_marker(rng: random.Random, answer: str) -> str:
    """Return the answer with text around it that graders look for."""
    shapes = ("So \\boxed{{{}}}.", "#### {}", "The answer is {}", "The final answer is ${}$.", "Well, \\boxed{{{}")
    return rng.choice((shapes[0], *shapes)).format(answer)


def _tower(rng: random.Random) -> str:
    height = rng.randint(2, 30)
    sign = rng.choice(("^", "**", "^ "))
    return f"{sign}{{".join(str(rng.randint(2, 99)) for _ in range(height)) + "}" * (height - 1)


def _power_of_power(rng: random.Random) -> str:
    depth = rng.randint(1, 12)
    return "(" * depth + "9" + "".join(f"^{{{rng.randint(9, 9999)}}})" for _ in range(depth))


def _factorials(rng: random.Random) -> str:
    inner = str(rng.randint(3, 10**7))
    return rng.choice((inner + "!" * rng.randint(1, 9), f"(({inner})!)!", rf"\frac{{{inner}!}}{{{inner}!+1}}"))


def _binomials(rng: random.Random) -> str:
    top = 10 ** rng.randint(2, 12)
    return rng.choice((rf"\binom{{{top}}}{{{top // 2}}}", rf"\binom{{\binom{{{top}}}{{9}}}}{{\binom{{99}}{{9}}}}"))


def _ranges(rng: random.Random) -> str:
    name, end = rng.choice((r"\sum", r"\prod", r"\int")), 10 ** rng.randint(3, 12)
    return rf"{name}_{{k=1}}^{{{end}}} k^{{k}}"


def _digits(rng: random.Random) -> str:
    return str(rng.randint(1, 9)) * rng.choice((200, 5_000, 1_000_000)) + rng.choice(("", ".5", "/3", "e9"))


def _exponents(rng: random.Random) -> str:
    times, sign = rng.choice(("e", "E", r" \times 10^")), rng.choice(("", "-"))
    return f"{rng.randint(1, 9)}{times}{sign}{10 ** rng.randint(3, 30)}"


def _brackets(rng: random.Random) -> str:
    left, right = rng.choice((("(", ")"), ("{", "}"), ("[", "]"), (r"\left(", r"\right)"), (r"\{", r"\}"), ("|", "|")))
    depth = rng.choice((3, 8, 12, 13, 100, 20_000))
    return left * depth + "x+1" + right * (depth - rng.choice((0, 0, 1)))


def _fractions(rng: random.Random) -> str:
    depth = rng.choice((4, 10, 12, 400))
    return r"\frac{1}{1+" * depth + "x" + "}" * depth


def _roots(rng: random.Random) -> str:
    return r"\sqrt{2+" * (depth := rng.randint(2, 12)) + "2" + "}" * depth


def _functions(rng: random.Random) -> str:
    depth = rng.randint(2, 11)
    return "{(".join(rng.choice(_FUNCTIONS) for _ in range(depth)) + "{x" + "})" * (depth - 1) + "}"


def _expansion(rng: random.Random) -> str:
    factors = (
        f"({rng.choice('abx')}+{rng.choice('cyz')}+{rng.randint(1, 9)})^{{{rng.randint(2, 99)}}}" for _ in range(3)
    )
    return "".join(factors)


def _long_sum(rng: random.Random) -> str:
    return rng.choice(("+", "-", r"\cdot ")).join(
        f"{rng.choice(_FUNCTIONS)}{{({rng.randint(2, 99)}{rng.choice('xyz')})}}" for _ in range(rng.randint(5, 60))
    )


def _chain(rng: random.Random) -> str:
    return rng.choice(("=", "<", r"\leq ", r"\in ", r"\cup ", "|", ",", "&", "_", "'")).join(
        rng.choice("xyz12") for _ in range(rng.choice((5, 50, 400)))
    )


def _matrix(rng: random.Random) -> str:
    side = rng.choice((2, 6, 12))
    rows = r"\\".join("&".join(rng.choice(("x", "\\frac{x}{y}", "2^{99}")) for _ in range(side)) for _ in range(side))
    kind = rng.choice(("pmatrix", "vmatrix", "array"))
    return rf"\begin{{{kind}}}{rows}\end{{{kind}}}{rng.choice(('', '^{99}', '^{-1}', '!'))}"


def _operator(rng: random.Random) -> str:
    name = rng.choice(("eye", "zeros", "ones", "diag", "rref", "svd", "eigenvals", "gcd", "lcm"))
    return rf"\operatorname{{{name}}}({rng.randint(10**3, 10**7)},{rng.randint(10**3, 10**7)})"


CODE: Sequence[str] = (
    "__import__('os').system('touch {}')",
    "eval(\"__import__('os').system('touch {}')\")",
    "open('{}', 'w')",
    "().__class__.__base__.__subclasses__()[0]('touch {}')",
    "exec('import os; os.system(\"touch {}\")')",
    "lambda: __import__('os').system('touch {}')",
    "$(touch {})",
    "`touch {}`",
    "Symbol('x').subs('x', \"__import__('os').system('touch {}')\")",
    "x; import os; os.system('touch {}')",
    "\\text{{__import__('os').system('touch {}')}}",
    "\\operatorname{{__import__('os').system}}('touch {}')",
    "1 if open('{}','w') else 2",
    "{{__import__('os').system('touch {}')}}",
    "f_{{__import__('os').system('touch {}')}}",
    "[x for x in [open('{}','w')]]",
    "getattr(__builtins__,'open')('{}','w')",
    "sympify(\"open('{}','w')\")",
    "\\input{{|touch {}}}",
    "\\write18{{touch {}}}",
)
"""Programs that would create a file, in the languages and forms in which an answer could contain one."""


def _code(rng: random.Random) -> str:
    return rng.choice(CODE).format("stepspec-was-here")


def _noise(rng: random.Random) -> str:
    tokens = (
        "\\ { } ( ) [ ] ^ _ & % $ # ~ ! | = < > + - * / . , ; : ' \" 1 2 x \\frac \\sqrt \\text \\left \\begin{pmatrix}"
    )
    return "".join(rng.choice(tokens.split(" ")) for _ in range(rng.choice((5, 30, 300))))


def _unicode(rng: random.Random) -> str:
    return "".join(chr(rng.choice((rng.randrange(32, 0xD800), rng.randrange(0xD800, 0xE000)))) for _ in range(40))


def _megabyte(rng: random.Random) -> str:
    repeated = rng.choice(
        ("x+", "9,", r"\boxed{", "{", " ", "\n", "#### 1\n", "the answer is ", r"\frac{", "$", "1 ", "- ", "a=")
    )
    return repeated * (1_000_000 // len(repeated))


FAMILIES: Sequence[Callable[[random.Random], str]] = (
    *(_tower, _power_of_power, _factorials, _binomials, _ranges, _digits, _exponents, _brackets, _fractions, _roots),
    *(_functions, _expansion, _long_sum, _chain, _matrix, _operator, _code, _noise, _unicode, _megabyte),
)


def main(
    number: Annotated[int, typer.Argument(min=1, help="Number of texts.")] = 10,
    seed: Annotated[int, typer.Argument(help="Random seed.")] = 0,
) -> None:
    """Print some hostile texts, shortened."""
    for text in hostile_texts(number, seed):
        print(ascii(text[:150]))
