"""Chat templates that come with packages: Mistral's, made by mistral-common, and MiniCPM-V's, which vLLM ships.

Both packages are in `.venv-vllm`. Templates of other formats are written after the vendors'; see `thinking_families`.
"""

import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from stepspec.chat.prompts import checked_messages, encode_prompt
from stepspec.engines.hugging_face import HuggingFaceTokenizer, load_tokenizer
from stepspec.mini import WEIGHTS

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
MISTRAL = """
from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion

print(
    generate_chat_template(
        spm=False,
        tokenizer_version=TokenizerVersion.v13,
        image_support=False,
        audio_support=False,
        thinking_support=True,
        default_system_prompt="First draft your thinking process, then answer.",
        plain_thinking_support=False,
        use_special_token_variables=True,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )
)
"""
MISTRAL_TOKENS = (
    "[THINK]",
    "[/THINK]",
    "[INST]",
    "[/INST]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CALLS]",
    "[ARGS]",
)
MINICPM = """
from importlib.util import find_spec
from pathlib import Path

(package,) = find_spec("vllm").submodule_search_locations  # importing vLLM takes seconds
print((Path(package) / "transformers_utils" / "chat_templates" / "template_minicpmv45.jinja").read_text())
"""

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm with the packages")


def tokenizer_with(script: str, tokens: tuple[str, ...], folder: Path) -> HuggingFaceTokenizer:
    """Return the embedded target's tokenizer with these special tokens, and with the template that a script prints."""
    done = subprocess.run([str(PYTHON), "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": [*tokens]})
    tokenizer.chat_template = done.stdout
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("script", "tokens", "name", "opened"),
    [
        (MISTRAL, MISTRAL_TOKENS, "mistral", "[/INST][THINK]"),
        (MINICPM, ("<|im_start|>", "<|im_end|>"), "think", "<|im_start|>assistant\n<think>\n"),
    ],
    ids=["mistral", "minicpm-v-4.5"],
)
def test_the_thinking_of_a_packaged_template_is_found_and_opened(
    script: str, tokens: tuple[str, ...], name: str, opened: str, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(script, tokens, tmp_path)
    assert tokenizer.thinking is not None
    assert tokenizer.thinking.format.name == name
    turns = [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Why? [/THINK] </think>"},
    ]
    prompt = encode_prompt(tokenizer, checked_messages(turns))
    assert prompt.thinks
    assert tokenizer.decode(prompt.ids).endswith(opened)
    assert tokenizer.thinking.end not in prompt.ids, "a tag in a message is text"
    if name == "think":
        assert not encode_prompt(tokenizer, checked_messages(turns), arguments={"enable_thinking": False}).thinks
