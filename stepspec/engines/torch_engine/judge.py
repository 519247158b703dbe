"""Judge models in PyTorch: process reward models for sequence classification, and encoders with mean pooling.

One thread owns the model. A reward reads only what is new since the last call on the same text: the keys and values of
the last texts stay in transformers' own caches.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, DynamicCache

from stepspec.engines.hugging_face import (
    HuggingFaceTokenizer,
    load_config,
    load_tokenizer,
    loading_options,
    weights_hash,
)
from stepspec.engines.judge_model import JudgeAbility, RewardIds, check_reward_tokenizer
from stepspec.engines.thinking import NONE
from stepspec.engines.torch_engine.slots import common_prefix
from stepspec.engines.torch_engine.threads import default_threads, end_workers, use_threads
from stepspec.errors import ContextError, EngineError, ModelError, reason_of

T = TypeVar("T")
MAX_TEXTS = 64
"""Number of texts whose keys and values are kept."""


class TorchJudge:
    """A judge model by Hub name or folder.

    A model for sequence classification gives rewards: the logistic function of its score at the end of a step, or the
    probability of its last label. Any other model embeds texts by the mean of its last hidden states.
    """

    def __init__(self, network: Any, tokenizer: HuggingFaceTokenizer, name: str, weights: str | None = None) -> None:
        self.name = name
        head = getattr(network, "score", None)
        self.abilities: frozenset[JudgeAbility] = frozenset({"embed" if head is None else "reward", "forget"})
        self._body = network if head is None else network.base_model
        self._head = head
        self._tokenizer, self._ids = tokenizer, RewardIds(tokenizer)
        self._weights = weights
        self._max_context = int(getattr(network.config, "max_position_embeddings", None) or 1 << 30)
        self._dtype, self._device = network.dtype, network.device
        self._texts: OrderedDict[tuple[str | None, tuple[int, ...]], DynamicCache] = OrderedDict()  # by group and ids
        self._num_parameters = sum(parameter.numel() for parameter in network.parameters())
        self._thread = ThreadPoolExecutor(1, f"judge {name}", self._begin)

    @classmethod
    def load(cls, name: str, device: str | None = None, title: str | None = None) -> "TorchJudge":
        """Load a judge model.

        Args:
            name: Hub name or folder.
            device: a torch device; the default is CUDA if there is a GPU, else the CPU.
            title: the model's name in results; the default is the Hub name or the folder's name.

        Raises:
            ModelError: the model cannot be loaded.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        options = loading_options(name)
        try:
            config = load_config(name)
            classifies = any("ForSequenceClassification" in each for each in config.architectures or ())
            kind: Any = AutoModelForSequenceClassification if classifies else AutoModel
            loaded = kind.from_pretrained(
                name, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
            )
        except Exception as error:  # a bad configuration can fail with any exception
            raise ModelError(f"Cannot load {name!r} as a judge model: {reason_of(error)}.") from error
        network, report = loaded
        if missing := sorted(report["missing_keys"]):  # transformers would initialize them randomly
            raise ModelError(f"{name!r} lacks {len(missing)} of its weights, such as {missing[0]}.")
        title = title or (Path(name).resolve().name if Path(name).is_dir() else name)
        tokenizer = load_tokenizer(name, config, thinking=NONE)
        if classifies:
            check_reward_tokenizer(tokenizer, name)
        return cls(network.to(device).eval(), tokenizer, title, weights_hash(name))

    async def reward(self, prompt: str, steps: Sequence[str], group: str | None = None) -> float:
        """See `JudgeModel.reward`."""
        return await self._run(self._reward, self._ids.of(prompt, steps), group)

    async def embed(self, texts: Sequence[str], group: str | None = None) -> list[list[float]]:
        """See `JudgeModel.embed`."""
        return await self._run(self._embed, [self._tokenizer.own(text)["input_ids"] for text in texts])

    def describe(self) -> dict[str, str | None]:
        """See `JudgeModel.describe`."""
        dtype = str(self._dtype).removeprefix("torch.")
        return {"name": self.name, "weights": self._weights, "dtype": dtype, "device": str(self._device)}

    async def forget(self) -> None:
        """See `JudgeModel.forget`."""
        await self._run(self._texts.clear)

    async def aclose(self) -> None:
        """See `JudgeModel.aclose`."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        def work_and_rest() -> T:
            try:
                return work(*arguments)
            finally:
                end_workers()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work_and_rest)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"The GPU ran out of memory while running {self.name}.") from error
        except RuntimeError as error:
            raise EngineError(f"{self.name} failed: {error}") from error

    # The methods below run in the model's thread.

    def _begin(self) -> None:
        if self._device.type == "cpu":
            use_threads(default_threads(self._num_parameters))

    @torch.inference_mode()
    def _reward(self, ids: tuple[int, ...], group: str | None) -> float:
        self._check_room(len(ids))
        own = (text for of, text in self._texts if of == group)
        held = max(own, key=lambda text: common_prefix(text, ids), default=())
        length = min(common_prefix(held, ids), len(ids) - 1)
        if 2 * length < len(held):  # another text with the same beginning, which may go on
            held, length = (), 0
        cache = self._texts.pop((group, held)) if held else DynamicCache()
        if length < len(held):
            cache.crop(length - len(held))  # a negative number removes as many
        read = torch.tensor([ids[length:]], device=self._device)
        last = self._body(input_ids=read, past_key_values=cache, use_cache=True).last_hidden_state[0, -1]
        self._texts[group, ids] = cache
        while len(self._texts) > MAX_TEXTS:
            self._texts.popitem(last=False)
        assert self._head is not None
        scores = self._head(last).float()
        return float(scores.sigmoid()[0] if len(scores) == 1 else scores.softmax(-1)[-1])

    @torch.inference_mode()
    def _embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Embed each text alone, so that padding cannot change it."""
        found: list[list[float]] = []
        for ids in texts:
            self._check_room(len(ids))
            hidden = self._body(input_ids=torch.tensor([ids], device=self._device)).last_hidden_state[0].float()
            found.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).tolist())
        return found

    def _check_room(self, length: int) -> None:
        if length > self._max_context:
            raise ContextError(
                f"A text of {length} tokens does not fit the context of {self.name}, which is {self._max_context}."
            )
