"""HTML of a result for notebooks: the steps, colored by who wrote them, then the answer, tokens and seconds."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepspec.loop.step import Result, Step

COLOURS: Mapping[str, str] = {"draft": "#2a9d8f", "salvaged": "#e0a100", "target": "#4a7bd0"}
"""Color of the bar beside a step, by origin. Medium tones stay visible on light and dark pages."""

STYLE = "border-left: 4px solid {colour}; padding: 0.1em 0.8em; margin: 0.25em 0; white-space: pre-wrap"


def result_html(result: "Result") -> str:
    """Render a result as HTML that needs no style sheet, script or network."""
    return "\n".join(["<div>", *_lines(result), "</div>"])


def _lines(result: "Result") -> Iterator[str]:
    yield from (_step_line(step) for step in result.steps)
    if result.answer and result.answer != result.reasoning:  # otherwise the steps already are the answer
        yield f'<div style="margin: 0.6em 0; white-space: pre-wrap">{escape(result.answer.strip())}</div>'
    for call in (call for call in result.tool_calls if call.problem is None):
        yield f'<div style="margin: 0.6em 0"><code>{escape(f"{call.name}({call.arguments})")}</code></div>'
    usage, times = result.usage, result.times
    summary = f"{usage.completion_tokens} tokens in {times.wall:.2f} s, {usage.draft_tokens} of them the draft's"
    if result.finish_reason == "length":
        summary += f"; cut short by {result.limit}"
    yield f'<div style="opacity: 0.7; font-size: 90%">{summary}</div>'
    if result.note is not None:
        yield f'<div style="font-size: 90%"><b>Note:</b> {escape(result.note)}</div>'


def _step_line(step: "Step") -> str:
    scores = ", ".join(f"{name} {score:.3g}" for name, score in step.scores.items() if score is not None)
    title = escape(f"{step.origin}, {step.num_tokens} tokens" + (f", {scores}" if scores else ""), quote=True)
    style = STYLE.format(colour=COLOURS[step.origin])
    return f'<div style="{style}" title="{title}">{escape(step.text.strip())}</div>'
