"""Renders a chat template in a process of its own, with bounds on time and memory.

Run as a script, with the bound on CPU time in seconds as its argument and the template on stdin.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from the machine, and lets it run for
ever. What it does with a short conversation is tried here before it is ever rendered in our own process. A template
that only never ends with some other conversation is not found out by this.
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
MOST_CHARACTERS = 1 << 22
MOST_REASON = 200

TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


class Generation(Extension):
    """The tag `generation`, which transformers adds: what stands in it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (so it is declared by jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def main() -> None:
    """Prints what is wrong with the template, or nothing."""
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
    """What is wrong with a template; nothing if it is merely of a form that some conversations do not have."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _today
    environment.filters["tojson"] = _to_json
    try:
        compiled = environment.from_string(template)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # not only jinja's: a number of 5,000 digits is Python's ValueError
        return f"it is no template ({str(error)[:MOST_REASON]})"
    for messages in (TURNS[1:2], TURNS, TURNS[1:]):
        for tools in (None, [TOOL]):
            try:
                text = compiled.render(messages=messages, tools=tools, add_generation_prompt=True)
            except (RecursionError, MemoryError):
                raise
            except Exception:
                continue
            if len(text) > MOST_CHARACTERS:
                return f"it makes {len(text)} characters of a short conversation"
    return ""


def _today(form: str) -> str:
    return "2026-01-01"


def _to_json(value: Any, **form: Any) -> str:
    return json.dumps(value)


def _refuse(message: Any) -> None:
    raise TemplateError(str(message))


if __name__ == "__main__":
    main()
