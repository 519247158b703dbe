"""Write the folder of a reward model that is a model with a head on its last hidden state."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open

from stepspec.errors import UsageError

HEAD = Path(__file__).with_name("qwen-reward.safetensors")
"""Head for the target of `qwen`, trained on `evals/data/qwen-steps.jsonl.gz` by `python -m evals.bench reward_head`."""
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def write_reward_model(model: Path, head: Path, folder: Path) -> None:
    """Write the folder of a reward model. The weights of the model are linked, not copied.

    Args:
        model: folder of a causal language model with one file of weights.
        head: file with `score.weight`, [1, D], such as `python -m evals.bench reward_head` writes.
        folder: replaces one of an earlier call.

    Raises:
        UsageError: the head does not fit the model.
    """
    config = json.loads((model / "config.json").read_text())
    with safe_open(head, "pt") as weights:
        shape = weights.get_slice("score.weight").get_shape() if "score.weight" in set(weights.keys()) else None
    if shape != (wanted := [1, config["hidden_size"]]):
        raise UsageError(f"{head} needs a tensor score.weight of shape {wanted}; it has {shape}.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = {WEIGHTS: "base.safetensors", "config.json": None, INDEX: None, "head.safetensors": None}
    for file in model.resolve().iterdir():
        if name := names.get(file.name, file.name):
            (folder / name).symlink_to(file)
    (kind,) = config["architectures"]
    changed = {"architectures": [kind.replace("ForCausalLM", "ForSequenceClassification")], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config | changed, indent=2))
    shutil.copy(head, folder / "head.safetensors")
    with safe_open(folder / "base.safetensors", "pt") as weights:
        files = dict.fromkeys(weights.keys(), "base.safetensors") | {"score.weight": "head.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
