"""Record an answer in a terminal as an animated picture, with its steps as they are committed.

A clock shows the time beside that of the target alone.

    python -m evals.bench recording "QUESTION" docs/images/recording.svg --pair qwen

Both answers are greedy. The target alone answers first and last, and the shorter one of its times is shown.
"""

import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple
from xml.sax.saxutils import escape

import typer

from stepspec import SyncStepSpec
from stepspec.base.files import write_text
from stepspec.cli.options import MaxTokensOption, PairOption, PolicyOption
from stepspec.evaluation.records import BASELINE
from stepspec.loop.step import Origin, StepCommitted

COLUMNS, MAX_LINES = 96, 40
CHARACTER, LINE, MARGIN = 8.4, 19, 16
"""Width of a character, height of a line, and margin, in pixels."""
PAUSE_S = 4.0
"""Seconds before the animation starts again."""
COLORS: Mapping[str, str] = {
    "draft": "#7ee787",
    "salvaged": "#e3b341",
    "target": "#79c0ff",
    "text": "#e6edf3",
    "dim": "#8b949e",
    "back": "#0d1117",
    "track": "#21262d",
}


class Shown(NamedTuple):
    """A step as it is shown: its text, its writer, and the seconds until it was committed."""

    text: str
    origin: Origin
    seconds: float


class Recorded(NamedTuple):
    """An answer: its steps, and the seconds until it ended."""

    steps: Sequence[Shown]
    seconds: float


def record(question: str, policy: str, pair: str | None, max_tokens: int | None) -> Recorded:
    """Answer a question, and return its steps with their times."""
    with SyncStepSpec(policy=policy, pair=pair) as spec:
        spec.generate(question, max_tokens=2)  # what is loaded at the first request does not count
        steps, since = list[Shown](), time.perf_counter()
        for event in spec.stream(question, prompt="boxed", sampling={"temperature": 0}, max_tokens=max_tokens):
            if isinstance(event, StepCommitted):
                steps.append(Shown(event.step.text, event.step.origin, time.perf_counter() - since))
        return Recorded(steps, time.perf_counter() - since)


class Picture:
    """Lines of an animated terminal. Everything appears at its time, and all begins again after a pause."""

    def __init__(self, seconds: float) -> None:
        self._total = seconds + PAUSE_S
        self._styles, self._parts, self._lines = list[str](), list[str](), 0

    def line(self, text: str, color: str, at_s: float | None = None) -> None:
        """Add a line. `at_s`: when it appears; None for a line that is always there."""
        self._lines += 1
        self._text(text, color, MARGIN, at_s)

    def clock(self, name: str, seconds: float, longest: float, color: str) -> None:
        """Add a bar that grows until an answer has ended, and then shows its seconds."""
        self._lines += 1
        left, full = MARGIN + 22 * CHARACTER, (COLUMNS - 32) * CHARACTER
        self._text(name, "text", MARGIN)
        top, width = MARGIN + self._lines * LINE - 12, full * seconds / longest
        self._parts.append(f'<rect x="{left}" y="{top}" width="{full:.0f}" height="12" fill="{COLORS["track"]}"/>')
        how = f"from{{transform:scaleX(0)}}{self._share(seconds)}%,to{{transform:scaleX(1)}}"
        self._parts.append(
            f'<rect x="{left}" y="{top}" width="{width:.0f}" height="12" fill="{COLORS[color]}" '
            f'style="transform-origin:{left}px 0;{self._animation(how, "linear")}"/>'
        )
        self._text(f"{seconds:.1f} s", "text", left + full + CHARACTER, seconds)

    def svg(self) -> str:
        """Return the picture."""
        width, height = 2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + self._lines * LINE
        still = "@media(prefers-reduced-motion:reduce){*{animation:none!important}}"
        font = "font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
            f"<style>text{{{font}}}{''.join(self._styles)}{still}</style>"
            f'<rect width="100%" height="100%" rx="8" fill="{COLORS["back"]}"/>{"".join(self._parts)}</svg>\n'
        )

    def _text(self, text: str, color: str, x: float, at_s: float | None = None) -> None:
        style = ""
        if at_s is not None:
            how = f"from,{self._share(at_s)}%{{opacity:0}}{self._share(at_s + 0.01)}%,to{{opacity:1}}"
            style = f' style="{self._animation(how, "step-end")}"'
        y = MARGIN + self._lines * LINE - 2
        self._parts.append(f'<text x="{x:.0f}" y="{y}" fill="{COLORS[color]}"{style}>{escape(text)}</text>')

    def _animation(self, how: str, timing: str) -> str:
        name = f"a{len(self._styles)}"
        self._styles.append(f"@keyframes {name}{{{how}}}")
        return f"animation:{name} {self._total:.2f}s {timing} infinite"

    def _share(self, seconds: float) -> str:
        return f"{100 * min(1.0, seconds / self._total):.2f}"


def draw(question: str, command: str, answer: Recorded, alone: Recorded, policy: str) -> str:
    """Return the picture of an answer beside the time of the target alone."""
    picture, longest = Picture(max(answer.seconds, alone.seconds)), max(answer.seconds, alone.seconds)
    for line in wrapped(f'$ {command} "{question}"'):
        picture.line(line, "text")
    picture.line("", "text")
    lines = [(line, step) for step in answer.steps for line in wrapped(step.text.strip())]
    for line, step in lines[:MAX_LINES]:
        picture.line(line, step.origin, step.seconds)
    if len(lines) > MAX_LINES:
        picture.line("...", "dim", answer.seconds)
    picture.line("", "text")
    picture.clock(policy, answer.seconds, longest, "draft")
    picture.clock("target alone", alone.seconds, longest, "target")
    return picture.svg()


def wrapped(text: str) -> list[str]:
    """Return the lines of a text in the width of the terminal, without blank ones."""
    return [line for part in text.splitlines() if part.strip() for line in textwrap.wrap(part, COLUMNS)]


def main(
    question: Annotated[str, typer.Argument(help="The question.")],
    file: Annotated[Path, typer.Argument(help="The picture to write, as SVG.")],
    pair: PairOption = None,
    policy: PolicyOption = "two-level",
    max_tokens: MaxTokensOption = 448,
) -> None:
    """Record an answer as an animated picture of a terminal."""
    first = record(question, BASELINE, pair, max_tokens)
    answer = record(question, policy, pair, max_tokens)
    alone = min(first, record(question, BASELINE, pair, max_tokens), key=lambda each: each.seconds)
    command = f"stepspec run{'' if pair is None else f' --pair {pair}'} --prompt boxed --temperature 0"
    write_text(file, draw(question, command, answer, alone, policy))
    print(f"{policy}: {answer.seconds:.1f} s; target alone: {alone.seconds:.1f} s. Wrote {file}.")
