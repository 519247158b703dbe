"""Every command on the page "Many machines" that needs no GPU runs, with the embedded pair on servers of this machine.

Most are soak tests, because each starts several processes.
"""

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from servers import VLLM_PYTHON, environment, needs_router, needs_vllm, running_server

from evals.bench.service.process import free_port, started
from stepspec.mini import WEIGHTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "many-machines.md").read_text("utf-8")
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
NOT_HERE = {
    "a GPU": r"^CUDA_VISIBLE_DEVICES=|^vllm serve Qwen|vllm:Qwen|ray-eight-gpus",
    "a network": r"^pip install",
    "docker or Kubernetes": r"^docker |^kubectl ",
    "a second machine": r"^ray start --address",
}
"""What commands need that is not here, with a pattern for them."""
ADDRESS = r"http://[\w.]+:\d+/v1"
ASKED = {"messages": [{"role": "user", "content": "How many seconds are in a day?"}], "max_tokens": 4}


@pytest.fixture(autouse=True, scope="module")
def _interruptible() -> None:
    """Let processes that the tests start react to SIGINT, which those of a shell's background jobs ignore."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def shown(pattern: str) -> list[str]:
    """Return the commands of the page that run here and match a pattern."""
    return [
        command
        for command in COMMANDS
        if re.search(pattern, command) and not any(re.search(each, command) for each in NOT_HERE.values())
    ]


def on_this_machine(command: str, target_port: int, draft_port: int) -> list[str]:
    """Return a command of stepspec with the addresses of servers here, as the arguments of a process."""
    words = shlex.split(command)
    for place in range(len(words)):
        if words[place - 1] == "--port":
            words[place] = "0"
        port = target_port if words[place - 1] == "--target" else draft_port
        words[place] = re.sub(ADDRESS, f"http://127.0.0.1:{port}/v1", words[place], count=1)
        words[place] = re.sub(f" {ADDRESS}", f" http://localhost:{port}/v1", words[place])  # the same server again
    return [sys.executable, "-m", "stepspec", *words[1:]]


def num_answered(url: str) -> int:
    """Ask a service, and return the number of tokens of its answer."""
    found = httpx.post(f"{url}/v1/chat/completions", json=ASKED, headers={"X-Session-ID": "one"}, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()["usage"]["completion_tokens"]


def run(words: Sequence[str], folder: Path) -> str:
    """Run a command to its end in a folder, and return what it prints."""
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900, env=environment())
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def listens(address: str) -> bool:
    """Whether something listens at HOST:PORT."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


def test_every_command_is_run_or_needs_something_that_is_not_here() -> None:
    patterns = [*NOT_HERE.values(), *RUN_HERE]
    for command in COMMANDS:
        found = [pattern for pattern in patterns if re.search(pattern, command)]
        assert len(found) == 1, (command, found)
    for pattern in RUN_HERE:
        assert shown(pattern), pattern


@needs_vllm
@pytest.mark.parametrize(
    "place", [0, *(pytest.param(place, marks=pytest.mark.soak) for place in range(1, len(shown("^stepspec serve "))))]
)
def test_services_with_models_on_servers(target_port: int, draft_port: int, place: int) -> None:
    with started(on_this_machine(shown("^stepspec serve ")[place], target_port, draft_port)) as service:
        assert num_answered(f"http://{service.address.host}:{service.address.port}")


@needs_vllm
@needs_router
@pytest.mark.soak
def test_a_router_in_front_of_services(target_port: int, draft_port: int, tmp_path: Path) -> None:
    command = on_this_machine(shown("^stepspec serve --port 8011")[0], target_port, draft_port)
    with started(command) as one, started(command) as other:
        urls = [f"http://{each.address.host}:{each.address.port}" for each in (one, other)]
        (routed,) = shown("^vllm-router ")
        words = shlex.split(routed)
        words = [str(VLLM_PYTHON.with_name(words[0])), *words[1 : words.index("--worker-urls") + 1], *urls]
        place = words.index("--port")
        with running_server([*words[:place], *words[place + 2 :]], tmp_path / "router.log") as port:
            (curl,) = shown("^curl ")
            asked = shlex.split(curl)
            asked = [re.sub(r"http://localhost:\d+", f"http://127.0.0.1:{port}", word) for word in asked]
            assert json.loads(run(asked, tmp_path))["choices"]


@needs_vllm
@pytest.mark.soak
def test_advice_for_a_draft_on_a_server(target_port: int, draft_port: int, tmp_path: Path) -> None:
    rows = [{"question": f"Ann has {number} apples. How many apples does Ann have?"} for number in (3, 4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (command,) = shown("^stepspec advise ")
    words = on_this_machine(command, target_port, draft_port)
    assert "round trip" in run([*words, "--max-tokens", "16"], tmp_path)


@needs_vllm
@pytest.mark.soak
def test_the_distances_of_a_draft(tmp_path: Path) -> None:
    serve = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS / "draft")]
    serve += ["--served-model-name", "draft", "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    with running_server(serve, tmp_path / "draft.log") as port:
        address, file = f"http://127.0.0.1:{port}/v1", str(tmp_path / "found.json")
        measure = [sys.executable, "-m", "evals.bench", "distance", "--draft", address, "--json", file]
        run([*measure, "--limit", "2"], tmp_path)
    assert (tmp_path / "found.json").is_file()


@contextmanager
def application(command: str) -> Generator[str]:
    """Run an application with `serve run`, and yield its URL. It has no option for the port."""
    words = [str(Path(sys.executable).with_name("serve")), *shlex.split(command)[1:]]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, end = "http://127.0.0.1:8000", time.monotonic() + 240
        while process.poll() is None and time.monotonic() < end:
            try:
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.soak
@pytest.mark.parametrize("place", range(len(shown("^serve run "))))
def test_applications_on_ray(place: int) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    with application(shown("^serve run ")[place]) as url:
        assert num_answered(url)


@pytest.mark.soak
@pytest.mark.parametrize("place", range(len(shown("^stepspec eval "))))
def test_evaluations_on_ray(place: int, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    words = shlex.split(shown("^stepspec eval ")[place])
    output = run([sys.executable, "-m", "stepspec", *words[1:], "--output", "runs/mine"], tmp_path)
    assert "Ran on 1 machine" in output


@pytest.mark.soak
def test_a_cluster_that_asks_for_a_token(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    own = environment() | {"HOME": str(tmp_path)}
    for command in shown("^export "):
        name, _, value = command.removeprefix("export ").partition("=")
        own[name] = value
    ray = str(Path(sys.executable).with_name("ray"))
    (generate,), (start,) = shown("^ray get-auth-token "), shown("^ray start ")
    subprocess.run([ray, *shlex.split(generate)[1:]], env=own, check=True, stdout=subprocess.DEVNULL)
    address = f"127.0.0.1:{free_port()}"
    options = ["--port", address.partition(":")[2], "--num-cpus", "1", "--include-dashboard=false", "--block"]
    # Not in Ray's own folder, where the address of this cluster would stay. Paths of sockets have to be short.
    own["RAY_TMPDIR"] = tempfile.mkdtemp()
    head = subprocess.Popen([ray, *shlex.split(start)[1:], *options], env=own, stdout=subprocess.DEVNULL)
    evaluate = [sys.executable, "-m", "stepspec", "eval", "gsm-mini", "--limit", "1", "--policy", "target"]
    evaluate += ["--ray", address, "--output", "run"]
    try:
        end = time.monotonic() + 120
        while not listens(address) and time.monotonic() < end:
            time.sleep(0.5)
        for mode, wanted in (("disabled", "and set RAY_AUTH_MODE=token"), ("token", "Ran on 1 machine")):
            with_mode = own | {"RAY_AUTH_MODE": mode}
            ran = subprocess.run(evaluate, cwd=tmp_path, env=with_mode, capture_output=True, text=True, timeout=300)
            assert wanted in ran.stdout + ran.stderr, (mode, ran.stdout, ran.stderr)
    finally:
        head.send_signal(signal.SIGINT)
        head.wait(60)
        shutil.rmtree(own["RAY_TMPDIR"], ignore_errors=True)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with measured costs."""
    folder = tmp_path_factory.mktemp("costs")
    (command,) = shown("^stepspec costs service ")
    words = [sys.executable, "-m", "stepspec", *shlex.split(command)[1:]]
    run([*words, "--concurrency", "1,2", "--requests", "20"], folder)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("place", range(len(shown("^stepspec size "))))
def test_sizes(costs: Path, place: int) -> None:
    words = shlex.split(shown("^stepspec size ")[place])
    assert "replicas" in run([sys.executable, "-m", "stepspec", *words[1:]], costs)


RUN_HERE = (
    "^stepspec costs service (?!.*vllm:)",
    "^stepspec size ",
    "^stepspec serve (?!.*vllm:)",
    "^vllm-router |^curl ",
    "^stepspec advise ",
    "^serve run ",
    "^stepspec eval (?!.*vllm:)",
    "^export |^ray get-auth-token |^ray start --head",
)
"""Patterns of the commands that the tests above run."""
