"""The vLLM engine in process, in `.venv-vllm`, compared with the torch engine on the same weights."""

import asyncio
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from servers import VllmForks, needs_vllm

from evals.training.gsm_mini import load_split
from stepspec.chat.prompts import encode_request
from stepspec.engines.protocol import (
    Generate,
    Probe,
    Sampling,
    Stop,
    TokenBuffer,
    Verify,
    collect,
)
from stepspec.engines.torch_engine import TorchEngine
from stepspec.mini import WEIGHTS

pytestmark = [pytest.mark.anyio, needs_vllm]

ROUNDING = 2e-3
NUM_TEXTS = 3
INSIDE = Path(__file__).with_name("inside_vllm.py")
DELIMITERS, MAX_TOKENS = ("\n\n",), 40


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_it_writes_and_verifies_like_the_torch_engine(vllm: VllmForks, tmp_path: Path) -> None:
    torch_engine = TorchEngine.load(str(WEIGHTS / "target"))
    tokenizer = torch_engine.tokenizer
    prompts = [
        encode_request(tokenizer, each.question) for _, each in zip(range(NUM_TEXTS), load_split("test"), strict=False)
    ]
    stop = Stop(MAX_TOKENS, DELIMITERS)
    calls = [Generate(TokenBuffer(ids), Sampling(), stop, logprobs=True) for ids in prompts]
    chunks = [await collect(torch_engine.generate(call)) for call in calls]
    texts = [chunk.ids for chunk in chunks]
    steps = [(*ids[:4], ids[2], *ids[4:]) for ids in texts]  # differs from what the model would write
    labels = [tokenizer.encode(str(digit))[-1] for digit in range(10)]
    probes = [tokenizer.encode(text) for text in ("Rating: ", " so it is ")]
    request = {"prompts": prompts, "steps": steps, "labels": labels, "probes": probes}
    request["questions"] = [each.question for each in islice(load_split("test"), 5)]
    request |= {"delimiters": DELIMITERS, "max_tokens": MAX_TOKENS, "schema": {"enum": ["stepspec", "others"]}}
    request["many labels"] = [*range(30, 60)]  # more than vLLM's top tokens
    request_file, answer_file = tmp_path / "asked.json", tmp_path / "found.json"
    request_file.write_text(json.dumps(request))
    log = tmp_path / "log"
    words = [str(INSIDE), str(WEIGHTS), str(request_file), str(answer_file)]
    await asyncio.to_thread(vllm.run, words, log, 500.0)
    assert answer_file.exists(), log.read_text()[-3000:]
    found: dict[str, Any] = json.loads(answer_file.read_text())
    assert [tuple(ids) for ids in found["texts"]] == texts
    assert tuple(found["after"]) == texts[0][5:]
    for logprobs, chunk in zip(found["logprobs"], chunks, strict=True):
        assert logprobs == pytest.approx(chunk.logprobs, abs=ROUNDING)
    for ids, step, seen in zip(prompts, steps, found["seen"], strict=True):
        own = await torch_engine.verify(
            Verify(TokenBuffer(ids), step, [Probe(tuple(probe), tuple(labels)) for probe in probes])
        )
        assert seen["logprobs"] == pytest.approx(own.logprobs, abs=ROUNDING)
        assert tuple(seen["choices"]) == own.choices
        assert (seen["next"], tuple(seen["probe_choices"])) == (own.next_choice, own.probe_choices)
        assert seen["less"] == [None, own.next_choice]
        for distribution, expected in zip(seen["distributions"], own.probe_logprobs, strict=True):
            shown = [index for index, logprob in enumerate(distribution) if logprob is not None]
            assert shown
            assert [distribution[index] for index in shown] == pytest.approx(
                [expected[index] for index in shown], abs=ROUNDING
            )
    await torch_engine.aclose()
    abilities = ["choices", "forget", "json schema", "label logprobs", "logprobs", "relaxed acceptance", "scores"]
    assert found["abilities"] == abilities
    assert json.loads(found["held"]) in request["schema"]["enum"]
    assert found["no schema"][0] == "UsageError"
    assert "The JSON schema is not supported" in found["no schema"][1]
    assert found["context"] == 1024
    assert found["described"]["device"] == "vLLM on cpu"
    assert found["own speculation"] == "draft_model, 3 tokens"
    assert all(found["hot"])
    assert found["cached"][-1][0] > found["cached"][0][0], "the prefix cache does not serve generated tokens"
    assert found["forgot"][0] == 0 < found["forgot"][1], "`forget` did not clear the cache, or it does not fill again"
    # After `forget`, the calls without a group filled its cache. A verification finds what the text before it has read.
    assert found["groups"] == [[False, True], [True, True], [False, True], [True, True], [True, True]]
    assert 0 < found["metrics"]["accepted"] <= found["metrics"]["drafted"]
    assert found["from_other_loop"] == found["texts"][0]
    unknown, nowhere, wrong, too_long = found["errors"]
    assert unknown[0] == "UsageError"
    assert "Did you mean 'max_model_len'" in unknown[1]
    assert nowhere[0] == wrong[0] == too_long[0] == "ModelError"
    assert re.search(r"dtype: Input should be .*, got 'int3'\.$", wrong[1])
    assert "max_model_len (999999) is greater than the derived max_model_len" in too_long[1]
    assert "Token id 1000000 is not in the vocabulary" in found["wrong id"]
    assert "closed" in found["closed"]
    draft = TorchEngine.load(str(WEIGHTS / "draft"))
    labels = request["many labels"]
    seen = await draft.verify(Verify(TokenBuffer(prompts[0]), (), [Probe((), tuple(labels))]))
    assert found["labels"][0] == pytest.approx(seen.probe_logprobs[0], abs=ROUNDING)
    assert found["labels"][1] == pytest.approx(seen.probe_logprobs[0][:2], abs=ROUNDING)
    written = await collect(draft.generate(Generate(TokenBuffer(prompts[0]), Sampling(), Stop(4), logprobs=True)))
    assert found["beside labels"] == pytest.approx(written.logprobs, abs=ROUNDING)
    await draft.aclose()
