"""Converts GGUF files into model folders, which load in seconds and with half of the memory.

The folder holds the weights in bfloat16, and the tokenizer, chat template and end tokens that the file names.
"""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from stepspec.base.files import cache_folder, file_hash, require_space
from stepspec.engines.hugging_face import ids_as_set
from stepspec.errors import ModelError, reason_of

SUFFIX = ".gguf"
BYTES = 2
"""Bytes of a weight in bfloat16."""
SHARED_END = "<|endoftext|>"
"""Ends a text in every family that has it. A GGUF file names a single end token, that of a chat turn."""


def model_folder(name: str) -> str:
    """Return the folder of the model in a GGUF file, which is converted at its first use; any other name as it is.

    Raises:
        ModelError: there is no such file, or it cannot be converted.
    """
    file = Path(name)
    if file.suffix != SUFFIX or file.is_dir():
        return name
    if not file.is_file():
        raise ModelError(f"There is no file {name}.")
    folder = cache_folder() / "gguf" / f"{file.stem}-{file_hash(file)[:16]}"
    convert(file, folder)
    return str(folder)


Adapt = Callable[[Any, Path], None]
"""Changes a tokenizer before it is written to a folder, and may write other files there."""


def convert(file: Path, folder: Path, *, tied: bool = False, adapt: Adapt | None = None) -> None:
    """Convert a GGUF file, unless the folder exists. It appears under its name only when it is complete.

    A concurrent process waits for the first one.

    Args:
        file: the GGUF file.
        folder: the folder to write.
        tied: whether the model has one matrix as embedding and head. The file may hold it twice, quantized differently;
            that of the head, the more precise one, is then both.
        adapt: called with the tokenizer and the folder.

    Raises:
        ModelError: the file is damaged, transformers does not read its architecture, or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if folder.is_dir():
                return
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a conversion that was killed
            try:
                _write(file, unfinished, tied, adapt)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"The model of {file} cannot be written to {folder}: {reason_of(error)}. Free up space or fix the "
            "permissions there, or choose another cache folder with the environment variable XDG_CACHE_HOME."
        ) from error


def _write(file: Path, folder: Path, tied: bool, adapt: Adapt | None) -> None:
    network, tokenizer = _read(file)
    require_space(folder.parent, sum(each.numel() for each in network.parameters()) * BYTES)
    config = network.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if tied:
        config.tie_word_embeddings = True
        network.get_input_embeddings().weight = network.get_output_embeddings().weight
    # A network that was read from a GGUF file can be saved in no other format, and one of the same shape can.
    with torch.device("meta"):
        fresh = type(network)(config)
    fresh.load_state_dict(network.state_dict(), assign=True)
    fresh.tie_weights()
    shared_end = tokenizer.get_vocab().get(SHARED_END)
    ends = ids_as_set(config.eos_token_id) | ids_as_set(tokenizer.eos_token_id) | ids_as_set(shared_end)
    fresh.generation_config.eos_token_id = sorted(ends) or None
    fresh.save_pretrained(folder)
    if adapt is not None:
        adapt(tokenizer, folder)
    tokenizer.save_pretrained(folder)


def _read(file: Path) -> tuple[Any, Any]:
    """Return the network in bfloat16 and the tokenizer."""
    for package in ("accelerate", "gguf"):  # errors of transformers do not say which one is missing
        importlib.import_module(package)
    transformers_logging.set_verbosity_error()
    causal: Any
    fast: Any
    causal, fast = AutoModelForCausalLM, AutoTokenizer
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.bfloat16, "output_loading_info": True}
    if dense := getattr(transformers, "GgufConfig", None):  # newer releases may leave the weights packed
        options["quantization_config"] = dense(dequantize=True)
    try:
        tokenizer = fast.from_pretrained(file.parent, gguf_file=file.name)
        network, report = causal.from_pretrained(file.parent, **options)
    except Exception as error:  # a damaged file can fail with any exception
        raise ModelError(f"{file} cannot be read as a GGUF model: {reason_of(error)}.") from error
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them randomly
        raise ModelError(f"The weights in {file} are incomplete: {len(missing)} are missing, such as {missing[0]}.")
    return network, tokenizer
