"""The shared tokenizer of the pair: byte-level BPE with one token per digit, trained on problems and prompts."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from evals.training import gsm_mini as problems
from evals.training.selection import SELECTION_PROMPT
from evals.training.wording import RATINGS
from stepspec.chat import prompts

VOCAB_SIZE = 1024
CONTEXT = 2048
PROMPT_SHARES = {"bare": 0.6, "boxed": 0.2, "steps": 0.1, "newlines": 0.1}
"""The problem prompts that the pair is trained on, with the share of each."""
JUDGE_PROMPTS = (prompts.YES_NO_PROMPT, prompts.EQUIVALENCE_PROMPT, SELECTION_PROMPT)
SYSTEM_TURNS = (
    "You are a helpful assistant.",
    "You are a careful assistant who reasons step by step.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
)
SPECIAL_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"]

# Newlines are separate, so that the end of a step is one token. Each digit is one token. The space before a number
# belongs to the preceding text, so that a number has the same tokens everywhere.
PIECES = r"\n+|'s|\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|><think>{% endif -%}
"""


def build_tokenizer(num_problems: int = 20_000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the first training problems and on every prompt that the pair is trained on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_problems), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL_TOKENS[1:],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _texts(num_problems: int) -> Iterator[str]:
    rng = random.Random(0)
    for problem in itertools.islice(problems.load_split("train"), num_problems):
        yield problem.question
        for voice in get_args(problems.Voice):
            yield "\n\n".join(problems.write_solution(problem, rng, voice)) + "\n\n"
    for _ in range(num_problems // 4):  # often enough that the words of the long published prompt become single tokens
        yield from (prompts.PROBLEM_PROMPTS[id] for id in PROMPT_SHARES)
        for prompt in (*RATINGS.values(), *JUDGE_PROMPTS):
            yield from (prompt.user, prompt.prefill)
        yield from SYSTEM_TURNS
        yield " yes no A B C D none"
        yield "The answer is \\boxed{12}."


def opening(user: str, system: str = "") -> str:
    """Return the text up to the reasoning, as the chat template renders a user turn and an optional system turn."""
    before = f"<|system|>{system}<|end|>" if system else ""
    return f"{before}<|user|>{user}<|end|><|assistant|><think>"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model folder. If there is none, build it and save it there."""
    if not (folder / "tokenizer.json").exists():
        build_tokenizer().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)
