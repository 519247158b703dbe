"""Pairs of models by name. `embedded` ships with stepspec, `qwen` is built once on each machine."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stepspec.base.extras import from_extra
from stepspec.base.files import cache_folder, file_hash, package_folder, require_space
from stepspec.engines.draft_vocabulary import FILE as VOCABULARY_FILE
from stepspec.errors import ModelError, UsageError, reason_of, unknown_name

EMBEDDED_NAME = "embedded"
"""The default pair."""
QWEN_NAME = "qwen"
"""The pair that `build_qwen` builds."""

PAIRS: Sequence[str] = (EMBEDDED_NAME, QWEN_NAME)
EMBEDDED = package_folder() / "mini" / "weights"

REMOVED: Mapping[str, str] = {"smol": "Name models of your own with --target and --draft, or use the pair 'qwen'."}
"""What to use instead, by the name of a removed pair."""


class SourceFile(NamedTuple):
    """A file on the Hugging Face Hub that a model is made from."""

    repository: str
    name: str
    num_bytes: int
    sha256: str
    num_converted: int
    """Bytes of the model that is made from it."""
    vocabulary: Path | None = None
    """Draft vocabulary of the model."""


QWEN: Mapping[str, SourceFile] = {
    "target": SourceFile(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        3_100_000_000,
    ),
    "draft": SourceFile(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        1_000_000_000,
        package_folder() / "api" / "qwen_vocabulary.json",
    ),
}
"""The files of the pair `qwen` by role."""

QWEN_WEIGHTS: Mapping[str, str] = {"target": "quantize=int8", "draft": "quantize=int4"}
"""Options of the pair `qwen` by role, unless the user chooses data types."""

TEMPLATE_CHANGES: Mapping[str, str] = {
    # The published template describes calls with doubled braces, and the model then writes them in several forms.
    r"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}": (
        r"{\"name\": <function-name>, \"arguments\": <args-json-object>}"
    ),
    # Without a word after a tool's result, the model tends to call the same tool again.
    """messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}""": """messages[loop.index0 + 1].role != "tool") %}
            {{- '\\nAnswer the user with this result, or call the next function.<|im_end|>\\n' }}""",
}
"""What to write in the chat template of the pair `qwen` instead, so that agents work."""


def find_pair(name: str) -> Path:
    """Return the folder of a pair, which has `target` and `draft`, and may have `pair.json`.

    Raises:
        UsageError: there is no pair of that name.
        ModelError: the pair has not been built.
    """
    if name in REMOVED:
        raise UsageError(f"The pair {name!r} was removed in 0.2.0. {REMOVED[name]}")
    if name not in PAIRS:
        raise UsageError(unknown_name("pair", name, PAIRS))
    if name == EMBEDDED_NAME:
        return EMBEDDED
    folder = _built_folder()
    if not all((folder / role).is_dir() for role in QWEN):
        raise ModelError(f"The pair {name!r} has not been built on this machine. Build it: stepspec pair build {name}")
    return folder


def pair_specs(name: str, options: str) -> tuple[str, str, Path]:
    """Return the spec strings of a pair's target and draft, and the pair's folder.

    Args:
        name: the pair.
        options: options of both models, as in `dtype=bfloat16&threads=2`; empty for none.

    Errors are those of `find_pair`.
    """
    folder, given = find_pair(name), [option for option in options.split("&") if option]
    quantized = name == QWEN_NAME and not any(option.startswith(("dtype=", "quantize=")) for option in given)

    def spec(role: str) -> str:
        chosen = [*given, QWEN_WEIGHTS[role]] if quantized else given
        return f"torch:{folder / role}" + (f"?{'&'.join(chosen)}" if chosen else "")

    return spec("target"), spec("draft"), folder


def _built_folder() -> Path:
    return cache_folder() / QWEN_NAME


def build_qwen(files: Sequence[Path], report: Callable[[str], None], sources: Mapping[str, SourceFile] = QWEN) -> Path:
    """Build the pair `qwen` in the user's cache folder, and return its folder. Models that are there are kept.

    Args:
        files: GGUF files in any order, recognized by their hashes. The Hub has those that are missing here.
        report: receives progress messages.
        sources: the file of each role.

    Raises:
        ModelError: a file is damaged or another one, cannot be downloaded, or cannot be converted.
        StepSpecError: the disk has not enough space.
        MissingExtraError: a package is not installed.
    """
    folder = _built_folder()
    missing = {role: source for role, source in sources.items() if not (folder / role).is_dir()}
    if not missing:
        report("The pair is already built.")
        return folder
    require_space(folder, sum(source.num_converted for source in missing.values()))
    with from_extra("torch", f"Building the pair {QWEN_NAME!r}"):
        from stepspec.engines.gguf_file import convert
    given = dict(_recognized(file, sources, report) for file in files)
    for role, source in missing.items():
        file = given.get(role) or _download(source, report)
        report(f"Converting the {role}: a minute or two, and up to 8 GB of memory.")
        convert(file, folder / role, tied=True, adapt=partial(_adapt, source))
    return folder


def _adapt(source: SourceFile, tokenizer: Any, folder: Path) -> None:
    """Change a model's chat template, and give it its draft vocabulary."""
    for published, changed in TEMPLATE_CHANGES.items():
        tokenizer.chat_template = tokenizer.chat_template.replace(published, changed)
    if source.vocabulary is not None:
        shutil.copyfile(source.vocabulary, folder / VOCABULARY_FILE)


def _recognized(file: Path, sources: Mapping[str, SourceFile], report: Callable[[str], None]) -> tuple[str, Path]:
    """Return a file with its role."""
    report(f"Checking {file}.")
    try:
        size = file.stat().st_size
        found = file_hash(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {reason_of(error)}.") from error
    for role, source in sources.items():
        if source.sha256 == found:
            return role, file
    sizes = " or ".join(f"{source.sha256} ({source.num_bytes:,} bytes, {source.name})" for source in sources.values())
    raise ModelError(
        f"{file} is damaged or another file. Its SHA-256 is {found} ({size:,} bytes), not {sizes}. "
        "If it is damaged, delete it and get it again."
    )


def _download(source: SourceFile, report: Callable[[str], None]) -> Path:
    """Return a file in the Hub's cache. A download that was interrupted continues."""
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_CACHE

    hub: Any = huggingface_hub
    if not isinstance(hub.try_to_load_from_cache(source.repository, source.name), str):
        require_space(Path(HF_HUB_CACHE), source.num_bytes)
        report(f"Downloading {source.name} ({source.num_bytes // 1_000_000:,} MB).")
    try:
        file = Path(hub.hf_hub_download(source.repository, source.name)).resolve()
    except Exception as error:  # from httpx or httpx2, by the version of huggingface_hub
        raise ModelError(
            f"{source.name} of {source.repository} cannot be downloaded: {reason_of(error)}. Run the command again "
            "to continue, or name the file with --gguf. Without access to the Hub, see docs/choosing-models.md."
        ) from error
    return _recognized(file, {"": source}, report)[1]
