"""What servers get wrong, each a sentence that names the server and says what to do. The server here is a script."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from proxy import Call, Fault, Proxy, serving

from stepspec import StepSpec, load_pair
from stepspec.engine import Sampling, Stop, TokenBuffer, collect
from stepspec.errors import ContextError, EngineError, ModelError, UsageError
from stepspec.mini import WEIGHTS
from stepspec.remote import RemoteEngine

pytestmark = pytest.mark.anyio

TOKENIZER = str(WEIGHTS / "target")
Script = Callable[[Call], Fault]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def said(fields: Any, status: int = 200, **settings: Any) -> Fault:
    return Fault(status=status, body=json.dumps(fields).encode(), **settings)


def events(*found: Any, done: bool = True) -> Fault:
    lines = [f"data: {json.dumps(each) if not isinstance(each, str) else each}\n\n" for each in found]
    body = "".join(lines) + ("data: [DONE]\n\n" if done else "")
    return Fault(status=200, body=body.encode(), content_type="text/event-stream")


def piece(*ids: int, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": list(ids), "finish_reason": None} | fields]}


MODELS = {"data": [{"id": "target", "root": TOKENIZER, "max_model_len": 64, "owned_by": "vllm"}]}


def well(call: Call) -> Fault:
    """What a server says that is all right, asked for one token."""
    if call.path.endswith("/models"):
        return said(MODELS)
    if call.path.endswith("/completions"):
        rows = [None, *({"6": {"logprob": -1.0, "rank": 1}},) * 2] if "prompt_logprobs" in call.fields else None
        choice = piece(9, finish_reason="length", prompt_logprobs=rows)["choices"][0]
        return said({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    return said({}, 404)


@pytest.fixture
def server() -> Iterator[Callable[[Script], Proxy]]:
    with ExitStack() as stack:
        yield lambda script: stack.enter_context(serving(Proxy(None, script)))


ServerFixture = Callable[[Script], Proxy]


def load(url: str) -> RemoteEngine:
    return RemoteEngine.load(url)


def test_a_server_that_answers_well_is_served(server: ServerFixture) -> None:
    engine = load(server(well).url)
    assert (engine.name, engine.max_context) == ("target", 64)
    assert engine.abilities == {"scores", "choices"}


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (lambda call: Fault(status=200, body=b"<html>hello", content_type="text/html"), "a web page.*ends in /v1"),
        (lambda call: Fault(status=200, body=b'{"data": [{"id"'), "JSON that cannot be read"),
        (lambda call: said({"data": 7}), "no list of models"),
        (lambda call: said([]), "JSON that is no object"),
        (
            lambda call: said({"error": {"message": "no such key"}}, 401),
            "refuses the key.*no such key.*STEPSPEC_API_KEY",
        ),
        (lambda call: said({"detail": "Not Found"}, 404), "does not have this model or path.*Not Found"),
        (lambda call: said({"error": "on fire"}, 500), "failed or is overloaded.*on fire"),
        (lambda call: Fault(status=200, cut_after=0, body=b"", reset=True), "http://127.0.0.1"),
        (lambda call: said(MODELS) if "models" in call.path else said({"message": "no text"}, 400), "refused.*no text"),
        (lambda call: said(MODELS) if "models" in call.path else said({"choices": []}), "0 choices"),
        (lambda call: said(MODELS) if "models" in call.path else said({"choices": 3}), "no completion.*choices"),
        (lambda call: said(MODELS) if "models" in call.path else said({"error": {"message": "x", "code": 404}}), "404"),
    ],
)
def test_what_is_no_such_server_is_refused_when_it_is_loaded(
    server: ServerFixture, script: Script, sentence: str
) -> None:
    proxy = server(script)
    with pytest.raises(ModelError, match=f"(?s){sentence}") as caught:
        load(proxy.url)
    assert proxy.url in str(caught.value)


def test_a_port_where_nobody_is_is_named() -> None:
    with pytest.raises(ModelError, match=r"Nothing answers at http://127.0.0.1:9/v1 .*host and port"):
        load("http://127.0.0.1:9/v1")


def test_tls_where_there_is_none_is_named(server: ServerFixture) -> None:
    proxy = server(well)
    with pytest.raises(ModelError, match=r"No TLS connection.*SSL_CERT_FILE"):
        load(proxy.url.replace("http", "https"))


def test_a_model_that_the_server_does_not_have_is_named(server: ServerFixture) -> None:
    with pytest.raises(ModelError, match=r"no model 'targt'\. Did you mean 'target'\?"):
        load(server(well).url + "#targt")


def test_one_of_several_models_must_be_chosen(server: ServerFixture) -> None:
    two = {"data": [{"id": "one"}, {"id": "two"}]}
    with pytest.raises(ModelError, match=r"has 2 models; write one behind '#': one, two"):
        load(server(lambda call: said(two)).url)


def test_a_tokenizer_that_nobody_knows_is_asked_for(server: ServerFixture, tmp_path: Path) -> None:
    models = {"data": [{"id": "some-model", "root": str(tmp_path)}]}
    proxy = server(lambda call: said(models) if "models" in call.path else well(call))
    with pytest.raises(ModelError, match=r"tokenizer.*\?tokenizer=NAME"):
        load(proxy.url)
    assert load(f"{proxy.url}?tokenizer={TOKENIZER}").name == "some-model"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("http:", "does not name a model"),
        ("http://", "names no host"),
        ("http://127.0.0.1:9/v1?timout=3", "no option of an address 'timout'.*Did you mean 'timeout'"),
        ("http://127.0.0.1:9/v1?timeout=soon", "timeout='soon' of an address is not a number"),
        ("http://127.0.0.1:9/v1?key_env=NOBODY_SET_THIS", "NOBODY_SET_THIS.*is not set"),
    ],
)
def test_an_address_that_is_none_is_refused(spec: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load_pair(spec, "torch:nowhere")


async def written(engine: RemoteEngine, max_tokens: int = 8) -> tuple[int, ...]:
    chunk = await collect(engine.generate(TokenBuffer([5, 6, 7]), Sampling(), Stop(max_tokens)))
    await engine.aclose()
    return chunk.ids


def streaming(answer: Fault) -> Script:
    return lambda call: answer if call.fields.get("stream") else well(call)


async def test_a_stream_is_read_to_its_end(server: ServerFixture) -> None:
    answer = events(piece(8, 9), piece(10, finish_reason="length"), {"choices": [], "usage": {"prompt_tokens": 3}})
    assert await written(load(server(streaming(answer)).url)) == (8, 9, 10)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (events(piece(8), done=False), "ended its answer in the middle"),
        (events(piece(8, finish_reason="content_filter")), "unknown reason 'content_filter'"),
        (events(piece(8), '{"choices": [{"te'), "JSON that cannot be read"),
        (events(piece(8), {"error": {"message": "out of memory", "code": 500}}), "out of memory"),
        (events(piece(8), piece(99_999_999)), "a token that the tokenizer does not have"),
        (events({"choices": [{"text": "a"}]}), "text without token ids"),
        (Fault(status=200, body=b"<html>", content_type="text/html"), "a web page"),
        (said({"message": "boo"}, 418), "refused the call .418: boo"),
    ],
)
async def test_what_goes_wrong_in_a_stream_is_an_error(server: ServerFixture, answer: Fault, sentence: str) -> None:
    proxy = server(streaming(answer))
    engine = load(proxy.url)
    with pytest.raises(EngineError, match=sentence) as caught:
        await written(engine)
    assert proxy.url in str(caught.value)


async def test_a_prompt_that_is_too_long_is_a_context_error(server: ServerFixture) -> None:
    message = {"error": {"message": "This model's maximum context length is 2 tokens."}}
    engine = load(server(streaming(said(message, 400))).url)
    with pytest.raises(ContextError, match="maximum context length is 2"):
        await written(engine)
    with pytest.raises(ContextError, match="context of 64"):
        await collect(engine.generate(TokenBuffer([5] * 64), Sampling(), Stop(1)))


async def test_a_server_that_says_nothing_is_given_up(server: ServerFixture) -> None:
    proxy = server(streaming(Fault(hangs=True, status=200)))
    engine = load(proxy.url + "?timeout=0.3")
    with pytest.raises(EngineError, match=r"sent nothing for 0.3 s"):
        await written(engine)


async def test_what_may_pass_is_tried_again_and_the_server_is_obeyed_as_to_when(server: ServerFixture) -> None:
    answers = iter(
        [said({}, 503), said({}, 429, headers=(("Retry-After", "1"),)), events(piece(8, finish_reason="length"))]
    )
    proxy = server(lambda call: next(answers) if call.fields.get("stream") else well(call))
    assert await written(load(proxy.url)) == (8,)
    assert sum(bool(call.fields.get("stream")) for call in proxy.calls) == 3


async def test_it_is_not_tried_for_ever(server: ServerFixture) -> None:
    proxy = server(streaming(said({"error": {"message": "full"}}, 503)))
    with pytest.raises(EngineError, match=r"overloaded \(503: full"):
        await written(load(proxy.url + "?retries=2"))
    assert sum(bool(call.fields.get("stream")) for call in proxy.calls) == 3


async def test_the_key_comes_from_the_environment_and_is_never_shown(
    server: ServerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "a-secret")
    proxy = server(streaming(said({"message": "no"}, 401)))
    engine = load(proxy.url + "?key_env=MY_KEY")
    with pytest.raises(EngineError, match="MY_KEY") as caught:
        await written(engine)
    assert all(call.headers["authorization"] == "Bearer a-secret" for call in proxy.calls)
    assert "a-secret" not in str(caught.value) + str(engine.describe()) + repr(engine)


async def test_calls_of_one_request_are_held_together_by_headers(server: ServerFixture) -> None:
    answer = events(piece(8, finish_reason="length"))
    answer = Fault(status=200, body=answer.body, content_type=answer.content_type, headers=(("X-Token", "replica-3"),))
    proxy = server(streaming(answer))
    engine = load(proxy.url + "?session_header=X-Flow&replay_headers=x-token")
    one, other = TokenBuffer([5, 6]), TokenBuffer([5, 6])
    for buffer in (one, one, other):
        await collect(engine.generate(buffer, Sampling(), Stop(4)))
    await engine.aclose()
    first, second, third = (call.headers for call in proxy.calls if call.fields.get("stream"))
    assert first["x-flow"] == second["x-flow"] != third["x-flow"]
    assert "x-token" not in first
    assert second["x-token"] == "replica-3"
    assert "x-token" not in third


async def test_a_policy_that_needs_what_the_server_does_not_give_is_refused(server: ServerFixture) -> None:
    def plain(call: Call) -> Fault:
        return said({"message": "unknown field"}, 400) if "prompt_logprobs" in call.fields else well(call)

    pair = load_pair(server(plain).url, f"torch:{WEIGHTS / 'draft'}")
    assert pair.target.abilities == set()
    with pytest.raises(UsageError, match=r"log-probabilities of proposed tokens.*'specreason'"):
        StepSpec(policy="stepspec", pair=pair)
    StepSpec(policy="specreason", pair=pair)
    await pair.aclose()


async def test_a_step_comes_in_one_piece(server: ServerFixture) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    whole = said({**piece(8, 9, 10, finish_reason="length"), "usage": usage})
    proxy = server(lambda call: whole if call.fields.get("max_tokens") == 3 else well(call))
    engine = load(proxy.url)
    chunks = [each async for each in engine.generate(TokenBuffer([5, 6, 7]), Sampling(), Stop(3, ("\n\n",)))]
    await engine.aclose()
    assert [(each.ids, each.end, each.passes, each.cached) for each in chunks] == [((8, 9, 10), "length", 3, 2)]


def test_steps_of_a_text_are_not_drawn_with_the_same_numbers() -> None:
    one, other = Sampling(seed=1), Sampling(seed=2)
    seeds = [each.seed_at(position) for each in (one, other) for position in (0, 1, 100)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [each.seed_at(position) for each in (one, other) for position in (0, 1, 100)]
    assert all(0 <= seed < 2**31 for seed in seeds)
