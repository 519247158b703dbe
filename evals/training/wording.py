"""Wording of stories and steps: several phrasings for each part of a step, with a frequency per voice.

A step restates the story, names the quantities that it needs, computes, and states the result. Sometimes it checks
itself with the inverse computation. Each part is chosen independently, so a step has thousands of wordings.
`Next, Ann has 3 more than Ben, and Ben has 12. So 12 + 3 = 15, so Ann has 15.`

The two voices have the same phrasings with different frequencies, like the small and the large model of a family.
`evals.training.oracle` parses steps with the same tables.
"""

import random
from collections.abc import Mapping
from typing import Literal

from stepspec.chat.prompts import RATING_PROMPT, JudgePrompt

Voice = Literal["target", "draft"]
Phrasings = tuple[tuple[str, int, int], ...]
"""Texts with their relative frequencies for the target and the draft."""

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

RATINGS: Mapping[str, JudgePrompt] = {
    "short": JudgePrompt("Rate the last step from 0 to 9.", "Rating: "),
    "specreason": RATING_PROMPT,
}
"""Questions that the target answers with 9 for a right step and 0 for a wrong one."""

FRACTIONS: Mapping[int, str] = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}

# The start of a step, before it computes: the words of the story, then the quantities that they refer to.
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

# The result of a step for the final value. Results about a person use RESULT_OF_SUBJECT.
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
    """Return every text that connects the required parts of a step."""
    tables = (LEADS, JOINS, COMPUTATIONS, CONCLUSIONS, CHECK_LEADS)
    return [text.replace("{do}", doing) for table in tables for text, _, _ in table for doing in DOINGS.values()]


CHOICE, CHOSEN = "\x02", "\x03"
"""Marks around each text that is one of several phrasings."""


def draw_wording(key: str, rng: random.Random, voice: Voice) -> str:
    """Sample a step of a kind with the voice's frequencies. Slots stay open, and marks surround the choices."""
    reason = _pick(LEADS, rng, voice) + REASONS[key].replace("{join}", _pick(JOINS, rng, voice))
    computation = _pick(COMPUTATIONS, rng, voice).replace("{do}", DOINGS[key]) + EQUATIONS[key]
    conclusion = _pick(CONCLUSIONS, rng, voice) + RESULTS.get(key, RESULT_OF_SUBJECT)
    if key != "price":
        conclusion += _pick(UNITS, rng, voice)
    check = _pick(CHECK_LEADS, rng, voice) if key in CHECKS else ""
    return reason + computation + conclusion + check + (CHECKS[key] if unmarked(check) else "") + "."


def unmarked(text: str) -> str:
    """Return the text without marks."""
    return text.replace(CHOICE, "").replace(CHOSEN, "")


def _pick(phrasings: Phrasings, rng: random.Random, voice: Voice) -> str:
    weights = [target if voice == "target" else draft for _, target, draft in phrasings]
    return CHOICE + rng.choices([text for text, _, _ in phrasings], weights)[0] + CHOSEN
