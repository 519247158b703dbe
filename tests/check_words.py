"""Finds words that stepspec does not use, with the ones that it uses: `python tests/check_words.py`.

Run by `make check`. It looks at code, documents, policies and benchmarks.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("stepspec", "tests", "docs", "policies", "evals")
SUFFIXES = (".py", ".md", ".toml")
SKIPPED = ("evals/results/", "evals/data/", "evals/LOG.md", "evals/gsm8k-8shot.toml", "tests/check_words.py")
"""Results, data and prompts of others, and the log, which says what was said at the time."""

WORDS = {
    r"\blaws?\b|_laws?\b": "distribution, or log-probs of labels",
    r"\bcalls? of (a )?tools?\b": "tool calls",
    r"\bways in\b(?! \w+\.)": "interfaces",
    r"\b(can|could)(not)? (not )?be had\b": "is not available, or is not supported",
    r"\bof one's own\b": "custom",
    r"\bhurr(y|ied)\b": "cut off at the deadline",
    r"\botherwise than\b": "differently from",
    r"\b[Ww]hoever\b": "the caller, or who it is",
    r"\bwrites? on alone\b": "a single writer",
    r"\basked of a model\b": "the engine interface",
    r"\bmended\b": "fixed",
    r"(?<![.\w\"'])told\b": "emitted, an event, or a message",
    r"\b[Pp]ieces\b": "chunks, or parts",
    r"\b[Aa]t once\b(?!\")": "concurrently, or immediately",
    r"\b[Ss]omebody\b": "a user, or who it is",
    r"\b[Ww]hatever\b(?!_)": "any, or what it is",
    r"\bPlaces\b|\bframed\b": "positions, graph inputs",
}

SYNONYMS = {
    r"(?i)\b(helper|assistant|guide) model\b(?!s;)|\bspeculator\b|\bproposer\b": "draft, or drafter",
    r"(?i)\b(large|larger|big|bigger|main|base|teacher|verifier) model\b|\bverifier\b": "target",
    r"(?i)\bcritic\b|(?<!affinity )\bscorer\b": "judge",
    r"(?i)\bstrateg(y|ies)\b(?!: session)|(?<!-)\bpresets?\b(?!`)|\brecipes?\b": "policy",
    r"(?i)\bspeed-ups?\b|\bacceleration\b": "speedup",
    r"(?i)\baccuracy drop\b|\bdegradation\b": "loss",
    r"(?i)\bguarantees?\b|\bwarranty\b": "certificate",
    r"(?i)\bthoughts? steps?\b|\breasoning (chunk|segment)s?\b": "step",
    r"(?i)\bcandidate (token|step)s?\b": "drafted token, or proposed step",
    r"(?i)\bforward calls?\b|\bmodel evaluations?\b": "pass",
    r"(?i)\bcut-?offs?\b(?! at the)": "threshold",
}
"""Other words for the terms of docs/glossary.md, which the README and the documents do not use."""


def found_in(path: Path) -> Iterator[str]:
    """A line for every unwanted word in a file."""
    words = WORDS | SYNONYMS if path.parent.name == "docs" or path == ROOT / "README.md" else WORDS
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        for pattern, better in words.items():
            for match in re.finditer(pattern, line):
                yield f"{path.relative_to(ROOT)}:{number}: {match[0]!r} should be: {better}"


def main() -> int:
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    files += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    wanted = [path for path in files if not path.relative_to(ROOT).as_posix().startswith(SKIPPED)]
    found = [line for path in wanted for line in found_in(path)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
