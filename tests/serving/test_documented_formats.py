"""Servers that need a GPU, played by scripts in the formats that their documentation and sources describe.

Nothing here was recorded from a running server. Real servers are in `test_remote` and, for llama.cpp, `test_llama_cpp`.
"""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from proxy import Call, Fault, Proxy, Script, ServerFixture

from stepspec.engines.protocol import Generate, Probe, Sampling, Stop, TokenBuffer, Verify, collect
from stepspec.engines.remote import RemoteEngine
from stepspec.errors import EngineError
from stepspec.mini import WEIGHTS

pytestmark = pytest.mark.anyio

TOKENIZER = str(WEIGHTS / "target")
NEXT = 9
"""The token that every script writes."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def load(proxy: Proxy) -> RemoteEngine:
    return RemoteEngine.load(f"{proxy.url}?tokenizer={TOKENIZER}&context=64")


def reply(fields: Any, status: int = 200) -> Fault:
    body = fields if isinstance(fields, str) else json.dumps(fields)
    return Fault(status=status, body=body.encode())


def models(owner: str, **fields: Any) -> Fault:
    card = {"id": "target", "object": "model", "created": 1764200000, "owned_by": owner}
    return reply({"object": "list", "data": [card | fields]})


def completion(call: Call, choice: dict[str, Any]) -> Fault:
    """Respond with one choice for each prompt."""
    prompt = call.fields["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    choices = [{"index": index, "finish_reason": "length"} | choice for index in range(len(prompt) if several else 1)]
    usage = {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1}
    return reply({"id": "cmpl-1", "object": "text_completion", "model": "target", "choices": choices, "usage": usage})


def sglang(call: Call) -> Fault:
    """https://docs.sglang.io/basic_usage/native_api.html and `sglang/srt/entrypoints/openai/protocol.py`."""
    if call.path == "/v1/models":
        return models("sglang", root=TOKENIZER, parent=None, max_model_len=64)
    if call.path == "/v1/completions":
        tops = {"text_offset": [], "token_logprobs": [-0.1], "tokens": [" a"], "top_logprobs": [{" a": -0.1}]}
        schema = call.fields.get("json_schema")
        if schema is not None and not isinstance(schema, str):
            return reply(
                {"object": "error", "message": "json_schema: Input should be a valid string", "code": 400}, 400
            )
        text = " a" if schema is None else '"stepspec"'
        return completion(call, {"text": text, "matched_stop": None, "logprobs": tops})
    if call.path == "/generate":
        ids, first = call.fields["input_ids"], call.fields["logprob_start_len"]
        read = [[None if index == first else -float(index), ids[index], None] for index in range(first, len(ids))]
        tops = [None, *([[-0.5, index, None]] for index in range(first + 1, len(ids)))]
        meta = {"id": "1", "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": len(ids)}
        meta |= {
            "input_token_logprobs": read,
            "input_top_logprobs": tops,
            "cached_tokens": first,
            "completion_tokens": 1,
        }
        return reply({"text": " a", "output_ids": [NEXT], "meta_info": meta})
    return reply({"detail": "Not Found"}, 404)


TENSORRT_FIELDS = {
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "logprobs",
    "stream",
    "stream_options",
    "stop",
    "seed",
}
TENSORRT_FIELDS |= {"top_p", "presence_penalty", "frequency_penalty", "logit_bias", "skip_special_tokens"}
TENSORRT_FIELDS |= {"stop_token_ids", "include_stop_str_in_output", "top_k", "min_p", "repetition_penalty"}


def tensorrt_llm(call: Call) -> Fault:
    """`tensorrt_llm/serve/openai_protocol.py`: fields that it does not know are refused."""
    if call.path == "/v1/models":
        return models("tensorrt_llm")
    if call.path == "/version":
        return reply({"version": "1.2.0"})
    if call.path == "/v1/completions":
        if unknown := call.fields.keys() - TENSORRT_FIELDS:
            message = f"[{{'type': 'extra_forbidden', 'loc': ('body', '{min(unknown)}')}}]"
            return reply({"object": "error", "message": message, "type": "BadRequestError", "code": 400}, 400)
        tops = {"text_offset": [0], "token_logprobs": [-0.1], "tokens": [" a"], "top_logprobs": [{" a": -0.1}]}
        return completion(call, {"text": " a", "token_ids": None, "logprobs": tops, "stop_reason": None})
    return reply({"detail": "Not Found"}, 404)


def tgi(call: Call) -> Fault:
    """`router/src/lib.rs` of text-generation-inference: prompts are text, and a chunk that is not the last one has an
    empty finish reason."""
    if call.path == "/v1/models":
        return models("target")
    if call.path == "/v1/completions":
        prompt = call.fields["prompt"]
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return reply("Failed to deserialize the JSON body into the target type: prompt: no variant of Prompt", 422)
        if not call.fields.get("stream"):
            return completion(call, {"text": " a", "logprobs": None})
        chunks = [("Tom", ""), (" has", ""), (" 3", "length")]
        found = [{"index": 0, "text": text, "logprobs": None, "finish_reason": end} for text, end in chunks]
        lines = [f"data:{json.dumps({'object': 'text_completion', 'choices': [each]})}\n\n" for each in found]
        return Fault(status=200, body="".join([*lines, "data: [DONE]\n\n"]).encode(), content_type="text/event-stream")
    return reply("", 404)


def as_numpy_file(values: Sequence[float]) -> str:
    file = io.BytesIO()
    np.save(file, np.array(values, dtype=np.float32)[:, None])
    return base64.b64encode(file.getvalue()).decode()


def vllm(call: Call) -> Fault:
    """vLLM 0.32 on a GPU with `--enable-scale-out`: `vllm/entrypoints/scale_out/token_in_token_out/protocol.py`.

    It does not score what its prefix cache holds. A text whose last token is 7 counts as held.
    """
    if call.path == "/v1/models":
        return models("vllm", root=TOKENIZER, max_model_len=64)
    if call.path == "/v1/completions":
        return completion(call, {"text": " a", "token_ids": [NEXT]})
    if call.path == "/inference/v1/generate":
        ids, sampling = call.fields["token_ids"], call.fields["sampling_params"]
        wanted = [row[0] for row in sampling["prompt_logprob_token_ids"]]
        assert wanted == ids[sampling["prompt_logprob_start"] + 1 :], "the ids that the text has at these places"
        held = ids[-1] == 7 and len(ids) > 3 and not sampling["skip_reading_prefix_cache"]
        scores = None if held else as_numpy_file([-float(id) for id in wanted])
        choice = {"index": 0, "logprobs": None, "finish_reason": "length", "token_ids": [NEXT]}
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 2}}
        return reply({"request_id": "1", "choices": [choice], "prompt_token_id_logprobs": scores, "usage": usage})
    return reply({"error": {"message": "Not Found"}}, 404)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (sglang, ("SGLang", True, False, 20, True, "generate", "json_schema as text")),
        (tensorrt_llm, ("TensorRT-LLM 1.2.0", True, False, 5, True, None, None)),
        (tgi, ("a server", False, False, 0, False, None, None)),
        (vllm, ("vLLM", True, True, 0, False, "inference", None)),
    ],
    ids=["SGLang", "TensorRT-LLM", "TGI", "vLLM"],
)
async def test_what_a_server_can_do_is_found_by_asking(
    server: ServerFixture, script: Script, expected: tuple[Any, ...]
) -> None:
    engine = load(server(script))
    found = engine.server
    flags = (found.kind, found.takes_ids, found.gives_ids, found.num_logprobs, found.written_logprobs)
    assert (*flags, found.scores, found.schema_field) == expected
    assert found.shows_special
    assert ("cached scores" in engine.abilities) == (found.scores is not None)
    await engine.aclose()


@pytest.mark.parametrize(
    ("script", "fields"),
    [
        (sglang, {"/v1/completions": "cache_salt", "/generate": "extra_key"}),
        (tensorrt_llm, {}),
        (tgi, {}),
        (vllm, {"/v1/completions": "cache_salt", "/inference/v1/generate": "cache_salt"}),
    ],
    ids=["SGLang", "TensorRT-LLM", "TGI", "vLLM"],
)
async def test_calls_of_a_group_have_its_salt_on_servers_that_know_it(
    server: ServerFixture, script: Script, fields: dict[str, str]
) -> None:
    proxy = server(script)
    engine = load(proxy)
    salts: dict[tuple[str | None, int], set[Any]] = {}
    for number, group in enumerate((None, "a", "a", "b", "forget", "a")):
        if group == "forget":
            await engine.forget()
            continue
        start, prompt = len(proxy.calls), TokenBuffer([1, 2, 3], group=group)
        await engine.verify(Verify(prompt, [5, 6], [Probe((7,), (1,))], scores=bool(engine.server.scores)))
        calls = proxy.calls[start:]
        assert {call.path for call in calls} >= fields.keys()
        salts[group, number] = {call.fields.get(fields.get(call.path, "cache_salt")) for call in calls}
    assert salts["a", 1] == salts["a", 2]
    assert all(len(each) == 1 for each in salts.values())
    different = [salts[each].pop() for each in ((None, 0), ("a", 1), ("b", 3), ("a", 5))]
    assert len(set(different)) == (4 if fields else 1)
    assert different[0] is None
    assert all(len(salt) == 64 for salt in different[1:] if fields), "vLLM takes at most 128 plain characters"
    await engine.aclose()


async def test_sglang_scores_a_step_after_its_prefix(server: ServerFixture) -> None:
    proxy = server(sglang)
    engine = load(proxy)
    found = await engine.verify(Verify(TokenBuffer([1, 2, 3]), [5, 6]))
    assert (found.logprobs, found.choices, found.next_choice) == ((-3.0, -4.0), (3, 4), NEXT)
    assert proxy.calls[-1].fields["logprob_start_len"] == 2
    await engine.aclose()


@pytest.mark.parametrize(("step", "asked"), [([5, 6], 1), ([5, 7], 2)], ids=["not cached", "cached"])
async def test_vllm_scores_a_step_even_if_its_cache_holds_it(
    server: ServerFixture, step: list[int], asked: int
) -> None:
    proxy = server(vllm)
    engine = load(proxy)
    num_calls = len(proxy.calls)
    found = await engine.verify(Verify(TokenBuffer([1, 2, 3]), step))
    assert (found.logprobs, found.next_choice) == (tuple(-float(id) for id in step), NEXT)
    assert len(proxy.calls) - num_calls == asked
    await engine.aclose()


@pytest.mark.parametrize("scores", [None, "", as_numpy_file([-1.0])], ids=["none", "no file", "too few"])
async def test_scores_that_never_come_are_an_error(server: ServerFixture, scores: str | None) -> None:
    def without(call: Call) -> Fault:
        answer = vllm(call)
        if not call.path.endswith("generate") or len(call.fields["token_ids"]) == 3:  # while it is asked what it can do
            return answer
        return reply(json.loads(answer.body) | {"prompt_token_id_logprobs": scores})

    engine = load(server(without))
    with pytest.raises(EngineError, match="log-probabilities that do not match the prompt"):
        await engine.verify(Verify(TokenBuffer([1, 2, 3]), [5, 6]))
    await engine.aclose()


async def test_a_route_that_returns_no_scores_is_not_used(server: ServerFixture) -> None:
    def without(call: Call) -> Fault:
        answer = vllm(call)
        if not call.path.endswith("generate"):
            return answer
        return reply(json.loads(answer.body) | {"prompt_token_id_logprobs": None})

    engine = load(server(without))
    assert engine.server.scores is None
    await engine.aclose()


async def test_tgi_streams_text(server: ServerFixture) -> None:
    engine = load(server(tgi))
    call = Generate(TokenBuffer(engine.tokenizer.encode_text("Who?")), Sampling(), Stop(20))
    chunk = await collect(engine.generate(call))
    assert (engine.tokenizer.decode(chunk.ids), chunk.end) == ("Tom has 3", "length")
    await engine.aclose()
