"""Loading of causal LMs, without running code that comes with them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from stepspec.engines.hugging_face import load_config, loading_options
from stepspec.errors import ModelError, reason_of


def refuse_unsupported(config: Any, name: str) -> None:
    """Reject models with layers whose state cannot be rolled back by a length.

    With a sliding window it can: the cache keeps everything, and a mask hides what is too far back.

    Raises:
        ModelError: the configuration has chunked or recurrent layers, or an encoder.
    """
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif others:
        reason = f"it has layers of type {', '.join(sorted(others))}"
    elif not getattr(text, "num_attention_heads", None):
        reason = "it has no attention layers"
    if reason:
        raise ModelError(
            f"The torch engine cannot serve {name}: {reason}, and only decoders with full or sliding-window attention "
            "are supported. "
            "Serve it with vLLM or another server instead."
        )


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Configuration fields that make a model large. A weight takes at least one bit on disk, which limits them."""


def _check_weights(folder: Path, config: Any) -> None:
    """Check that a folder's weights are safe to read and that the configuration matches their size.

    Raises:
        ModelError: the weights are pickles, which can run code, or the configuration describes a far larger model.
    """
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    pickles = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickles and not files:
        raise ModelError(
            f"The weights of {str(folder)!r} are pickles ({pickles[0]}), which can run any code when they are read. "
            "Convert them to safetensors."
        )
    if not files:
        return  # on the hub, or missing; loading reports missing weights
    text, max_size = config.get_text_config(), sum(file.stat().st_size for file in files) * 8
    sizes = {name: getattr(text, name, None) for name in SIZES}
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, int) and 1 <= size <= max_size):
            raise ModelError(
                f"The configuration of {str(folder)!r} has {name} = {size!r}, which does not match its weights."
            )
    if (sizes["num_hidden_layers"] or 0) > (num_tensors := sum(map(_num_tensors, files))):
        raise ModelError(
            f"The configuration of {str(folder)!r} has num_hidden_layers = {sizes['num_hidden_layers']}, but its "
            f"weights have only {num_tensors} tensors."
        )
    for name in ("vocab_size", "num_hidden_layers"):
        if (sizes[name] or 0) * (sizes["hidden_size"] or 0) > max_size:
            raise ModelError(
                f"The configuration of {str(folder)!r} has {name} = {sizes[name]}, which does not match its weights."
            )


def _num_tensors(file: Path) -> int:
    """Return the number of tensors in a safetensors file, read from its header."""
    try:
        with safe_open(file, "pt") as tensors:
            return len(tensors.keys())
    except SafetensorError as error:
        raise ModelError(f"The weights in {str(file)!r} cannot be read: {reason_of(error)}.") from error


def load_network(name: str, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load a causal LM by hub name or folder. Code that comes with the model never runs.

    Args:
        name: hub name or folder.
        device: a torch device.
        dtype: of the weights; the default is float32 on a CPU, else bfloat16.

    Raises:
        ModelError: there is no such model, it is not a causal LM, or the engine does not support it.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # a library must not write to its caller's stderr
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = loading_options(name)
    try:
        config = load_config(name)
        refuse_unsupported(config, name)
        _check_weights(Path(name), config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
        network, report = loaded
    except ModelError:
        raise
    except Exception as error:  # a bad configuration can fail with any exception
        place = "folder" if Path(name).exists() else "hub name or folder"
        raise ModelError(f"Cannot load {name!r} as a causal language model ({place}): {reason_of(error)}.") from error
    if missing := sorted(report["missing_keys"]):  # transformers would initialize them randomly
        raise ModelError(f"The weights of {name!r} are incomplete: {len(missing)} are missing, such as {missing[0]}.")
    return network.to(device)
