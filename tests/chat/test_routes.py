"""The routes besides chat completions, several answers to one request, several pairs, metrics, and step events."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from following import THOUGHTS, following_pair
from service import serving

from stepspec import __version__
from stepspec.serve import ServiceLimits, Settings, bodies
from stepspec.serve.admission import Admission
from stepspec.serve.merged_metrics import merged_metrics
from stepspec.serve.monitor import COUNTERS, HISTOGRAMS, Monitor, Outcome

ASK: list[Any] = [{"role": "user", "content": "How many?"}]
ANSWER = "\n\nYou said 1 things, How many? among them."
PROMPT = '{"messages": [{"role": "user", "content": "How many?"}], "tools": null}\n<|assistant|>'
THOUGHT = "".join(THOUGHTS)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pairs = {"small": following_pair(name="small target"), "plain": following_pair(thinks=False)}
    with serving(pairs, "specreason") as base_url:
        yield base_url


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as opened:
        yield opened


def test_a_prompt_that_leaves_the_thinking_open_is_followed_by_thinking_and_answer(client: openai.OpenAI) -> None:
    request: Any = {"model": "small", "prompt": f"{PROMPT}<think>"}
    whole = client.completions.create(**request)
    assert whole.choices[0].text == f"{THOUGHT}</think>{ANSWER}"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens > whole.usage.completion_tokens_details.reasoning_tokens > 0  # type: ignore[union-attr, operator]
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].model_extra["metrics"]["stepspec"]["counts"]["steps_accepted"] == 2  # type: ignore[index]


def test_completions_take_several_prompts_and_answers_and_return_logprobs(client: openai.OpenAI) -> None:
    request: Any = {"model": "plain", "prompt": [PROMPT, PROMPT], "n": 2, "logprobs": 2, "stop": "things"}
    found = client.completions.create(**request)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in found.choices} == {"\n\nYou said 1 "}
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens).startswith("\n\nYou said 1")
    assert len(logprobs.token_logprobs or ()) == len(logprobs.text_offset or ()) == len(logprobs.tokens)
    ids = httpx.post(f"{str(client.base_url).removesuffix('/v1/')}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert client.completions.create(model="small", prompt=ids).choices[0].text == ANSWER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 8}, "prompt"),
        ({"prompt": [1 << 40]}, None),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "thinking_token_budget": 5}, "thinking_token_budget"),
        ({}, "prompt"),
    ],
)
def test_invalid_completion_requests_are_rejected_by_name(address: str, fields: Any, param: str | None) -> None:
    answer = httpx.post(f"{address}/completions", json=fields)
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").partition(".")[0] == (param or "")


def test_several_answers_to_one_chat_request(client: openai.OpenAI) -> None:
    request: Any = {"model": "small", "messages": ASK, "n": 3}
    whole = client.chat.completions.create(**request)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(i, ANSWER) for i in range(3)]
    one = client.chat.completions.create(model="small", messages=ASK).usage
    assert whole.usage is not None
    assert one is not None
    assert whole.usage.prompt_tokens == one.prompt_tokens
    assert whole.usage.completion_tokens == 3 * one.completion_tokens
    assert whole.model_extra["metrics"]["stepspec"] is None  # type: ignore[index]
    with client.chat.completions.stream(**request) as events:
        final = events.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER] * 3


@pytest.mark.parametrize("seed", [None, 5, 2**31 - 1])
def test_each_answer_to_a_prompt_has_random_numbers_of_its_own(seed: int | None) -> None:
    pair = following_pair(thinks=False)
    target: Any = pair.target
    with serving(pair, "target") as address:
        for path, body in (("chat/completions", {"messages": ASK}), ("completions", {"prompt": [PROMPT, PROMPT]})):
            target.calls.clear()
            fields = {**body, "n": 3, "seed": seed, "temperature": 1.0}
            assert httpx.post(f"{address}/{path}", json=fields).status_code == 200
            num_prompts = len(body.get("prompt", [PROMPT]))
            seeds = sorted(call.sampling.seed for call in target.calls)
            assert len(seeds) == 3 * num_prompts
            assert len(set(seeds)) == 3
            assert seed in (None, *seeds)


def test_a_pair_and_its_policy_are_chosen_by_the_name_of_the_model(client: openai.OpenAI) -> None:
    for model, thinks, policy in (("plain", False, "specreason"), ("small@target", True, "target")):
        metrics = client.chat.completions.create(model=model, messages=ASK).model_extra["metrics"]["stepspec"]  # type: ignore[index]
        assert (metrics["thinks"], metrics["policy"]) == (thinks, policy)
    with pytest.raises(openai.NotFoundError, match="small@token"):
        client.chat.completions.create(model="small@tokens", messages=ASK)


def test_the_request_chooses_threshold_and_exact_mode(client: openai.OpenAI) -> None:
    def steps(**speculation: Any) -> Any:
        found = client.chat.completions.create(model="small", messages=ASK, extra_body={"stepspec": speculation})
        metrics = found.model_extra["metrics"]["stepspec"]  # type: ignore[index]
        return metrics["counts"]["steps_accepted"], metrics["policy"]

    assert steps() == (2, "specreason")
    assert steps(threshold=9) == (2, "specreason")
    with pytest.raises(openai.BadRequestError, match="must be at most 9, got 9"):
        steps(threshold=9.5)
    assert steps(exact=True)[1] == "exact"
    assert steps(exact=True, policy="token")[1] == "token"


def test_step_events_are_sent_only_if_they_are_asked_for(address: str) -> None:
    def events(**fields: Any) -> list[str]:
        body = {"model": "small", "messages": ASK, "stream": True, **fields}
        return re.findall(r'"type": "(step\.\w+)"', httpx.post(f"{address}/chat/completions", json=body).text)

    assert events() == []
    assert events(stepspec={"events": True}) == ["step.proposed", "step.judged"] * 2
    assert events(stepspec={"events": True}, include_reasoning=False) == []


def test_tokens_of_a_prompt_and_of_a_conversation(address: str) -> None:
    root = address.removesuffix("/v1")
    prompt = httpx.post(f"{root}/tokenize", json={"prompt": "One two.", "return_token_strs": True}).json()
    assert (prompt["count"], prompt["token_strs"]) == (3, ["One", " two", "."])
    bare = httpx.post(f"{root}/tokenize", json={"prompt": "One two.", "add_special_tokens": False}).json()
    assert bare["tokens"] == prompt["tokens"], "this model has no token that begins every text"
    chat = httpx.post(f"{root}/tokenize", json={"model": "plain", "messages": ASK}).json()
    assert chat["count"] == len(chat["tokens"])
    for fields in ({}, {"prompt": "a", "messages": ASK}, {"prompt": 5}, {"messages": [{"role": "me"}]}):
        assert httpx.post(f"{root}/tokenize", json=fields).status_code == 400


def test_request_ids_are_returned_and_harmless(address: str) -> None:
    url = f"{address}/models"
    assert httpx.get(url, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for odd in ("a b", "x" * 200, "a\tb"):
        assert httpx.get(url, headers={"X-Request-Id": odd}).headers["x-request-id"] != odd
        body = {"messages": ASK, "request_id": odd}
        assert httpx.post(f"{address}/chat/completions", json=body).json()["error"]["param"] == "request_id"


def test_metrics_have_every_name_and_count_what_was_answered(client: openai.OpenAI, address: str) -> None:
    root = address.removesuffix("/v1")
    labels, engine = 'model_name="small",policy="lookahead"', 'engine="0",'

    def value(name: str, more: str = "") -> float:
        found = re.findall(rf"^{name}{{{more}{labels}}} (\S+)$", httpx.get(f"{root}/metrics").text, re.M)
        return float(found[0]) if found else 0.0

    answer = client.chat.completions.create(model="small@lookahead", messages=ASK)
    usage, counts = answer.usage, answer.model_extra["metrics"]["stepspec"]["counts"]  # type: ignore[index]
    assert usage is not None
    text = httpx.get(f"{root}/metrics").text
    names = {*(f"stepspec_{name}" for name in HISTOGRAMS), *(f"stepspec_{name}_total" for name in COUNTERS)}
    names |= {f"vllm:{vllm}" for _, vllm, _ in HISTOGRAMS.values() if vllm}
    names |= {f"vllm:{vllm}_total" for _, vllm in COUNTERS.values() if vllm}
    assert {name for name in names if name.removesuffix("_total") not in text} == set()
    for name, more in (("stepspec_committed_tokens_total", ""), ("vllm:generation_tokens_total", engine)):
        assert value(name, more) == usage.completion_tokens
    assert value("vllm:prompt_tokens_total", engine) == usage.prompt_tokens
    assert value("stepspec_time_to_first_thought_seconds_count") == 1
    assert value("stepspec_target_passes_total") == counts["target_passes"] > 0
    assert 'stepspec_requests_total{model_name="small",outcome="stop",policy="lookahead"} 1.0' in text
    assert 'stepspec_engine_up{model_name="small",role="draft"} 1.0' in text
    assert f'stepspec_build_info{{version="{__version__}"}} 1.0' in text
    merged = merged_metrics({"a": text.encode()}).decode()
    assert f'stepspec_build_info{{replica="a",version="{__version__}"}} 1.0' in merged
    for each in (text, merged):
        assert re.search(r"^process_resident_memory_bytes\S* [1-9]", each, re.M)


def test_outcomes_have_the_names_of_vllm_in_its_metric() -> None:
    pair = following_pair()
    monitor = Monitor(Admission(ServiceLimits()), {"a": pair}, "target")
    outcomes: list[Outcome] = ["stop", "tool_calls", "length", "cancelled", "error"]
    for outcome in outcomes:
        monitor.ended(("a", "target"), outcome, pair)
    found = re.findall(
        r'^vllm:request_success_total{.*finished_reason="(\w+)".*} (\S+)$', monitor.text().decode(), re.M
    )
    assert dict(found) == {"stop": "2.0", "length": "1.0", "abort": "1.0", "error": "1.0"}
    assert len(found) == 4


def test_requests_beyond_the_queue_are_turned_away_at_once_and_counted() -> None:
    settings = Settings(limits=ServiceLimits(max_running=1, max_queued=1))
    pair = following_pair(delay_s=1.5)
    with serving(pair, "target", settings) as address, ThreadPoolExecutor(8) as pool, httpx.Client() as shared:
        root = address.removesuffix("/v1")

        def ask(_: int) -> tuple[int, float, str | None]:
            since = time.perf_counter()
            answer = shared.post(f"{address}/chat/completions", json={"messages": ASK}, timeout=30)
            return answer.status_code, time.perf_counter() - since, answer.headers.get("Retry-After")

        answers = list(pool.map(ask, range(6)))
        refused = [answer for answer in answers if answer[0] == 503]
        assert len(refused) == 4
        assert all(seconds < 1 and retry == "1" for _, seconds, retry in refused)
        assert [status for status, _, _ in answers].count(200) == 2
        counts = re.findall(r'^stepspec_rejections_total{reason="\w+"} (\S+)$', httpx.get(f"{root}/metrics").text, re.M)
        assert sum(map(float, counts)) == 4
        assert 'vllm:num_requests_running{engine="0",model_name="target"} 0.0' in httpx.get(f"{root}/metrics").text


def test_requests_that_are_being_read_are_limited_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ARRIVAL_S", 2.0)
    with serving(following_pair(), settings=Settings(limits=ServiceLimits(max_running=1, max_queued=0))) as address:
        host, port = httpx.URL(address).host, httpx.URL(address).port or 0
        with socket.create_connection((host, port), timeout=30) as slow:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
            time.sleep(0.1)
            for path in ("/v1/chat/completions", "/tokenize"):
                answer = httpx.post(address.removesuffix("/v1") + path, json={"messages": ASK})
                assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "1")
                assert "--max-running and --max-queued allow together (1)" in answer.json()["error"]["message"]
            answered = b"".join(iter(lambda: slow.recv(9_000), b""))
        assert b" 408 " in answered
        assert b"request_timeout" in answered
        assert httpx.post(f"{address}/chat/completions", json={"messages": ASK}).status_code == 200


def test_the_service_is_ready_until_its_queue_is_full() -> None:
    settings = Settings(limits=ServiceLimits(max_running=1, max_queued=0))
    with serving(following_pair(delay_s=3), "target", settings) as address:
        root = address.removesuffix("/v1")
        assert httpx.get(f"{root}/ready").status_code == 200
        drafts = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="target",policy="target"} 0.0'
        assert drafts in httpx.get(f"{root}/metrics").text, "load generators look for it before the first request"

        def ask() -> None:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{address}/chat/completions", json={"messages": ASK}, timeout=1)

        thread = threading.Thread(target=ask)
        thread.start()
        deadline = time.monotonic() + 5
        while httpx.get(f"{root}/ready").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert httpx.get(f"{root}/ready").status_code == 503
        assert httpx.get(f"{root}/load").json() == {"server_load": 1}
        thread.join()
        while httpx.get(f"{root}/ready").status_code == 503 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert httpx.get(f"{root}/ready").status_code == 200
