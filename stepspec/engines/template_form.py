"""What a chat template takes: texts or lists of parts, and system turns or none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stepspec.errors import ModelError, UsageError

Turns = Sequence[Mapping[str, Any]]

ASKED = {"role": "user", "content": "Wq1?"}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"x": 1}}}
TRIALS: Mapping[str, Turns] = {
    "user": [ASKED],
    "system": [{"role": "system", "content": "Wq2."}, ASKED],
    "assistant": [ASKED, {"role": "assistant", "content": "Wq3."}, ASKED],
    "tool": [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "Wq4."},
    ],
}
"""By role, a conversation that has a turn of it."""


@dataclass(frozen=True)
class TemplateForm:
    """The form of the turns that a chat template takes.

    Attributes:
        parts: roles whose content must be a list of parts.
        takes_system: whether the template shows system turns.
    """

    parts: frozenset[str] = frozenset()
    takes_system: bool = True

    def fitted(self, turns: Turns) -> list[Mapping[str, Any]]:
        """Return turns in this form. Without system turns, their text begins the next user turn."""
        fitted, held = list[Mapping[str, Any]](), list[str]()
        for turn in turns:
            role, content = turn["role"], turn.get("content") or ""
            if role == "system" and not self.takes_system:
                held.append(content)
                continue
            if role == "user" and held:
                content = "\n\n".join([*held, content])
                held.clear()
            if role in self.parts:
                content = [{"type": "text", "text": content}]
            fitted.append({**turn, "content": content} if content else turn)
        return fitted + (self.fitted([{"role": "user", "content": "\n\n".join(held)}]) if held else [])


def find_form(render: Callable[[Turns], str]) -> TemplateForm:
    """Return the form that a chat template takes, from trial conversations.

    Args:
        render: renders turns with the template. It raises a `UsageError` if the template rejects them.

    Raises:
        ModelError: the template does not show what users write.
    """

    def shows(form: TemplateForm, role: str) -> bool | None:
        """Return whether the prompt has the text of this role. None if the template rejects the conversation."""
        try:
            text = render(form.fitted(TRIALS[role]))
        except UsageError:
            return None
        return all(turn["content"].lower() in text.lower() for turn in TRIALS[role] if turn["role"] == role)

    form = TemplateForm()
    for role in TRIALS:
        if shown := shows(form, role):
            continue
        in_parts = replace(form, parts=form.parts | {role})
        if shows(in_parts, role):
            form = in_parts
        elif role == "system":
            form = replace(form, takes_system=False)
        elif role == "user" and shown is False:
            raise ModelError("Its chat template does not show what a user writes, neither as text nor as parts.")
    return form
