"""Write the folder of a reward model that is a model with a head on its last hidden state."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open

HEAD = Path(__file__).with_name("qwen-reward.safetensors")
"""Head for the target of `qwen`, trained on `evals/data/qwen-steps.jsonl.gz` by `python -m evals.bench reward_head`."""
WEIGHTS = "model.safetensors"


def write_reward_model(model: Path, head: Path, folder: Path) -> None:
    """Write the folder of a reward model. The weights of the model are linked, not copied.

    Args:
        model: folder of a causal language model with one file of weights.
        head: file with `score.weight`, [1, D], such as `python -m evals.bench reward_head` writes.
        folder: replaces one of an earlier call.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in model.resolve().iterdir():
        (folder / ("base.safetensors" if file.name == WEIGHTS else file.name)).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (kind,) = config["architectures"]
    changed = {"architectures": [kind.replace("ForCausalLM", "ForSequenceClassification")], "num_labels": 1}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | changed, indent=2))
    shutil.copy(head, folder / "head.safetensors")
    with safe_open(folder / "base.safetensors", "pt") as weights:
        files = dict.fromkeys(weights.keys(), "base.safetensors") | {"score.weight": "head.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
