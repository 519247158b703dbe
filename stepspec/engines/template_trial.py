"""Renders a chat template in a separate process with limits on CPU time and memory.

Run it as a script: the argument is the limit on CPU time in seconds, and stdin is the template.

A chat template is untrusted code that comes with a model. Jinja's sandbox protects the machine, but does not limit run
time. This script renders short conversations before the main process uses the template. It does not detect a template
that loops forever only on other conversations.
"""

import json
import resource
import sys
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 22
MAX_REASON = 200

TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


class GenerationTag(Extension):
    """The tag `generation` of transformers. Its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it this way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Print the problem with the template, or nothing."""
    cpu_s = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        sys.stdout.write(trouble(sys.stdin.read()))
    except MemoryError:
        sys.stdout.write(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory")
    except RecursionError:
        sys.stdout.write("it recurses without end")


def trouble(template: str) -> str:
    """Return the problem with a template, or "". An error that a template raises for a conversation is no problem."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    environment.filters["tojson"] = _to_json
    try:
        compiled = environment.from_string(template)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # not only jinja errors: Python raises ValueError for a number of 5,000 digits
        return f"it is not a valid template ({str(error)[:MAX_REASON]})"
    in_parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    for messages in (TURNS[1:2], TURNS, TURNS[1:], in_parts, in_parts[1:]):
        for tools in (None, [TOOL]):
            try:
                text = compiled.render(messages=messages, tools=tools, add_generation_prompt=True)
            except (RecursionError, MemoryError):
                raise
            except Exception:
                continue
            if len(text) > MAX_CHARACTERS:
                return f"it renders a short conversation to {len(text)} characters"
    return ""


def _today(form: str) -> str:
    return "2026-01-01"


def _to_json(value: Any, **form: Any) -> str:
    return json.dumps(value)


def _refuse(message: Any) -> None:
    raise TemplateError(str(message))


if __name__ == "__main__":
    main()
