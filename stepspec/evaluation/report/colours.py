"""The colors of the page in the light and the dark theme. Plots refer to colors by name.

The colors of policies and of steps are distinguishable with color blindness (M. Okabe, K. Ito, Color Universal Design,
2008). Everything that a color shows is also written as text.
"""

import re
from collections.abc import Callable, Mapping, Sequence

# Name: on light, on dark.
PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#fbfaf8", "#14161a"),
    "card": ("#ffffff", "#1b1e24"),
    "sunken": ("#f3f1ed", "#22262d"),
    "ink": ("#1d2126", "#e8e6e1"),
    "muted": ("#5d6570", "#a2a9b3"),
    "line": ("#dedad2", "#353a43"),
    "accent": ("#0b5fa5", "#7cb8ee"),
    "warn": ("#8a5300", "#f0b95c"),
    "warn-back": ("#fdf3df", "#33290f"),
    "good": ("#1d7a4c", "#65c896"),
    "bad": ("#b3372b", "#f08a7d"),
    "draft": ("#1f8f83", "#4cc2b4"),
    "salvaged": ("#c98a00", "#e9b949"),
    "target": ("#5a62c8", "#979ff2"),
    "judge": ("#b8548c", "#e48cbd"),
    "queue": ("#b3aea4", "#5f6670"),
    "controller": ("#6d6a64", "#979ca5"),
    "other": ("#dcd6c8", "#454a52"),
    "rejected": ("#b3372b", "#e2786b"),
    "abandoned": ("#d8a49c", "#8f5a53"),
    "series-0": ("#6a7078", "#aeb4bd"),
    "series-1": ("#0072b2", "#58aee8"),
    "series-2": ("#d55e00", "#ff9a52"),
    "series-3": ("#9a4a8f", "#d990cf"),
    "series-4": ("#00866a", "#3fc5a3"),
    "series-5": ("#8a6d00", "#d9bb4a"),
    "series-6": ("#3a94c9", "#8fd0f5"),
    "series-7": ("#7a4b2e", "#c89878"),
}

_NAMES: Sequence[str] = tuple(PALETTE)
_VALUE = re.compile(r":[\w.-]+=| (?=-?[\d.]\S*$)")
"""What is before a value in a name."""
NUM_SERIES = sum(name.startswith("series-") for name in _NAMES)


def placeholder(name: str) -> str:
    """Return a unique placeholder color for matplotlib. The CSS variable replaces it afterwards."""
    return f"#f0{_NAMES.index(name):02x}e1"


def placeholders() -> dict[str, str]:
    """Return the CSS variable of each placeholder."""
    return {placeholder(name): f"var(--{name})" for name in _NAMES}


def css(dark: bool) -> str:
    """Return the CSS variables of a theme."""
    return "".join(f"--{name}:{colours[dark]};" for name, colours in PALETTE.items())


def series(policies: Sequence[str], group: Callable[[str], str] = str) -> dict[str, str]:
    """Return the color name of each policy. Those of one group share it, and the target has the neutral color."""
    others = dict.fromkeys(group(policy) for policy in policies if policy != "target")
    names = {each: f"series-{1 + index % (NUM_SERIES - 1)}" for index, each in enumerate(others)}
    return {policy: names.get(group(policy), "series-0") for policy in policies}


def without_values(name: str) -> str:
    """Return the policy and the keys of a variant, or the policy of a setting of a sweep; else the name itself."""
    return "".join([_VALUE.split(name)[0], *_VALUE.findall(name)]).replace("=", "").strip()


def values_of(name: str) -> str:
    """Return the values of a variant, or the thresholds of a setting of a sweep; empty for other policies."""
    return ", ".join(_VALUE.split(name)[1:])
