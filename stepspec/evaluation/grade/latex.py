r"""Normalize the LaTeX of an answer, so that answers that look the same become the same text. Nothing is evaluated.

The rules follow the graders of MATH (arXiv:2103.03874) and Minerva (arXiv:2206.14858)."""

import re
import unicodedata
from functools import lru_cache


def listed(text: str) -> list[str]:
    return text.split()


_NAMED = listed(
    """π pi ∞ infty θ theta α alpha β beta γ gamma λ lambda μ mu φ phi ω omega ± pm √ sqrt ≤ leq ≥ geq ≠ neq ≈ approx
    ∈ in ∪ cup ∩ cap ∅ emptyset × cdot · cdot ⋅ cdot"""
)
_SIGNS = {sign: rf"\{name} " for sign, name in zip(_NAMED[::2], _NAMED[1::2], strict=True)}
_SIGNS |= dict.fromkeys("−–‐‑﹣－", "-") | dict.fromkeys("\u00a0\u202f\u2007\u200a\u3000", "\u2009")
_SIGNS |= dict.fromkeys("\u200b\ufeff\u2060", "") | dict.fromkeys("÷⁄∕", "/") | {"，": ", ", "°": r"^\circ "}
_SIGNS |= dict(zip("％“”‘’（）。＝ℝℤℕℚ", "%\"\"''().=RZNQ", strict=True))
_SIGNS |= {sign: rf"\frac{{{up}}}{{{low}}}" for sign, up, low in zip("½¼¾⅓⅔", "11312", "24433", strict=True)}
_UNICODE = str.maketrans(_SIGNS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_RENAMED = {
    name: new
    for new, names in [
        (r"\frac", "dfrac tfrac cfrac"), (r"\binom", "dbinom tbinom"), (r"\leq ", "le leqslant leqq"), (r"\neq ", "ne"),
        (r"\geq ", "ge geqslant geqq"), (r"\cdot ", "times ast"), (r"\{", "lbrace lcurly"), (r"\}", "rbrace rcurly"),
        ("<", "lt"), (">", "gt"), ("/", "div"), ("|", "lvert rvert vert mid"), (r"\emptyset ", "varnothing"),
        ("...", "ldots dots cdots"), (r"^\circ ", "degree"), (r"\text{or}", "lor vee"), (r"\text{and}", "land wedge"),
        (" ", "quad qquad thinspace medspace"), ("", "left right middle displaystyle textstyle limits bf"),
        ("", "big bigg Big Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr large Large checkmark euro pounds"),
    ]
    for name in names.split()
}  # fmt: skip
_STYLES = r"\\(?:(?:text|math)(?:bf|it|sf|normal)|boldsymbol|bm|pmb|underline|emph|boxed|fbox)\s*\{([^{}]*)\}"
_COMMAND = re.compile(r"(\\\\)|\\(?:left|right)(?![a-zA-Z])\.?|\\([a-zA-Z]+)")
# In order. Each takes one pass, and none can backtrack over more than a command.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # `1{,}234` and `1,\!234` are one number; `1,\,234` and `1,\ 234` are two.
        (r"(?<=\d)(?:\{,\}|,?\\!\s*|\\[,;: ]\s*|\u2009|')(?=\d{3}(?!\d))", ""),
        (r"(\\\\)\[[^\[\]]*\]", r"\1"),
        (r"\\(?:hspace|vspace|hskip|[hv]?phantom|label|tag|(?:text)?color)\*?\s*\{[^{}]*\}|(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|~|\u2009", " "),
        (_STYLES, r"\1"),
        (_STYLES, r"\1"),
        (r"\\(?:textrm|mbox|hbox|mathrm|operatorname)(?=\s*\{)", r"\\text"),
        (r"\\text\s*\{([^a-zA-Z{}]*)\}", r" \1 "),
        (r"\\text\s*\{\s*([ie])\s*\}", r"\1"),
        (r"\\text\s*\{\s*[Ii]nfinity\s*\}", r"\\infty "),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\^\s*\\(?:circ|degree)(?![a-zA-Z])\s*", r"^\\circ "),
        (r"\\?\$|[€£¥₹]|\\[()\[\]]|\*\*(?=\s*$)|^\s*\*\*|__(?=\s*$)|^\s*__|`", ""),
        (r"<=", r"\\leq "),
        (r">=", r"\\geq "),
        (r"!=|\\not\s*=", r"\\neq "),
        (r"\*\*", "^"),
        (r"\*|(?<=\d)\s+x\s+(?=10\^)", r"\\cdot "),
        (r"\\%|(?<=[\d}])\s*(?:\\text\{\s*)?per\s?cent(?:age points?)?\b\s*\}?", "%"),
        (r"\{([:;!])\}", r"\1"),
        (r"\\([_&])", r"\1"),
        (r"\\log_\s*\{?e\}?", r"\\ln "),
        (r"\\frac\s*([0-9a-zA-Z])\s*(?=[0-9a-zA-Z{])", r"\\frac{\1}"),
        (r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9]+|[a-zA-Z])", r"\\sqrt{\1}"),
    )
]
_BARE_NAMES = re.compile(
    r"(?<![\\a-zA-Z])(pi|inf(?:ty|inity)|alpha|beta|theta|(?:arc)?(?:sin|cos|tan)|cot|csc|ln|log)(?![a-zA-Z])"
)
_WRAPPED = re.compile(r"(\\\(|\\\[|\*{1,2}|__|\${1,2}|`)(.+?)(?:\\\)|\\\]|\*{1,2}|__|(?<!\\)\${1,2}|`)", re.DOTALL)
_EMPHASIS = re.compile(r"(?<![\w*)])(\*\*|\*|__)(?=[^\s*_])([^*_\n]+?)(?<=[^\s*_])\1(?![\w*(])")
_BRACES = re.compile(r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)(?<!\\)\}")
WORDS = re.compile(r"\\text\{([^{}]*)\}")


_MARKS = " \t\n.,;:✅✓🎉\ufe0f"


def _without_marks(text: str) -> str:
    text = re.sub(r"(?<!\\)\\[,;:! ]\s*$", "", text.rstrip()).rstrip(_MARKS)
    return re.sub(r"(?<![\w)}!])!+$", "", text).rstrip(_MARKS)  # behind a formula, it is a factorial


@lru_cache(maxsize=4096)
def cleaned(answer: str) -> str:
    r"""Return the answer in normalized LaTeX, with single spaces and words as `\text{...}`.

    >>> cleaned(r"$\left( \dfrac12,\; 3{,}000 \text{ cm} \right)$.")
    '( \\frac{1}{2}, 3000 \\text{ cm} )'
    """
    text = "".join(str(unicodedata.decimal(sign)) if ord(sign) > 127 and sign.isdecimal() else sign for sign in answer)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _without_marks(_EMPHASIS.sub(r"\2", text.translate(_UNICODE)).strip())
    for _ in range(4):
        if wrapped := _WRAPPED.fullmatch(text):
            text = _without_marks(wrapped[2].strip())
    text = _COMMAND.sub(lambda match: match[1] or _RENAMED.get(match[2] or "left", match[0]), text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    if r"\text{" not in text:
        text = _BARE_NAMES.sub(lambda match: "\\" + match[1].replace("infinity", "infty"), text)
    text = " ".join(text.split()).lstrip(" ,;:").rstrip(" .,;:")
    while braced := _BRACES.fullmatch(text):
        text = braced[1].strip()
    return text


def text_key(clean: str) -> str:
    """Return a comparison key for a cleaned answer, without spaces and braces around single characters."""
    bare = re.sub(r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}", r"\1\2", WORDS.sub(r"\1", clean))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", bare)  # `1 2` is not `12`
