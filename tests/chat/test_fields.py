"""Request fields: each is honored, rejected by name, or listed as ignored. The OpenAPI document matches."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

import httpx
import pytest
from following import following_pair
from openai.types.chat import completion_create_params
from service import serving

from stepspec import RawPrompt, RequestOptions, Sampling, StepSpec, SyncStepSpec, UsageError
from stepspec.client import RemoteStepSpec
from stepspec.langchain import ChatStepSpec, StepSpecRunnable
from stepspec.serve.completions import CompletionRequest
from stepspec.serve.errors import RefusedError
from stepspec.serve.fields import Body
from stepspec.serve.refused import CHAT as REFUSED
from stepspec.serve.requests import ChatRequest
from stepspec.serve.responses_request import ResponsesRequest
from stepspec.serve.tokenize import TokenizeRequest

ASK = [{"role": "user", "content": "How many?"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
NAN = float("nan")
INTEGER = ("max_tokens", "max_completion_tokens", "thinking_token_budget", "top_k", "seed")
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
BOOLEAN = ("stream", "include_reasoning", "parallel_tool_calls", "enable_thinking")


HTTP = httpx.Client(timeout=60)


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with serving(following_pair()) as address:
        yield address.removesuffix("/v1")


@pytest.fixture(scope="module")
def document(root: str) -> Mapping[str, Any]:
    return HTTP.get(f"{root}/openapi.json").json()


def post(root: str, messages: Any = ASK, **fields: Any) -> httpx.Response:
    body = json.dumps({"messages": messages, **fields})
    return HTTP.post(f"{root}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})


def content(answer: httpx.Response) -> str:
    return answer.json()["choices"][0]["message"]["content"]


# Fields of other services

IGNORED = {
    # These change speed, price or storage but not the answer, or concern images and audio.
    "prediction": {"type": "content", "content": "a"},
    "service_tier": "flex",
    "prompt_cache_key": "a",
    "prompt_cache_options": {"ttl": 1},
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"a": 1},
    "mm_payload": "full",
    "return_mm_kwargs": True,
    "routed_experts_prompt_start": 0,
    # These have an effect only together with fields that are rejected.
    "length_penalty": 2.0,
    "truncation_side": "left",
    "spaces_between_special_tokens": False,
}
CHANGING = {
    "policy": "token",
    "deadline_s": 1.0,
    "max_thinking_s": 1.0,
    "best_of": 2,
    "use_beam_search": True,
    "prompt_logprobs": 1,
    "logprob_token_ids": [1],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "echo": True,
    "allowed_token_ids": [1],
    "bad_words": ["no"],
    "logits_processors": ["a"],
    "vllm_xargs": {"a": 1},
    "watermarking": True,
    "min_tokens": 5,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "repetition_detection": {"max_pattern_size": 3},
    "chat_template": "{{ messages }}",
    "documents": [{"text": "a"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 5,
    "web_search_options": {"a": 1},
    "guided_regex": "[0-9]+",
    "guided_grammar": "root ::= 'a'",
    "guided_whitespace_pattern": " ?",
    "functions": [{"name": "add"}],
    "function_call": {"name": "add"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "a"},
    "verbosity": "low",
    "moderation": {"a": 1},
}
"""Values that would change the answer or the response."""

OF_VLLM = {
    "messages", "model", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "max_tokens",
    "max_completion_tokens", "n", "presence_penalty", "response_format", "seed", "stop", "stream", "stream_options",
    "temperature", "top_p", "tools", "tool_choice", "reasoning_effort", "thinking_token_budget",
    "include_reasoning", "parallel_tool_calls", "user", "use_beam_search", "top_k", "min_p", "repetition_penalty",
    "watermarking", "length_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "skip_special_tokens", "spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side",
    "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words", "echo", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "documents", "chat_template", "chat_template_kwargs",
    "media_io_kwargs", "mm_processor_kwargs", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "return_token_offsets",
    "return_prompt_text", "mm_payload", "return_mm_kwargs", "cache_salt", "kv_transfer_params",
    "ec_transfer_params", "vllm_xargs", "repetition_detection", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "guided_whitespace_pattern",
}  # fmt: skip
"""The fields of vLLM 0.32, and those of earlier versions that clients still send."""


def test_every_field_of_openai_and_vllm_is_honored_rejected_or_listed() -> None:
    openai = get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
    assert {*openai, *OF_VLLM} - {*ChatRequest.model_fields, *REFUSED, *IGNORED} == set()
    assert not REFUSED.keys() & {*ChatRequest.model_fields, *IGNORED}
    assert CHANGING.keys() == REFUSED.keys()


def test_a_field_that_would_change_the_answer_is_rejected_by_name(root: str) -> None:
    for name, value in CHANGING.items():
        answer = post(root, **{name: value})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == name
        assert name in answer.json()["error"]["message"]


def test_every_field_is_accepted_with_a_value_that_changes_nothing(root: str) -> None:
    harmless = {name: [None, *values][-1] for name, values in REFUSED.items()}
    for fields in (harmless, dict.fromkeys(REFUSED), dict.fromkeys(ChatRequest.model_fields.keys() - {"messages"})):
        answer = post(root, **fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["metrics"]["ignored_fields"] == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logit_bias": {"x": 1.0}}, "token ids as keys, got 'x'"),
        ({"logit_bias": {"5": 101.0}}, "between -100 and 100"),
        ({"logit_bias": {str(id): 1.0 for id in range(1025)}}, "at most 1024 tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2"),
        ({"reasoning_effort": "low"}, "no variable for it"),
        ({"chat_template_kwargs": {"a": 1}}, "no variable 'a'"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "Leave out one"),
        ({"top_logprobs": 3}, "logprobs is false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be between 0 and 20"),
    ],
)
def test_wrong_values_of_fields_about_tokens_and_templates_are_rejected(
    root: str, fields: Mapping[str, Any], problem: str
) -> None:
    answer = post(root, **fields)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in fields


def test_penalties_biases_and_logprobs_are_honored(root: str) -> None:
    asked = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": 1.0, "7": -100}}
    assert content(post(root, **asked))
    answer = post(root, logprobs=True, top_logprobs=0).json()["choices"][0]
    message, listed = answer["message"], answer["logprobs"]["content"]
    assert message["content"] in "".join(each["token"] for each in listed)
    assert all(each["logprob"] <= 0 and bytes(each["bytes"]).decode() == each["token"] for each in listed)
    last = chunks(post(root, stream=True, logprobs=True))[-1]["choices"][0]
    assert len(last["logprobs"]["content"]) == len(listed)


@pytest.mark.parametrize("usage", [False, True])
def test_other_fields_are_listed_as_ignored(root: str, usage: bool) -> None:
    assert post(root, **IGNORED, thinking={"type": "on"}).json()["metrics"]["ignored_fields"] == [*IGNORED, "thinking"]
    options = {"include_usage": usage, "continuous_usage_stats": True}
    last = chunks(post(root, stream=True, stream_options=options, thinking=1))[-1]
    assert last["metrics"]["ignored_fields"] == ["thinking", "stream_options.continuous_usage_stats"]


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    ],
)
def test_every_field_for_a_schema_constrains_the_answer(root: str, fields: Mapping[str, Any]) -> None:
    assert json.loads(content(post(root, [{"role": "user", "content": "It is 7."}], **fields))) == {"n": 7}


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_the_answer_is_one_of_the_choices_verbatim(root: str, field: str) -> None:
    choices = ['so "be" it\n', "no"]
    fields = {field: choices if field == "guided_choice" else {"choice": choices}}
    assert content(post(root, **fields)) == choices[0]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(post(root, stream=True, **fields))]
    assert [delta["content"] for delta in deltas if delta.get("content")] == choices[:1]


@pytest.mark.anyio
@pytest.mark.parametrize("policy", ["target", "specreason", "two-level"])
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(policy: str, thinks: bool) -> None:
    pair = following_pair(thinks=thinks)
    (stop,) = pair.target.tokenizer.encode(" things")
    spec = StepSpec(policy=policy, pair=pair)
    unstopped = await spec.generate("Many things?")
    result = await spec.generate("Many things?", stop_token_ids=[stop])
    assert result.answer == "\n\nYou said 1"
    assert unstopped.answer.startswith(result.answer)
    assert result.finish_reason == "stop"
    assert len(result.steps) == len(unstopped.steps)


def test_the_service_accepts_stop_tokens(root: str) -> None:
    everything = list(range(100))
    assert content(post(root, stop_token_ids=everything)) == ""


# Errors


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "thinking_token_budget"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"top_p": 2}, "top_p", "top_p"),
        ({"stepspec": {"deadline_s": 0}}, "stepspec", "stepspec.deadline_s must be above 0"),
        ({"stepspec": {"max_thinking_s": 0}}, "stepspec", "stepspec.max_thinking_s must be above 0"),
        ({"stepspec": {"threshold": 5, "policy": "target"}}, "stepspec", "has 0"),
        ({"stepspec": {"polcy": "target"}}, "stepspec.polcy", "not permitted"),
        ({"n": 17}, "n", "less than or equal to 16"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": 5}, "guided_json", "guided_json"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice", "Leave out one"),
        ({"guided_json": SCHEMA, "tools": [ADD], "tool_choice": "add"}, "tool_choice", "Leave out guided_json"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "not supported"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "Did you mean 'json'"),
        *(({name: value}, name, "valid integer") for name in INTEGER for value in (True, "1", 1.5)),
        *(({name: value}, name, "valid number") for name in REAL for value in (True, "1")),
        *(({name: value}, name, "valid boolean") for name in BOOLEAN for value in (1, "yes")),
        ({"stop_token_ids": [True]}, "stop_token_ids.0", "valid integer"),
        ({"structured_outputs": {"json_object": "no"}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"x" * 10_000: 1}}, f"structured_outputs.{'x' * 42}...", "There is no kind"),
        *(
            ({**form, **stop}, next(iter(stop)), f"together with {next(iter(form))}")
            for form in (
                {"guided_json": SCHEMA},
                {"guided_choice": ["a"]},
                {"response_format": {"type": "json_object"}},
            )
            for stop in ({"stop": "a"}, {"stop": ["a"]}, {"stop_token_ids": [1]})
        ),
        ({"response_format": {"type": "json_object", "schma": SCHEMA}}, "response_format", "'schma'. Did you mean"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format", "has no JSON schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format", "'schema'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}},
            "response_format",
            "'x'",
        ),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": [5]}, "stop", "string"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "0 or more"),
        ({"tools": [{"type": "function"}]}, "tools", "Tool 1"),
        ({"messages": [5]}, "messages.0", "messages.0"),
        ({"messages": [{"role": "me", "content": "a"}]}, "messages", "Turn 1"),
        ({"stepspec": {"policy": "two-levle"}}, "stepspec.policy", "Did you mean 'two-level'"),
        ({"stepspec": {"policy": "stepspec"}}, "stepspec.policy", "'stepspec' is called 'two-level' since 0.2.0."),
        ({"model": "target@stepspec"}, "model", "The policy 'stepspec' is called 'two-level' since 0.2.0."),
        ({"model": "gpt-5"}, "model", "gpt-5"),
        ({"temperature": NAN}, None, "NaN"),
        ({"structured_outputs": {"\ud800": 1}}, "structured_outputs", "surrogate pair"),
        ({"\ud800": 1}, "\\ud800", "surrogate pair"),
        ({"tools": [{"type": "function", "x": [float("inf")]}]}, None, "Infinity"),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(root: str, fields: Any, param: str | None, message: str) -> None:
    error = post(root, **{"messages": ASK, **fields}).json()["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "at line 1, column 2"),
        (b'{"messages": [], "temperature": 1e999}', "1e999 is too large"),
        (b'{"messages": [], "seed": -Infinity}', "-Infinity"),
        (b"\xff", "byte 0 is not UTF-8"),
        (b"[" * 5000, "nested too deeply"),
        (b"[" + b"1," * 100_001 + b"1]", "more than 100000 values"),
        (b"9" * 5000, "digits"),
        (b"5", "must be a JSON object"),
    ],
)
def test_the_error_for_an_invalid_body_explains_it_and_names_no_field(root: str, body: bytes, message: str) -> None:
    sent = {"content": body, "headers": {"Content-Type": "application/json"}}
    error = HTTP.post(f"{root}/v1/chat/completions", **sent).json()["error"]  # type: ignore[arg-type]
    assert message in error["message"]
    assert error["param"] is None
    plain = HTTP.post(f"{root}/v1/chat/completions", content=json.dumps({"messages": ASK}))
    assert (plain.status_code, "application/json" in plain.text) == (400, True)


# The OpenAPI document


def test_the_document_describes_every_field_and_only_statuses_that_occur(document: Any) -> None:
    statuses = {path: set(route[method]["responses"]) for path, route in document["paths"].items() for method in route}
    of_texts = {"200", "400", "401", "403", "404", "408", "413", "429", "503", "default"}
    assert statuses == {
        **{path: {"200"} for path in ("/health", "/metrics", "/version", "/load")},
        "/ready": {"200", "503"},
        "/tokenize": of_texts,
        "/v1/models": {"200", "401", "403", "default"},
        "/v1/models/{name}": {"200", "401", "403", "404", "default"},
        "/v1/chat/completions": of_texts,
        "/v1/completions": of_texts,
        "/v1/responses": of_texts,
        "/v1/messages": of_texts,
        "/v1/messages/count_tokens": of_texts,
    }
    assert "content" not in document["paths"]["/health"]["get"]["responses"]["200"]
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields.keys() == {*ChatRequest.model_fields, *REFUSED}
    assert all(field["description"] for field in fields.values())


def test_responses_match_the_document(document: Any, root: str) -> None:
    responses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    response_schema = responses["200"]["content"]["application/json"]["schema"]
    chunk_schema = responses["200"]["content"]["text/event-stream"]["schema"]
    add = [{"role": "user", "content": "Please add 4."}]
    for messages, fields in (
        (ASK, {}),
        (ASK, {"include_reasoning": False}),
        (ASK, {"max_tokens": 5}),
        (add, {"tools": [ADD]}),
    ):
        check(post(root, messages, **fields).json(), response_schema, document)
        streamed = chunks(post(root, messages, stream=True, stream_options={"include_usage": True}, **fields))
        for chunk in streamed:
            check(chunk, chunk_schema, document)
    for fields in ({"temperature": -1}, {"model": "x"}, {"messages": []}):
        answer = post(root, **{"messages": ASK, **fields})
        form = responses[str(answer.status_code)]["content"]["application/json"]["schema"]
        check(answer.json(), form, document)
    for path in ("/v1/models", "/v1/models/target", "/v1/models/x"):
        answer = HTTP.get(root + path)
        route = document["paths"]["/v1/models" if path == "/v1/models" else "/v1/models/{name}"]["get"]
        check(
            answer.json(),
            route["responses"][str(answer.status_code)]["content"]["application/json"]["schema"],
            document,
        )


def check(value: Any, schema: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    """Assert that a value matches a JSON schema. Supports only the keywords that the document uses."""
    if "$ref" in schema:
        check(value, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
        return
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if (option.get("type") == "null") == (value is None)]
        assert len(options) == 1, (value, schema)
        check(value, options[0], document)
        return
    assert value in schema.get("enum", [value]), (value, schema)
    assert value == schema.get("const", value), (value, schema)
    if kind := schema.get("type"):
        types = {
            "object": dict,
            "array": list,
            "string": str,
            "integer": int,
            "number": (int, float),
            "null": type(None),
        }
        assert isinstance(value, bool) if kind == "boolean" else isinstance(value, types[kind]), (value, schema)  # type: ignore[arg-type]
    if isinstance(value, list):
        for each in value:
            check(each, schema.get("items", {}), document)
    if isinstance(value, dict):
        named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        assert set(schema.get("required", ())) <= value.keys(), (value, schema)
        assert others is not False or value.keys() <= named.keys(), (value.keys(), schema)
        for name, each in value.items():
            check(each, named.get(name, others if isinstance(others, dict) else {}), document)


# Python and LangChain


def refusals(pair: Any) -> Iterator[tuple[Callable[[], Any], str]]:
    """Yield calls with an unknown option, each with the suggested name."""
    spec, chat = StepSpec(pair=pair), ChatStepSpec(pair=pair)
    remote = RemoteStepSpec("http://127.0.0.1:9/v1")
    wrong: dict[str, Any] = {"max_token": 5}
    for answering in (spec, remote):
        yield lambda answering=answering: answering.generate("a", **wrong), "max_tokens"
        yield lambda answering=answering: answering.stream("a", **wrong), "max_tokens"
    yield lambda: spec.batch(["a"], max_new_tokens=5), "max_tokens"
    yield lambda: RequestOptions(**wrong), "max_tokens"
    yield lambda: RequestOptions.of(RequestOptions(), wrong), "max_tokens"
    for kind in (StepSpec, SyncStepSpec):
        yield lambda kind=kind: kind(polcy="token"), "policy"
        yield lambda kind=kind: kind(model="torch:a"), "target"
    yield lambda: RemoteStepSpec("http://127.0.0.1:9/v1", retry=5), "retries"
    for made in (ChatStepSpec, StepSpecRunnable):
        yield lambda made=made: made(target="torch:a"), "model"
        yield lambda made=made: made(temprature=1.0), "temperature"
    yield lambda: chat.invoke("a", **wrong), "max_tokens"
    yield lambda: next(iter(chat.stream("a", **wrong))), "max_tokens"
    yield lambda: chat.bind(**wrong).invoke("a"), "max_tokens"
    yield lambda: StepSpecRunnable(chat).invoke("a", **wrong), "max_tokens"
    yield lambda: StepSpecRunnable(chat).invoke("a", target="torch:a"), "model"


def test_unknown_options_are_rejected_with_the_nearest_name() -> None:
    for call, nearest in refusals(following_pair()):
        with pytest.raises((UsageError, ValueError), match=f"Did you mean '{nearest}'"):
            call()
    with pytest.raises(UsageError, match="either chat or settings"):
        StepSpecRunnable(ChatStepSpec(pair=following_pair()), policy="token")


@pytest.mark.parametrize("kind", [StepSpec, SyncStepSpec, RemoteStepSpec])
def test_the_signatures_of_calls_list_the_options_of_a_request(kind: type[Any]) -> None:
    for name in ("generate", "stream", "batch"):
        parameters = inspect.signature(getattr(kind, name)).parameters
        assert list(parameters)[3:] == list(RequestOptions.model_fields)


WRONG: Mapping[str, list[Any]] = {
    "prompt": [None, 5],
    "sampling": [5, {"temprature": 1.0}, {"temperature": -1.0}, {"logit_bias": 5}],
    "max_tokens": [0, -1, "1", True, NAN],
    "max_thinking_tokens": [-1, "1", True],
    "deadline_s": [0, -1.0, "1", True],
    "max_thinking_s": [0, -1.0, "1", True],
    "enable_thinking": [1, "no"],
    "reasoning_effort": [5, True],
    "chat_template_kwargs": [None, "x", []],
    "draft_chat_template_kwargs": [None, "x", []],
    "stop": [None, 5, [""], "", [None], ["a", 5]],
    "stop_token_ids": [None, 5, "1", [True], ["1"], [-1], [1 << 31]],
    "json_schema": ["x", 5, [SCHEMA]],
    "tools": [None, "x", ADD],
    "tool_choice": [None, {"type": "function"}],
    "parallel_tool_calls": [None, 1],
    "logprobs": [None, 1],
    "top_logprobs": [-1, 21, 1, "1", True],
    "session_id": [5, True],
    "cache_salt": [5, True],
    "step_deltas": [None, 1],
    "policy": [5, True],
}


@pytest.mark.anyio
async def test_an_option_of_a_wrong_type_is_rejected_by_name_before_any_request_is_sent() -> None:
    assert WRONG.keys() == RequestOptions.model_fields.keys()
    for spec in (StepSpec(pair=following_pair()), RemoteStepSpec("http://127.0.0.1:9/v1", retries=0)):
        for name, values in WRONG.items():
            for value in values:
                with pytest.raises(UsageError, match=rf"\b{name}|A {name} string|temp|logit_bias"):
                    await spec.generate("a", **{name: value})
        for stop in ({"stop": "a"}, {"stop_token_ids": [1]}):
            with pytest.raises(UsageError, match="together with json_schema"):
                await spec.generate("a", json_schema=SCHEMA, **stop)  # type: ignore[arg-type]
        for question in ("\ud800", 5, None, [5], RawPrompt("\ud800")):
            with pytest.raises(UsageError, match=r"Turn 1|The question|The conversation|The prompt"):
                await spec.generate(question)  # type: ignore[arg-type]


@pytest.mark.anyio
@pytest.mark.parametrize(("name", "values"), [("max_retries", [-1, 1.5, True]), ("timeout", [0, -1.0])])
async def test_timeouts_and_retry_counts_are_validated(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=name):
            await ChatStepSpec(pair=following_pair()).ainvoke("a", **{name: value})
        with pytest.raises(UsageError, match=name.removeprefix("max_")):
            RemoteStepSpec("http://127.0.0.1:9/v1", **{name.removeprefix("max_"): value})


@pytest.mark.anyio
async def test_stop_tokens_outside_the_vocabulary_are_rejected() -> None:
    async with StepSpec() as spec:
        num_ids = spec.pair.target.tokenizer.num_ids
        assert num_ids is not None
        with pytest.raises(UsageError, match=f"stop_token_ids: Token id {num_ids} is not in the vocabulary"):
            await spec.generate("a", stop_token_ids=[1, num_ids])
        assert (await spec.generate("a", stop_token_ids=[num_ids - 1], max_tokens=5)).counts.committed == 5


@pytest.mark.anyio
@pytest.mark.parametrize("value", [NAN, float("inf"), True, "1"])
async def test_non_finite_numbers_are_rejected_in_python_and_langchain(value: Any) -> None:
    pair = following_pair()
    spec, chat = StepSpec(pair=pair), ChatStepSpec(pair=pair)
    for name in (each for each in inspect.signature(Sampling).parameters if each not in ("logit_bias", "allowed")):
        with pytest.raises(UsageError, match=name):
            Sampling(**{name: value})
        with pytest.raises(UsageError, match=name):
            await chat.ainvoke("a", **{name: value})
    for name in ("max_tokens", "max_thinking_tokens", "max_thinking_s", "deadline_s"):
        with pytest.raises(UsageError, match=name):
            await spec.generate("a", **{name: value})
    for options in ({"tools": [{**ADD, "x": [NAN]}]}, {"json_schema": {"minimum": NAN}}):
        with pytest.raises(UsageError, match="NaN"):
            await spec.generate("a", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="NaN"):
        await spec.generate([{"role": "user", "content": "a", "x": {"y": NAN}}])
    if isinstance(value, float):
        with pytest.raises(ValueError, match="finite"):
            ChatStepSpec(temperature=value)


@pytest.mark.parametrize("name", ["seed", "max_tokens", "top_k", "thinking_token_budget", "temperature"])
def test_a_huge_number_is_a_bad_request(root: str, name: str) -> None:
    answer = post(root, **{name: 10**400})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text


def test_a_huge_number_is_an_error_in_python() -> None:
    with pytest.raises(UsageError, match="seed must be between"):
        Sampling(seed=10**5000)


def test_a_bias_is_of_a_token_of_the_vocabulary() -> None:
    request = CompletionRequest.validated({"prompt": "One.", "logit_bias": {"7": 1.0}})
    request.options((), num_ids=8)
    with pytest.raises(RefusedError, match="the ids end at 6"):
        request.options((), num_ids=7)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, ResponsesRequest])
def test_no_field_takes_half_of_a_surrogate_pair(kind: type[Body]) -> None:
    needed: dict[str, Any] = {"input": "a"} if kind is ResponsesRequest else {"messages": ASK, "prompt": "a"}
    for name in (*kind.model_fields, "unknown"):
        for value in ("a\ud800", ["a", "\udc00"], {"a": [{"\ud800": 1}]}, [{"type": "text", "text": "\ud800"}]):
            with pytest.raises(RefusedError, match="half of a surrogate pair") as caught:
                kind.parsed(json.dumps({**needed, name: value}).encode())
            assert caught.value.param == name
    assert kind.parsed(json.dumps({**needed, "user": "\U0001f600"}).encode())


def test_a_body_without_surrogates_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepspec.serve.fields.json.dumps", None)
    assert ResponsesRequest.parsed('{"input": "a \U0001f600 é"}'.encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_prompt_with_half_of_a_surrogate_pair_is_a_bad_request(root: str, path: str) -> None:
    body = json.dumps({"prompt": "a\ud800"})
    answer = HTTP.post(f"{root}{path}", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
