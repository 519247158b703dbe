"""Unsupported fields of OpenAI's and vLLM's chat completions that would change the answer or the response.

Each field is accepted with values that change nothing. Any other value is rejected with an error that names the field.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""Values that change nothing in any field."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    # Number of answers, and token details in the response.
    "n": (1,),
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
    "ignore_eos": (False,),
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

INSTEAD: Mapping[str, str] = {
    "functions": "Use tools.",
    "function_call": "Use tool_choice.",
    "guided_regex": "Use guided_json or guided_choice.",
    "guided_grammar": "Use guided_json or guided_choice.",
}


def why_refused(name: str, value: Any) -> str | None:
    """Return why a field's value is rejected; None if it is accepted."""
    if name not in REFUSED or any(_same(value, harmless) for harmless in (*NOTHING, *REFUSED[name])):
        return None
    return f"{name} is not supported. {INSTEAD.get(name, 'Leave it out.')}"


def _same(value: Any, harmless: Any) -> bool:
    """Whether two JSON values are equal. Booleans never equal numbers."""
    return value == harmless and isinstance(value, bool) == isinstance(harmless, bool)


@cache
def refused_properties() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields as JSON schema properties."""
    return {
        name: {
            "title": name.replace("_", " ").title(),
            "enum": [None, *harmless] if harmless else [None],
            "description": f"Not supported. {INSTEAD.get(name, '')}".strip(),
        }
        for name, harmless in REFUSED.items()
    }
