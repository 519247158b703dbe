"""The embedded pair in vLLM. Skipped without vLLM, which needs a separate environment with `pip install -e .`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evals.training.gsm_mini import load_split
from stepspec.mini import WEIGHTS

pytest.importorskip("vllm")

# The engine runs as a child process, which needs a script with a main guard.
SCRIPT = """
import json, pathlib, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, answers, *questions = json.loads(sys.argv[1])
    llm = LLM(model=folder, enforce_eager=True, max_model_len=1024, dtype="bfloat16", enable_prefix_caching=True)
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=640, skip_special_tokens=False))
    pathlib.Path(answers).write_text(json.dumps([output.outputs[0].text for output in outputs]))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("role", "at_least"), [("target", 14), ("draft", 5)])
def test_the_pair_answers_in_vllm(tmp_path: Path, role: str, at_least: int) -> None:
    """The minimum is of 20 problems, in bfloat16, whose tokens can differ from float32."""
    script, answers = tmp_path / "answer.py", tmp_path / "answers.json"
    script.write_text(SCRIPT)
    problems = [problem for problem, _ in zip(load_split("test"), range(20), strict=False)]
    arguments = json.dumps([str(WEIGHTS / role), str(answers), *(problem.question for problem in problems)])
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.run(
        [sys.executable, script, arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    texts = json.loads(answers.read_text())
    solved = [f"\\boxed{{{problem.answer}}}" in text for problem, text in zip(problems, texts, strict=True)]
    assert sum(solved) >= at_least
