"""Small chat templates that treat thinking as the templates of model families do, with their special tokens.

They are written after the vendors' templates: how the thinking is opened, what switches it, and how earlier turns are
shown. Everything else is left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from scripted import PLAIN_TEMPLATE, WordTokenizer

from stepspec.engines.thinking import ANSWER_LINE, find_tags


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        thinking: name of its thinking format.
        template: a chat template that treats thinking as those of the family do.
        special: its special tokens, besides `<|end|>`, which ends a turn in all templates here.
        opened: what the prompt ends with.
        ending: what the model writes between its thinking and its answer.
        longer: matches tokens that reach over the borders of tags that are text.
        switches: whether template arguments turn the thinking off.
        ends: tokens that end a text.
    """

    thinking: str
    template: str
    special: tuple[str, ...]
    opened: str
    ending: str
    switches: bool = False
    ends: tuple[str, ...] = ("<|end|>",)
    longer: str = ""

    def tokenizer(self) -> WordTokenizer:
        """Return a tokenizer with the family's template and special tokens."""
        tokens = sorted({*self.special, *self.ends, "<|end|>", "<|turn|>"}, key=len, reverse=True)
        special = "|".join(map(re.escape, tokens))
        return WordTokenizer(self.template, special=special, ends=self.ends, longer=self.longer)


def turns(assistant: str = "{{ m.content }}", before: str = "", turn: str = "<|turn|>{{ m.role }}\n") -> str:
    """Return a template for the turns of a conversation, up to the generation prompt."""
    return (
        f"{before}{{%- for m in messages -%}}{turn}{{% if m.role == 'assistant' %}}{assistant}{{% else %}}"
        "{{ m.content }}{% endif %}<|end|>{% endfor -%}"
    )


FORGETS = "{{ m.content.split('</think>')[-1] }}"
GENERATES = "{%- if add_generation_prompt %}<|turn|>assistant\n"
TAGS = ("<think>", "</think>", "<tool_call>")

SWITCHED_BY_SYSTEM = (
    "{%- set ns = namespace(on=true) -%}"
    "{%- for m in messages if '/no_think' in m.content %}{% set ns.on = false %}{% endfor -%}"
    + turns(FORGETS)
    + GENERATES
    + "{% if not ns.on %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

MERGED = r">\n+|\.?</"
"""Tokens of vocabularies in which tags are text."""

FAMILIES: Mapping[str, Family] = {
    "qwen3": Family(
        "think",
        turns(FORGETS)
        + GENERATES
        + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}",
        TAGS,
        "assistant\n<think>\n",
        "</think>",
        switches=True,
    ),
    "qwen3.5, small": Family(  # its thinking is off unless it is turned on
        "think",
        turns(FORGETS)
        + GENERATES
        + "{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
        "{% endif %}",
        TAGS,
        "assistant\n<think>\n",
        "</think>",
        switches=True,
    ),
    "r1": Family("think", turns(FORGETS) + GENERATES + "<think>\n{% endif %}", TAGS, "<think>\n", "</think>"),
    "nemotron": Family(  # a switch in the system turn
        "think",
        SWITCHED_BY_SYSTEM,
        TAGS,
        "assistant\n<think>\n",
        "</think>",
    ),
    "glm": Family(
        "glm",
        turns("\n<think></think>\n{{ m.content }}", before="[gMASK]<sop>", turn="<|{{ m.role }}|>\n")
        + "{% if add_generation_prompt %}<|assistant|>"
        "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}",
        (*TAGS, "<sop>", "<|assistant|>", "<|user|>"),
        "<|assistant|>\n<think>",
        "</think>",
        switches=True,
    ),
    "magistral": Family(
        "mistral",
        turns(
            "[THINK]{{ m.reasoning_content | default('') }}[/THINK]{{ m.content }}"
            "{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% endif %}",
            turn="[INST]",
        ),
        ("[THINK]", "[/THINK]", "[INST]", "[TOOL_CALLS]"),
        "<|end|>[THINK]",
        "[/THINK]",
    ),
    "gemma4": Family(
        "gemma",
        turns(
            "{{ m.content }}",
            before="{% if enable_thinking is defined and enable_thinking %}<|turn|>system\n<|think|><|end|>{% endif %}",
        )
        + "{%- if add_generation_prompt %}<|turn|>model\n"
        "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
        ("<|channel>", "<channel|>", "<|think|>", "<|tool_call>"),
        "<|turn|>model\n<|channel>thought\n",
        "<channel|>",
        switches=True,
    ),
    "gpt-oss": Family(
        "harmony",
        turns(
            "{% if m.tool_calls %}<|channel|>analysis<|message|>{{ m.reasoning_content }}{% endif %}"
            "<|channel|>final<|message|>{{ m.content }}",
            before="Reasoning: {{ reasoning_effort | default('medium') }}",
            turn="<|start|>{{ m.role }}{{ '' if m.role == 'assistant' else '<|message|>' }}",
        )
        + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        ends=("<|return|>", "<|call|>"),
    ),
    "seed": Family(
        "seed",
        turns("<seed:think>{{ m.reasoning_content | default('') }}</seed:think>{{ m.content }}")
        + GENERATES
        + "{% endif %}",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>"),
        "assistant\n<seed:think>",
        "</seed:think>",
    ),
    "command": Family(
        "cohere",
        turns("<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_RESPONSE|>{{ m.content }}")
        + GENERATES
        + "{% if reasoning is defined and not reasoning %}<|START_THINKING|><|END_THINKING|>{% endif %}{% endif %}",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>"),
        "assistant\n<|START_THINKING|>",
        "<|END_THINKING|><|START_RESPONSE|>",
        switches=True,
    ),
    "kimi": Family(
        "kimi",
        turns("◁think▷◁/think▷{{ m.content }}") + GENERATES + "{% endif %}",
        ("◁think▷", "◁/think▷"),
        "assistant\n◁think▷",
        "◁/think▷",
    ),
    "olmo3": Family(
        "think",
        turns(FORGETS) + GENERATES + "<think>{% endif %}",
        (),
        "assistant\n<think>",
        "</think>",
        longer=MERGED,
    ),
    "llama-nemotron": Family(
        "think",
        SWITCHED_BY_SYSTEM,
        (),
        "assistant\n<think>\n",
        "</think>",
        longer=MERGED,
    ),
    "hunyuan": Family(
        "hunyuan",
        turns("{{ m.content.split('<answer>')[-1].split('</answer>')[0] }}")
        + GENERATES
        + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n{% endif %}{% endif %}",
        (),
        "assistant\n<think>\n",
        "</think>\n<answer>\n",
        switches=True,
        longer=MERGED,
    ),
}


@dataclass(frozen=True)
class AskedFamily(Family):
    """Models that mark their thinking only if they are asked to, so that the format is chosen."""

    def tokenizer(self) -> WordTokenizer:
        tokenizer = super().tokenizer()
        tokenizer.thinking = find_tags(tokenizer, self.template, self.thinking)
        return tokenizer


ASKED = AskedFamily(ANSWER_LINE, PLAIN_TEMPLATE, (), "<|assistant|>", "\nAnswer:", longer=r"\.\n\n|:[$5]")
