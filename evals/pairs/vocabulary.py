"""Choose the draft vocabulary of the pair `qwen`: `python -m evals.pairs.vocabulary FILE.jsonl...`.

The files have problems of a training split, and texts that the target wrote for them. All tokens of their keys
`question`, `answer` and `text` are chosen, and all special tokens. The tokens with the lowest ids fill up the rest: the
tokenizer's training added frequent ones first.
"""

import json
import sys
from pathlib import Path

from stepspec.api.pairs import QWEN, find_pair
from stepspec.engines.hugging_face import load_tokenizer

SIZE = 32_000
KEYS = ("question", "answer", "text")


def main() -> None:
    tokenizer = load_tokenizer(str(find_pair("qwen") / "draft"))
    lines = (json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text("utf-8").splitlines())
    used = {id for row in lines for key in KEYS for id in tokenizer.encode(row.get(key, ""))}
    chosen = used | set(tokenizer.own.added_tokens_encoder.values())
    chosen |= set(sorted(set(range(tokenizer.num_ids)) - chosen)[: max(0, SIZE - len(chosen))])
    file = QWEN["draft"].vocabulary
    assert file is not None
    file.write_text(json.dumps({"version": 1, "ids": sorted(chosen)}, separators=(",", ":")) + "\n", "utf-8")
    print(f"{file}: {len(used):,} tokens of the files, {len(chosen):,} in all")


if __name__ == "__main__":
    main()
