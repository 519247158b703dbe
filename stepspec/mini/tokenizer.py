"""Builds the pair's one tokenizer: byte-level BPE, every digit a token, merges learned over problems and prompts."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stepspec.chat import prompts
from stepspec.evaluation.generators import gsm_mini as problems

VOCAB_SIZE = 1024
CONTEXT = 2048
PROMPT_SHARES = {"bare": 0.6, "boxed": 0.2, "steps": 0.1, "newlines": 0.1}
"""The wordings that the pair is trained on, and how often each is used."""
JUDGE_PROMPTS = (prompts.YES_NO_PROMPT, prompts.EQUIVALENCE_PROMPT, prompts.SELECTION_PROMPT)
SYSTEM_TURNS = (
    "You are a helpful assistant.",
    "You are a careful assistant who reasons step by step.",
    "Please reason step by step, and put your final answer within \\boxed{}.",
)
SPECIAL_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<think>", "</think>"]

# Newlines stand alone so that a step's end is one token; a digit is always its own token, and the space before a
# number belongs to what stands in front of it, so that numbers look the same everywhere.
PIECES = r"\n+|'s|\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>{{ message['content'] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|><think>{% endif -%}
"""


def build_tokenizer(num_problems: int = 20_000) -> PreTrainedTokenizerFast:
    """Learns the merges from the first training problems and from every prompt the pair is trained on."""
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
    for _ in range(num_problems // 4):  # often enough that the long published prompt merges into whole words
        yield from (prompts.PROBLEM_PROMPTS[id] for id in PROMPT_SHARES)
        for prompt in (*prompts.RATING_PROMPTS.values(), *JUDGE_PROMPTS):
            yield from (prompt.user, prompt.prefill)
        yield from SYSTEM_TURNS
        yield " yes no A B C D none"
        yield "The answer is \\boxed{12}."


def opening(user: str, system: str = "") -> str:
    """What the chat template makes of a user turn and perhaps a system turn: the text up to the reasoning."""
    before = f"<|system|>{system}<|end|>" if system else ""
    return f"{before}<|user|>{user}<|end|><|assistant|><think>"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder; built and written there first if there is none."""
    if not (folder / "tokenizer.json").exists():
        build_tokenizer().save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)
