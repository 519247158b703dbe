"""A result as HTML for notebooks, as a short text, and its figures in one line."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepspec.loop.step import Result, Step

COLOURS: Mapping[str, str] = {"draft": "#2a9d8f", "salvaged": "#e0a100", "target": "#4a7bd0"}
"""Color of the bar beside a step, by origin. Medium tones stay visible on light and dark pages."""

STYLE = "border-left: 4px solid {colour}; padding: 0.1em 0.8em; margin: 0.25em 0; white-space: pre-wrap"


SHOWN_ANSWER = 300
"""Most characters of an answer in the short text of a result."""


def result_text(result: "Result") -> str:
    """Return one short paragraph: the answer, or its beginning and end, then figures and note."""
    answer = " ".join(result.answer.split()) or "(no answer)"
    if len(answer) > SHOWN_ANSWER:
        answer = f"{answer[: SHOWN_ANSWER // 2]} ... {answer[-SHOWN_ANSWER // 2 :]}"
    calls = "".join(f" {call.name}({call.arguments})" for call in result.tool_calls if call.problem is None)
    return f"{answer}{calls} ({figures(result)}){f' {result.note}' if result.note else ''}"


def figures(result: "Result") -> str:
    """Return one line with the time and tokens of a request and the share of the draft's work that was accepted."""
    counts = result.counts
    parts = [f"{result.times.wall:.2f} s", f"{counts.committed:,} tokens"]
    if result.not_proposed != "the policy proposes none":
        why = f" ({result.not_proposed})" if result.not_proposed else ""
        parts.append(f"{counts.steps_proposed:,} step{'s' * (counts.steps_proposed != 1)} proposed{why}")
    if counts.steps_judged:
        parts.append(f"{counts.steps_accepted}/{counts.steps_judged} steps accepted")
    if counts.token_drafted:
        exact = "" if result.token_level_exact else " (not exact)"
        parts.append(f"{counts.token_accepted / counts.token_drafted:.0%} of drafted tokens accepted{exact}")
    if counts.target_passes:
        parts.append(f"{counts.committed / counts.target_passes:.2f} tokens per target pass")
    if result.finish_reason == "length":
        parts.append(f"cut short by {result.limit or 'a stop string'}")
    if counts.wasted:
        parts.append(f"{counts.wasted:,} tokens wasted")
    return " · ".join(parts)


def result_html(result: "Result") -> str:
    """Render a result as HTML that needs no style sheet, script or network."""
    return "\n".join(["<div>", *_lines(result), "</div>"])


def _lines(result: "Result") -> Iterator[str]:
    yield from (_step_line(step) for step in result.steps)
    if result.answer and result.answer != result.reasoning:  # otherwise the steps already are the answer
        yield f'<div style="margin: 0.6em 0; white-space: pre-wrap">{escape(result.answer.strip())}</div>'
    for call in (call for call in result.tool_calls if call.problem is None):
        yield f'<div style="margin: 0.6em 0"><code>{escape(f"{call.name}({call.arguments})")}</code></div>'
    yield f'<div style="opacity: 0.7; font-size: 90%">{figures(result)}</div>'
    if result.note is not None:
        yield f'<div style="font-size: 90%"><b>Note:</b> {escape(result.note)}</div>'


def _step_line(step: "Step") -> str:
    scores = ", ".join(f"{name} {score:.3g}" for name, score in step.scores.items() if score is not None)
    title = escape(f"{step.origin}, {step.num_tokens} tokens" + (f", {scores}" if scores else ""), quote=True)
    style = STYLE.format(colour=COLOURS[step.origin])
    return f'<div style="{style}" title="{title}">{escape(step.text.strip())}</div>'
