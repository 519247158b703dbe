"""Keys do not share texts: an attacker who knows a prompt up to a secret cannot find the secret token by token."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from following import following_pair
from service import serving

from stepspec import RequestOptions, StepSpec
from stepspec.api.models import load_pair
from stepspec.api.scope import PairScope
from stepspec.client import RemoteStepSpec
from stepspec.engines.protocol import EVERYTHING, Generate, TokenBuffer
from stepspec.langchain import ChatStepSpec
from stepspec.serve import Keys, Settings
from stepspec.serve.fields import Speculation
from stepspec.serve.keys import key_hash
from stepspec.serve.models import MAX_SESSIONS, ServedModel

VICTIM, ATTACKER, FRIEND, COLLEAGUE = ("sk-" + letter * 40 for letter in "vafc")
GROUPS = {VICTIM: "", ATTACKER: "", FRIEND: "both", COLLEAGUE: "both"}
CLIENT = httpx.Client(timeout=60)
BEFORE = "Ann keeps her apples in a box, and Ben keeps the pears. The lock of the box opens with #"
ROUTES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "completions": lambda text: {"prompt": text, "max_tokens": 1},
    "chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "responses": lambda text: {"input": text, "max_output_tokens": 1},
}

CASES = [
    (VICTIM, ATTACKER, ("", ""), False),
    (VICTIM, ATTACKER, ("a", "a"), False),
    (VICTIM, VICTIM, ("a", "b"), False),
    (VICTIM, VICTIM, ("", "c"), False),
    (VICTIM, VICTIM, ("a", "a"), True),
    (FRIEND, COLLEAGUE, ("", ""), True),
    (COLLEAGUE, ATTACKER, ("", ""), False),
    (FRIEND, COLLEAGUE, ("a", "b"), False),
]
"""Who sends a secret, who guesses it, their salts, and whether it is found."""


def settings(folder: Path) -> Settings:
    tables = [
        f'[[keys]]\nname = "{key[3]}"\nsha256 = "{key_hash(key)}"\n' + (f'group = "{group}"\n' if group else "")
        for key, group in GROUPS.items()
    ]
    (folder / "keys.toml").write_text("version = 1\n" + "".join(tables))
    return Settings(keys=Keys(folder / "keys.toml"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(load_pair(), settings=settings(tmp_path_factory.mktemp("keys"))) as base_url:
        yield base_url


def cached(address: str, route: str, key: str, text: str, **fields: Any) -> int:
    """Send a text and return how much of it was cached."""
    answer = CLIENT.post(f"{address}/{route}", json=ROUTES[route](text) | fields, headers=headers(key))
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


def attack(address: str, route: str, secret: str, digits: str) -> None:
    """Send a secret under several keys and salts, and guess it: a right guess finds one more token in the cache."""
    for number, (victim, attacker, salts, finds_it) in enumerate(CASES):
        before = f"{number}, {route}, {len(secret)}, {secret[:1]}: {BEFORE}"  # no case finds the text of another
        sent, guessing = ({"cache_salt": salt} if salt else {} for salt in salts)
        found, is_unique = "", True
        while is_unique and len(found) < len(secret):
            cached(address, route, attacker, f"{before}{found}x", **guessing)  # so that all guesses find what is known
            counts: dict[str, int] = {}
            for digit in digits:
                cached(address, route, victim, f"{before}{secret}.", **sent)  # a guess may take over its place
                counts[digit] = cached(address, route, attacker, f"{before}{found}{digit}x", **guessing)
            found += max(digits, key=lambda digit: counts[digit])
            is_unique = len(set(counts.values())) > 1
        assert is_unique == finds_it, (victim, attacker, salts, counts)
        assert not finds_it or found == secret


@pytest.mark.parametrize("route", ROUTES)
def test_a_secret_in_the_prompt_of_one_key_cannot_be_guessed_with_another(address: str, route: str) -> None:
    attack(address, route, "7", "37")


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_a_long_secret_in_the_prompt_of_one_key_cannot_be_guessed_with_another(address: str, route: str) -> None:
    for secret in ("48213", "00000", "99817"):
        attack(address, route, secret, "0123456789")


class RecordingJudge:
    """A judge model that records the groups of its calls."""

    name = "reward"
    abilities = frozenset({"reward"})

    def __init__(self) -> None:
        self.groups: list[str | None] = []

    async def reward(self, prompt: str, steps: Sequence[str], group: str | None = None) -> float:
        self.groups.append(group)
        return 1.0

    def describe(self) -> Mapping[str, str]:
        return {"name": self.name}

    async def aclose(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TokenBuffer]:
    """Return a list of all buffers that are made from now on."""
    buffers: list[TokenBuffer] = []
    create = TokenBuffer.__init__

    def recorded(self: TokenBuffer, *given: Any, **named: Any) -> None:
        create(self, *given, **named)
        buffers.append(self)

    monkeypatch.setattr(TokenBuffer, "__init__", recorded)
    return buffers


@pytest.mark.parametrize("one_vocabulary", [True, False])
def test_every_buffer_of_a_request_has_the_group_of_its_key(
    tmp_path: Path, made: list[TokenBuffer], one_vocabulary: bool
) -> None:
    judge = RecordingJudge()
    scope = PairScope(version=1, knows="stories", least_logprob=-5.0, measured="by hand")
    pair = following_pair()
    pair = replace(pair, one_vocabulary=one_vocabulary, scope=scope, judges={"reward": judge})
    with serving(pair, settings=settings(tmp_path)) as address:
        policies = [card["id"] for card in CLIENT.get(f"{address}/models", headers=headers(VICTIM)).json()["data"]]
        for model in policies:
            groups, sessions = list[set[str | None]](), list[set[str | None]]()
            for key, salt in ((VICTIM, ""), (ATTACKER, ""), (VICTIM, "a"), (FRIEND, ""), (COLLEAGUE, "")):
                made.clear()
                judge.groups.clear()
                body = {**ROUTES["chat/completions"]("How many?"), "model": model, "max_tokens": 40, "cache_salt": salt}
                body |= {"logprobs": True, "session_id": "one"}
                answer = CLIENT.post(f"{address}/chat/completions", json=body, headers=headers(key))
                assert (answer.status_code, len(made) > 1) == (200, True), answer.text
                found = {each.group and each.group.removeprefix("scope ") for each in made}  # the check has its own
                groups.append({None if each == "None" else each for each in (*found, *judge.groups)})
                sessions.append({each.session for each in made} - {None})
            assert [len(each) for each in (*groups, *sessions)] == [1] * 10, (model, groups)
            for different in (groups, sessions):
                assert different[3] == different[4], "keys of a group"
                assert len(set(map(str, different))) == 4, "no key or salt has that of another"
            assert not {None, "one", VICTIM, key_hash(VICTIM)} & set.union(*groups, *sessions)


@pytest.mark.anyio
async def test_the_salt_of_a_call_reaches_the_engine_in_every_interface(made: list[TokenBuffer]) -> None:
    pair = following_pair()
    chat = ChatStepSpec(pair=pair, cache_salt="a")
    await StepSpec(pair=pair).generate("How many?", cache_salt="a")
    await chat.ainvoke("How many?")
    assert {each.group for each in made} == {"a"}
    made.clear()
    await chat.ainvoke("How many?", cache_salt="b")
    await StepSpec(pair=pair).generate("How many?", RequestOptions(cache_salt="b"))
    assert {each.group for each in made} == {"b"}
    with serving(pair) as address:
        groups = []
        for salt in (None, "a", "a", "b"):
            made.clear()
            await RemoteStepSpec(address).generate("How many?", cache_salt=salt)
            groups.append({each.group for each in made})
    assert groups[0] == {None}, "without keys and salts, everybody shares"
    assert groups[1] == groups[2] != groups[3]


def test_thresholds_of_clients_do_not_displace_what_the_session_of_a_policy_has_learned() -> None:
    model = ServedModel("small", following_pair(), "specreason")
    usual = [model.session(name, Speculation())[1] for name in (None, "two-level")]
    for number in range(MAX_SESSIONS + 5):
        model.session(None, Speculation(threshold=number / 100))
    assert [model.session(name, Speculation())[1] for name in (None, "two-level")] == usual


def headers(key: str) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {key}"}


JUDGES = {"without salts": {"reward"}, "with salts": {"reward", "forget"}}


def test_a_server_without_salts_is_named_in_the_log_and_its_cache_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("stepspec").propagate = True
    judges: Any = {name: SimpleNamespace(name=name, abilities=known) for name, known in JUDGES.items()}
    pair = replace(following_pair(abilities=EVERYTHING - {"forget"}), judges=judges)
    generate = type(pair.target).generate

    async def with_hits(self: Any, call: Generate) -> Any:
        async for chunk in generate(self, call):
            yield replace(chunk, cached=7) if chunk.end else chunk

    monkeypatch.setattr(type(pair.target), "generate", with_hits)
    for mine, seen in ((Settings(), 7), (settings(tmp_path), 0)):
        caplog.clear()
        with serving(pair, "target", mine) as address:
            assert cached(address, "chat/completions", VICTIM, "How many?") == min(seen, 7)
        for name in ("target", "without salts"):
            assert (f"{name} keeps the texts of different keys in one cache" in caplog.text) == (seen == 0)
        assert "with salts keeps" not in caplog.text
