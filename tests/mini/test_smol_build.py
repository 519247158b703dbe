"""The build of the pair `smol` is atomic, and the pair is checked when it is loaded."""

import errno
import multiprocessing
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import filelock
import pytest
from safetensors import SafetensorError

from stepspec.api import pairs
from stepspec.errors import ModelError
from stepspec.mini.smol import build


def write_small(folder: Path, *_: object) -> None:
    """Write small files in place of the models, which take longer to build."""
    for role in ("target", "draft"):
        (folder / role).mkdir()
        (folder / role / "model.safetensors").write_text(role)
    (folder / "pair.json").write_text("{}")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Use a temporary cache folder and a fast build. Returns the folder of the pairs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pairs, "PAIRS", ("embedded", "smol"))
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "draft.safetensors").write_text("the draft's layers")
    monkeypatch.setattr(pairs, "SMOL_WEIGHTS", weights)
    monkeypatch.setattr(build, "write_pair", write_small)
    monkeypatch.setattr(build, "find_base", lambda: tmp_path / "base.gguf")
    return tmp_path / "stepspec"


def test_the_pair_is_built_once_and_found_by_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="stepspec pair build smol"):
        pairs.find_pair("smol")
    folder = build.build_smol(print)
    assert pairs.find_pair("smol") == folder
    assert folder.parent == cache
    assert sorted(pairs.Manifest.of(folder).sha256) == [
        "draft/model.safetensors",
        "pair.json",
        "target/model.safetensors",
    ]
    assert capsys.readouterr().out == ""
    build.build_smol(print)
    assert "already" in capsys.readouterr().out
    with filelock.FileLock(cache / "smol.lock", timeout=0):
        pass  # the builds have released the lock


def test_different_weights_give_a_different_folder() -> None:
    first = build.build_smol(print)
    (pairs.SMOL_WEIGHTS / "draft.safetensors").write_text("others")
    assert build.build_smol(print) != first


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_a_damaged_pair_is_rejected_and_can_be_rebuilt(damage: str) -> None:
    folder = build.build_smol(print)
    file = folder / ("manifest.json" if damage == "manifest" else "target/model.safetensors")
    file.unlink() if damage == "missing" else file.write_text("x")
    with pytest.raises(ModelError, match=r"is damaged: .*(manifest|target/model).*stepspec pair build smol"):
        pairs.find_pair("smol")
    assert build.build_smol(print) == folder
    assert pairs.find_pair("smol") == folder


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_failed_build_leaves_no_files_and_gives_the_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    def fills_the_disk(folder: Path, *_: object) -> None:
        write_small(folder)
        raise error

    monkeypatch.setattr(build, "write_pair", fills_the_disk)
    with pytest.raises(ModelError, match=r"No space left on device\. Free up space"):
        build.build_smol(print)
    assert [path.name for path in cache.iterdir()] == ["smol.lock"]
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(5_000_000))
    with pytest.raises(ModelError, match=r"needs 1200 MB of free space in .*; there are 5 MB"):
        build.build_smol(print)


def test_a_file_in_place_of_the_cache_folder_is_an_error(cache: Path) -> None:
    cache.write_text("no folder")
    with pytest.raises(ModelError, match="cannot be written"):
        build.build_smol(print)


def test_a_killed_build_can_be_repeated(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def hangs(folder: Path, *_: object) -> None:
        write_small(folder)
        time.sleep(600)

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_pair", hangs)
        process = multiprocessing.get_context("fork").Process(target=build.build_smol, args=(print,))
        process.start()
        while not list(cache.glob(".unfinished-*/pair.json")):
            time.sleep(0.01)
        process.kill()
        process.join()
    with pytest.raises(ModelError, match="has not been built"):
        pairs.find_pair("smol")
    folder = build.build_smol(print)
    assert pairs.find_pair("smol") == folder
    assert {path.name for path in cache.iterdir()} == {"smol.lock", folder.name}


def test_the_second_of_two_concurrent_builds_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    proceed, messages, built = threading.Event(), list[str](), list[Path]()

    def waits(folder: Path, *_: object) -> None:
        assert proceed.wait(60)
        write_small(folder)

    monkeypatch.setattr(build, "write_pair", waits)
    both = [threading.Thread(target=lambda: built.append(build.build_smol(messages.append))) for _ in range(2)]
    for thread in both:
        thread.start()
    while not messages:
        time.sleep(0.01)
    proceed.set()
    for thread in both:
        thread.join()
    assert messages == ["Another process is building the pair. Waiting for it to finish.", "The pair is already built."]
    assert built[0] == built[1] == pairs.find_pair("smol")
