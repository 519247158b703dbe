"""Unsupported fields of OpenAI's and vLLM's chat completions that would change the answer or the response.

Each field is accepted with values that change nothing. Any other value is rejected with an error that names the field.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stepspec.serve.errors import RefusedError

NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""Values that change nothing in any field."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    # Moved into the object `stepspec`.
    "policy": (),
    "deadline_s": (),
    "max_thinking_s": (),
    # Choice among answers, and token details in the response.
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "echo": (False,),
    # Choice of tokens.
    "allowed_token_ids": (),
    "bad_words": (),
    "logits_processors": (),
    "vllm_xargs": (),
    "watermarking": (False,),
    # End of the answer.
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "repetition_detection": (),
    # Input of the model.
    "chat_template": (),
    "documents": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
    # Format of the answer.
    "guided_regex": (),
    "guided_grammar": (),
    "guided_whitespace_pattern": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "moderation": (),
}
"""By field, further values that change nothing."""

OF_CHAT = (
    "chat_template",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "verbosity",
    "web_search_options",
)
"""Fields that only chat completions have."""

INSTEAD: Mapping[str, str] = {
    "policy": "Use stepspec.policy.",
    "deadline_s": "Use stepspec.deadline_s.",
    "max_thinking_s": "Use stepspec.max_thinking_s.",
    "max_completion_tokens": "Use max_tokens.",
    "functions": "Use tools.",
    "function_call": "Use tool_choice.",
    "guided_regex": "Use guided_json or guided_choice.",
    "guided_grammar": "Use guided_json or guided_choice.",
}


def _same(value: Any, harmless: Any) -> bool:
    """Whether two JSON values are equal. Booleans never equal numbers."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


class Refusals(Mapping[str, tuple[Any, ...]]):
    """The unsupported fields of a route, with the values that change nothing."""

    def __init__(self, values: Mapping[str, tuple[Any, ...]]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> tuple[Any, ...]:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def check(self, fields: Mapping[str, Any]) -> None:
        """Check that fields have no value that is not supported.

        Raises:
            RefusedError: one has.
        """
        for name, value in fields.items():
            if name in self and not any(_same(value, harmless) for harmless in (*NOTHING, *self[name])):
                raise RefusedError(name, f"{name} is not supported. {INSTEAD.get(name, 'Leave it out.')}")

    def document(self, schema: dict[str, Any]) -> None:
        """Add the fields to the JSON schema of a request."""
        schema["properties"] |= {
            name: {
                "title": name.replace("_", " ").title(),
                "enum": [None, *harmless] if harmless else [None],
                "description": f"Not supported. {INSTEAD.get(name, '')}".strip(),
            }
            for name, harmless in self.items()
        }


CHAT = Refusals(REFUSED)
COMPLETIONS = Refusals(
    {
        **{name: values for name, values in REFUSED.items() if name not in (*OF_CHAT, "add_special_tokens")},
        "suffix": (),
        # Fields of chat completions, which would change the answer there.
        "max_completion_tokens": (),
        "reasoning_effort": (),
        "enable_thinking": (),
        "chat_template_kwargs": (),
    }
)

TOKENIZE = Refusals(
    {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "mm_processor_kwargs": (),
    }
)
