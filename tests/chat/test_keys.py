"""API keys: who may use the service, the limits of keys, and what the service never shows."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from following import FollowingEngine, following_pair
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Call, Reply
from service import serving
from typer.testing import CliRunner

from stepspec import Pair
from stepspec.cli import app
from stepspec.errors import UsageError
from stepspec.serve import Keys, Settings
from stepspec.serve.admission import Admission, ServiceLimits, Ticket
from stepspec.serve.errors import NoKeyError, RateError
from stepspec.serve.keys import ENVIRONMENT, Client, Rates, authorization_of, key_hash

KEY, OTHER, SLOW = ("sk-" + letter * 40 for letter in "kos")
BODY: Any = {"messages": [{"role": "user", "content": "How many?"}]}


def key_file(folder: Path, **limits: int) -> Path:
    """Write a file with two keys. The limits are those of the second one."""
    settings = "".join(f"{name} = {value}\n" for name, value in limits.items())
    tables = f'[[keys]]\nname = "team"\nsha256 = "{key_hash(KEY)}"\n'
    tables += f'[[keys]]\nname = "slow"\nsha256 = "{key_hash(SLOW)}"\n{settings}'
    file = folder / "keys.toml"
    file.write_text(f"version = 1\n{tables}")
    return file


TABLE = f"[[keys]]\nname = 'a'\nsha256 = '{key_hash(KEY)}'\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = key_file(tmp_path_factory.mktemp("keys"), requests_per_minute=2)
    with serving(following_pair(), settings=Settings(keys=Keys(file, {ENVIRONMENT: OTHER}))) as base_url:
        yield base_url


def ask(address: str, key: str | None = None, path: str = "/chat/completions") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.post(f"{address}{path}", json=BODY, headers=headers)


@pytest.mark.parametrize("key", [None, "wrong", KEY[:-1], f"{KEY}x"])
def test_a_request_without_a_known_key_is_rejected_everywhere_but_at_open_routes(address: str, key: str | None) -> None:
    answer = ask(address, key)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    root = address.removesuffix("/v1")
    assert ask(root, key, "/tokenize").status_code == 401
    assert httpx.get(f"{address}/models").status_code == 401
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert httpx.get(root + path).status_code == 200


def test_keys_of_file_and_environment_are_accepted(address: str) -> None:
    assert [ask(address, key).status_code for key in (KEY, OTHER)] == [200, 200]


@pytest.mark.parametrize("header", [f"Basic {KEY}", KEY, f"Bearer{KEY}", f"Bearers {KEY}", f"Basic Bearer {KEY}"])
def test_no_other_scheme_than_bearer_is_accepted(address: str, header: str) -> None:
    assert httpx.get(f"{address}/models", headers={"Authorization": header}).status_code == 401


@settings(max_examples=40)
@given(st.text(st.characters(codec="latin-1"), max_size=9) | st.sampled_from(["bearer", "BEARER", "bEaReR"]))
def test_a_scheme_is_bearer_in_any_case(scheme: str) -> None:
    keys = Keys(None, {ENVIRONMENT: KEY})
    if scheme in ("bearer", "BEARER", "bEaReR"):
        assert keys.client(f"{scheme} {KEY}").group == key_hash(KEY)
    else:
        with pytest.raises(NoKeyError):
            keys.client(f"{scheme} {KEY}")


@pytest.mark.parametrize(
    ("asked", "floor", "has"),
    [(-3, 5, 5), (None, 5, 5), (7, 5, 7), (None, -2, 0), (-3, -2, -2)],
)
def test_a_request_cannot_go_below_the_priority_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, floor: int, has: int
) -> None:
    tickets: list[Ticket] = []
    slot = Admission.slot

    def recorded(self: Admission, ticket: Ticket) -> Any:
        tickets.append(ticket)
        return slot(self, ticket)

    monkeypatch.setattr(Admission, "slot", recorded)
    with serving(following_pair(), settings=Settings(keys=Keys(key_file(tmp_path, priority=floor)))) as address:
        headers = {"Authorization": f"Bearer {SLOW}"}
        assert httpx.post(f"{address}/responses", json={"input": "a", "priority": asked}, headers=headers).is_success
    assert [ticket.priority for ticket in tickets] == [has]


def test_the_limit_of_a_key_is_429_with_the_time_to_wait(address: str) -> None:
    answers = [ask(address, SLOW) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["Retry-After"]) <= 60
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    assert ask(address.removesuffix("/v1"), SLOW, "/tokenize").status_code == 429
    assert ask(address, KEY).status_code == 200


def test_the_tokens_of_a_key_are_limited(tmp_path: Path) -> None:
    file = key_file(tmp_path, tokens_per_minute=10)
    with serving(following_pair(), settings=Settings(keys=Keys(file))) as address:
        answers = [ask(address, SLOW) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert "10 tokens a minute" in answers[1].json()["error"]["message"]


def test_windows_last_a_minute_whatever_happens_to_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    now, client = [1000.0], Client("team", requests_per_minute=2, tokens_per_minute=10)
    rates = Rates(lambda: now[0])
    for day in (0.0, 1e9, -1e9):
        monkeypatch.setattr(time, "time", lambda day=day: day)
        for _ in range(2):
            rates.check(client)
        with pytest.raises(RateError, match="2 requests a minute") as caught:
            rates.check(client)
        assert caught.value.retry_after_s == pytest.approx(60)
        now[0] += 59.9
        with pytest.raises(RateError):
            rates.check(client)
        now[0] += 0.2
        assert rates.counts()["team", "requests"] == 0
        rates.used(client, 25)
        with pytest.raises(RateError, match="10 tokens a minute"):
            rates.check(client)
        now[0] += 60.1


def test_keys_are_reloaded_and_stay_if_the_file_disappears(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stepspec")
    file = key_file(tmp_path)
    keys = Keys(file)
    assert keys.client(f"Bearer {KEY}").name == "team"
    file.write_text(file.read_text().replace(key_hash(KEY), key_hash(OTHER)))
    keys.reload()
    Keys(file, {ENVIRONMENT: KEY}).reload()
    found = [each.getMessage() for each in caplog.records]
    assert found == [f"Reloaded 2 API keys from {file}.", f"Reloaded 3 API keys from {file} and {ENVIRONMENT}."]
    assert keys.client(f"bearer {OTHER}").name == "team"
    with pytest.raises(NoKeyError):
        keys.client(f"Bearer {KEY}")
    file.unlink()
    keys.reload()
    assert keys.client(f"Bearer {OTHER}").name == "team"
    assert "the old ones stay" in caplog.text
    assert KEY not in caplog.text


def test_a_request_that_its_deadline_ends_in_the_queue_costs_nothing(tmp_path: Path) -> None:
    keys = Keys(key_file(tmp_path, tokens_per_minute=1))
    settings = Settings(limits=ServiceLimits(max_running=1), keys=keys)
    with serving(following_pair(delay_s=1.0), "target", settings) as address, ThreadPoolExecutor(1) as threads:
        running = threads.submit(ask, address, KEY)
        time.sleep(0.3)
        for _ in range(2):
            headers, body = {"Authorization": f"Bearer {SLOW}"}, {**BODY, "stepspec": {"deadline_s": 0.1}}
            answer = httpx.post(f"{address}/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert running.result().status_code == 200


class Saving(Keys):
    """Keys whose file is saved by its operator right after it was read."""

    def _read(self) -> dict[str, Client]:
        found = super()._read()
        if self.file is not None and key_hash(KEY) in self.file.read_text():
            self.file.write_text(self.file.read_text().replace(key_hash(KEY), key_hash(OTHER)))
        return found


@pytest.mark.parametrize("reloads", [False, True])
def test_a_key_that_is_revoked_while_the_file_is_read_does_not_stay(tmp_path: Path, *, reloads: bool) -> None:
    file = key_file(tmp_path)
    keys = Saving(file)
    if reloads:
        key_file(tmp_path)
        keys.reload()
    assert keys.client(f"Bearer {KEY}")
    time.sleep(0.01)
    keys.refresh()
    assert keys.client(f"Bearer {OTHER}")
    with pytest.raises(NoKeyError):
        keys.client(f"Bearer {KEY}")


def test_a_signal_to_reload_keys_does_not_end_a_service_that_loads_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(**_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        raise UsageError("It was not ended.")

    monkeypatch.setattr("stepspec.serve.pairs.load_pair", load)
    before = signal.getsignal(signal.SIGHUP)
    try:
        found = CliRunner().invoke(app, ["serve", "--port", "0"])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert str(found.exception) == "It was not ended."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version = 1\nkeys = []", "keys"),
        ('version = 1\n[[keys]]\nname = "a"\nsha256 = "abc"', "sha256"),
        (f'version = 1\n[[keys]]\nname = "a"\nkey = "{KEY}"\nsha256 = "{key_hash(KEY)}"', "key"),
        ("version = 1\n" + TABLE * 2, "Two API keys are the same"),
        (f"version = 1\n{TABLE}[[keys]]\nname = 'a'\nsha256 = '{key_hash(OTHER)}'\nrequests_per_minute = 5", "share"),
    ],
)
def test_an_invalid_file_of_keys_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(UsageError, match=problem):
        Keys(tmp_path / "keys.toml")


@pytest.mark.parametrize(
    ("keys", "problem"), [(f"{KEY},short", "at least 16 characters"), (f"{KEY},{OTHER}, {KEY}", "and key 3 of it")]
)
def test_keys_in_the_environment_that_cannot_be_used_are_errors(keys: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        Keys(None, {ENVIRONMENT: keys})


def test_the_command_creates_a_key_that_the_service_accepts(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["key", "ci", "--requests-per-minute", "5", "--group", "builds"])
    assert made.exit_code == 0
    key = made.stderr.rpartition(" ")[2].strip()
    assert key not in made.stdout
    (tmp_path / "keys.toml").write_text(f"version = 1\n{made.stdout}")
    client = Keys(tmp_path / "keys.toml", {}).client(f"Bearer {key}")
    assert (client.name, client.requests_per_minute, client.group) == ("ci", 5, "group builds")


def test_keys_share_a_group_only_if_they_name_it(tmp_path: Path) -> None:
    tables = [
        (KEY, f'group = "{key_hash(OTHER)}"'),
        (SLOW, 'group = "a"'),
        ("sk-" + "b" * 40, 'group = "a"'),
        (OTHER, ""),
    ]
    text = "".join(f'[[keys]]\nname = "same"\nsha256 = "{key_hash(key)}"\n{group}\n' for key, group in tables)
    (tmp_path / "keys.toml").write_text(f"version = 1\n{text}")
    own = "sk-" + "e" * 40
    keys = Keys(tmp_path / "keys.toml", {ENVIRONMENT: own})
    groups = [keys.client(f"Bearer {key}").group for key in (*(key for key, _ in tables), own)]
    assert groups[1] == groups[2]
    assert None not in groups
    assert len(set(groups)) == 4, "a group with the hash of another key as its name is not that key's"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--host", "0.0.0.0"], "Without API keys"),
        (["--api-keys", "/nothing/keys.toml"], "keys.toml"),
        (["--tls-cert", "cert.pem"], "needs both"),
        (["--policy", "nothing"], "There is no policy"),
        (["--pair", "a=torch:/nothing"], "There is no folder"),
        (["--pair", "a=torch:models/none/here"], "There is no folder models/none/here"),
        (["--pair", "smal"], "There is no pair"),
        (["--pair", "qwen"], "stepspec pair build qwen"),
        (["--pair", "a=embedded", "--pair", "a=embedded"], "Two pairs"),
        (["--judge", "reward"], "--judge takes"),
        (["--pair", "embedded?foo=1"], "There is no key 'foo'"),
        (["--target", "https:/foo", "--policy", "target"], "names no host or port"),
        (["--cors-origin", "example.org"], "is not a web origin"),
        (["--trusted-proxy", "nonsense"], "is not an IP address or network"),
    ],
)
def test_check_says_what_would_be_wrong_without_loading_anything(
    options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stepspec.serve.pairs.load_pair", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(os.environ, ENVIRONMENT, raising=False)
    found = CliRunner().invoke(app, ["serve", "--check", "--port", "0", *options])
    assert (found.exit_code, problem in found.stdout) == (2, True), found.output
    fine = CliRunner().invoke(app, ["serve", "--check", "--port", "0", "--pair", "a=embedded", "--pair", "embedded"])
    assert (fine.exit_code, fine.stdout.startswith("Nothing is wrong")) == (0, True)


def test_check_says_no_more_than_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    check = ["serve", "--check", "--port", "0", "--policy", "target"]
    monkeypatch.delitem(os.environ, ENVIRONMENT, raising=False)
    found = CliRunner().invoke(app, [*check, "--target", "torch:no/folder?dtype=float32"])
    assert found.stdout.startswith("There is no folder no/folder, so it must be a name on the Hugging Face Hub.\n")
    monkeypatch.setitem(os.environ, ENVIRONMENT, "short")
    found = CliRunner().invoke(app, [*check, "--host", "0.0.0.0"])
    assert found.stdout == f"Key 1 in {ENVIRONMENT} must have at least 16 characters.\n", "not that there are none"


class Endless(FollowingEngine):
    """An engine that writes its text and then hangs."""

    def _reply_to(self, call: Call) -> Reply:
        reply = super()._reply_to(call)
        return replace(reply, text=reply.text.removesuffix("<|end|>"))


def test_a_client_that_leaves_pays_for_every_token_that_it_got(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "stepspec")
    pair = following_pair(thinks=False)
    target = Endless(pair.target.tokenizer, "target", chunk_size=12, hangs=True)  # type: ignore[arg-type]
    with serving(Pair(target, None), "target") as address:
        with httpx.stream("POST", f"{address}/chat/completions", json={**BODY, "stream": True}) as answer:
            text = ""
            for line in answer.iter_lines():
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "") if line[6:7] == "{" else ""
                if len(text) > 20:
                    break
        end = time.monotonic() + 5
        while "(response incomplete)" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)
    line = next(line for line in caplog.text.splitlines() if "(response incomplete)" in line)
    assert int(line.partition(" s ")[2].partition(" tokens")[0]) >= len(pair.target.tokenizer.encode_text(text)) > 5


def test_a_client_that_leaves_pays_for_what_it_asked(tmp_path: Path) -> None:
    file = key_file(tmp_path, tokens_per_minute=1)
    with serving(following_pair(delay_s=2), settings=Settings(keys=Keys(file))) as address:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                f"{address}/chat/completions", json=BODY, headers={"Authorization": f"Bearer {SLOW}"}, timeout=0.5
            )
        assert ask(address, SLOW).status_code == 429


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"authorization": "Bearer a"}, "Bearer a"),
        ({"x-api-key": "b"}, "Bearer b"),
        ({"authorization": "bearer a", "x-api-key": "b"}, "bearer a"),
        ({"authorization": "Basic a", "x-api-key": "b"}, "Bearer b"),
    ],
)
def test_a_key_is_in_either_header(headers: dict[str, str], expected: str | None) -> None:
    assert authorization_of(headers.get) == expected
