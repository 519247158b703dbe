"""How stories and steps are put into words: for each part of a step several phrasings, and how often a voice uses them.

A step restates what the story says, names the quantities that it needs, computes, and says what follows; now and then
it checks itself by the inverse computation. Each part is a choice of its own, so there are thousands of ways to say
one step. `Next, Ann has 3 more than Ben, and Ben has 12. So 12 + 3 = 15, so Ann has 15.`

The two voices know the same phrasings and prefer others of them, as the small and the large model of a family do.
`stepspec.mini.oracle` reads steps back from the same tables.
"""

import random
from collections.abc import Mapping
from typing import Literal

Voice = Literal["target", "draft"]
Phrasings = tuple[tuple[str, int, int], ...]
"""Texts with how often the target and the draft use them."""

STATEMENTS: Mapping[str, tuple[str, ...]] = {
    "given": ("{S} {has} {K} {item}.", "We know that {S} {has} {K} {item}."),
    "rate": ("{S} {has} {K} {item} a day for {N} days.",),
    "boxes": ("{S} {has} {N} {box} of {K} {item} each.",),
    "more": ("{S} {has} {K} more {item} than {R}.", "Compared with {R}, {S} {has} {K} more {item}."),
    "fewer": ("{S} {has} {K} fewer {item} than {R}.", "Compared with {R}, {S} {has} {K} fewer {item}."),
    "times": ("{S} {has} {K} times as many {item} as {R}.", "Compared with {R}, {S} {has} {K} times as many {item}."),
    "part": ("{S} {has} {fraction} as many {item} as {R}.", "Compared with {R}, {S} {has} {fraction} as many {item}."),
    "percent": ("{S} {has} {K}% as many {item} as {R}.", "Compared with {R}, {S} {has} {K}% as many {item}."),
    "sum": ("{S} {has} as many {item} as {R} and {Q} together.",),
    "share": ("{R} shares the {item} equally among {K} friends.",),
    "price": ("The {item} cost {K} dollars each.",),
}

FRACTIONS: Mapping[int, str] = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}

# What a step says before it computes: the story's own words, then the quantities that they refer to.
REASONS: Mapping[str, str] = {
    "rate": "{S} {has} {K} {item} a day for {N} days",
    "boxes": "{S} {has} {N} {box} of {K} {item} each",
    "more": "{S} {has} {K} more than {R}{join}{R} {has} {a}",
    "fewer": "{S} {has} {K} fewer than {R}{join}{R} {has} {a}",
    "times": "{S} {has} {K} times as many as {R}{join}{R} {has} {a}",
    "part": "{S} {has} {fraction} as many as {R}{join}{R} {has} {a}",
    "percent": "{S} {has} {K}% as many as {R}{join}{R} {has} {a}",
    "sum": "{S} {has} the sum of {R} and {Q}{join}{R} {has} {a} and {Q} {has} {b}",
    "total": "{R} {has} {a}{join}{Q} {has} {b}",
    "gap": "{R} {has} {a}{join}{Q} {has} {b}",
    "share": "{R} {has} {a}{join}{R} shares the {item} among {K} friends",
    "price": "{R} {has} {a}{join}the {item} cost {K} dollars each",
}

EQUATIONS: Mapping[str, str] = {
    "rate": "{K} * {N} = {c}",
    "boxes": "{N} * {K} = {c}",
    "more": "{a} + {K} = {c}",
    "fewer": "{a} - {K} = {c}",
    "times": "{a} * {K} = {c}",
    "part": "{a} / {N} = {c}",
    "percent": "{K}% of {a} = {c}",
    "sum": "{a} + {b} = {c}",
    "total": "{a} + {b} = {c}",
    "gap": "{a} - {b} = {c}",
    "share": "{a} / {K} = {c}",
    "price": "{a} * {K} = {c}",
}

CHECKS: Mapping[str, str] = {
    "rate": "{c} / {N} = {K}",
    "boxes": "{c} / {N} = {K}",
    "more": "{c} - {K} = {a}",
    "fewer": "{c} + {K} = {a}",
    "times": "{c} / {K} = {a}",
    "part": "{c} * {N} = {a}",
    "sum": "{c} - {b} = {a}",
    "total": "{c} - {b} = {a}",
    "gap": "{c} + {b} = {a}",
    "share": "{c} * {K} = {a}",
    "price": "{c} / {K} = {a}",
}

DOINGS: Mapping[str, str] = {
    **dict.fromkeys(("more", "sum", "total"), "add"),
    **dict.fromkeys(("fewer", "gap"), "subtract"),
    **dict.fromkeys(("rate", "boxes", "times", "price"), "multiply"),
    **dict.fromkeys(("part", "share"), "divide"),
    "percent": "share",
}

# What follows: about somebody, or for what the question asks in the end.
RESULTS: Mapping[str, str] = {
    "total": "together they {have} {c}",
    "gap": "the difference is {c}",
    "share": "each friend gets {c}",
    "price": "the price is {c} dollars",
}
RESULT_OF_SUBJECT = "{S} {has} {c}"

LEADS: Phrasings = (
    ("Next, ", 9, 3),
    ("We know ", 4, 2),
    ("Now, ", 3, 3),
    ("The story says ", 2, 1),
    ("We read ", 1, 6),
    ("It says ", 1, 5),
    ("Look: ", 1, 2),
)
JOINS: Phrasings = (
    (", and ", 9, 3),
    (", where ", 3, 1),
    (", while ", 1, 7),
    (". Also, ", 1, 4),
    (". We see ", 2, 2),
)
COMPUTATIONS: Phrasings = (
    (". So ", 9, 2),
    (". That is ", 3, 2),
    (". We {do}: ", 2, 8),
    (". Then ", 1, 4),
    (", which gives ", 1, 1),
)
CONCLUSIONS: Phrasings = (
    (", so ", 8, 2),
    (". Thus ", 2, 2),
    (", which means ", 2, 1),
    (". Hence ", 1, 7),
    (". We find ", 1, 2),
)
UNITS: Phrasings = (("", 7, 3), (" {item}", 2, 7))
CHECK_LEADS: Phrasings = (("", 30, 26), (". Check: ", 2, 1), (". Indeed, ", 1, 2))


def phrasings() -> list[str]:
    """Every text that stands between what a step must say."""
    tables = (LEADS, JOINS, COMPUTATIONS, CONCLUSIONS, CHECK_LEADS)
    return [text.replace("{do}", doing) for table in tables for text, _, _ in table for doing in DOINGS.values()]


CHOICE, CHOSEN = "\x02", "\x03"
"""Stand around each text that is one of several phrasings."""


def draw_wording(key: str, rng: random.Random, voice: Voice) -> str:
    """A step of that kind with its slots left open, phrased with the voice's frequencies; choices are marked."""
    reason = _pick(LEADS, rng, voice) + REASONS[key].replace("{join}", _pick(JOINS, rng, voice))
    computation = _pick(COMPUTATIONS, rng, voice).replace("{do}", DOINGS[key]) + EQUATIONS[key]
    conclusion = _pick(CONCLUSIONS, rng, voice) + RESULTS.get(key, RESULT_OF_SUBJECT)
    if key != "price":
        conclusion += _pick(UNITS, rng, voice)
    check = _pick(CHECK_LEADS, rng, voice) if key in CHECKS else ""
    return reason + computation + conclusion + check + (CHECKS[key] if unmarked(check) else "") + "."


def unmarked(text: str) -> str:
    """The text alone."""
    return text.replace(CHOICE, "").replace(CHOSEN, "")


def _pick(phrasings: Phrasings, rng: random.Random, voice: Voice) -> str:
    weights = [target if voice == "target" else draft for _, target, draft in phrasings]
    return CHOICE + rng.choices([text for text, _, _ in phrasings], weights)[0] + CHOSEN
