"""The question which of several next steps is the best, in which the embedded pair is trained. No judge asks it."""

from stepspec.chat.prompts import JudgePrompt

SELECTION_PROMPT = JudgePrompt("Which is the best next step, or is none correct?\n{candidates}", "Best:")
SELECTION_NAMES = ("A", "B", "C", "D")
SELECTION_NONE = "none"


def selection_line(name: str, step: str) -> str:
    """Return a candidate's line in `SELECTION_PROMPT`."""
    return f"{name}: {step}"
