"""The embedded pair outside stepspec: plain transformers, its tokenizer and its model card."""

import hashlib
import re
from functools import cache
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evals.training.gsm_mini import load_split
from evals.training.tokenizer import PROMPT_SHARES, SYSTEM_TURNS
from stepspec.chat.prompts import PROBLEM_PROMPTS, RATING_PROMPT
from stepspec.mini import WEIGHTS

ROLES = ["target", "draft"]


@pytest.fixture(scope="module", params=ROLES)
def model_folder(request: pytest.FixtureRequest):
    torch.set_num_threads(1)
    return WEIGHTS / request.param


@cache
def load_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def answers_of(
    folder, num_problems: int, wording: str = "{question}", system: str | None = None
) -> list[tuple[int, str]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    problems = list(islice(load_split("test"), num_problems))
    conversations = [
        [
            *([{"role": "system", "content": system}] if system else []),
            {"role": "user", "content": wording.format(question=problem.question)},
        ]
        for problem in problems
    ]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    output = load_model(folder).generate(**inputs, max_new_tokens=300, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    return [(problem.answer, text) for problem, text in zip(problems, texts, strict=True)]


# Every prompt runs with a system turn and without one. An ordinary run has one of the two.
@pytest.mark.parametrize(
    ("prompt", "system"),
    [
        pytest.param(
            prompt,
            system,
            id=f"{prompt}-{'a' if system else 'no'} system turn",
            marks=[pytest.mark.soak] if bool(system) != bool(number % 2) else [],
        )
        for number, prompt in enumerate(PROMPT_SHARES)
        for system in (None, SYSTEM_TURNS[0])
    ],
)
def test_the_target_loads_and_solves_problems_in_plain_transformers(prompt: str, system: str | None):
    """At least 7 of 10 under every trained prompt. At the 92% of the model card, fewer occur once in 200 runs."""
    answers = answers_of(WEIGHTS / "target", 10, PROBLEM_PROMPTS[prompt], system)
    assert sum(f"\\boxed{{{gold}}}" in text for gold, text in answers) >= 7


def test_the_draft_has_at_most_a_fifth_of_the_weights_of_the_target():
    """The model card has the cost in milliseconds. A timed test would measure the machine."""
    sizes = {role: AutoModelForCausalLM.from_pretrained(WEIGHTS / role).num_parameters() for role in ROLES}
    assert sizes["draft"] <= sizes["target"] / 5


def test_the_draft_thinks_in_steps_and_then_boxes_an_answer_in_plain_transformers():
    for _, text in answers_of(WEIGHTS / "draft", 4):
        reasoning, _, answer = text.partition("</think>")
        assert reasoning.count("\n\n") >= 2
        assert re.search(r"\\boxed\{\d+\}", answer)


def test_both_models_share_one_tokenizer():
    assert (WEIGHTS / "target" / "tokenizer.json").read_bytes() == (WEIGHTS / "draft" / "tokenizer.json").read_bytes()


def test_any_text_round_trips_and_every_digit_is_a_separate_token(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for text in ["h\u00e9llo \u65e5\u672c\n\n 12,345  x\ty", "\x00\x7f \U0001f600", "x = 40 * 7 - 3"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert sum(tokenizer.decode([id]).strip() in list("0123456789") for id in ids) == len(re.findall(r"\d", text))


def test_the_published_rating_prompt_takes_at_most_100_tokens(model_folder):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert len(tokenizer.encode(RATING_PROMPT.user)) <= 100


def test_the_pair_is_small_and_the_model_card_names_its_weights(model_folder):
    weights = model_folder / "model.safetensors"
    card = (WEIGHTS / "README.md").read_text(encoding="utf-8")
    assert hashlib.sha256(weights.read_bytes()).hexdigest() in card
    assert sum((WEIGHTS / role / "model.safetensors").stat().st_size for role in ROLES) < 32e6
