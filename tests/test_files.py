"""Policies and benchmarks are found from a checkout, an editable install and a wheel. Every package is really built."""

import contextlib
import json
import os
import shutil
import site
import stat
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from stepspec.base.files import data_folder, find_data_file, is_link, list_data_files, whole_file, write_text
from stepspec.errors import StepSpecError, UsageError

CHECKOUT = Path(__file__).parent.parent
BUILT_FROM = ["pyproject.toml", "README.md", "LICENSE", ".gitignore", "stepspec", "policies", "evals"]

WHERE = """
import json, stepspec, stepspec.base.files as files
print(json.dumps({
    "package": stepspec.__file__,
    "folders": {kind: str(files.data_folder(kind)) for kind in ("policies", "evals")},
    "names": {kind: list(files.list_data_files(kind)) for kind in ("policies", "evals")},
}))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_TARGET"))}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def fresh_python(folder: Path) -> Path:
    """Create an interpreter that sees this environment's packages, except those that its `.pth` files add.

    A `.pth` file only adds a folder, and the `.pth` files inside that folder are not read. An editable install of the
    checkout therefore stays invisible.
    """
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    Path(own, "packages-of-the-tests.pth").write_text("\n".join(site.getsitepackages()), "utf-8")
    return python


def where(python: Path, cwd: Path, *flags: str, **environment: str) -> dict[str, Any]:
    return json.loads(run(python, *flags, "-c", WHERE, cwd=cwd, **environment))


def names_in(folder: Path) -> dict[str, list[str]]:
    return {kind: sorted(path.stem for path in (folder / kind).glob("*.toml")) for kind in ("policies", "evals")}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build from, with extra files that no package may contain."""
    folder = tmp_path_factory.mktemp("copy") / "stepspec-copy"
    folder.mkdir()
    for name in BUILT_FROM:
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(CHECKOUT / name, folder / name)
    for extra in (
        "evals/results/planted/summary.json",
        "evals/results/planted/planted.toml",
        "policies/planted.md",
        "tests/test_planted.py",
        "runs/planted/rows.jsonl",
        ".venv/planted.py",
        "stepspec/__pycache__/planted.pyc",
    ):
        (folder / extra).parent.mkdir(parents=True, exist_ok=True)
        (folder / extra).write_text("", "utf-8")
    return folder


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip_wheel = ("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    run(sys.executable, *pip_wheel, cwd=copy)
    (built,) = folder.glob("stepspec-*.whl")
    return built


def test_a_checkout_finds_its_own_folders(tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "environment")
    found = where(python, tmp_path, PYTHONPATH=str(CHECKOUT))
    assert Path(found["package"]) == CHECKOUT / "stepspec" / "__init__.py"
    assert found["folders"] == {kind: str(CHECKOUT / kind) for kind in ("policies", "evals")}
    assert found["names"] == names_in(CHECKOUT)


def test_an_editable_install_finds_the_folders_of_its_checkout(copy: Path, tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "environment")
    install = ("-m", "pip", "install", "--no-compile", "--no-deps", "--no-build-isolation", "--no-index")
    run(python, *install, "-e", copy, cwd=tmp_path)
    found = where(python, tmp_path, "-I")
    assert Path(found["package"]) == copy / "stepspec" / "__init__.py"
    assert found["folders"] == {kind: str(copy / kind) for kind in ("policies", "evals")}
    assert found["names"] == names_in(CHECKOUT)


def test_a_wheel_finds_the_folders_that_it_contains(wheel: Path, tmp_path: Path) -> None:
    python = fresh_python(tmp_path / "environment")
    run(python, "-m", "pip", "install", "--no-compile", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    found = where(python, tmp_path, "-I")
    package = Path(found["package"]).parent
    assert package.is_relative_to(tmp_path / "environment")
    assert found["folders"] == {kind: str(package / kind) for kind in ("policies", "evals")}
    assert found["names"] == names_in(CHECKOUT)


def test_the_wheel_contains_the_package_and_the_data_and_nothing_else(copy: Path, wheel: Path) -> None:
    package = {path.relative_to(copy) for path in (copy / "stepspec").rglob("*") if path.is_file()}
    package -= {path for path in package if "__pycache__" in path.parts}
    data = {Path("stepspec", kind, f"{name}.toml") for kind, names in names_in(copy).items() for name in names}
    names = ("typed.jsonl", *(f"gsm-mini-{split}.jsonl.gz" for split in ("test", "calibration", "train")))
    data |= {Path("stepspec", "evals", "data", name) for name in names}
    calibrated = {Path("stepspec", file.relative_to(copy)) for file in (copy / "policies").glob("thresholds/*/*.json")}
    assert calibrated
    data |= calibrated
    members = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {path for path in members if not path.parts[0].endswith(".dist-info")} == package | data
    assert {Path("stepspec", name) for name in ("py.typed", "mini/weights/target/model.safetensors")} <= members
    assert not {"bench", "training", "results", "tests"} & {part for path in members for part in path.parts}
    assert wheel.stat().st_size <= 13_000_000


def test_the_source_package_builds_the_same_wheel(copy: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, cwd=copy)
    (built,) = tmp_path.glob("stepspec-*.tar.gz")
    shutil.unpack_archive(built, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not {"runs", ".venv"} & {path.name for path in unpacked.iterdir()}
    pip_wheel = ("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path)
    run(sys.executable, *pip_wheel, cwd=unpacked)
    (again,) = tmp_path.glob("stepspec-*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_a_package_without_its_data_uses_no_unrelated_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    shutil.rmtree(tmp_path / "stepspec" / "policies")
    (tmp_path / "policies").mkdir()
    program = (
        "import stepspec.base.files, stepspec.errors\n"
        "try: stepspec.base.files.data_folder('policies')\n"
        "except stepspec.errors.StepSpecError as error: print(error)\n"
    )
    output = run(fresh_python(tmp_path / "environment"), "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert "'policies' is neither in the package" in output


@pytest.mark.parametrize("kind", ["policies", "evals"])
def test_every_listed_name_finds_its_file(kind: Any) -> None:
    files = list_data_files(kind)
    assert files
    assert list(files) == sorted(files)
    for name, path in files.items():
        assert find_data_file(kind, name) == path == data_folder(kind) / f"{name}.toml"


def test_an_unknown_policy_is_refused_with_the_known_names_and_the_closest() -> None:
    with pytest.raises(UsageError, match=r"no policy 'Specreson'\. Did you mean 'specreason'") as caught:
        find_data_file("policies", "Specreson")
    assert all(name in str(caught.value) for name in list_data_files("policies"))


def test_an_unknown_benchmark_without_a_similar_name_is_refused_without_a_suggestion() -> None:
    with pytest.raises(UsageError, match="no benchmark 'qqqq'") as caught:
        find_data_file("evals", "qqqq")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "..", "*", "[a-z]*", "target\0"])
def test_a_name_is_not_a_pattern_and_not_a_folder(name: str) -> None:
    with pytest.raises(UsageError, match="There is no policy '"):
        find_data_file("policies", name)


def test_a_path_is_taken_as_the_user_s_own_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("# mine\n", "utf-8")
    without_suffix = tmp_path / "mine"
    without_suffix.write_text("# mine\n", "utf-8")
    assert find_data_file("policies", str(mine)) == mine
    assert find_data_file("policies", str(without_suffix)) == without_suffix
    with contextlib.chdir(tmp_path):
        assert find_data_file("policies", "mine.toml") == Path("mine.toml")


@pytest.mark.parametrize("name", ["nowhere.toml", "no/where", "."])
def test_a_path_to_no_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="There is no policy file at"):
        find_data_file("policies", name)


def test_a_file_that_replaces_another_one_has_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / f"{'a' * 250}.txt"
    write_text(file, "new")
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    for mode in (0o600, 0o666):
        file.chmod(mode)
        write_text(file, "newer")
        assert (stat.S_IMODE(file.stat().st_mode), file.read_text("utf-8")) == (mode, "newer")
    assert len(list(tmp_path.iterdir())) == 2


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    with whole_file(tmp_path / "file") as first, whole_file(tmp_path / "file") as second:
        first.write("first")
        second.write("second")
    assert (tmp_path / "file").read_text("utf-8") == "first"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_a_link_in_dev_is_not_followed_over_another_file() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mine, link = Path(folder, "mine"), Path(folder, "link")
        mine.write_text("precious", "utf-8")
        link.symlink_to(mine)
        with pytest.raises(StepSpecError, match="it is a symbolic link; remove it"):
            write_text(link, "other")
        assert mine.read_text("utf-8") == "precious"
    assert not is_link(Path("/dev/stdout"))


def test_a_usage_error_is_a_stepspec_error() -> None:
    assert issubclass(UsageError, StepSpecError)
