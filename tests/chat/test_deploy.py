"""The files in docs/deploy: the dashboard knows the metrics, and the commands of unit and container file work."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import httpx
import pytest
import yaml
from commands import stepspec
from following import FollowingEngine, following_pair
from service import serving
from typer.testing import CliRunner

from stepspec.cli import app
from stepspec.cli.sockets import listening_sockets
from stepspec.engines.protocol import DrafterName
from stepspec.loop.calibrated import user_folder
from stepspec.serve.models import ServedModels

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
KEY = "sk-0123456789abcdef"


def test_the_dashboard_shows_metrics_that_the_service_has() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = set(re.findall(r"stepspec_\w+", " ".join(queries) + board["templating"]["list"][1]["query"]))
    body = {"messages": [{"role": "user", "content": "How many?"}]}
    with serving(following_pair()) as address:
        httpx.post(f"{address}/chat/completions", json=body)
        text = httpx.get(f"{address.removesuffix('/v1')}/metrics").text
    known = set(re.findall(r"^# TYPE (\w+) ", text, re.M)) | set(re.findall(r"^(\w+)[{ ]", text, re.M))
    assert len(named) > 15
    assert named - known == set()


def test_the_unit_starts_the_service_and_reloads_and_stops_it(tmp_path: Path) -> None:
    unit = (DEPLOY / "stepspec.service").read_text()
    for each in (sockets := listening_sockets("127.0.0.1", 0)):
        port = each.getsockname()[1]
        each.close()
    assert sockets
    assert "LoadCredential=keys.toml:" in unit
    keys = tmp_path / "keys.toml"
    keys.write_text(f'version = 1\n[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\n')

    def words(name: str, options: str = f"--port {port}") -> list[str]:
        line = re.findall(rf"^{name}=/opt/stepspec/bin/stepspec (.*)$", unit, re.M)[0]
        return shlex.split(line.replace("%d/keys.toml", str(keys)).replace("$OPTIONS", options))

    (shown,) = re.findall(r"^#   OPTIONS=(.*)$", unit, re.M)
    for options in (f"--port {port}", f"{shown} --port {port}"):
        assert stepspec(*words("ExecStartPre", options)).returncode == 0
    reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    reports.bind(str(tmp_path / "notify"))
    reports.settimeout(60)
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
    command = [sys.executable, "-m", "stepspec", *words("ExecStart")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert reports.recv(100) == b"READY=1"
        assert httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert reports.recv(100) == b"STOPPING=1"
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
        reports.close()
    models = r"target embedded target \(float32\), draft embedded draft \(float32\)"
    assert re.search(rf"Model \S+: {models}, policy \S+\.", log), log
    assert re.findall(rf"(\w+) 1 API key from {keys}\.", log) == ["Loaded", "Reloaded"]
    assert all(json.loads(line)["message"] for line in log.splitlines())
    if shutil.which("systemd-analyze"):
        copy = tmp_path / "stepspec.service"
        copy.write_text(unit.replace("/opt/stepspec/bin/stepspec", sys.executable))
        subprocess.run(["systemd-analyze", "verify", str(copy)], check=True, timeout=60)


def test_thresholds_are_where_unit_image_and_manifest_expect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stepspec.service", "Containerfile"):
        (folder,) = re.findall(r"XDG_CONFIG_HOME=(\S+)", text := (DEPLOY / name).read_text())
        monkeypatch.setenv("XDG_CONFIG_HOME", folder)
        assert f"{user_folder()}" in text
    assert f"{user_folder()}/" in (DEPLOY / "kubernetes.yaml").read_text()


def test_the_arguments_in_the_manifest_are_those_of_the_service(tmp_path: Path) -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = next(each for each in documents if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    keys = tmp_path / "keys.toml"
    keys.write_text(f'version = 1\n[[keys]]\nname = "a"\nsha256 = "{"0" * 64}"\n')
    given = [str(keys) if each == "/keys/keys.toml" else each for each in pod["containers"][0]["args"]]
    found = CliRunner().invoke(app, ["serve", "--check", "--host", "0.0.0.0", "--port", "0", *given])
    assert found.exit_code == 0, found.output
    drain_s = float(given[given.index("--drain") + 1])
    pause_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= drain_s + pause_s + 10


@pytest.mark.parametrize(
    ("name", "drafters", "policy", "leaves_out"),
    [
        ("served", ("engine",), "two-level", True),
        ("served", ("engine",), "specreason", False),
        ("served", ("draft-model",), "two-level", False),
        ("target", ("engine",), "two-level", False),  # conftest.py has thresholds for this name
    ],
)
def test_the_start_says_that_a_draft_is_not_used_for_want_of_thresholds(
    name: str, drafters: Sequence[DrafterName], policy: str, leaves_out: bool
) -> None:
    pair = following_pair(name=name)
    cast("FollowingEngine", pair.target).drafters = drafters
    (line,) = ServedModels({"pair": pair}, policy).in_words
    said = ". The draft is not used: there are no thresholds for this pair. Run `stepspec calibrate`"
    assert line.endswith(f"policy {policy}{said if leaves_out else ''}")


@pytest.mark.soak
def test_the_container_answers() -> None:
    tool = next((each for each in ("docker", "podman") if shutil.which(each)), None)
    if tool is None or subprocess.run([tool, "info"], capture_output=True).returncode:
        pytest.skip("There is no docker or podman that works.")
    root = DEPLOY.parents[1]
    build = [tool, "build", "-q", "-f", str(DEPLOY / "Containerfile"), "-t", "stepspec-test", str(root)]
    subprocess.run(build, check=True)
    start = [tool, "run", "-d", "--rm", "-p", "127.0.0.1::8000", "-e", f"STEPSPEC_API_KEYS={KEY}", "stepspec-test"]
    container = subprocess.run(start, check=True, capture_output=True, text=True).stdout.strip()
    try:
        found = subprocess.run([tool, "port", container, "8000"], check=True, capture_output=True, text=True).stdout
        url = f"http://{found.split()[-1]}/v1/models"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                assert httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
                return
            except httpx.TransportError:
                time.sleep(1)
        raise AssertionError("the container does not answer")
    finally:
        subprocess.run([tool, "kill", container], check=False)
