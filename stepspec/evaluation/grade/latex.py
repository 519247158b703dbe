r"""Normalize the LaTeX of an answer, so that answers that look the same become the same text.

The rules follow the graders of MATH (D. Hendrycks et al., arXiv:2103.03874, appendix) and Minerva (A. Lewkowycz et al.,
arXiv:2206.14858, appendix D): spacing, sizes of brackets, styles and currency signs are left out. Nothing is evaluated.
"""

import re
import unicodedata
from functools import lru_cache

_SIGNS = {
    "−–‐‑﹣－": "-", "\u00a0\u202f\u2007\u200a\u3000": "\u2009", "\u200b\ufeff\u2060\u200e\u200f": "",
    "×·⋅∙": r"\cdot ", "÷⁄∕": "/", "％": "%", "“”": '"', "‘’": "'", "（": "(", "）": ")", "，": ", ", "。": ".", "＝": "=",
    "π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ",
    "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ", "±": r"\pm ", "√": r"\sqrt ", "≤": r"\leq ", "≥": r"\geq ",
    "≠": r"\neq ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "°": r"^\circ ",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
}  # fmt: skip
_UNICODE = str.maketrans({sign: latex for signs, latex in _SIGNS.items() for sign in signs})
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_END = r"(?![a-zA-Z])"


def _rule(pattern: str, replacement: str) -> tuple[re.Pattern[str], str]:
    return re.compile(pattern), replacement


# In order. Each takes one pass, and none can backtrack over more than a command.
_RULES = [
    # `1{,}234` and `1,\!234` are one number; `1,\,234` and `1,\ 234` are two.
    _rule(r"(?<=\d)(?:\{,\}|,?\\!\s*|\\[,;: ]\s*|\u2009|')(?=\d{3}(?!\d))", ""),
    _rule(rf"\\(?:left|right|middle|[bB]igg?[lrm]?){_END}\.?", ""),
    _rule(rf"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|strut|rm|bf|it){_END}", ""),
    _rule(r"\\(?:hspace|vspace|hskip|[hv]?phantom|label|tag)\*?\s*\{[^{}]*\}", ""),
    _rule(r"(?<!\\)\\!", ""),
    _rule(rf"(?<!\\)\\[,;:> ]|\\(?:q?quad|thinspace|enspace|medspace){_END}|~|\u2009", " "),
    *[_rule(r"\\(?:text|math)(?:bf|it|sf|normal)\s*\{([^{}]*)\}|\\(?:boldsymbol|bm|pmb|underline|emph|boxed|fbox)\s*\{([^{}]*)\}", r"\1\2")] * 2,
    _rule(r"\\(?:textrm|mbox|hbox|mathrm|operatorname)\s*\{([^{}]*)\}", r"\\text{\1}"),
    _rule(r"\\text\s*\{\s*\}", " "),
    _rule(r"\\text\s*\{([^a-zA-Z{}]*)\}", r" \1 "),
    _rule(r"\\text\s*\{\s*([ie])\s*\}", r"\1"),
    _rule(rf"\^\s*(?:\{{\s*\\(?:circ|degree)\s*\}}|\\(?:circ|degree){_END})\s*|\\degree{_END}\s*", r"^\\circ "),
    _rule(rf"\\?\$|\\(?:euro|pounds){_END}|[€£¥₹]", ""),
    _rule(r"\\[()\[\]]|\*\*(?=\s*$)|^\s*\*\*|__(?=\s*$)|^\s*__|`", ""),
    _rule(rf"\\[dtc]frac{_END}", r"\\frac"),
    _rule(rf"\\[dt]binom{_END}", r"\\binom"),
    _rule(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    _rule(rf"\\(?:le|leqslant|leqq){_END}|<=", r"\\leq "),
    _rule(rf"\\(?:ge|geqslant|geqq){_END}|>=", r"\\geq "),
    _rule(rf"\\lt{_END}", "<"),
    _rule(rf"\\gt{_END}", ">"),
    _rule(rf"\\(?:ne|not\s*=){_END}|!=", r"\\neq "),
    _rule(r"\*\*", "^"),
    _rule(rf"\\(?:times|ast){_END}|\*|(?<=\d)\s+x\s+(?=10\^)", r"\\cdot "),
    _rule(rf"\\div{_END}", "/"),
    _rule(r"\\(?:lbrace|lcurly)(?![a-zA-Z])", r"\\{"),
    _rule(r"\\(?:rbrace|rcurly)(?![a-zA-Z])", r"\\}"),
    _rule(r"\\(?:[lr]?vert|mid)(?![a-zA-Z])", "|"),
    _rule(rf"\\varnothing{_END}", r"\\emptyset "),
    _rule(r"\\%|(?<=[\d}])\s*(?:\\text\{\s*)?per\s?cent\b(?:age points)?\s*\}?|(?<=[\d}])\s*(?:\\text\{\s*)?percentage points\b\s*\}?", "%"),
    _rule(r"\\(?:ldots|dots|cdots)(?![a-zA-Z])", "..."),
    _rule(r"\\_", "_"),
    _rule(r"\\&", "and"),
    _rule(r"\\(?:lor|vee)(?![a-zA-Z])", r"\\text{or}"),
    _rule(r"\\(?:land|wedge)(?![a-zA-Z])", r"\\text{and}"),
    _rule(r"\\log_\s*\{?e\}?", r"\\ln "),
    _rule(r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
    _rule(r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{"),
    _rule(r"\\frac\s+\{", r"\\frac{"),
    _rule(r"(\\frac\{[^{}]*\})\s*\{", r"\1{"),
    _rule(r"(\\frac\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
    _rule(r"\\?(?<![a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    _rule(r"\\sqrt\s*([0-9]+|[a-zA-Z])", r"\\sqrt{\1}"),
]  # fmt: skip
_BARE_NAMES = re.compile(
    r"(?<![\\a-zA-Z])(pi|infty|infinity|alpha|beta|theta|sin|cos|tan|cot|csc|ln|log|arcsin|arccos|arctan)(?![a-zA-Z])"
)
_INFINITY = re.compile(r"\\text\{\s*infinity\s*\}", re.IGNORECASE)
_WRAPPERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("$$", "$$"), ("$", "$"), ("*", "*"), ("`", "`"))


@lru_cache(maxsize=4096)
def cleaned(answer: str) -> str:
    r"""Return the answer in normalized LaTeX, with single spaces and words as `\text{...}`.

    >>> cleaned(r"$\left( \dfrac12,\; 3{,}000 \text{ cm} \right)$.")
    '( \\frac{1}{2}, 3000 \\text{ cm} )'
    """
    text = "".join(str(unicodedata.decimal(sign)) if ord(sign) > 127 and sign.isdecimal() else sign for sign in answer)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _unwrapped(_EMPHASIS.sub(r"\2", text.translate(_UNICODE)))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _INFINITY.sub(r"\\infty ", text)
    if r"\text{" not in text:
        text = _BARE_NAMES.sub(lambda match: "\\" + match[1].replace("infinity", "infty"), text)
    text = " ".join(text.split()).lstrip(" ,;:").rstrip(" .,;:")
    while text.startswith("{") and text.endswith("}") and _closes(text) == len(text) - 1 and not text.endswith(r"\}"):
        text = text[1:-1].strip()
    return text


# An exclamation mark behind a formula is a factorial.
_LAST_MARKS = re.compile(r"(?:(?<!\\)[.,;:\s✅✓🎉\ufe0f]|(?<![\d)}a-z])!)+$")
_EMPHASIS = re.compile(r"(?<![\w*)])(\*\*|\*|__)(?=[^\s*_])([^*_\n]+?)(?<=[^\s*_])\1(?![\w*(])")


def _unwrapped(text: str) -> str:
    """Remove the final marks and the math or bold delimiters around the whole text."""
    while True:
        text = _LAST_MARKS.sub("", text.strip())
        inner = next(
            (
                text[len(left) : -len(right)]
                for left, right in _WRAPPERS
                if text.startswith(left) and text.endswith(right) and len(text) > len(left) + len(right)
            ),
            None,
        )
        if inner is None or inner.endswith("\\"):
            return text
        text = inner


def _closes(text: str) -> int:
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return index
    return -1


WORDS = re.compile(r"\\text\{([^{}]*)\}")
_ONE_IN_BRACES = re.compile(r"([\^_])\s*\{\s*([0-9a-zA-Z])\s*\}")
# A space between digits separates numbers: `1 2` is not `12`.
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


def text_key(clean: str) -> str:
    """Return a comparison key for a cleaned answer, without spaces and braces around single characters."""
    return _SPACE.sub("", _ONE_IN_BRACES.sub(r"\1\2", WORDS.sub(r"\1", clean)))
