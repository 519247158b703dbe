"""Generate the base model's answers to general questions: `python -m stepspec.mini.smol.chat`.

The pair trains on these answers, so that it does not lose its ability to chat. Decoding is greedy, and each answer is
cut after its first sentences.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch

from stepspec.mini.smol.base import find_base, load_base, load_tokenizer

MAX_TOKENS, BATCH = 64, 32
QUESTIONS, OUTPUT = (Path(__file__).with_name(name) for name in ("chat_questions.txt", "chat.jsonl"))
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system prompt that the base was trained with. The pair learns the answers without it."""


def first_sentences(text: str) -> str:
    """Return the first two sentences. For a text with line breaks, such as a list, return all complete sentences."""
    text = text.strip()
    found = list(re.finditer(r"[.!?](?=\s|$)", text))
    if "\n" not in text:
        found = found[:2]
    return text[: found[-1].end()] if found else text


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, asked: list[str]) -> list[str]:
    """Return the base model's answers."""
    before = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    texts = [f"{before}{each}<|im_end|>\n<|im_start|>assistant\n" for each in asked]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    output = model.generate(
        **inputs,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    path = find_base()
    model, tokenizer = load_base(path).to(torch.bfloat16), load_tokenizer(path)
    asked = QUESTIONS.read_text("utf-8").splitlines()
    with OUTPUT.open("w", encoding="utf-8") as output:
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            for question, answer in zip(batch, answers(model, tokenizer, batch), strict=True):
                shortened = first_sentences(answer)
                if shortened:
                    output.write(json.dumps({"question": question, "answer": shortened}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
